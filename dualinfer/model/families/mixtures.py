"""Mixtures of experts: which layers have one, how its router chooses, and what HF calls its parts.

A file has a tensor for each expert; a module of transformers 5 has one for all of them. HF sources:
the routers and the blocks around them in models/NAME/modeling_NAME.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...blocks.clamped import Clamped
from ...blocks.shared_expert import SharedScaled
from ...blocks.weighed_inputs import WeighedInputs
from ...errors import ModelError
from .. import rows as make
from ..spec import Experts, Mlp
from ..weights import Row, Source, row
from . import mixed_layers, routers
from .fields import ConfigFields


@dataclass(frozen=True)
class Mixture:
    """HF's names for the parts of a mixture, and its fields of a config.

    `expert` are the parts of one expert in files, gate, up and down; Granite's files have all
    experts in one tensor, as modules do. `shared` is a layer's module of the shared expert, which
    is as wide as so many experts as the field `shares` says, and `shared_parts` are its own, two of
    them where gate and up are one; what it gives may be times a `shared_gate`. `choice_bias` is a
    tensor of `choice_axes`; with `router_bias` logits have one as well. A
    tensor of all experts may lie `turned`, columns before rows, and be `marked` so in HF's class,
    or files may hold it in `either` way.
    `stacked` files have a tensor of all experts for each part. `ignored` fields change nothing at
    inference. Of a shared expert without `shares` the width is the field `shared_ffn`, if there is
    one (`shared_if_any`: or it is 0 and there is no such expert). `route`, `choose` and `mixed` are
    functions of `routers` and `mixed_layers`; `edit` is what else a family's mixture does.
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
    either: bool = False
    stacked: bool = False
    count: str = "num_experts"
    chosen: str = "num_experts_per_tok"
    ffn: str = "moe_intermediate_size"
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    shared_ffn: str = ""
    shared_if_any: bool = False
    route: routers.Route = routers.by_share
    choose: Callable[[ConfigFields, Any, int, int], int] = routers.chosen
    mixed: mixed_layers.Mixed = mixed_layers.every
    edit: Callable[[ConfigFields, Experts], Experts] = lambda fields, mixture: mixture
    ignored: tuple[str, ...] = field(default=("router_aux_loss_coef", "router_jitter_noise"))


def _weighing_input(fields: ConfigFields, mixture: Experts) -> Experts:
    """Llama 4's: an expert reads its input times its weight."""
    return replace(mixture, mixing=WeighedInputs())


def _clamped(fields: ConfigFields, mixture: Experts) -> Experts:
    """GPT-OSS's experts: gates and ups within a limit, gate * sigmoid(1.702 gate) * (up + 1)."""
    fields.require("hidden_act", "silu")
    fields.require("swiglu_alpha", 1.702)  # that of the activation
    limit = 7.0 if fields.take("swiglu_limit") is None else fields.number("swiglu_limit")
    each = replace(mixture.each, activation="quick_gelu")
    return replace(mixture, each=each, mixing=Clamped(limit, 1.0))


def _averaged(fields: ConfigFields, mixture: Experts) -> Experts:
    """Cohere's: the sum, or the mean, of what the chosen experts and the shared ones make."""
    name = "shared_expert_combination_strategy"
    fields.require(name, "sum", "average")
    if not mixture.shared or fields.take(name) == "sum":
        return mixture
    return replace(mixture, router=replace(mixture.router, scale=0.5), mixing=SharedScaled(0.5))


