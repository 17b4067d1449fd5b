"""Llama's relatives: decoders that differ from it by names and by facts that the spec has.

Each is a row of `_KINDS`, and its model a pass over it. HF sources: models/NAME/modeling_NAME.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...errors import ModelError, UnservedError, shown
from ..spec import Activation, Attention, Experts, Head, Layer, Mlp, ModelSpec, Norm, Rope
from ..weights import Row, WeightTable, row
from . import mixtures
from . import rows as make
from .fields import ConfigFields, is_positive
from .rope import make_rope, reach, ropes_by_kind, rotary_size

_Bias = bool | str  # the name of a config's field says it
_PRE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SHARED = {"attn_norm": "input_layernorm"}


@dataclass(frozen=True)
class _Kind:
    """What tells one family from another.

    `eps` is the field of the norms' epsilon; without one it is 1e-5. `weighted` norms have weights.
    `norms` are HF's names by ours; without `norm_bias` LayerNorm has a weight alone. `qkv` is HF's
    name of a joint projection; `mlp` are its names from gate or up to down, two of them where the
    MLP is not gated or gate and up are one. `qk_names` are those of the norms of queries and keys,
    `{x}` a head's number. Of `partial` families HF reads partial_rotary_factor. `always` are fields
    of the makers' own code with what HF takes for granted; `ignored` ones change nothing at
    inference.
    """

    name: str
    also: tuple[str, ...] = ()  # classes of the makers' own code, with the same names of weights
    norm: Literal["rms", "layer"] = "rms"
    eps: str = "rms_norm_eps"
    unit_offset: bool = False
    weighted: bool = True
    norm_bias: bool = True
    norms: Mapping[str, str] = field(default_factory=lambda: _PRE)
    final_norm: str = "norm"
    placement: Literal["pre", "around", "behind"] = "pre"
    qk_norm: _Bias = False
    qk_norm_over: Literal["head", "own", "all"] = "head"
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_turned: bool = False
    qkv_bias: _Bias = "attention_bias"
    out_bias: _Bias = "attention_bias"
    mlp_bias: _Bias = False
    head_bias: _Bias = False
    qkv: str | None = None
    out: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    parallel: _Bias = False
    interleaved: bool = False
    backwards: bool = False
    partial: bool = False
    tied: bool = False
    always: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """HF's classes, with a head and without."""
        return f"{self.name}ForCausalLM", f"{self.name}Model", *self.also


