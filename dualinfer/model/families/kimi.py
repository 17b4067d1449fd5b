"""Kimi Linear and Ling 3: Kimi Delta Attention, latent attention in some layers, and experts.

HF sources: models/kimi_linear and models/bailing_hybrid.
"""

from dataclasses import replace

from ...blocks.delta_rule import KERNELS, READS, DeltaRule
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Head, Layer, Mlp, ModelSpec, Norm, Rope
from ..weights import Row, WeightTable
from . import mixtures
from .deepseek import latent_attention, latent_rows
from .fields import ConfigFields
from .qwen3_next import KINDS, layers_of
from .rope import reach

CLASSES = {
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearModel"),
    "bailing_hybrid": ("BailingHybridForCausalLM", "BailingHybridModel"),
}
# HF's names of DeepSeek's fields, and what configs have in their place.
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_UNTURNED = {"rope_type": "default", "rope_theta": 1e4}  # which nothing turns by


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of one of them."""
    is_kimi = fields.family == "kimi_linear"
    same = {ours: fields.take(theirs) for ours, theirs in _NAMES.items()}
    if is_kimi:  # whose attention turns nothing, and has heads of other sizes
        same |= dict.fromkeys(("rope_theta", "head_dim"))
    fields = fields.of_family(fields.family, same)
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    positions = fields.size("max_position_embeddings")
    norm = Norm("rms", fields.number("rms_norm_eps"))
    if is_kimi:
        attention = latent_attention(fields, _UNTURNED, positions)
        attention = replace(attention, rope=_still(fields))
    else:
        parameters = fields.take("rope_parameters")
        attention = replace(latent_attention(fields, parameters, positions), gate="sigmoid")
        positions = reach(parameters, positions)
    recurrence = _recurrence(fields, norm)
    kinds = fields.kinds("layer_types", count, KINDS)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    mlps = mixtures.read_layers(fields, mlp, count)
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=layers_of(kinds, mlps, Layer(attention, mlp, norm, "pre"), recurrence),
        max_positions=positions,
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    # Of the makers' own code; what HF folds into lists of layers; and layers of a second token.
    fields.require("mla_use_nope", True)
    fields.require("moe_router_activation_func", "sigmoid")
    fields.require("moe_layer_freq", 1)
    fields.ignore("linear_attn_config", "first_k_dense_replace", "layer_group_size")
    fields.ignore("use_grouped_topk", "attention_dropout", "short_conv_kernel_size")
    fields.ignore("num_nextn_predict_layers", "mtp_loss_scaling_factor")
    return spec, _table(fields, spec)


def _still(fields: ConfigFields) -> Rope:
    """A rotary embedding by which nothing turns: Kimi's attention knows no positions."""
    turning = fields.size("qk_rope_head_dim")
    return Rope("default", (0.0,) * (turning // 2))


def _recurrence(fields: ConfigFields, norm: Norm) -> DeltaRule:
    heads, head_dim = fields.heads("linear_num_heads"), fields.size("linear_head_dim")
    taps, activation = fields.size("linear_conv_kernel_dim"), fields.activation("hidden_act")
    own = DeltaRule(
        *(heads, heads, head_dim, head_dim, taps, activation, norm),
        by_channel=True,
        gate="sigmoid",
    )
    if fields.family == "kimi_linear":
        return replace(own, decay_rank=head_dim, gate_rank=head_dim)
    floor = fields.take("kda_lower_bound", -5.0)
    if not fields.flag("kda_safe_gate", True):
        return own
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not -1e4 < floor < 0:
        raise ModelError(
            f"config.json has kda_lower_bound={shown(floor)}; expected a number below 0."
        )
    return replace(own, floor=float(floor))


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    norm, hf, bias = spec.layers[0].norm, "model.layers.{i}.", fields.flag("attention_bias", False)
    is_kimi, mixture = spec.family == "kimi_linear", mixtures.MIXTURES[spec.family]

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        rows = make.norm(norm, "attn_norm", f"{hf}input_layernorm")
        rows += make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm")
        if isinstance(layer.recurrence, DeltaRule):
            rows += _recurrent_rows(layer.recurrence, f"{hf}self_attn")
        else:
            rows += _attention_rows(layer.attention, f"{hf}self_attn", bias)
        return (*rows, *mixtures.feed_rows(mixture, layer.mlp, hf, "mlp"))

    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False) and is_kimi,
        base="model.",
        unused=[r"rotary_emb\.", rf"^(model\.)?layers\.{len(spec.layers)}\."],
        renames=mixture.renames,
    )
    return make.by_layer(table, rows_of)


def _recurrent_rows(own: DeltaRule, hf: str) -> list[Row]:
    """The rows of Kimi Delta Attention, whose files have three convolutions."""
    names = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "forget_gate.f_proj"]
    if own.decay_rank:
        names[3], names[5] = "g_a_proj", "forget_gate.f_a_proj"
    return own.rows(
        hf,
        list(zip(names, READS, strict=True)),
        kernels=KERNELS,
        gate_up="g_b_proj",
        decay_up="forget_gate.f_b_proj",
        decay="forget_gate",
        stored_scale="one one delta_heads one" if own.decay_rank else "delta_heads",
        norm="o_norm",
        out="o_proj",
    )


def _attention_rows(a: Attention, hf: str, bias: bool) -> list[Row]:
    assert a.latent is not None
    rows = latent_rows(a, f"{hf}.", bias)
    if a.gate:
        rows += make.linear("attn_gate", f"{hf}.g_proj", "heads embed", bias=False)
    return rows + make.linear("out", f"{hf}.o_proj", "embed v", bias)
