"""Mixtures of experts: which layers have one, how its router chooses, and what HF calls its parts.

A file has a tensor for each expert; a module of transformers 5 has one for all of them. HF sources:
the routers and the blocks around them in models/NAME/modeling_NAME.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...blocks.shared_expert import SharedScaled
from ...errors import ModelError, shown
from .. import rows as make
from ..spec import Experts, Mlp, Router
from ..weights import Row, Source, row
from .fields import ConfigFields


@dataclass(frozen=True)
class Mixture:
    """HF's names for the parts of a mixture, and its fields of a config.

    `expert` are the parts of one expert in files, gate, up and down; Granite's files have all
    experts in one tensor, as modules do. `shared` is a layer's module of the shared expert, which
    is as wide as so many experts as the field `shares` says, and `shared_parts` are its own, two of
    them where gate and up are one; what it gives may be times a `shared_gate`. `choice_bias` is a
    tensor of `choice_axes`; with `router_bias` logits have one as well. A
    tensor of all experts may lie `turned`, columns before rows, and be `marked` so in HF's class.
    `stacked` files have a tensor of all experts for each part. `ignored` fields change nothing at
    inference.
    """

    block: str = "mlp"
    router: str = "gate"
    expert: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    shared_parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shares: str = ""
    shared_gate: str = ""
    choice_bias: str | None = None
    choice_axes: str = "choices"
    router_bias: bool = False
    turned: bool = False
    marked: bool = True
    stacked: bool = False
    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    ffn: str = "moe_intermediate_size"
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = field(default=("router_aux_loss_coef", "router_jitter_noise"))


_MIXTRAL = Mixture(
    expert=("w1", "w3", "w2"),
    count="num_local_experts",
    ffn="intermediate_size",
    renames=((".mlp.", ".block_sparse_moe."),),
)
_DEEPSEEK = Mixture(
    count="n_routed_experts",
    shared="mlp.shared_experts",
    shares="n_shared_experts",
    choice_bias="gate.e_score_correction_bias",
)
_GRANITE = Mixture(
    block="block_sparse_moe",
    router="router",
    shared="shared_mlp",
    shared_parts=("input_linear", "output_linear"),
    count="num_local_experts",
    ffn="intermediate_size",
    renames=(
        (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
        (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
        (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    ),
)
_GRANITES = ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared")
_LATENT = (
    "deepseek_v32",
    "glm_moe_dsa",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "mistral4",
)  # by their attention
_DEEPSEEKS = ("dots1", "exaone_moe", "glm4_moe", "mimo_v2_flash", "solar_open", *_LATENT)
# Those whose mlp_layer_types says which layers are mixtures.
_LISTED = ("axk1", "axk2", "cohere2_moe", "exaone_moe", "glm4_moe_lite", "hy_v3", "mellum")
_LISTED += ("deepseek_v32", "glm_moe_dsa", "deepseek_ocr2_text", "laguna", "mimo_v2_flash")
_LISTED += ("step3p5", "bailing_hybrid", "kimi_linear")
_SEVERAL = Mixture(shared="mlp.shared_experts", shares="num_shared_experts")
# Those whose config has a width of the shared expert by Qwen's name.
_SHARED = ("flint", "kolibri1", "laguna", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next")
_FACTOR = "routed_scaling_factor"
_TRAINED = ("aux_loss_alpha", "seq_aux")
MIXTURES: Mapping[str, Mixture] = {
    "afmoe": replace(_SEVERAL, router="router.gate", choice_bias="expert_bias"),
    "aria_text": Mixture(
        router="router",
        shared="mlp.shared_experts",
        shares="moe_num_shared_experts",
        turned=True,
        count="moe_num_experts",
        chosen="moe_topk",
        ffn="intermediate_size",
        renames=(
            (".mlp.experts.gate_up_proj", ".mlp.experts.fc1.weight"),
            (".mlp.experts.down_proj", ".mlp.experts.fc2.weight"),
        ),
    ),
    "axk1": replace(
        _DEEPSEEK,
        renames=((".mlp.post_mlp_layernorm.", ".post_mlp_layernorm."),),
        unused=(r"\.post_mlp_layernorm\.",),  # that of dense layers, which have none
    ),
    "axk2": replace(
        _DEEPSEEK,
        renames=(
            *((".mlp.fc1.", ".W_down."), (".mlp.fc2.", ".W_up.")),
            (".self_attn.q_gate_proj.", ".self_attn.q_b_proj."),
        ),
    ),
    "bailing_hybrid": replace(
        _DEEPSEEK,
        count="num_experts",
        renames=(
            (".forget_gate.", "."),
            ("model.embed_tokens.", "model.word_embeddings."),
            (".self_attn.", ".attention."),
            (".attention.o_proj.", ".attention.dense."),
            (".gate.e_score_correction_bias", ".gate.expert_bias"),
        ),
    ),
    "cohere2_moe": replace(_SEVERAL, ffn="intermediate_size"),
    "deepseek_ocr2_text": replace(_DEEPSEEK, choice_bias=None, ignored=_TRAINED),
    "deepseek_v2": replace(_DEEPSEEK, choice_bias=None, ignored=_TRAINED),
    "deepseek_v3": replace(_DEEPSEEK, ignored=_TRAINED),
    "deepseek_v32": replace(_DEEPSEEK, ignored=_TRAINED),
    "dots1": _DEEPSEEK,
    "ernie4_5_moe": Mixture(
        shared="mlp.shared_experts",
        shares="moe_num_shared_experts",
        choice_bias="gate.moe_statics.e_score_correction_bias",
        choice_axes="one choices",
        count="moe_num_experts",
        chosen="moe_k",
        renames=((".gate.moe_statics.", ".moe_statics."),),
        unused=(r"(^|\.)mtp_",),
    ),
    "exaone_moe": replace(
        _SEVERAL,
        choice_bias=_DEEPSEEK.choice_bias,
        renames=((".mlp.gate.e_score_", ".mlp.e_score_"),),
        unused=(r"(^|\.)mtp\.",),
    ),
    "jamba": Mixture(block="feed_forward", router="router", ffn="intermediate_size"),
    "lfm2_moe": Mixture(block="feed_forward", expert=("w1", "w3", "w2"), choice_bias="expert_bias"),
    "flint": Mixture(renames=((".self_attn.sinks", ".self_attn.softmax_offset"),)),
    "flex_olmo": Mixture(ffn="intermediate_size"),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "gpt_oss": Mixture(
        router="router",
        count="num_local_experts",
        ffn="intermediate_size",
        router_bias=True,
    ),
    "granitemoe": _GRANITE,
    "granitemoe_swa": replace(_GRANITE, renames=()),
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hy_v3": replace(
        _SEVERAL,
        choice_bias="e_score_correction_bias",
        renames=(
            (".mlp.gate.weight", ".mlp.router.gate.weight"),
            (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.shared_experts.", ".mlp.shared_mlp."),
        ),
    ),
    "hunyuan_v1_moe": Mixture(
        router="gate.wg", shared="mlp.shared_mlp", chosen="moe_topk", ffn="intermediate_size"
    ),
    "kimi_linear": replace(
        _DEEPSEEK,
        expert=("w1", "w3", "w2"),
        count="num_experts",
        renames=((".forget_gate.", "."), (".mlp.", ".block_sparse_moe.")),
    ),
    "kolibri1": Mixture(
        shared="mlp.shared_experts",
        choice_bias=_DEEPSEEK.choice_bias,
        renames=(
            (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
            (".post_self_attn_layernorm.", ".post_attn_norm."),
            (".post_mlp_layernorm.", ".post_ffn_norm."),
        ),
    ),
    "laguna": Mixture(
        shared="mlp.shared_experts",
        choice_bias=_DEEPSEEK.choice_bias,
        renames=(
            (".mlp.gate.e_score_", ".mlp.experts.e_score_"),
            (".mlp.shared_experts.", ".mlp.shared_expert."),
        ),
    ),
    "llama4_text": Mixture(
        block="feed_forward",
        router="router",
        shared="feed_forward.shared_expert",
        turned=True,
        marked=False,
        count="num_local_experts",
        ffn="intermediate_size",
    ),
    "longcat_flash": Mixture(
        router="router.classifier", shared="mlps.0", choice_bias="router.e_score_correction_bias"
    ),
    "mellum": Mixture(unused=(r"^mtp\.",)),
    "mimo_v2_flash": replace(
        _DEEPSEEK,
        shares="",
        renames=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        unused=(r"^model\.mtp\.",),
    ),
    "minimax": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, choice_bias="e_score_correction_bias"),
    "mistral4": replace(_DEEPSEEK, choice_bias=None),
    "mixtral": _MIXTRAL,
    "olmoe": Mixture(ffn="intermediate_size"),
    "phimoe": replace(
        _MIXTRAL,
        router="router",
        renames=(*_MIXTRAL.renames, (".router.weight", ".gate.weight")),
        ignored=("router_aux_loss_coef", "input_jitter_noise", "num_experts_per_tok"),
    ),
    "qwen2_moe": Mixture(shared_gate="shared_expert_gate"),
    "qwen3_5_moe_text": Mixture(shared_gate="shared_expert_gate"),
    "qwen3_moe": Mixture(),
    "qwen3_next": Mixture(shared_gate="shared_expert_gate"),
    "solar_open": _DEEPSEEK,
    "step3p5": replace(
        _DEEPSEEK,
        shares="",
        stacked=True,
        renames=(
            (".mlp.experts.", ".moe."),
            (".mlp.gate.e_score_correction_bias", ".moe.router_bias"),
            (".mlp.gate.weight", ".moe.gate.weight"),
            (".mlp.shared_experts.", ".share_expert."),
        ),
    ),
}


def read_layers(fields: ConfigFields, dense: Mlp, layers: int) -> list[Mlp | Experts]:
    """The feed-forward, dense or mixed, of each layer of a family of `MIXTURES`."""
    own, activation = MIXTURES[fields.family], dense.activation
    assert activation != "xielu"
    fields.ignore(*own.ignored)
    fields.ignore("output_router_logits")
    ffn, shared = fields.size(own.ffn), _shared(fields)
    count = fields.size(_name_of_count(fields))
    if fields.family == "hunyuan_v1_moe":
        fields.require("num_shared_expert", 1, [1] * layers)  # HF does not read it
    by_layer: list[Mlp | Experts] = []
    for i, is_mixture in enumerate(_which(fields, layers)):
        router = replace(_router(fields), chosen=_chosen(fields, own.chosen, i, layers))
        if router.chosen > count:
            raise ModelError(
                f"config.json has {count} experts, of which a token chooses {router.chosen} "
                f"({own.chosen}); it cannot choose more experts than there are."
            )
        mixture = Experts(count, ffn, activation, dense.gated, router, shared)
        if fields.family == "llama4_text":
            mixture = replace(mixture, weighs_input=True)
        if fields.family == "gpt_oss":
            mixture = _clamped(fields, mixture)
        if fields.family == "cohere2_moe":
            mixture = _averaged(fields, mixture)
        by_layer.append(mixture if is_mixture else dense)
    return by_layer


def _clamped(fields: ConfigFields, mixture: Experts) -> Experts:
    """GPT-OSS's experts: gates and ups within a limit, gate * sigmoid(1.702 gate) * (up + 1)."""
    fields.require("hidden_act", "silu")
    fields.require("swiglu_alpha", 1.702)  # that of the activation
    limit = 7.0 if fields.take("swiglu_limit") is None else fields.number("swiglu_limit")
    return replace(mixture, activation="quick_gelu", limit=limit, offset=1.0)


