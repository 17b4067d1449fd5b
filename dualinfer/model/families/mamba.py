"""Mamba-2, and decoders of its layers beside those that attend: Bamba, Falcon-H1, Nemotron-H.

HF sources: models/mamba2, models/bamba, models/falcon_h1 and models/nemotron_h.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...blocks.latent_experts import LatentExperts
from ...blocks.scaled_sublayers import ScaledAttention, ScaledMlp
from ...blocks.state_space import StateSpace
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm, Router
from ..weights import Row, Source, WeightTable, row
from . import states
from .fields import ConfigFields, check_layers, is_positive
from .rope import make_rope, reach, rotary_size

CLASSES = {
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Model"),
    "bamba": ("BambaForCausalLM", "BambaModel"),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Model"),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHModel"),
}
_MOST = 1 << 20  # positions, of models whose layers know none
_NONE, _IDLE = Attention(1, 1, 1, 1.0), Mlp(1, "silu", gated=False)  # of layers without
_TRAINED = ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
_TRAINED += ("rescale_prenorm_residual", "residual_in_fp32")
_PART = "partial_rotary_factor"


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of one of them."""
    embed = fields.size("hidden_size")
    is_bare = fields.family in ("mamba2", "nemotron_h")
    norm = Norm("rms", fields.number("layer_norm_epsilon" if is_bare else "rms_norm_eps"))
    make_layers = {
        "mamba2": _mamba2,
        "bamba": _bamba,
        "falcon_h1": _falcon,
        "nemotron_h": _nemotron,
    }[fields.family]
    layers, positions = make_layers(fields, embed, norm)
    is_scaled = fields.family == "falcon_h1"
    scale = fields.number("lm_head_multiplier") if is_scaled else 1.0
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(layers),
        max_positions=positions,
        embed_scale=fields.number("embedding_multiplier") if is_scaled else 1.0,
        final_norm=norm,
        late_states=fields.family == "mamba2",
        head=Head("causal", scale=scale) if architecture.endswith("ForCausalLM") else None,
    )
    fields.ignore("num_logits_to_keep", "logits_to_keep")
    return spec, _table(fields, spec, norm, is_bare)


def _mamba2(fields: ConfigFields, embed: int, norm: Norm) -> tuple[list[Layer], int]:
    own = states.read(fields, norm, int(embed * fields.number("expand")))
    fields.ignore(*_TRAINED, "norm_before_gate")  # HF's class gates first
    fields.require("rms_norm", True)
    fields.require("intermediate_size", own.width)
    layer = Layer(_NONE, _IDLE, norm, "pre", recurrence=own, attends=False, feeds=False)
    return [layer] * fields.layers("num_hidden_layers"), _MOST


def _bamba(fields: ConfigFields, embed: int, norm: Norm) -> tuple[list[Layer], int]:
    count, given = fields.layers("num_hidden_layers"), fields.take("attn_layer_indices", [])
    if not isinstance(given, list | tuple) or any(type(i) is not int for i in given):
        raise ModelError(
            f"config.json has attn_layer_indices={shown(given)}; expected a list of layers."
        )
    own = states.read(fields, norm, int(embed * fields.number("mamba_expand")))
    attention, positions = _attention(fields, embed)
    fields.require("attn_rotary_emb", 2 * attention.rope_pairs)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    attends = Layer(attention, mlp, norm, "pre")
    recurs = replace(attends, recurrence=own, attends=False)
    fields.ignore("z_loss_coefficient", "layers_block_type", "layer_types", "attention_dropout")
    return [attends if i in given else recurs for i in range(count)], positions


def _falcon(fields: ConfigFields, embed: int, norm: Norm) -> tuple[list[Layer], int]:
    """Both in each layer, with factors of what they read and give."""
    width = fields.take("mamba_d_ssm")
    width = int(embed * fields.number("mamba_expand")) if width is None else width
    own = states.read(fields, norm if fields.flag("mamba_rms_norm", False) else None, width)
    attention, positions = _attention(fields, embed)
    # Where a product has a bias, what it reads and its result are not times the same.
    for bias, name in (
        ("mamba_proj_bias", "ssm_in_multiplier"),
        ("projectors_bias", "ssm_out_multiplier"),
        ("attention_bias", "attention_in_multiplier"),
        ("attention_bias", "attention_out_multiplier"),
        ("mlp_bias", "mlp_multipliers"),
    ):
        if fields.flag(bias, False):
            fields.require(name, 1.0, [1.0, 1.0], (1.0, 1.0))
    scales = tuple(x * fields.number("ssm_in_multiplier") for x in _numbers(fields, "ssm", 5))
    own = replace(
        own,
        gated_last=fields.flag("mamba_norm_before_gate", True),
        scales=None if set(scales) == {1.0} else scales,
        out_scale=fields.number("ssm_out_multiplier"),
    )
    before = fields.number("attention_in_multiplier")
    scale = attention.scale * before**2 * fields.number("key_multiplier")
    gate, down = _numbers(fields, "mlp", 2)
    mlp = Mlp(fields.size("intermediate_size"), fields.activation("hidden_act"), gated=True)
    layer = Layer(
        *(replace(attention, scale=scale), mlp, norm, "pre"),
        recurrence=own,
        edits=(
            ScaledAttention(before * fields.number("attention_out_multiplier")),
            ScaledMlp(gate, down),
        ),
    )
    fields.require("mamba_use_mlp", True)
    fields.require("attn_layer_indices", [])
    fields.ignore("mamba_expand", "layers_block_type", "layer_types", "attention_dropout")
    fields.ignore("mlp_expansion_factor")
    return [layer] * fields.layers("num_hidden_layers"), positions