_LAYER_NORM: dict[str, Any] = {"norm": "layer", "eps": "layer_norm_eps"}
_GLM: dict[str, Any] = {"out_bias": False, "partial": True, "mlp": ("gate_up_proj", "down_proj")}
_COHERE: dict[str, Any] = {**_LAYER_NORM, "norm_bias": False, "norms": _SHARED, "parallel": True}
_PER_HEAD: dict[str, Any] = {
    "qk_norm": "qk_layernorm",
    "qk_names": ("q_layernorm", "k_layernorm"),
}
_AROUND = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
_PERI = {**_PRE, "attn_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"}
_BEHIND = {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_OLMO2: dict[str, Any] = {"placement": "behind", "norms": _BEHIND, "qk_norm": True}
_OLMO2 |= {"qk_norm_over": "all"}
_ORIGINAL = "original_max_position_embeddings"
_MSCALES = "short_mscale", "long_mscale"
_LLAMA: dict[str, Any] = {"mlp_bias": "mlp_bias"}
_WINDOWED = ("use_sliding_window", "max_window_layers")  # HF folds them into windows of layers
_HUNYUAN: dict[str, Any] = {
    "qk_norm": True,
    "qk_names": ("query_layernorm", "key_layernorm"),
    "norm_turned": True,
    # HF reads none of what follows, which is of the makers' own code and of models that see images.
    "always": {
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "norm_type": "rms",
    },
    "ignored": (
        *(
            "cla_share_factor",
            "class_num",
            "dense_list",
            "eod_token_id",
            "im_end_id",
            "im_start_id",
        ),
        *("im_newline_id", "image_token_id", "mask_init_id", "org_vocab_size", "pad_id"),
        *("pool_type", "text_end_id", "text_start_id", "video_end_id", "video_start_id"),
        *("anyres_pooling_size", "anyres_vit_max_image_size"),
    ),
}
_KINDS = {
    "apertus": _Kind(
        *("Apertus",),
        norms={"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        qk_norm=True,
        mlp=("up_proj", "down_proj"),
        gated=False,
        always={"qk_norm": True, "post_norm": False, "mlp_bias": False},
        ignored=("hidden_dropout",),
    ),
    "arcee": _Kind("Arcee", mlp=("up_proj", "down_proj"), gated=False, mlp_bias="mlp_bias"),
    "cohere": _Kind(
        *("Cohere",),
        **_COHERE,
        interleaved=True,
        tied=True,
        qk_norm="use_qk_norm",
        qk_norm_over="own",
    ),
    "cohere2": _Kind(
        *("Cohere2",),
        **_COHERE,
        interleaved=True,
        tied=True,
        ignored=(  # of the makers' own code; HF folds the pattern into layer_types
            *("cache_implementation", "order_of_interleaved_layers", "position_embedding_type"),
            *("rotary_pct", "sliding_window_pattern", "_sliding_window_pattern"),
            *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
            "use_parallel_embedding",
        ),
    ),
    "cwm": _Kind("Cwm", qkv_bias=False, out_bias=False),
    "dots1": _Kind("Dots1", qk_norm=True, ignored=_WINDOWED),
    "ernie4_5": _Kind(
        *("Ernie4_5",),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
        interleaved=True,
        tied=True,
    ),
    "ernie4_5_moe": _Kind(
        *("Ernie4_5_Moe",), qkv_bias=False, out_bias=False, interleaved=True, tied=True
    ),
    "exaone4": _Kind(
        *("Exaone4",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        placement="behind",
        norms=_BEHIND,
        qk_norm=True,
        ignored=("sliding_window_pattern",),  # HF folds it into layer_types
    ),
    "gemma": _Kind("Gemma", unit_offset=True, tied=True, ignored=("hidden_activation",)),
    "glm": _Kind("Glm", **_GLM, interleaved=True),
    "glm4": _Kind("Glm4", **_GLM, interleaved=True, placement="around", norms=_AROUND),
    "glm4_moe": _Kind(
        *("Glm4Moe",),
        partial=True,
        out_bias=False,
        qk_norm="use_qk_norm",
        ignored=("num_nextn_predict_layers", "num_mtp_layers"),  # layers behind those that answer
    ),
    "gpt_oss": _Kind(
        *("GptOss",),
        ignored=("initial_context_length",),
    ),
    "granite": _Kind("Granite", mlp_bias="mlp_bias"),
    "granitemoe": _Kind("GraniteMoe"),
    "granitemoeshared": _Kind("GraniteMoeShared"),
    "helium": _Kind("Helium", interleaved=True, out_bias=False, mlp_bias="mlp_bias"),
    "hunyuan_v1_dense": _Kind("HunYuanDenseV1", **_HUNYUAN),
    "hunyuan_v1_moe": _Kind("HunYuanMoEV1", **_HUNYUAN),
    "hyperclovax": _Kind("HyperCLOVAX", **_LLAMA, placement="around", norms=_PERI),
    "internlm3": _Kind("Llama", ("InternLM3ForCausalLM",), **_LLAMA),
    "iquestcoder": _Kind("Llama", ("IQuestCoderForCausalLM",), **_LLAMA),
    "jais2": _Kind(
        *("Jais2",),
        **_LAYER_NORM,
        **_LLAMA,
        mlp=("up_proj", "down_proj"),
        gated=False,
    ),
    "ministral": _Kind("Ministral", qkv_bias=False, out_bias=False),
    "ministral3": _Kind("Ministral3", qkv_bias=False, out_bias=False),
    "minimax_m2": _Kind(
        *("MiniMaxM2",),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        partial=True,
        qk_norm=True,
        qk_norm_over="all",
    ),
    "mixtral": _Kind("Mixtral", qkv_bias=False, out_bias=False),
    "nanochat": _Kind(
        *("NanoChat",),
        weighted=False,
        qk_norm=True,
        norm_turned=True,
        backwards=True,
        mlp=("fc1", "fc2"),
        gated=False,
    ),
    "nemotron": _Kind(
        *("Nemotron",),
        partial=True,
        norm="layer",
        eps="norm_eps",
        unit_offset=True,
        mlp=("up_proj", "down_proj"),
        gated=False,
        mlp_bias="mlp_bias",
    ),
    "olmo": _Kind("Olmo", norm="layer", eps="", weighted=False),
    "olmo2": _Kind("Olmo2", **_OLMO2),
    "olmo3": _Kind("Olmo3", **_OLMO2),
    "olmoe": _Kind("Olmoe", qk_norm=True, qk_norm_over="all"),
    "phi": _Kind(
        *("Phi",),
        partial=True,
        **_LAYER_NORM,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "head_bias", "parallel"), True),
        **_PER_HEAD,
        norms=_SHARED,
        final_norm="final_layernorm",
        out="dense",
        mlp=("fc1", "fc2"),
        gated=False,
        ignored=("embd_pdrop", "resid_pdrop"),
    ),
    "phi3": _Kind(
        *("Phi3",),
        partial=True,
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        qkv="qkv_proj",
        mlp=("gate_up_proj", "down_proj"),
        # Of the makers' own code, where these ask for nothing else.
        always={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        ignored=("embd_pdrop", "resid_pdrop", _ORIGINAL),
    ),
    "phimoe": _Kind(
        *("Phimoe", ("PhiMoEForCausalLM",)),
        norm="layer",
        head_bias="lm_head_bias",
        ignored=(_ORIGINAL,),  # HF's text begins anew beyond it, with the same numbers
    ),
    "qwen2_moe": _Kind("Qwen2Moe", qkv_bias="qkv_bias", out_bias=False, ignored=_WINDOWED),
    "qwen3_moe": _Kind("Qwen3Moe", qk_norm=True, ignored=_WINDOWED),
    "seed_oss": _Kind(
        *("SeedOss",),
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        ignored=("residual_dropout",),
    ),
    "smollm3": _Kind(
        *("SmolLM3",),
        mlp_bias="mlp_bias",
        tied=True,
        # HF folds them into lists of layers.
        ignored=("use_sliding_window", "max_window_layers", "no_rope_layer_interval"),
    ),
    "stablelm": _Kind(
        *("StableLm",),
        partial=True,
        **_LAYER_NORM,
        qkv_bias="use_qkv_bias",
        out_bias=False,
        parallel="use_parallel_residual",
        qk_norm="qk_layernorm",
        qk_norm_over="own",
        qk_names=("q_layernorm.norms.{x}", "k_layernorm.norms.{x}"),
        ignored=("hidden_dropout",),
    ),
    "starcoder2": _Kind(
        *("Starcoder2",),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), "use_bias"),
        norm="layer",
        eps="norm_epsilon",
        mlp=("c_fc", "c_proj"),
        gated=False,
        tied=True,
        ignored=(  # of GPT-BigCode's config, from which it comes; HF reads none of them
            *("residual_dropout", "embedding_dropout", "activation_function", "mlp_type"),
            *("attention_softmax_in_fp32", "layer_norm_epsilon", "norm_type"),
            *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
        ),
    ),
}
_ROPES_BY_KIND = ("olmo3",)
_GRANITES = ("granite", "granitemoe", "granitemoeshared", "hyperclovax")
CLASSES = {family: kind.classes for family, kind in _KINDS.items()}