def _averaged(fields: ConfigFields, mixture: Experts) -> Experts:
    """Cohere's: the sum, or the mean, of what the chosen experts and the shared ones make."""
    name = "shared_expert_combination_strategy"
    fields.require(name, "sum", "average")
    if not mixture.shared or fields.take(name) == "sum":
        return mixture
    return replace(mixture, router=replace(mixture.router, scale=0.5), mixing=SharedScaled(0.5))


def _name_of_count(fields: ConfigFields) -> str:
    """The field that says how many experts there are: transformers 5 has moved Qwen3's."""
    name = MIXTURES[fields.family].count
    return name if fields.take(name) is not None else "num_local_experts"


def _chosen(fields: ConfigFields, name: str, layer: int, layers: int) -> int:
    """The number of experts that a token of a layer chooses; HunYuan's may differ by layer."""
    if fields.family == "phimoe":
        return 2  # whatever the field says: HF's router has two picks written out
    value = fields.take(name)
    if fields.family != "hunyuan_v1_moe" or not isinstance(value, list):
        return fields.size(name)
    if len(value) != layers or any(type(k) is not int or k < 1 for k in value):
        raise ModelError(
            f"config.json has {name}={shown(value)}; expected a positive int, or one for each of "
            f"{layers} layers."
        )
    return value[layer]


