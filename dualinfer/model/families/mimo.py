"""MiMo-V2-Flash: values narrower than keys, windows in turns with more KV heads and sinks, experts.

HF source: models/mimo_v2_flash/modeling_mimo_v2_flash.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ModelError
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm
from ..weights import Row, WeightTable, row
from . import mixtures
from . import rows as make
from .fields import ConfigFields
from .rope import make_rope, reach, ropes_by_kind, rotary_size

CLASSES = {"mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashModel")}
_SLIDING, _PART = "sliding_attention", "partial_rotary_factor"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a MiMo-V2-Flash."""
    embed, count = fields.size("hidden_size"), fields.layers("num_hidden_layers")
    norm, kinds = Norm("rms", fields.number("rms_norm_eps")), fields.layer_types(count)
    positions = fields.size("max_position_embeddings")
    dense = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    mlps = mixtures.read_layers(fields, dense, count)
    parameters = ropes_by_kind(fields.take("rope_parameters"), kinds)
    attentions = _attentions(fields, embed, kinds, positions, parameters)
    own = list(zip(kinds, mlps, strict=True))
    layers = {key: Layer(attentions[key[0]], key[1], norm, "pre") for key in own}
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
    _check_said_again(fields, spec, kinds, parameters)
    return spec, _table(fields, spec, kinds)


def _attentions(
    fields: ConfigFields,
    embed: int,
    kinds: list[str],
    positions: int,
    parameters: Mapping[str, Any],
) -> dict[str, Attention]:
    """The attention of each kind of layer."""
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    value_dim = fields.size("v_head_dim")
    if value_dim > head_dim:
        raise ModelError(f"v_head_dim={value_dim} is more than head_dim={head_dim}.")
    found = {}
    for kind, window in dict(zip(kinds, fields.windows(kinds), strict=True)).items():
        more = kv_heads * (2 if kind == _SLIDING else 1)
        if heads % more:
            raise ModelError(f"num_attention_heads={heads} is no multiple of {more} KV heads.")
        turning = parameters[kind]
        if isinstance(turning, Mapping) and turning.get("rope_type", "default") == "default":
            turning = {_PART: 0.334, **turning}  # HF's
        rope = make_rope({**turning, _PART: None}, rotary_size(turning, head_dim), positions)
        found[kind] = Attention(
            *(heads, more, head_dim, head_dim**-0.5),
            window=window,
            rope=rope,
            value_dim=value_dim,
            value_scale=fields.optional_number("attention_value_scale") or 1.0,
        )
    return found


def _check_said_again(
    fields: ConfigFields, spec: ModelSpec, kinds: list[str], parameters: Mapping[str, Any]
) -> None:
    """Refuse fields of the makers' own code that ask for other than what HF's class does."""
    a = spec.layers[0].attention
    full, sliding = (parameters.get(k) or {} for k in ("full_attention", _SLIDING))
    window = fields.take("sliding_window")
    kv_heads = fields.take("num_key_value_heads")
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
        "swa_num_key_value_heads": 2 * kv_heads,
        "swa_rope_theta": sliding.get("rope_theta"),
        "swa_v_head_dim": a.value_dim,
    }.items():
        fields.require(name, value)
    fields.ignore("attention_chunk_size", "attention_dropout", "hybrid_block_size")
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")  # layers behind those that answer


def _table(fields: ConfigFields, spec: ModelSpec, kinds: list[str]) -> WeightTable:
    norm, mixture = spec.layers[0].norm, mixtures.MIXTURES[spec.family]
    bias, hf = fields.flag("attention_bias", False), "model.layers.{i}."
    shared = [
        *make.norm(norm, "attn_norm", f"{hf}input_layernorm"),
        *make.norm(norm, "mlp_norm", f"{hf}post_attention_layernorm"),
        *make.joined("qkv", hf + "self_attn.{p}", make.QKV, bias),
        *make.linear("out", f"{hf}self_attn.o_proj", "embed given", bias=False),
    ]
    sinks = replace(row("sinks", "heads", (f"{hf}self_attn.sinks", "heads")), wide=True)
    dense = [
        *make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias=False),
        *make.linear("down", f"{hf}mlp.down_proj", "embed up", bias=False),
    ]

    def rows_of(kind: str, mlp: Mlp | Experts) -> tuple[Row, ...]:
        feed = mixtures.make_rows(mixture, mlp, hf) if isinstance(mlp, Experts) else dense
        return (*shared, *feed, *([sinks] if kind == _SLIDING else []))

    table = make.causal_table(
        spec,
        shared,
        make.norm(norm, "final_norm", "model.norm"),
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", False),
        base="model.",
        unused=[r"rotary_emb\.", *mixture.unused],
        renames=mixture.renames,
    )
    own = list(zip(kinds, (layer.mlp for layer in spec.layers), strict=True))
    by_kind = {key: rows_of(*key) for key in dict.fromkeys(own)}
    return replace(table, layers=tuple(by_kind[key] for key in own))