_MIXTRAL = Mixture(
    expert=("w1", "w3", "w2"),
    count="num_local_experts",
    ffn="intermediate_size",
    renames=((".mlp.", ".block_sparse_moe."),),
    route=routers.renormalized,
)
_DEEPSEEK = Mixture(
    count="n_routed_experts",
    shared="mlp.shared_experts",
    shares="n_shared_experts",
    choice_bias="gate.e_score_correction_bias",
    route=routers.grouped,
    mixed=mixed_layers.behind_first,
)
_GRANITE = Mixture(
    route=routers.of_chosen,
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
_SEVERAL = Mixture(shared="mlp.shared_experts", shares="num_shared_experts")
_TRAINED = ("aux_loss_alpha", "seq_aux")
MIXTURES: Mapping[str, Mixture] = {
    "afmoe": replace(
        _SEVERAL,
        router="router.gate",
        choice_bias="expert_bias",
        route=routers.scaled_by("route_scale"),
        mixed=mixed_layers.behind_dense,
    ),
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
        route=routers.of_chosen,
    ),
    "axk1": replace(
        _DEEPSEEK,
        renames=((".mlp.post_mlp_layernorm.", ".post_mlp_layernorm."),),
        unused=(r"\.post_mlp_layernorm\.",),  # that of dense layers, which have none,
        mixed=mixed_layers.listed,
    ),
    "axk2": replace(
        _DEEPSEEK,
        renames=(
            *((".mlp.fc1.", ".W_down."), (".mlp.fc2.", ".W_up.")),
            (".self_attn.q_gate_proj.", ".self_attn.q_b_proj."),
        ),
        route=routers.one_group,
        mixed=mixed_layers.listed,
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
        mixed=mixed_layers.listed,
    ),
    "cohere2_moe": replace(
        _SEVERAL,
        ffn="intermediate_size",
        route=routers.cohere2,
        mixed=mixed_layers.listed,
        edit=_averaged,
    ),
    "deepseek_ocr2_text": replace(
        _DEEPSEEK,
        choice_bias=None,
        ignored=_TRAINED,
        route=routers.limited,
        mixed=mixed_layers.listed,
    ),
    "deepseek_v2": replace(_DEEPSEEK, choice_bias=None, ignored=_TRAINED, route=routers.limited),
    "deepseek_v3": replace(_DEEPSEEK, ignored=_TRAINED),
    "deepseek_v32": replace(_DEEPSEEK, ignored=_TRAINED, mixed=mixed_layers.listed),
    "dots1": replace(_DEEPSEEK, route=routers.grouped_dots),
    "ernie4_5_moe": Mixture(
        shared="mlp.shared_experts",
        shares="moe_num_shared_experts",
        choice_bias="gate.moe_statics.e_score_correction_bias",
        choice_axes="one choices",
        count="moe_num_experts",
        chosen="moe_k",
        renames=((".gate.moe_statics.", ".moe_statics."),),
        unused=(r"(^|\.)mtp_",),
        route=routers.ernie,
        mixed=mixed_layers.between,
    ),
    "exaone_moe": replace(
        _SEVERAL,
        choice_bias=_DEEPSEEK.choice_bias,
        renames=((".mlp.gate.e_score_", ".mlp.e_score_"),),
        unused=(r"(^|\.)mtp\.",),
        route=routers.grouped,
        mixed=mixed_layers.listed,
    ),
    "jamba": Mixture(
        block="feed_forward", router="router", ffn="intermediate_size", mixed=mixed_layers.periodic
    ),
    "lfm2_moe": Mixture(
        block="feed_forward",
        expert=("w1", "w3", "w2"),
        choice_bias="expert_bias",
        route=routers.lfm2,
        mixed=mixed_layers.behind_dense,
    ),
    "flint": Mixture(
        renames=((".self_attn.sinks", ".self_attn.softmax_offset"),),
        route=routers.flint,
        mixed=mixed_layers.stepped,
        shared_ffn="shared_expert_intermediate_size",
    ),
    "flex_olmo": Mixture(ffn="intermediate_size"),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": replace(_DEEPSEEK, mixed=mixed_layers.listed_behind),
    "glm_moe_dsa": replace(_DEEPSEEK, mixed=mixed_layers.listed),
    "gpt_oss": Mixture(
        router="router",
        count="num_local_experts",
        ffn="intermediate_size",
        router_bias=True,
        route=routers.of_chosen,
        edit=_clamped,
    ),
    "granitemoe": _GRANITE,
    "granitemoe_swa": replace(
        _GRANITE, renames=(), shared_ffn="shared_intermediate_size", shared_if_any=True
    ),
    "granitemoehybrid": replace(
        _GRANITE, shared_ffn="shared_intermediate_size", shared_if_any=True
    ),
    "granitemoeshared": replace(
        _GRANITE, shared_ffn="shared_intermediate_size", shared_if_any=True
    ),
    "hy_v3": replace(
        _SEVERAL,
        choice_bias="e_score_correction_bias",
        renames=(
            (".mlp.gate.weight", ".mlp.router.gate.weight"),
            (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.shared_experts.", ".mlp.shared_mlp."),
        ),
        route=routers.scaled_by("router_scaling_factor"),
        mixed=mixed_layers.listed,
    ),
    "hunyuan_v1_moe": Mixture(
        router="gate.wg",
        shared="mlp.shared_mlp",
        chosen="moe_topk",
        ffn="intermediate_size",
        route=routers.renormalized,
        choose=routers.chosen_by_layer,
        mixed=mixed_layers.every_by_one,
        shared_ffn="intermediate_size",
    ),
    "kimi_linear": replace(
        _DEEPSEEK,
        expert=("w1", "w3", "w2"),
        count="num_experts",
        renames=((".forget_gate.", "."), (".mlp.", ".block_sparse_moe.")),
        mixed=mixed_layers.listed,
    ),
    "kolibri1": Mixture(
        shared="mlp.shared_experts",
        choice_bias=_DEEPSEEK.choice_bias,
        renames=(
            (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
            (".post_self_attn_layernorm.", ".post_attn_norm."),
            (".post_mlp_layernorm.", ".post_ffn_norm."),
        ),
        route=routers.kolibri,
        shared_ffn="shared_expert_intermediate_size",
    ),
    "laguna": Mixture(
        shared="mlp.shared_experts",
        choice_bias=_DEEPSEEK.choice_bias,
        renames=(
            (".mlp.gate.e_score_", ".mlp.experts.e_score_"),
            (".mlp.shared_experts.", ".mlp.shared_expert."),
        ),
        route=routers.laguna,
        mixed=mixed_layers.listed,
        shared_ffn="shared_expert_intermediate_size",
    ),
    "llama4_text": Mixture(
        block="feed_forward",
        router="router",
        shared="feed_forward.shared_expert",
        turned=True,
        marked=False,
        count="num_local_experts",
        ffn="intermediate_size",
        route=routers.gates,
        mixed=mixed_layers.numbered,
        shared_ffn="intermediate_size",
        edit=_weighing_input,
    ),
    "mellum": Mixture(unused=(r"^mtp\.",), mixed=mixed_layers.listed),
    "mimo_v2_flash": replace(
        _DEEPSEEK,
        shares="",
        renames=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        unused=(r"^model\.mtp\.",),
        mixed=mixed_layers.listed,
    ),
    "minimax": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, choice_bias="e_score_correction_bias", route=routers.sigmoid),
    "mistral4": replace(_DEEPSEEK, choice_bias=None, route=routers.grouped_softmax),
    "mixtral": _MIXTRAL,
    "olmoe": Mixture(ffn="intermediate_size"),
    "phimoe": replace(
        _MIXTRAL,
        router="router",
        renames=(*_MIXTRAL.renames, (".router.weight", ".gate.weight")),
        ignored=("router_aux_loss_coef", "input_jitter_noise", "num_experts_per_tok"),
        route=routers.sparse,
        choose=routers.two,
    ),
    "qwen2_moe": Mixture(
        shared_gate="shared_expert_gate",
        mixed=mixed_layers.stepped,
        shared_ffn="shared_expert_intermediate_size",
    ),
    "qwen3_5_moe_text": Mixture(
        shared_gate="shared_expert_gate",
        route=routers.renormalized,
        shared_ffn="shared_expert_intermediate_size",
    ),
    "qwen3_moe": Mixture(mixed=mixed_layers.stepped),
    "qwen3_next": Mixture(
        shared_gate="shared_expert_gate",
        mixed=mixed_layers.stepped,
        shared_ffn="shared_expert_intermediate_size",
    ),
    "solar_open": replace(_DEEPSEEK, mixed=mixed_layers.behind_none),
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
        route=routers.scaled_by("moe_router_scaling_factor", 0.0),
        mixed=mixed_layers.listed,
        shared_ffn="share_expert_dim",
    ),
}


