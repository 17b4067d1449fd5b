"""JetMoE: mixtures of experts, and in attention pairs of projections that a router chooses among.

HF source: models/jetmoe. Keys and values are of all tokens alike. A token's query heads are those
of the pairs that it chooses: of each pair one for each KV head.
"""

from dataclasses import replace

from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, ModelSpec, Norm, Pairs, Router
from ..weights import Row, WeightTable, row
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"jetmoe": ("JetMoeForCausalLM", "JetMoeModel")}
_EPS = 1e-6  # of layers' norms, whatever the config says


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a JetMoE model."""
    embed, positions = fields.size("hidden_size"), fields.size("max_position_embeddings")
    kv_heads, head_dim = fields.heads("num_key_value_heads"), fields.size("kv_channels")
    count, chosen = fields.size("num_local_experts"), fields.size("num_experts_per_tok")
    fields.require("head_dim", head_dim)
    fields.ignore("output_router_logits")
    fields.ignore("aux_loss_coef", "attention_dropout", "num_attention_heads")
    router, parameters = Router(chosen, "chosen"), fields.take("rope_parameters")
    attention = Attention(
        *(chosen * kv_heads, kv_heads, head_dim, head_dim**-0.5),
        rope=make_rope(parameters, head_dim, positions),
        pairs=Pairs(count, router),
    )
    activation = fields.activation("activation_function")
    mlp = Experts(count, fields.size("intermediate_size"), activation, gated=True, router=router)
    norm = Norm("rms", fields.number("rms_norm_eps"))
    layer = Layer(attention, mlp, replace(norm, eps=_EPS), "pre")
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=(layer,) * fields.layers("num_hidden_layers"),
        max_positions=reach(parameters, positions),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    return spec, make.causal_table(
        spec,
        _layer(norm, "model.layers.{i}."),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", True),
        base="model.",
    )


def _layer(norm: Norm, hf: str) -> list[Row]:
    attention, mlp = f"{hf}self_attention.", f"{hf}mlp."
    stacked = [
        row(f"{ours}.weight", axes, (f"{theirs}.weight", axes))
        for ours, theirs, axes in (
            ("pairs.query", f"{attention}experts.input_linear", "paired k embed"),
            ("pairs.out", f"{attention}experts.output_linear", "paired embed k"),
            ("experts.up", f"{mlp}input_linear", "experts gate+up embed"),
            ("experts.down", f"{mlp}output_linear", "experts embed up"),
        )
    ]
    return [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.linear(
            "pairs.router", f"{attention}experts.router.layer", "paired embed", bias=False
        ),
        *make.linear("kv", f"{attention}kv_proj", "k+v embed", bias=False),
        *make.linear("router", f"{mlp}router.layer", "choices embed", bias=False),
        *(replace(own, dense=own.name.startswith("pairs")) for own in stacked),
        row("pairs.bias", "embed", (f"{attention}experts.bias", "embed")),
        row("experts.bias", "embed", (f"{mlp}bias", "embed")),
    ]
