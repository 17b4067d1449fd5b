"""Decoders whose layers have heads by kind: MiMo-V2-Flash, Laguna and Step 3.7, with windows.

MiMo's values are narrower than its keys, and layers with a window have twice the KV heads and
sinks; Laguna's and Step's layers have query heads by number, each gated, and some of Step's have
limits of their hidden values.
HF sources: models/mimo_v2_flash, models/laguna and models/step3p7.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...blocks.limited import Limited, LimitedMlp
from ...blocks.narrow_values import NarrowValues
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Edit, Experts, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from . import mixtures
from .fields import ConfigFields, is_positive
from .gemma4 import changes_of
from .rope import make_rope, reach, ropes_by_kind, rotary_size

CLASSES = {
    "laguna": ("LagunaForCausalLM", "LagunaModel"),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashModel"),
    "step3p5": ("Step3p7TextModel",),
}
_SLIDING, _PART = "sliding_attention", "partial_rotary_factor"
_MOST_PREDICTING = 9


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of one of them."""
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    is_step = fields.family == "step3p5"
    norm = Norm("rms", fields.number("rms_norm_eps"), unit_offset=is_step)
    kinds = fields.layer_types(count)
    positions = fields.size("max_position_embeddings")
    dense = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    mlps = mixtures.read_layers(fields, dense, count)
    feeds = _within_limits(fields, mlps) if is_step else [(mlp, ()) for mlp in mlps]
    parameters = ropes_by_kind(fields.take("rope_parameters"), kinds)
    sizes, more = _sizes(fields, embed, kinds), _more(fields, norm)
    own = list(zip(kinds, fields.windows(kinds), sizes, feeds, strict=True))
    ropes = {kind: _rope(fields, parameters[kind], sizes[0][2], positions) for kind in {*kinds}}
    scalar = fields.number("query_pre_attn_scalar") if is_step else sizes[0][2]
    layers = {
        key: Layer(
            Attention(*key[2], scalar**-0.5, window=key[1], rope=ropes[key[0]], **more),
            *(key[3][0], norm, "pre"),
            edits=key[3][1],
        )
        for key in own
    }
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers[key] for key in own),
        max_positions=max(reach(parameters[kind], positions) for kind in kinds),
        final_norm=norm,
        head=Head("causal") if architecture.endswith("ForCausalLM") else None,
    )
    if fields.family == "mimo_v2_flash":
        _check_said_again(fields, spec, kinds, parameters)
    fields.ignore("attention_dropout")
    return spec, _table(fields, spec, kinds)


def _sizes(fields: ConfigFields, embed: int, kinds: list[str]) -> list[tuple[int, int, int]]:
    """Of each layer the query heads, the KV heads and the elements of a head."""
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    by_layer = [heads] * len(kinds)
    if fields.family == "laguna":
        given = fields.take("num_attention_heads_per_layer", by_layer)
        fits = isinstance(given, list | tuple) and len(given) == len(kinds)
        if not fits or any(type(n) is not int or n < 1 for n in given):
            raise ModelError(
                f"config.json has num_attention_heads_per_layer={shown(given)}; expected a number "
                f"for each of {len(kinds)} layers."
            )
        by_layer = list(given)
    if fields.family == "step3p5":
        for i, changes in enumerate(changes_of(fields, len(kinds))):
            inner = ConfigFields(fields.family, changes, "per_layer_config")
            by_layer[i] = inner.heads("num_attention_heads", heads)
            inner.finish()
        fields.ignore("num_sliding_attention_heads")  # which HF folds into them
    twice = fields.family == "mimo_v2_flash"
    found = [
        (own, kv_heads * (2 if twice and kind == _SLIDING else 1), head_dim)
        for own, kind in zip(by_layer, kinds, strict=True)
    ]
    for own, groups, _ in found:
        if own % groups:
            raise ModelError(f"{own} query heads of a layer are no multiple of {groups} KV heads.")
    return found


def _more(fields: ConfigFields, norm: Norm) -> dict[str, Any]:
    """The fields that the attention of all layers has beside the common ones."""
    if fields.family == "laguna":
        fields.require("gating", True, "per-head", "per-element")
        return {"qk_norm": norm, "gate": "softplus"}
    if fields.family == "step3p5":
        return {"qk_norm": norm, "gate": "sigmoid"}
    value_dim, head_dim = fields.size("v_head_dim"), fields.size("head_dim")
    if value_dim > head_dim:
        raise ModelError(f"v_head_dim={value_dim} is more than head_dim={head_dim}.")
    scale = fields.optional_number("attention_value_scale") or 1.0
    return {"wiring": NarrowValues(value_dim, scale)}


