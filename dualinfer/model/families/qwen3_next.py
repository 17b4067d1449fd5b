"""Qwen3-Next, Qwen3.5 and 3.6: gated delta rules, and gated attention in some of the layers.

HF sources: models/qwen3_next, models/qwen3_5 and models/qwen3_5_moe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...blocks.delta_rule import READS, DeltaRule
from ...blocks.gated_queries import GatedQueries
from ...errors import ModelError
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from . import mixtures
from .fields import ConfigFields
from .rope import make_rope, reach, rotary_size

CLASSES = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextModel"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
}
KINDS = "linear_attention", "full_attention"
_PART = "partial_rotary_factor"
_SECTIONS = "mrope_section", "mrope_interleaved"  # of positions, whose parts are alike in texts


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of one of them."""
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    norm = Norm("rms", fields.number("rms_norm_eps"), unit_offset=True)
    attention, positions = _attention(fields, embed, norm)
    activation = fields.activation("hidden_act")
    recurrence = read(fields, replace(norm, unit_offset=False))
    kinds = fields.kinds("layer_types", count, KINDS)
    is_dense = fields.family == "qwen3_5_text"
    # Mixtures in all layers need no width of others.
    ffn = 1 if fields.family == "qwen3_5_moe_text" else fields.size("intermediate_size")
    mlp = Mlp(ffn, activation, gated=True)
    mlps: list[Mlp | Experts] = [mlp] * count
    if not is_dense:
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
    fields.require("attn_output_gate", True)
    fields.require("mamba_ssm_dtype", "float32")
    fields.ignore("attention_dropout", "full_attention_interval")  # HF makes layer_types of it
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    fields.ignore("intermediate_size")  # of mixtures
    return spec, _table(fields, spec)


def layers_of(
    kinds: Sequence[str], mlps: Sequence[Mlp | Experts], attending: Layer, recurrence: DeltaRule
) -> tuple[Layer, ...]:
    """Layers that attend or have a recurrence by their kind, each with its feed-forward."""
    own = list(zip(kinds, mlps, strict=True))
    recurring = replace(attending, recurrence=recurrence, attends=False)
    made = {
        (kind, mlp): replace(recurring if kind == KINDS[0] else attending, mlp=mlp)
        for kind, mlp in dict.fromkeys(own)
    }
    return tuple(made[key] for key in own)


def read(fields: ConfigFields, norm: Norm) -> DeltaRule:
    """The gated delta rule of a config's layers, by Qwen's names of its fields."""
    keys, values = (fields.heads(f"linear_num_{x}_heads") for x in ("key", "value"))
    if values % keys:
        raise ModelError(
            f"config.json has linear_num_value_heads={values}, no multiple of {keys} key heads."
        )
    key_dim, value_dim, taps = (
        fields.size(f"linear_{x}_dim") for x in ("key_head", "value_head", "conv_kernel")
    )
    activation = fields.activation("hidden_act")
    return DeltaRule(keys, values, key_dim, value_dim, taps, activation, norm)


def _attention(fields: ConfigFields, embed: int, norm: Norm) -> tuple[Attention, int]:
    """Attention with a rotary embedding of a part of each head, and its positions."""
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions, given = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    parameters: Any = given
    if isinstance(given, Mapping):
        parameters = {**given, **dict.fromkeys(_SECTIONS)}
        fields.within(given, rope_theta=None, partial_rotary_factor=0.25)
    turning = rotary_size(parameters, head_dim)
    rope = make_rope({**parameters, _PART: None}, turning, positions)
    attention = Attention(
        *(heads, kv_heads, head_dim, head_dim**-0.5),
        rope=rope,
        qk_norm=norm,
        wiring=GatedQueries(),
    )
    return attention, reach(parameters, positions)


def _table(fields: ConfigFields, spec: ModelSpec) -> WeightTable:
    norm, hf, bias = spec.layers[0].norm, "model.layers.{i}.", fields.flag("attention_bias", False)
    mixture = mixtures.MIXTURES.get(fields.family)
    reads = _reads_of(fields.family)

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        rows = make.norm(norm, "attn_norm", f"{hf}input_layernorm")
        rows += make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm")
        if isinstance(layer.recurrence, DeltaRule):
            rows += layer.recurrence.rows(f"{hf}linear_attn", reads)
        else:
            rows += _attention_rows(layer.attention, f"{hf}self_attn", bias)
        return (*rows, *mixtures.feed_rows(mixture, layer.mlp, hf, "mlp"))

    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=[r"rotary_emb\.", r"^mtp\.", r"^model\.visual\."],
        # Of a whole model's file, which sees as well.
        renames=(("model.", "model.language_model."),) if spec.family != "qwen3_next" else (),
    )
    return make.by_layer(table, rows_of)


def _reads_of(family: str) -> list[tuple[str, str]]:
    """HF's projections before the rule, with their axes; Qwen3-Next has all of a key head's."""
    if family == "qwen3_next":
        names = "in_proj_qkvz", "in_proj_ba"
        return list(
            zip(names, (f"{'+'.join(x)}/delta_keys" for x in (READS[:4], READS[4:])), strict=True)
        )
    parts = [f"in_proj_{x}" for x in ("qkv", "z", "b", "a")]
    return list(zip(parts, ("+".join(READS[:3]), *READS[3:]), strict=True))


def _attention_rows(a: Attention, hf: str, bias: bool) -> list[Row]:
    """The rows of attention whose queries have their gates behind them, head by head."""
    rows = []
    for part, rest in (("weight", " embed"), ("bias", ""))[: 1 + bias]:
        names = {"q_proj": "q+given/heads", "k_proj": "k", "v_proj": "v"}
        sources = [(f"{hf}.{name}.{part}", axis + rest) for name, axis in names.items()]
        rows.append(row(f"qkv.{part}", f"given+q+k+v{rest}", *sources))
    rows += make.head_norms(a, hf)
    return rows + make.linear("out", f"{hf}.o_proj", "embed q", bias)
