"""Llama's relatives: decoders that differ from it by names and by facts that the spec has.

Each is a row of `kinds.KINDS`, and its model a pass over it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...blocks.difference import Difference
from ...blocks.state_space import StateSpace
from ...blocks.sub_norms import NormedHeads, NormedHidden
from ...errors import ModelError, UnservedError, shown
from .. import rows as make
from ..spec import (
    Activation,
    Attention,
    Experts,
    Head,
    Layer,
    Mlp,
    ModelSpec,
    Norm,
    Recurrence,
    Rope,
)
from ..weights import Row, WeightTable, row
from . import mixtures, states
from .fields import ConfigFields, is_positive, query_growth
from .kinds import KINDS, ORIGINAL, Bias, Kind
from .rope import make_rope, reach, ropes_by_kind, rotary_size

_ROPES_BY_KIND = ("cohere_compass_text", "mellum", "olmo3")
_SWAS = ("granite_swa", "granitemoe_swa")
_SINKS = ("flint", "gpt_oss", *_SWAS)
_PHIS = "phi3", "phi4_multimodal"
_MSCALES = "short_mscale", "long_mscale"
_GRANITES = ("granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hyperclovax")
_GRANITES += _SWAS
_STATES = "mamba", "linear_attention"
CLASSES = {family: kind.classes for family, kind in KINDS.items()}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a relative of Llama's."""
    kind = KINDS[fields.family]

    def says(bias: Bias) -> bool:
        return fields.flag(bias, False) if isinstance(bias, str) else bias

    embed = fields.size("hidden_size")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions = fields.size("max_position_embeddings")
    eps = fields.number(kind.eps) if kind.eps else 1e-5
    norm = Norm(kind.norm, eps, kind.unit_offset)
    ffn = kind.ffn
    if fields.family == "cohere2_moe":
        if fields.take("rms_norm_eps") is not None:
            norm = Norm("rms", fields.number("rms_norm_eps"))
        if fields.take("prefix_dense_intermediate_size") is not None:
            ffn = "prefix_dense_intermediate_size"
    mlp = Mlp(fields.size(ffn), _activation(fields), kind.gated)
    attentions = _attentions(fields)
    growth = query_growth(fields) if fields.family == "ministral3" else None
    parameters = _rope_parameters(fields, [turns for _, turns in attentions])
    ropes: dict[str | None, Rope | None] = {None: None}
    for turns, own in parameters.items():
        size, turning = head_dim, own
        if kind.partial:
            size, turning = rotary_size(own, head_dim), {**own, "partial_rotary_factor": None}
        rope = make_rope(turning, size, positions, kind.interleaved, fields.family in _PHIS)
        if rope.rereads:  # HF's generate begins anew by one field, its model by the other
            fields.require(ORIGINAL, rope.original)
        if fields.family == "phimoe":
            rope = _without_lengths(rope, fields.take("rope_parameters"))
        if kind.backwards:
            backwards = [tuple(-f for f in own) for own in (rope.inv_freq, rope.long)]
            rope = replace(rope, inv_freq=backwards[0], long=backwards[1])
        ropes[turns] = rope
    is_granite = fields.family in _GRANITES
    scale = fields.number("attention_multiplier") if is_granite else head_dim**-0.5
    shared: dict[str, Any] = {"qk_norm": norm if says(kind.qk_norm) else None}
    if shared["qk_norm"]:
        shared |= {"qk_norm_over": kind.qk_norm_over, "norm_turned": kind.norm_turned}
    shared |= {"growth": growth, "gate": "sigmoid" if kind.attn_gate else None}
    if fields.family in ("olmo", "olmoe"):
        shared["clip"] = fields.optional_number("clip_qkv")
    shape = heads, kv_heads, head_dim, scale
    parallel = says(kind.parallel)
    behind = kind.placement
    if fields.family == "hyperclovax" and not fields.flag("use_post_norm", True):
        behind = "pre"
    placement: dict[str, Any] = {"parallel": parallel, "shared_norm": parallel}
    if kind.sub_norms:
        shared["wiring"] = NormedHeads(heads * head_dim)
        placement["edits"] = (NormedHidden(mlp.ffn),)
    mlps: list[Mlp | Experts] = [mlp] * len(attentions)
    is_hybrid = fields.family == "granitemoehybrid"
    if is_hybrid and not fields.take("num_local_experts", 0):
        fields.ignore("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef")
        fields.ignore("output_router_logits")
    elif fields.family in mixtures.MIXTURES:
        mlps = mixtures.read_layers(fields, mlp, len(attentions))
    kinds = [(*own, mlp) for own, mlp in zip(attentions, mlps, strict=True)]
    blocks = {
        (window, turns, mlp): Layer(
            Attention(*shape, window=window, rope=ropes[turns], **shared),
            mlp,
            norm,
            behind,
            **placement,
            residual_scale=fields.number("residual_multiplier") if is_granite else 1.0,
        )
        for window, turns, mlp in dict.fromkeys(kinds)
    }
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        vocab=fields.size("vocab_size"),
        embed=embed,
        layers=tuple(blocks[own] for own in kinds),
        max_positions=max(
            (reach(own, positions) for own in parameters.values()), default=positions
        ),
        embed_scale=_embed_scale(fields, embed),
        rounds_scale=fields.family == "gemma",
        scales_embeds=is_granite or fields.family == "afmoe",
        embed_norm=norm if fields.family == "nanochat" else None,
        final_norm=norm,
        head=_head(fields, architecture.endswith("ForCausalLM")),
    )
    if fields.family == "diffllama":
        spec = _with_differences(spec, eps)
    if is_hybrid:
        spec = _with_states(fields, spec)
    fields.require("use_bidirectional_attention", False)
    for name, value in kind.always.items():
        fields.require(name, *(value if isinstance(value, tuple) else (value,)))
    for name, other in kind.twins.items():
        value = fields.take(other)
        fields.require(name, value, [value] * len(attentions))
    if fields.family == "minimax_m2":
        sizes = {rope.inv_freq for rope in ropes.values() if rope}
        fields.require("rotary_dim", *(2 * len(own) for own in sizes))
        fields.require("attn_type_list", [1] * len(attentions))
    fields.ignore("attention_dropout", *kind.ignored)
    return spec, _table(fields, kind, spec, tuple(map(says, _biases(kind))), parallel)


