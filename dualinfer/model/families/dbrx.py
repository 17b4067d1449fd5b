"""DBRX: mixtures in every layer, whose files hold all experts as rows of one matrix.

HF source: models/dbrx/modeling_dbrx.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ModelError, UnservedError, shown
from .. import rows as make
from ..spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm, Router
from ..weights import WeightTable, row
from .decoders import decoder_spec
from .fields import ConfigFields
from .rope import make_rope, reach

CLASSES = {"dbrx": ("DbrxForCausalLM", "DbrxModel")}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a DBRX."""
    embed, heads, head_dim = fields.split("d_model", "n_heads")
    inner, feed = (fields.part(f"{x}_config", fields.family) for x in ("attn", "ffn"))
    kv_heads = inner.heads("kv_n_heads")
    if heads % kv_heads:
        raise ModelError(f"n_heads={heads} is no multiple of kv_n_heads={kv_heads}.")
    positions, parameters = fields.size("max_seq_len"), fields.take("rope_parameters")
    _check_theta(inner, parameters)
    rope, clip = make_rope(parameters, head_dim, positions), inner.optional_number("clip_qkv")
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope=rope, clip=clip)
    norm = Norm("layer", 1e-5)
    layer = Layer(attention, _experts(feed, embed), norm, "pre")
    spec = decoder_spec(
        *(fields, architecture, embed, (layer,) * fields.layers("n_layers"), norm),
        max_positions=reach(parameters, positions),
    )
    fields.ignore("output_router_logits")
    fields.require("tie_word_embeddings", False)
    fields.ignore("resid_pdrop", "emb_pdrop", "num_key_value_heads")  # HF reads kv_n_heads
    inner.ignore("attn_pdrop")
    for part in (inner, feed):
        part.finish()
    hf, own = "transformer.blocks.{i}.", "transformer.blocks.{i}.norm_attn_norm."
    experts = f"{hf}ffn.experts.mlp."
    rows = [
        *make.norm_without_bias(norm, "attn_norm", f"{own}norm_1"),
        *make.norm_without_bias(norm, "mlp_norm", f"{own}norm_2"),
        *make.linear("qkv", f"{own}attn.Wqkv", "q+k+v embed", bias=False),
        *make.linear("out", f"{own}attn.out_proj", "embed q", bias=False),
        *make.linear("router", f"{hf}ffn.router.layer", "choices embed", bias=False),
        row(
            *("experts.up.weight", "experts gate+up embed"),
            *((f"{experts}w1#{{x}}", "gate embed"), (f"{experts}v1#{{x}}", "up embed")),
        ),
        row("experts.down.weight", "experts embed up", (f"{experts}w2#{{x}}", "up embed")),
    ]
    outer = make.norm_without_bias(norm, "final_norm", "transformer.norm_f")
    embedding, base = "transformer.wte", "transformer."
    return spec, make.causal_table(spec, rows, outer, embedding=embedding, tied=False, base=base)


def _check_theta(inner: ConfigFields, parameters: Any) -> None:
    """Raise UnservedError where HF turns by another theta than the makers' own code."""
    theta = inner.take("rope_theta")
    own = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    if theta is not None and theta != own:
        raise UnservedError(
            f"config.json has attn_config with rope_theta={shown(theta)}, by which the makers' own "
            f"code turns, and transformers turns by {shown(own)}, that of rope_parameters. Pass "
            'args={"rope_parameters": {"rope_type": "default", "rope_theta": '
            f"{shown(theta)}}}}} to init_inference for the makers' text."
        )


def _experts(fields: ConfigFields, embed: int) -> Experts:
    """The mixture of every layer."""
    count, chosen = fields.size("moe_num_experts"), fields.size("moe_top_k")
    if chosen > count:
        raise ModelError(
            f"config.json has {count} experts, of which a token chooses {chosen} (moe_top_k); it "
            "cannot choose more experts than there are."
        )
    fields.require("hidden_size", embed)
    fields.require("moe_normalize_expert_weights", 1, 1.0)  # the norm of weights: their sum
    fields.ignore("moe_jitter_eps", "moe_loss_weight")
    function = fields.take("ffn_act_fn", {"name": "silu"})
    if not isinstance(function, Mapping) or set(function) != {"name"}:
        raise ModelError(f"config.json has ffn_act_fn={shown(function)}; expected a name alone.")
    activation = ConfigFields(fields.family, function).activation("name")
    router = Router(chosen)
    if fields.take("moe_normalize_expert_weights") is not None:
        router = replace(router, over_sum=0.0)
    return Experts(count, Mlp(fields.size("ffn_hidden_size"), activation, gated=True), router)