def _groups(fields: ConfigFields, least: int) -> tuple[int, int]:
    """Groups of at least `least` experts, and how many of them are open to a token."""
    groups, chosen = fields.size("n_group", 1), fields.size("topk_group", 1)
    total = fields.size(MIXTURES[fields.family].count)
    experts = fields.size(MIXTURES[fields.family].chosen)
    # Of too few open experts HF takes closed ones, those that a sort of equal numbers gives first.
    fits = total % groups == 0 and total // groups >= least and chosen <= groups
    if not fits or total // groups * chosen < experts:
        raise ModelError(
            f"config.json has n_group={groups} and topk_group={chosen} for {total} experts, of "
            f"which a token has {experts}; expected groups of one size of at least {least}, no "
            "more open ones than there are, and as many experts in them as a token has."
        )
    return groups, chosen


def _router(fields: ConfigFields) -> Router:
    """The router of a family, but for how many experts it chooses."""
    family = fields.family
    if family in ("aria_text", "gpt_oss", *_GRANITES):
        return Router(0, "chosen")
    if family in ("deepseek_ocr2_text", "deepseek_v2"):
        fields.require("norm_topk_prob", False)  # HF's router does not read it
        fields.require("scoring_func", "softmax")
        fields.require("topk_method", "greedy", "group_limited_greedy")
        limited = fields.take("topk_method") == "group_limited_greedy"
        groups, chosen = _groups(fields, 1) if limited else (1, 1)
        fields.ignore("n_group", "topk_group")
        scale = fields.number("routed_scaling_factor")
        return Router(0, groups=groups, groups_chosen=chosen, scale=scale)
    if family in _DEEPSEEKS:
        fields.require("scoring_func", "sigmoid", *(("noaux_tc",) * (family == "dots1")))
        fields.require("topk_method", "noaux_tc")
        if family == "axk2":  # whose closed groups HF gives scores of 0, which may be chosen
            fields.require("n_group", 1)
        groups, chosen = _groups(fields, 2)
        renormalized = fields.flag("norm_topk_prob", False)
        scale = fields.number("routed_scaling_factor")
        score = "softmax" if family == "mistral4" else "sigmoid"
        return Router(0, score, groups, chosen, "two", renormalized, 1e-20, scale)
    if family == "lfm2_moe":
        renormalized, scale = fields.flag("norm_topk_prob", True), fields.number(_FACTOR)
        return Router(0, "sigmoid", renormalized=renormalized, eps=1e-6, scale=scale)
    if family == "afmoe":
        scale = fields.number("route_scale")
        return Router(0, "sigmoid", renormalized=True, eps=1e-20, scale=scale)
    if family == "laguna":
        fields.require("moe_apply_router_weight_on_input", False)
        softcap = fields.take("moe_router_logit_softcapping", 0.0)
        softcap = fields.number("moe_router_logit_softcapping") if softcap else None
        scale = fields.number("moe_routed_scaling_factor")
        return Router(0, "sigmoid", renormalized=True, scale=scale, softcap=softcap)
    if family == "hy_v3":
        scale = fields.number("router_scaling_factor")
        return Router(0, "sigmoid", renormalized=True, eps=1e-20, scale=scale)
    if family == "cohere2_moe":
        fields.require("expert_selection_fn", "softmax", "sigmoid")
        renormalized = fields.flag("norm_topk_prob", True)
        if fields.take("expert_selection_fn") == "softmax":
            return Router(0, "chosen")
        return Router(0, "gates", renormalized=renormalized)
    if family == "llama4_text":
        return Router(0, "gates")
    if family in ("flint", "kolibri1"):
        score = "sigmoid" if family == "flint" else "gates"
        return Router(0, score, renormalized=fields.flag("norm_topk_prob", False))
    if family == "phimoe":
        name = "router_jitter_noise"
        jitter = 0.0 if fields.take(name) == 0 else fields.number(name)
        return Router(2, "sparse", jitter=jitter)
    if family == "minimax_m2":
        return Router(0, "sigmoid", renormalized=True)
    if family == "step3p5":
        scale = fields.number("moe_router_scaling_factor")
        return Router(0, "sigmoid", renormalized=True, scale=scale)
    if family == "ernie4_5_moe":
        # HF divides by the sum, but by moe_norm_min where that is more. Sums of probabilities are.
        fields.require("moe_norm_min", 1e-12)
        return Router(0, renormalized=True, eps=1e-12)
    if family in ("hunyuan_v1_moe", "minimax", "mixtral", "qwen3_5_moe_text"):
        return Router(0, renormalized=True)
    return Router(0, renormalized=fields.flag("norm_topk_prob", False))