def _numbers(fields: ConfigFields, what: str, count: int) -> tuple[Any, ...]:
    """A field of so many factors."""
    given = fields.take(f"{what}_multipliers", [1.0] * count)
    if not isinstance(given, list | tuple) or len(given) != count:
        given = None
    if given is None or not all(map(is_positive, given)):
        raise ModelError(
            f"config.json has {what}_multipliers={shown(given)}; expected {count} positive numbers."
        )
    return tuple(map(float, given))


def _nemotron(fields: ConfigFields, embed: int, norm: Norm) -> tuple[list[Layer], int]:
    """One sub-layer in each layer, by its kind."""
    given = fields.take("layers_block_type")
    known = ("linear_attention", "full_attention", "mlp", "moe")
    count = len(given) if isinstance(given, list | tuple) else 0
    check_layers("len(layers_block_type)", count)
    kinds = fields.kinds("layers_block_type", count, known, given)
    own = states.read(fields, norm, None)
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5)
    activation = fields.activation("mlp_hidden_act")
    mlp = Mlp(fields.size("intermediate_size"), activation, gated=False)
    only: dict[str, Any] = {"placement": "pre", "attends": False, "feeds": False}
    layers = {
        "linear_attention": Layer(_NONE, _IDLE, norm, **only, recurrence=own),
        "full_attention": Layer(attention, _IDLE, norm, "pre", feeds=False),
        "mlp": Layer(_NONE, mlp, norm, "pre", attends=False),
    }
    if "moe" in kinds:
        fields.require("mlp_bias", False)
        layers["moe"] = Layer(_NONE, _experts(fields, activation), norm, "pre", attends=False)
    fields.ignore("output_router_logits")
    for name in ("rms_norm_eps", "norm_eps"):
        fields.require(name, norm.eps)
    fields.require("attention_head_dim", head_dim)
    fields.ignore("rope_theta", "rope_parameters", _PART)  # its attention knows no positions
    fields.ignore(*_TRAINED, "num_hidden_layers", "attention_dropout", "hidden_dropout", "expand")
    fields.ignore("sliding_window", "mamba_proj_bias", "mamba_ssm_cache_dtype")  # not read by HF
    fields.ignore("use_mamba_kernels", "moe_shared_expert_overlap", "n_shared_experts")
    fields.ignore("hybrid_override_pattern", "layer_types", "num_nextn_predict_layers")
    fields.ignore("mtp_layers_block_type", "mtp_hybrid_override_pattern", "n_routed_experts")
    fields.ignore("moe_latent_size", *(f"moe_{x}intermediate_size" for x in ("", "shared_expert_")))
    fields.ignore("num_experts_per_tok", "routed_scaling_factor", "n_group", "topk_group")
    fields.ignore("norm_topk_prob")
    return [layers[kind] for kind in kinds], fields.size("max_position_embeddings")


def _experts(fields: ConfigFields, activation: Any) -> Experts:
    count, chosen = fields.size("n_routed_experts"), fields.size("num_experts_per_tok")
    groups, open_groups = fields.size("n_group", 1), fields.size("topk_group", 1)
    if count % groups or open_groups > groups or chosen > count or count // groups < 2:
        raise ModelError(
            f"config.json has n_routed_experts={count}, n_group={groups}, topk_group={open_groups} "
            f"and num_experts_per_tok={chosen}; expected groups of one size of at least 2, and no "
            "more chosen ones than there are."
        )
    renormalized, scale = (
        fields.flag("norm_topk_prob", True),
        fields.number("routed_scaling_factor"),
    )
    router = Router(chosen, "sigmoid", groups, open_groups, "two", renormalized, 1e-20, scale)
    shared = fields.size("moe_shared_expert_intermediate_size")
    ffn = fields.size("moe_intermediate_size")
    own = Experts(count, ffn, activation, gated=False, router=router, shared=shared)
    if fields.take("moe_latent_size") is None:
        return own
    return replace(own, mixing=LatentExperts(fields.size("moe_latent_size")))