def describe(fields: ConfigFields, architecture: str) -> tuple[ModelSpec, WeightTable]:
    """Spec and weight table of a relative of Llama's."""
    kind = _KINDS[fields.family]

    def says(bias: _Bias) -> bool:
        return fields.flag(bias, False) if isinstance(bias, str) else bias

    embed = fields.size("hidden_size")
    heads, kv_heads, head_dim = fields.grouped_heads(embed)
    positions = fields.size("max_position_embeddings")
    eps = fields.number(kind.eps) if kind.eps else 1e-5
    norm = Norm(kind.norm, eps, kind.unit_offset)
    mlp = Mlp(fields.size("intermediate_size"), _activation(fields), kind.gated)
    attentions = _attentions(fields)
    growth = _growth(fields)
    parameters = _rope_parameters(fields, [turns for _, turns in attentions])
    ropes: dict[str | None, Rope | None] = {None: None}
    for turns, own in parameters.items():
        size, turning = head_dim, own
        if kind.partial:
            size, turning = rotary_size(own, head_dim), {**own, "partial_rotary_factor": None}
        rope = make_rope(turning, size, positions, kind.interleaved, fields.family == "phi3")
        if rope.rereads:  # HF's generate begins anew by one field, its model by the other
            fields.require(_ORIGINAL, rope.original)
        if fields.family == "phimoe":
            rope = _without_lengths(rope, fields.take("rope_parameters"))
        if kind.backwards:
            rope = replace(rope, inv_freq=tuple(-frequency for frequency in rope.inv_freq))
        ropes[turns] = rope
    is_granite = fields.family in _GRANITES
    scale = fields.number("attention_multiplier") if is_granite else head_dim**-0.5
    shared: dict[str, Any] = {"qk_norm": norm if says(kind.qk_norm) else None}
    if shared["qk_norm"]:
        shared |= {"qk_norm_over": kind.qk_norm_over, "norm_turned": kind.norm_turned}
    shared["growth"] = growth
    if fields.family in ("olmo", "olmoe"):
        shared["clip"] = fields.optional_number("clip_qkv")
        shared["clip_normed"] = fields.family == "olmoe"
    shape = heads, kv_heads, head_dim, scale
    parallel = says(kind.parallel)
    behind = kind.placement
    if fields.family == "hyperclovax" and not fields.flag("use_post_norm", True):
        behind = "pre"
    placement: dict[str, Any] = {"parallel": parallel, "shared_norm": parallel}
    mlps: list[Mlp | Experts] = [mlp] * len(attentions)
    if fields.family in mixtures.MIXTURES:
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
        max_positions=max(reach(own, positions) for own in parameters.values()),
        embed_scale=_embed_scale(fields, embed),
        scales_embeds=is_granite,
        embed_norm=norm if fields.family == "nanochat" else None,
        final_norm=norm,
        head=_head(fields, architecture.endswith("ForCausalLM")),
    )
    fields.require("use_bidirectional_attention", False)
    if fields.family.startswith("hunyuan_v1"):
        fields.require("attention_head_dim", head_dim)
    for name, value in kind.always.items():
        fields.require(name, value)
    if fields.family == "ernie4_5_moe":
        fields.require("use_bias", False)
    elif fields.family == "minimax_m2":
        sizes = {rope.inv_freq for rope in ropes.values() if rope}
        fields.require("rotary_dim", *(2 * len(own) for own in sizes))
    fields.ignore("attention_dropout", *kind.ignored)
    return spec, _table(fields, kind, spec, tuple(map(says, _biases(kind))), parallel)


