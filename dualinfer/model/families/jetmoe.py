"""JetMoE: mixtures of experts, and in attention pairs of projections that a router chooses among.

HF source: models/jetmoe. Keys and values are of all tokens alike. A token's query heads are those
of the pairs that it chooses: of each pair one for each KV head.
"""

from dataclasses import replace

from ...blocks.chosen_pairs import ChosenPairs
from .. import rows as make
from ..spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm, Router
from ..weights import Row, WeightTable, row
from .decoders import decoder_spec
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
    pairs = ChosenPairs(count, router)
    attention = Attention(
        *(chosen * kv_heads, kv_heads, head_dim, head_dim**-0.5),
        rope=make_rope(parameters, head_dim, positions),
        wiring=pairs,
    )
    activation = fields.activation("activation_function")
    mlp = Experts(count, Mlp(fields.size("intermediate_size"), activation, gated=True), router)
    norm = Norm("rms", fields.number("rms_norm_eps"))
    layer = Layer(attention, mlp, replace(norm, eps=_EPS), "pre")
    spec = decoder_spec(
        *(fields, architecture, embed, (layer,) * fields.layers("num_hidden_layers"), norm),
        max_positions=reach(parameters, positions),
    )
    return spec, make.causal_table(
        spec,
        _layer(pairs, norm, "model.layers.{i}."),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", True),
        base="model.",
    )


def _layer(pairs: ChosenPairs, norm: Norm, hf: str) -> list[Row]:
    mlp = f"{hf}mlp."
    return [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *pairs.rows(f"{hf}self_attention."),
        *make.linear("router", f"{mlp}router.layer", "choices embed", bias=False),
        *(
            row(f"experts.{ours}.weight", axes, (f"{mlp}{theirs}_linear.weight", axes))
            for ours, theirs, axes in (
                ("up", "input", "experts gate+up embed"),
                ("down", "output", "experts embed up"),
            )
        ),
        row("experts.bias", "embed", (f"{mlp}bias", "embed")),
    ]