def _attention(fields: ConfigFields, embed: int) -> tuple[Attention, int]:
    """Attention with a rotary embedding, perhaps of a part of each head, and its positions."""
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions, parameters = fields.size("max_position_embeddings"), fields.take("rope_parameters")
    size = rotary_size(parameters, head_dim)
    fields.within(parameters, partial_rotary_factor=None)
    rope = make_rope({**parameters, _PART: None}, size, positions)
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope=rope)
    return attention, reach(parameters, positions)


def _table(fields: ConfigFields, spec: ModelSpec, norm: Norm, is_bare: bool) -> WeightTable:
    base = "backbone." if fields.family == "mamba2" else "model."
    hf = base + "layers.{i}."
    proj, conv, attn = (
        fields.flag(name, default)
        for name, default in (
            ("use_bias" if is_bare else "mamba_proj_bias", False),
            ("use_conv_bias" if is_bare else "mamba_conv_bias", True),
            ("attention_bias", False),
        )
    )
    attn = attn and fields.family != "nemotron_h"  # HF's reads no such field
    mlp_bias = fields.flag("mlp_bias", False)
    out = fields.flag("projectors_bias", False) if fields.family == "falcon_h1" else proj
    names = ("norm",) * 2 if is_bare else ("input_layernorm", "pre_ff_layernorm")
    parts = ("mixer",) * 3 if is_bare else ("mamba", "self_attn", "feed_forward")

    def rows_of(layer: Layer) -> tuple[Row, ...]:
        rows: list[Row] = []
        if layer.attends or layer.recurrence is not None:
            rows += make.norm(norm, "attn_norm", f"{hf}{names[0]}")
        if isinstance(layer.recurrence, StateSpace):
            rows += layer.recurrence.rows(f"{hf}{parts[0]}", proj, conv, out)
        if layer.attends:
            rows += make.joined("qkv", f"{hf}{parts[1]}.{{p}}", make.QKV, attn)
            rows += make.linear("out", f"{hf}{parts[1]}.o_proj", "embed q", attn)
        if layer.feeds:
            rows += make.norm(norm, "mlp_norm", f"{hf}{names[1]}")
            rows += _feed_rows(layer, f"{hf}{parts[2]}", mlp_bias)
        return tuple(rows)

    final = {"bamba": "final_layernorm", "falcon_h1": "final_layernorm"}.get(spec.family, "norm_f")
    embedding = f"{base}embeddings" if is_bare else f"{base}embed_tokens"
    renames = {
        "mamba2": (("backbone.embeddings.", "backbone.embedding."),),
        "nemotron_h": (("model.", "backbone."),),
    }
    table = make.causal_table(
        spec,
        (),
        make.norm(norm, "final_norm", f"{base}{final}"),
        embedding=embedding,
        tied=fields.flag("tie_word_embeddings", False) and spec.family != "nemotron_h",
        base=base,
        unused=[r"rotary_emb\.", r"^mtp"],
        renames=renames.get(spec.family, ()),
    )
    return make.by_layer(table, rows_of)


def _feed_rows(layer: Layer, hf: str, bias: bool) -> Sequence[Row]:
    if not isinstance(layer.mlp, Experts):
        if layer.mlp.gated:
            up = make.joined("up", hf + ".{p}", make.GATE_UP, bias)
            return [*up, *make.linear("down", f"{hf}.down_proj", "embed up", bias)]
        up = make.linear("up", f"{hf}.up_proj", "ffn embed", bias)
        return [*up, *make.linear("down", f"{hf}.down_proj", "embed ffn", bias)]
    rows = make.linear("router", f"{hf}.gate", "choices embed", bias=False)
    choice = row("router.choice_bias", "choices", (f"{hf}.gate.e_score_correction_bias", "choices"))
    rows.append(replace(choice, wide=True, fixed=True))
    width, mixing = "embed", layer.mlp.mixing
    if isinstance(mixing, LatentExperts):
        rows += mixing.rows(hf)
        width = "expert_latent"
    for ours, axes in (("up", f"ffn {width}"), ("down", f"{width} ffn")):
        each = row(
            f"experts.{ours}.weight",
            f"experts {axes}",
            (f"{hf}.experts.{{x}}.{ours}_proj.weight", axes),
        )
        whole = Source(f"{hf}.experts.{ours}_proj", ("experts", *axes.split()))
        rows.append(replace(each, others=(whole,)))
    rows += make.linear("shared.up", f"{hf}.shared_experts.up_proj", "shared embed", bias=False)
    return rows + make.linear(
        "shared.down", f"{hf}.shared_experts.down_proj", "embed shared", bias=False
    )