def _with_differences(spec: ModelSpec, eps: float) -> ModelSpec:
    """DiffLlama, whose layers have a number of their own each."""
    a = spec.layers[0].attention
    if a.kv_heads % 2 or a.heads % 2:
        raise ModelError(f"config.json has {a.kv_heads} KV heads; diffllama needs two halves.")
    starts = [0.8 - 0.6 * math.exp(-0.3 * i) for i in range(len(spec.layers))]
    own = [replace(a, wiring=Difference(start, eps)) for start in starts]
    layers = zip(spec.layers, own, strict=True)
    return replace(spec, layers=tuple(replace(layer, attention=a) for layer, a in layers))


def _with_states(fields: ConfigFields, spec: ModelSpec) -> ModelSpec:
    """Granite 4.0, which has Mamba-2 in most layers in attention's place."""
    kinds = fields.take("layer_types")
    if not {*kinds} & {*_STATES}:
        fields.ignore(*states.FIELDS)
        return spec
    own = states.read(fields, spec.final_norm, int(spec.embed * fields.number("mamba_expand")))
    recurs = {
        layer: replace(layer, recurrence=own, attends=False) for layer in dict.fromkeys(spec.layers)
    }
    layers = (
        recurs[layer] if kind in _STATES else layer
        for kind, layer in zip(kinds, spec.layers, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _activation(fields: ConfigFields) -> Activation | Literal["xielu"]:
    if fields.family == "apertus" and fields.take("hidden_act") == "xielu":
        return "xielu"
    return fields.activation("hidden_act")


def _biases(kind: Kind) -> tuple[Bias, Bias, Bias, Bias]:
    return kind.qkv_bias, kind.out_bias, kind.mlp_bias, kind.head_bias


def _rope_parameters(
    fields: ConfigFields, kinds: Sequence[str | None]
) -> dict[str, Mapping[str, Any]]:
    """HF's rope_parameters by the kinds of layers that have their own, "" where all have one."""
    given = fields.take("rope_parameters")
    parameters: dict[str, Mapping[str, Any]]
    if fields.family in _ROPES_BY_KIND:
        by_kind = ropes_by_kind(given, [kind for kind in kinds if kind])
        parameters = {kind: by_kind[kind] for kind in dict.fromkeys(kinds) if kind}
    else:
        parameters = {"": given}
    if not isinstance(given, Mapping):
        return parameters
    if fields.family in _SWAS:
        thetas = [kind for kind in dict.fromkeys(kinds) if kind]
        parameters = {theta: {**given, "rope_theta": float(theta)} for theta in thetas}
        fields.ignore("rope_theta")  # which layer_rope_theta says again for each layer
    for own in parameters.values():
        theta = 10000.0 if fields.family == "cohere2_moe" else None
        fields.within(own, rope_theta=theta, partial_rotary_factor=None)
        for name in ("rope_pct", "rope_percent"):  # of StableLM's makers, and Nemotron's
            fields.require(name, own.get("partial_rotary_factor"))
    if fields.family == "cohere_compass_text":  # of texts alone all parts count the same
        sections = dict.fromkeys(("mrope_section", "mrope_interleaved"))
        parameters = {kind: {**own, **sections} for kind, own in parameters.items()}
    if fields.family == "phimoe" and given.get("rope_type") == "longrope":
        parameters[""] = {**given, **dict.fromkeys(_MSCALES)}  # beside the angles
    if fields.family == "ministral3":  # HF reads neither for the angles
        parameters[""] = dict(given, llama_4_scaling_beta=None, max_position_embeddings=None)
    if fields.family.startswith("hunyuan_v1") and given.get("rope_type") == "dynamic":
        alpha, theta = given.get("alpha", 0), given.get("rope_theta", 0)
        dim = fields.size("head_dim")
        if is_positive(alpha) and is_positive(theta) and dim > 2:  # which makes it static
            base = theta * alpha ** (dim / (dim - 2))
            parameters[""] = {"rope_type": "default", "rope_theta": base}
    return parameters


def _without_lengths(rope: Rope, parameters: Mapping[str, Any]) -> Rope:
    """Phi-3.5-MoE's rotary embedding as HF has it: of longrope the short factors at any length.

    In the place of longrope's own factor on cos and sin the config has two, `short_mscale` and,
    where the longest sequence of a call is beyond the original length, `long_mscale`.
    """
    if rope.kind == "default":
        return rope
    if rope.kind != "longrope":
        raise UnservedError(
            f"config.json has rope_type={shown(rope.kind)}, which the phimoe family does not "
            "honour (default and longrope only); ignoring it would give wrong text."
        )
    values: list[Any] = [parameters.get(name) for name in _MSCALES]
    short, long = values
    if not is_positive(short) or not is_positive(long):
        raise ModelError(
            f"config.json has rope_parameters with short_mscale={shown(short)} and long_mscale="
            f"{shown(long)}; longrope of phimoe needs two positive numbers."
        )
    if short != long:
        raise UnservedError(
            f"config.json has rope_parameters with short_mscale={short} and long_mscale={long}; "
            "the phimoe family honours two equal ones only. By others a sequence's scores would "
            "depend on the lengths of those beside it. Take the short one for both if all texts "
            f"are of at most {parameters.get(ORIGINAL)} tokens."
        )
    return replace(rope, scaling=float(short), long=(), original=0)


def _attentions(fields: ConfigFields) -> list[tuple[int | None, str | None]]:
    """Of each layer its window, None where it sees all of the past, and which rotary it has.

    None for none, "" for the one that the model has, else HF's name of its kind of layer, or the
    layer's theta.
    """
    count, family = fields.layers("num_hidden_layers"), fields.family
    if family in ("starcoder2", *_PHIS, "phimoe", "ministral3", "mixtral", "qwen3_moe"):
        window = fields.take("sliding_window")
        return [(None if window is None else fields.size("sliding_window"), "")] * count
    if family == "granitemoehybrid":
        fields.kinds("layer_types", count, ("attention", "full_attention", *_STATES))
        fields.require("position_embedding_type", "rope", "nope")
        turns = fields.take("position_embedding_type") == "rope"
        return [(None, "" if turns else None)] * count
    turning = ("cwm", "dots1", "gpt_oss", "ministral", "qwen2_moe")
    windowed = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1")
    windowed += ("smollm3", *_ROPES_BY_KIND)
    if family not in (*turning, *windowed, *_SWAS):
        return [(None, "")] * count
    kinds = fields.layer_types(count)
    windows = fields.windows(kinds)
    if family in _ROPES_BY_KIND:
        given = fields.take("rope_parameters")
        bare = [k for k in {*kinds} if isinstance(given, Mapping) and given.get(k, 0) is None]
        turns = [None if kind in bare else kind for kind in kinds]  # Cohere's global ones
        return list(zip(windows, turns, strict=True))
    if family in _SWAS:
        thetas = fields.take("layer_rope_theta")
        fits = isinstance(thetas, list | tuple) and len(thetas) == count
        if not fits or not all(theta == 0 or is_positive(theta) for theta in thetas):
            raise ModelError(
                f"config.json has layer_rope_theta={shown(thetas)}; expected a positive number for "
                f"each of {count} layers, or 0 of one without rotary embedding."
            )
        return [(w, str(t) if t else None) for w, t in zip(windows, thetas, strict=True)]
    if family == "smollm3":
        turns = fields.take("no_rope_layers")
        if not isinstance(turns, list | tuple) or len(turns) != count or {*turns} - {0, 1}:
            raise ModelError(
                f"config.json has no_rope_layers={shown(turns)}; expected a 0 or 1 for each of "
                f"{count} layers."
            )
        return [(w, "" if t else None) for w, t in zip(windows, turns, strict=True)]
    everywhere = family in turning
    everywhere |= family.startswith(("exaone", "kolibri")) and fields.take("sliding_window") is None
    turns = [everywhere or w is not None for w in windows]
    if family == "cohere2_moe" and fields.take("prefix_dense_sliding_window_pattern") == 1:
        feeds = fields.kinds("mlp_layer_types", count, ("dense", "sparse"))
        turns = [turn or feed == "dense" for turn, feed in zip(turns, feeds, strict=True)]
    return [(w, "" if turn else None) for w, turn in zip(windows, turns, strict=True)]


def _embed_scale(fields: ConfigFields, embed: int) -> float:
    if fields.family in _GRANITES:
        return fields.number("embedding_multiplier")
    if fields.family == "afmoe":
        return embed**0.5 if fields.flag("mup_enabled", False) else 1.0
    return embed**0.5 if fields.family == "gemma" else 1.0


def _head(fields: ConfigFields, has_head: bool) -> Head | None:
    scale = 1.0
    if fields.family == "cohere_compass_text":
        scale = fields.optional_number("logit_scale") or 1.0
    elif fields.family.startswith("cohere"):
        scale = fields.number("logit_scale")
    elif fields.family == "hyperclovax":
        scale = fields.number("logits_scaling")
    elif fields.family in _GRANITES:
        scale = 1 / fields.number("logits_scaling")
    softcap = None
    if fields.family == "nanochat":
        softcap = fields.optional_number("final_logit_softcapping")
    return Head("causal", scale=scale, softcap=softcap) if has_head else None


def _table(
    fields: ConfigFields,
    kind: Kind,
    spec: ModelSpec,
    biases: tuple[bool, ...],
    parallel: bool,
) -> WeightTable:
    norm = spec.layers[0].norm
    qkv_bias, out_bias, mlp_bias, head_bias = biases
    hf = "model.layers.{i}."
    names = {n: name for n, name in kind.norms.items() if n != "mlp_norm" or not parallel}
    if spec.layers[0].placement == "pre":
        names = {n: name for n, name in names.items() if "post" not in n}
    layer = [r for n, name in names.items() for r in _norm(kind, norm, n, f"{hf}{name}")]
    norms = tuple(layer)
    if kind.qkv:
        layer += make.linear("qkv", f"{hf}self_attn.{kind.qkv}", "q+k+v embed", qkv_bias)
    elif isinstance(wiring := spec.layers[0].attention.wiring, Difference):
        layer += wiring.rows(f"{hf}self_attn", qkv_bias)
    else:
        layer += make.joined("qkv", hf + "self_attn.{p}", make.QKV, qkv_bias)
    if kind.weighted:
        layer += make.head_norms(spec.layers[0].attention, f"{hf}self_attn", kind.qk_names)
    elif kind.qk_norm:
        layer += [r for x in "qk" for r in make.plain_norm(norm, f"{x}_norm", "head_dim")]
    if kind.attn_gate:
        layer += make.linear("attn_gate", f"{hf}self_attn.{kind.attn_gate}", "q embed", False)
    layer += make.linear("out", f"{hf}self_attn.{kind.out}", "embed q", out_bias)
    for part in (spec.layers[0].attention.wiring, *spec.layers[0].edits):
        if isinstance(part, NormedHeads | NormedHidden):
            layer += part.rows(norm, hf)
    if fields.family in _SINKS:
        sinks = row("sinks", "heads", (f"{hf}self_attn.sinks", "heads"))
        layer.append(replace(sinks, wide=True))
    dense = _dense_rows(kind, hf, mlp_bias, spec.layers[0].mlp.activation == "xielu")
    own = mixtures.MIXTURES.get(fields.family)
    outer = _norm(kind, norm, "final_norm", f"model.{kind.final_norm}")
    if spec.embed_norm:
        outer += _norm(kind, norm, "embed_norm", "")
    if head_bias and spec.head:
        outer.append(row("head.bias", "vocab", ("lm_head.bias", "vocab")))
    unused = [r"rotary_emb\.inv_freq$", *kind.unused]
    if own:
        unused += [*own.unused, rf"^(model\.)?layers\.{len(spec.layers)}\."]
    table = make.causal_table(
        spec,
        layer,
        outer,
        embedding="model.embed_tokens",
        tied=fields.flag("tie_word_embeddings", kind.tied),
        base="model.",
        unused=unused,
        renames=own.renames if own else (),
    )

    biased = False, False
    if any(layer.recurrence for layer in spec.layers):
        biased = fields.flag("mamba_proj_bias", False), fields.flag("mamba_conv_bias", True)

    def rows_of(mlp: Mlp | Experts, recurs: Recurrence | None) -> tuple[Row, ...]:
        mixing = tuple(layer)
        if isinstance(recurs, StateSpace):
            mixing = (*norms, *recurs.rows(f"{hf}mamba", *biased))
        if own is None or not isinstance(mlp, Experts):
            return (*mixing, *dense)
        return (*mixing, *mixtures.make_rows(own, mlp, hf))

    kinds = [(own.mlp, own.recurrence) for own in spec.layers]
    by_kind = {key: rows_of(*key) for key in dict.fromkeys(kinds)}
    return replace(table, layers=tuple(by_kind[key] for key in kinds))


def _dense_rows(kind: Kind, hf: str, bias: bool, is_xielu: bool) -> list[Row]:
    """The rows of a feed-forward in a layer by HF's name."""
    hf += f"{kind.mlp_module}."
    rows: list[Row] = []
    *first, down = kind.mlp
    if len(first) == 2:
        rows += make.joined("up", hf + "{p}", make.GATE_UP, bias)
    else:
        axes = "gate+up embed" if kind.gated else "ffn embed"
        rows += make.linear("up", f"{hf}{first[0]}", axes, bias)
    if is_xielu:
        rows += make.xielu(f"{hf}act_fn")
    inner = "embed up" if kind.gated else "embed ffn"
    rows += make.linear("down", f"{hf}{down}", inner, bias)
    return rows


def _norm(kind: Kind, norm: Norm, ours: str, theirs: str) -> list[Row]:
    if not kind.weighted:
        return make.plain_norm(norm, ours)
    rows = make.norm(norm, ours, theirs)
    if norm.kind == "layer" and not kind.norm_bias:
        rows[1:] = make.plain_norm(norm, ours)[1:]
    return rows