def _within_limits(
    fields: ConfigFields, mlps: list[Mlp | Experts]
) -> list[tuple[Mlp | Experts, tuple[Edit, ...]]]:
    """Feed-forwards within the limits of their layers, which are lists, or None; 0 is no limit."""
    limits = []
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        given = fields.take(name) or [None] * len(mlps)
        fits = isinstance(given, list | tuple) and len(given) == len(mlps)
        if not fits or not all(x is None or x == 0 or is_positive(x) for x in given):
            raise ModelError(
                f"config.json has {name}={shown(given)}; expected a number, or None, for each of "
                f"{len(mlps)} layers."
            )
        limits.append([float(x) if x else None for x in given])
    found: list[tuple[Mlp | Experts, tuple[Edit, ...]]] = []
    for mlp, own, shared in zip(mlps, *limits, strict=True):
        if isinstance(mlp, Experts):
            found.append((replace(mlp, mixing=Limited(own, shared)), ()))
        else:
            found.append((mlp, () if shared is None else (LimitedMlp(shared),)))
    return found


def _rope(fields: ConfigFields, parameters: Any, head_dim: int, positions: int) -> Any:
    """A layer's rotary embedding, of the part of each head that HF turns."""
    kind = parameters.get("rope_type", "default") if isinstance(parameters, Mapping) else None
    if fields.family == "mimo_v2_flash" and kind == "default":
        parameters = {_PART: 0.334, **parameters}
    size = rotary_size(parameters, head_dim)
    return make_rope({**parameters, _PART: None}, size, positions)


def _check_said_again(
    fields: ConfigFields, spec: ModelSpec, kinds: list[str], parameters: Mapping[str, Any]
) -> None:
    """Refuse fields of MiMo's makers' own code that ask for other than what HF's class does."""
    a = spec.layers[0].attention
    full, sliding = (parameters.get(k) or {} for k in ("full_attention", _SLIDING))
    window = fields.take("sliding_window")
    for name, value in {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [int(kind == _SLIDING) for kind in kinds],
        "layernorm_epsilon": spec.layers[0].norm.eps,
        "moe_layer_freq": [int(layer.experts > 0) for layer in spec.layers],
        "n_shared_experts": 0,
        _PART: full.get(_PART),
        "rope_theta": full.get("rope_theta"),
        "sliding_window_size": window and window - 1,
        "swa_head_dim": a.head_dim,
        "swa_num_attention_heads": a.heads,
        "swa_num_key_value_heads": 2 * fields.heads("num_key_value_heads"),
        "swa_rope_theta": sliding.get("rope_theta"),
        "swa_v_head_dim": a.head_widths[2],
    }.items():
        fields.require(name, value)
    fields.ignore("attention_chunk_size", "hybrid_block_size")
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")  # layers behind those that answer


def _table(fields: ConfigFields, spec: ModelSpec, kinds: list[str]) -> WeightTable:
    norm, mixture = spec.layers[0].norm, mixtures.MIXTURES[spec.family]
    bias, hf = fields.flag("attention_bias", False), "model.layers.{i}."
    is_mimo = fields.family == "mimo_v2_flash"
    unused = [r"rotary_emb\.", *mixture.unused]
    if fields.family == "step3p5":
        fields.require("mlp_bias", False)
        # Of layers behind these that predict further tokens.
        fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
        fields.ignore("mtp_layer_types", "mtp_mlp_layer_types")
        more = "|".join(str(len(spec.layers) + i) for i in range(_MOST_PREDICTING))
        unused.append(rf"^(model\.)?layers\.({more})\.")
    shared = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
        *make.head_norms(spec.layers[0].attention, f"{hf}self_attn"),
    ]
    if not is_mimo:
        axes = "q embed" if fields.take("gating") == "per-element" else "heads embed"
        shared += make.linear("attn_gate", f"{hf}self_attn.g_proj", axes, bias=False)
    shared += make.linear("out", f"{hf}self_attn.o_proj", "embed given", bias and not is_mimo)
    sinks = replace(row("sinks", "heads", (f"{hf}self_attn.sinks", "heads")), wide=True)
    dense = [
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False),
    ]

    def rows_of(kind: str, mlp: Mlp | Experts) -> tuple[Row, ...]:
        feed = mixtures.make_rows(mixture, mlp, hf) if isinstance(mlp, Experts) else dense
        return (*shared, *feed, *([sinks] if is_mimo and kind == _SLIDING else []))

    table = make.causal_table(
        spec,
        shared,
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=unused,
        renames=mixture.renames,
    )
    own = list(zip(kinds, (layer.mlp for layer in spec.layers), strict=True))
    by_kind = {key: rows_of(*key) for key in dict.fromkeys(own)}
    return replace(table, layers=tuple(by_kind[key] for key in own))