def _shared(fields: ConfigFields) -> int:
    """The ffn of the shared expert; 0 without one."""
    own = MIXTURES[fields.family]
    if own.shares:
        return fields.size(own.shares) * fields.size(own.ffn) if fields.take(own.shares) else 0
    if fields.family == "step3p5":
        return fields.size("share_expert_dim")
    if fields.family in _SHARED:
        return fields.size("shared_expert_intermediate_size")
    if fields.family in _GRANITES[1:]:
        width = "shared_intermediate_size"
        return fields.size(width) if fields.take(width, 0) else 0
    if fields.family in ("hunyuan_v1_moe", "llama4_text"):
        return fields.size("intermediate_size")
    return 0


def _which(fields: ConfigFields, layers: int) -> list[bool]:
    """Of each layer whether it has a mixture."""
    family = fields.family
    if family == "llama4_text":
        fields.ignore("interleave_moe_layer_step")  # HF folds it into moe_layers
        mixed = fields.take("moe_layers")
        if not isinstance(mixed, list | tuple) or any(type(i) is not int for i in mixed):
            raise ModelError(
                f"config.json has moe_layers={shown(mixed)}; expected a list of layers."
            )
        return [i in mixed for i in range(layers)]
    if family in _LISTED:
        kinds = fields.kinds("mlp_layer_types", layers, ("dense", "sparse"))
        if family == "glm4_moe_lite":
            fields.require("first_k_dense_replace", kinds.count("dense"))  # HF does not read it
        return [kind == "sparse" for kind in kinds]
    if family in ("afmoe", "lfm2_moe"):
        dense = fields.size("num_dense_layers") if fields.take("num_dense_layers") else 0
        return [i >= dense for i in range(layers)]
    if family == "solar_open":
        fields.require("first_k_dense_replace", 0)
    if family in _DEEPSEEKS:
        fields.require("moe_layer_freq", 1)
        dense = fields.take("first_k_dense_replace", 0)
        if type(dense) is not int or dense < 0:
            raise ModelError(
                f"config.json has first_k_dense_replace={shown(dense)}; expected a number of "
                "layers."
            )
        return [i >= dense for i in range(layers)]
    if family == "ernie4_5_moe":
        start, end = fields.take("moe_layer_start_index", 1), fields.take("moe_layer_end_index", -1)
        step = fields.size("moe_layer_interval", 1)
        if not all(type(n) is int for n in (start, end)):
            raise ModelError(
                f"config.json has moe_layer_start_index={shown(start)} and moe_layer_end_index="
                f"{shown(end)}; expected numbers of layers."
            )
        end = layers - 1 if end == -1 else end
        return [start <= i <= end and (i + 1) % step == 0 for i in range(layers)]
    if family == "jamba":
        step, first = fields.size("expert_layer_period"), fields.take("expert_layer_offset", 0)
        return [i % step == first for i in range(layers)]
    if family in ("flint", "qwen2_moe", "qwen3_moe", "qwen3_next"):
        dense, step = fields.take("mlp_only_layers", []), fields.size("decoder_sparse_step", 1)
        if not isinstance(dense, list | tuple) or any(type(i) is not int for i in dense):
            raise ModelError(
                f"config.json has mlp_only_layers={shown(dense)}; expected a list of layers."
            )
        return [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    return [True] * layers


def feed_rows(names: Mixture | None, mlp: Mlp | Experts, layer: str, dense: str) -> list[Row]:
    """The rows of a mixture, or of a gated feed-forward by the name `dense`, in a layer by HF's.

    The layer's name ends in a dot.
    """
    if isinstance(mlp, Experts):
        assert names is not None
        return make_rows(names, mlp, layer)
    rows = make.joined("up", f"{layer}{dense}.{{p}}", make.GATE_UP, bias=False)
    return rows + make.linear("down", f"{layer}{dense}.down_proj", "embed up", bias=False)


def make_rows(names: Mixture, mixture: Experts, layer: str) -> list[Row]:
    """The rows of a mixture in a layer by HF's name, which ends in a dot."""
    hf = f"{layer}{names.block}"
    bias = names.router_bias
    rows = make.linear("router", f"{hf}.{names.router}", "choices embed", bias)
    if bias:
        return rows + _gpt_oss_rows(f"{hf}.experts")
    if names.choice_bias:
        source = (f"{hf}.{names.choice_bias}", names.choice_axes)
        bias = row("router.choice_bias", names.choice_axes, source)
        rows.append(replace(bias, wide=True, fixed=True))
    experts = f"{hf}.experts"
    rows += [
        _stacked(names, "up", "gate+up embed", f"{experts}.gate_up_proj", experts),
        _stacked(names, "down", "embed up", f"{experts}.down_proj", experts),
    ]
    if mixture.shared:
        *first, down = (f"{layer}{names.shared}.{part}" for part in names.shared_parts)
        if len(first) == 2:
            parts = {"shared_gate": first[0], "shared_up": first[1]}
            rows += make.joined("shared.up", "{p}", parts, bias=False)
        else:
            rows += make.linear("shared.up", first[0], "shared_gate+shared_up embed", bias=False)
        rows += make.linear("shared.down", down, "embed shared_up", bias=False)
    if mixture.shared and names.shared_gate:
        rows += make.linear("shared.gate", f"{hf}.{names.shared_gate}", "one embed", bias=False)
    return rows


def _gpt_oss_rows(experts: str) -> list[Row]:
    """GPT-OSS's: columns before rows, gates and ups by turns; a matrix each where it is mxfp4."""
    up, down = "experts gate+up embed", "experts embed up"
    turns, each = "gate+up/ffn", f"{experts}.{{x}}"
    rows = [
        row("experts.up.weight", up, (f"{each}.gate_up_proj.weight", f"{turns} embed")),
        row("experts.down.weight", down, (f"{each}.down_proj.weight", "embed up")),
    ]
    wholes = (
        Source(f"{experts}.gate_up_proj", ("experts", "embed", turns)),
        Source(f"{experts}.down_proj", ("experts", "up", "embed")),
    )
    rows = [replace(own, others=(one,)) for own, one in zip(rows, wholes, strict=True)]
    biases = (f"{experts}.gate_up_proj_bias", f"experts {turns}"), (f"{experts}.down_proj_bias",)
    return [
        *rows,
        row("experts.up.bias", "experts gate+up", biases[0]),
        row("experts.down.bias", "choices embed", (*biases[1], "choices embed")),
    ]


def _each(names: Mixture, experts: str, part: str) -> list[tuple[str, str]]:
    """The tensors of one expert, or of all, with their axes."""
    at, of = ("", "experts ") if names.stacked else (".{x}", "")
    gate, up, down = (f"{experts}{at}.{name}.weight" for name in names.expert)
    if part == "up":
        return [(gate, f"{of}gate embed"), (up, f"{of}up embed")]
    return [(down, f"{of}embed up")]


def _stacked(names: Mixture, ours: str, axes: str, whole: str, experts: str) -> Row:
    """The weight of all experts, which is one tensor `whole`, or some of each of them."""
    own = row(f"experts.{ours}.weight", f"experts {axes}", *_each(names, experts, ours))
    out, inner = axes.split()
    stored = ("experts", inner, out) if names.turned else ("experts", out, inner)
    return replace(own, others=(Source(whole, stored, marked=names.marked),))