def read_layers(fields: ConfigFields, own: Mixture, dense: Mlp, layers: int) -> list[Mlp | Experts]:
    """The feed-forward, dense or mixed, of each of the layers."""
    fields.ignore(*own.ignored)
    fields.ignore("output_router_logits")
    ffn, shared = fields.size(own.ffn), _shared(fields, own)
    # transformers 5 has moved Qwen3's.
    name = own.count if fields.take(own.count) is not None else "num_local_experts"
    count = fields.size(name)
    by_layer: list[Mlp | Experts] = []
    for i, is_mixture in enumerate(own.mixed(fields, layers)):
        router = replace(own.route(fields, own), chosen=own.choose(fields, own, i, layers))
        if router.chosen > count:
            raise ModelError(
                f"config.json has {count} experts, of which a token chooses {router.chosen} "
                f"({own.chosen}); it cannot choose more experts than there are."
            )
        mixture = Experts(count, dense.of_width(ffn), router, shared)
        mixture = own.edit(fields, mixture)
        by_layer.append(mixture if is_mixture else dense)
    return by_layer


def _shared(fields: ConfigFields, own: Mixture) -> int:
    """The ffn of the shared expert; 0 without one."""
    if own.shares:
        return fields.size(own.shares) * fields.size(own.ffn) if fields.take(own.shares) else 0
    if not own.shared_ffn or (own.shared_if_any and not fields.take(own.shared_ffn, 0)):
        return 0
    return fields.size(own.shared_ffn)


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
    source = Source(whole, stored, marked=names.marked)
    return replace(own, others=(source,), either=names.either)