def _activation(fields: ConfigFields) -> Activation | Literal["xielu"]:
    if fields.family == "apertus" and fields.take("hidden_act") == "xielu":
        return "xielu"
    return fields.activation("hidden_act")


def _growth(fields: ConfigFields) -> tuple[float, float, int] | None:
    """What Ministral 3 scales queries by, of the rotary embedding's parameters."""
    parameters = fields.take("rope_parameters")
    if fields.family != "ministral3" or not isinstance(parameters, Mapping):
        return None
    names = "llama_4_scaling_beta", _ORIGINAL
    beta, period = (parameters.get(name, 0) for name in names)
    if not is_positive(beta) or not is_positive(period):
        raise ModelError(
            f"config.json has rope_parameters={shown(dict(parameters))}; ministral3 needs a "
            f"positive {' and '.join(names)}."
        )
    return float(beta), float(period), 0


def _biases(kind: _Kind) -> tuple[_Bias, _Bias, _Bias, _Bias]:
    return kind.qkv_bias, kind.out_bias, kind.mlp_bias, kind.head_bias


def _rope_parameters(
    fields: ConfigFields, kinds: Sequence[str | None]
) -> dict[str, Mapping[str, Any]]:
    """HF's rope_parameters by the kinds of layers that have their own, "" where all have one."""
    given = fields.take("rope_parameters")
    if fields.family in _ROPES_BY_KIND:
        parameters = ropes_by_kind(given, [kind for kind in kinds if kind])
        parameters = {kind: parameters[kind] for kind in dict.fromkeys(kinds) if kind}
    else:
        parameters = {"": given}
    if not isinstance(given, Mapping):
        return parameters
    for own in parameters.values():
        for name in ("rope_theta", "partial_rotary_factor"):  # transformers 4 wrote them twice
            fields.require(name, own.get(name))
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
            f"are of at most {parameters.get(_ORIGINAL)} tokens."
        )
    return replace(rope, scaling=float(short), long=(), original=0)


def _attentions(fields: ConfigFields) -> list[tuple[int | None, str | None]]:
    """Of each layer its window, None where it sees all of the past, and which rotary it has.

    None for none, "" for the one that the model has, else HF's name of its kind of layer.
    """
    count, family = fields.layers("num_hidden_layers"), fields.family
    if family in ("starcoder2", "phi3", "phimoe", "ministral3", "mixtral", "qwen3_moe"):
        window = fields.take("sliding_window")
        return [(None if window is None else fields.size("sliding_window"), "")] * count
    turning = ("cwm", "dots1", "gpt_oss", "ministral", "qwen2_moe")
    if family not in (*turning, "cohere2", "exaone4", "olmo3", "smollm3"):
        return [(None, "")] * count
    kinds = fields.layer_types(count)
    windows = fields.windows(kinds)
    if family in _ROPES_BY_KIND:
        return list(zip(windows, kinds, strict=True))
    if family == "smollm3":
        turns = fields.take("no_rope_layers")
        if not isinstance(turns, list | tuple) or len(turns) != count or {*turns} - {0, 1}:
            raise ModelError(
                f"config.json has no_rope_layers={shown(turns)}; expected a 0 or 1 for each of "
                f"{count} layers."
            )
        return [(w, "" if t else None) for w, t in zip(windows, turns, strict=True)]
    everywhere = family in turning
    everywhere |= family == "exaone4" and fields.take("sliding_window") is None
    return [(w, "" if everywhere or w is not None else None) for w in windows]


def _embed_scale(fields: ConfigFields, embed: int) -> float:
    if fields.family in _GRANITES:
        return fields.number("embedding_multiplier")
    return embed**0.5 if fields.family == "gemma" else 1.0


def _head(fields: ConfigFields, has_head: bool) -> Head | None:
    scale = 1.0
    if fields.family.startswith("cohere"):
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
    kind: _Kind,
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
    if kind.qkv:
        layer += make.linear("qkv", f"{hf}self_attn.{kind.qkv}", "q+k+v embed", qkv_bias)
    else:
        layer += make.joined("qkv", hf + "self_attn.{p}", make.QKV, qkv_bias)
    if kind.weighted:
        layer += make.head_norms(spec.layers[0].attention, f"{hf}self_attn", kind.qk_names)
    elif kind.qk_norm:
        layer += [r for x in "qk" for r in make.plain_norm(norm, f"{x}_norm", "head_dim")]
    layer += make.linear("out", f"{hf}self_attn.{kind.out}", "embed q", out_bias)
    if fields.family == "gpt_oss":
        sinks = row("sinks", "heads", (f"{hf}self_attn.sinks", "heads"))
        layer.append(replace(sinks, wide=True))
    dense = _dense_rows(kind, hf, mlp_bias, spec.layers[0].mlp.activation == "xielu")
    own = mixtures.MIXTURES.get(fields.family)
    outer = _norm(kind, norm, "final_norm", f"model.{kind.final_norm}")
    if spec.embed_norm:
        outer += _norm(kind, norm, "embed_norm", "")
    if head_bias and spec.head:
        outer.append(row("head.bias", "vocab", ("lm_head.bias", "vocab")))
    unused = [r"rotary_emb\.inv_freq$"]
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

    def rows_of(mlp: Mlp | Experts) -> tuple[Row, ...]:
        if own is None or not isinstance(mlp, Experts):
            return (*layer, *dense)
        return (*layer, *mixtures.make_rows(own, mlp, hf))

    by_kind = {mlp: rows_of(mlp) for mlp in dict.fromkeys(layer.mlp for layer in spec.layers)}
    return replace(table, layers=tuple(by_kind[layer.mlp] for layer in spec.layers))


def _dense_rows(kind: _Kind, hf: str, bias: bool, is_xielu: bool) -> list[Row]:
    """The rows of a feed-forward in a layer by HF's name."""
    rows: list[Row] = []
    *first, down = kind.mlp
    if len(first) == 2:
        rows += make.joined("up", hf + "mlp.{p}", make.GATE_UP, bias)
    else:
        axes = "gate+up embed" if kind.gated else "ffn embed"
        rows += make.linear("up", f"{hf}mlp.{first[0]}", axes, bias)
    if is_xielu:
        rows += make.xielu(f"{hf}mlp.act_fn")
    inner = "embed up" if kind.gated else "embed ffn"
    rows += make.linear("down", f"{hf}mlp.{down}", inner, bias)
    return rows


def _norm(kind: _Kind, norm: Norm, ours: str, theirs: str) -> list[Row]:
    if not kind.weighted:
        return make.plain_norm(norm, ours)
    rows = make.norm(norm, ours, theirs)
    if norm.kind == "layer" and not kind.norm_bias:
        rows[1:] = make.plain_norm(norm, ours)[1:]
    return rows
