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
from ..spec import Activation, Attention, Experts, Layer, Mlp, ModelSpec, Router
from ..weights import Row, Source, row
from . import states
from .decoders import PART, Decoder, Factors, Hybrid, Kind, Recurrent, rms, serve
from .fields import check_layers, is_positive

# HF's names of fields, in the order of those in `states`.
_NAMES = "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "hidden_act"
_NEMOTRON = (
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "mamba_hidden_act",
)


class Mamba2(Recurrent):
    """Mamba-2 in each layer."""

    def recurrence(self) -> StateSpace:
        width = int(self.embed * self.fields.number("expand"))
        return states.read(self.fields, self.norm, width, _NAMES)

    def recurrent_rows(self, recurrence: StateSpace) -> list[Row]:
        biased = self.fields.flag("use_bias", False), self.fields.flag("use_conv_bias", True)
        return recurrence.rows(f"{self.hf}mixer", *biased)

    def check(self, spec: ModelSpec) -> None:
        self.fields.require("intermediate_size", self.recurrence().width)


class Bamba(Hybrid):
    """Mamba-2 beside attention, which the listed layers have."""

    def kinds(self) -> list[str]:
        given = self.fields.take("attn_layer_indices", [])
        if not isinstance(given, list | tuple) or any(type(i) is not int for i in given):
            raise ModelError(
                f"config.json has attn_layer_indices={shown(given)}; expected a list of layers."
            )
        return [(self.recurring + self.attending)[i in given] for i in range(self.count)]

    def recurrence(self) -> StateSpace:
        width = int(self.embed * self.fields.number("mamba_expand"))
        return states.read(self.fields, self.norm, width)

    def recurrent_rows(self, recurrence: StateSpace) -> list[Row]:
        biased = self.says("mamba_proj_bias"), self.fields.flag("mamba_conv_bias", True)
        return recurrence.rows(f"{self.hf}mamba", *biased)

    def check(self, spec: ModelSpec) -> None:
        pairs = {own.rope_pairs for own in spec.attentions}
        if pairs:  # else nothing turns
            self.fields.require("attn_rotary_emb", *(2 * own for own in pairs))


class FalconH1(Bamba):
    """Both in each layer, with factors of what they read and give."""

    def recurrence(self) -> StateSpace:
        fields, width = self.fields, self.fields.take("mamba_d_ssm")
        width = int(self.embed * fields.number("mamba_expand")) if width is None else width
        norm = self.norm if fields.flag("mamba_rms_norm", False) else None
        own, before = states.read(fields, norm, width), fields.number("ssm_in_multiplier")
        scales = tuple(x * before for x in self._numbers("ssm", 5))
        return replace(
            own,
            gated_last=fields.flag("mamba_norm_before_gate", True),
            scales=None if set(scales) == {1.0} else scales,
            out_scale=fields.number("ssm_out_multiplier"),
        )

    def recurrent_rows(self, recurrence: StateSpace) -> list[Row]:
        biased = self.says("mamba_proj_bias"), self.fields.flag("mamba_conv_bias", True)
        return recurrence.rows(f"{self.hf}mamba", *biased, self.says("projectors_bias"))

    def scale(self, head_dim: int) -> float:
        before, keys = (self.fields.number(f"{x}_multiplier") for x in ("attention_in", "key"))
        return head_dim**-0.5 * before**2 * keys

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        own, (gate, down) = self.recurrence(), self._numbers("mlp", 2)
        before, behind = (self.fields.number(f"attention_{x}_multiplier") for x in ("in", "out"))
        edits = ScaledAttention(before * behind), ScaledMlp(gate, down)
        layers = Decoder.layers(self, attentions, feeds)
        return [replace(layer, recurrence=own, edits=edits) for layer in layers]

    def _numbers(self, what: str, count: int) -> tuple[Any, ...]:
        """A field of so many factors."""
        given = self.fields.take(f"{what}_multipliers", [1.0] * count)
        if not isinstance(given, list | tuple) or len(given) != count:
            given = None
        if given is None or not all(map(is_positive, given)):
            raise ModelError(
                f"config.json has {what}_multipliers={shown(given)}; expected {count} positive "
                "numbers."
            )
        return tuple(map(float, given))

    def check(self, spec: ModelSpec) -> None:
        # Where a product has a bias, what it reads and its result are not times the same.
        for bias, name in (
            ("mamba_proj_bias", "ssm_in_multiplier"),
            ("projectors_bias", "ssm_out_multiplier"),
            ("attention_bias", "attention_in_multiplier"),
            ("attention_bias", "attention_out_multiplier"),
            ("mlp_bias", "mlp_multipliers"),
        ):
            if self.says(bias):
                self.fields.require(name, 1.0, [1.0, 1.0], (1.0, 1.0))


class NemotronH(Mamba2):
    """One sub-layer in each layer, by its kind."""

    def count_layers(self) -> int:
        given = self.fields.take("layers_block_type")
        count = len(given) if isinstance(given, list | tuple) else 0
        check_layers("len(layers_block_type)", count)
        return count

    def most_positions(self) -> int:
        return self.fields.size("max_position_embeddings")

    def recurrence(self) -> StateSpace:
        return states.read(self.fields, self.norm, None, _NEMOTRON, "time_step_min")

    def activation(self) -> Activation:
        return self.fields.activation("mlp_hidden_act")

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        fields, given = self.fields, self.fields.take("layers_block_type")
        known = ("linear_attention", "full_attention", "mlp", "moe")
        kinds = fields.kinds("layers_block_type", self.count, known, given)
        heads, kv_heads, head_dim = fields.grouped_heads(self.embed)
        attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5)
        empty = Layer(None, None, self.norm, "pre")
        layers = {
            "linear_attention": replace(empty, recurrence=self.recurrence()),
            "full_attention": replace(empty, attention=attention),
            "mlp": replace(empty, mlp=self.dense()),
        }
        if "moe" in kinds:
            fields.require("mlp_bias", False)
            layers["moe"] = replace(empty, mlp=self.experts())
        return [layers[kind] for kind in kinds]

    def experts(self) -> Experts:
        """The mixture."""
        fields, activation = self.fields, self.activation()
        count, chosen = fields.size("n_routed_experts"), fields.size("num_experts_per_tok")
        groups, open_groups = fields.size("n_group", 1), fields.size("topk_group", 1)
        if count % groups or open_groups > groups or chosen > count or count // groups < 2:
            raise ModelError(
                f"config.json has n_routed_experts={count}, n_group={groups}, topk_group="
                f"{open_groups} and num_experts_per_tok={chosen}; expected groups of one size of "
                "at least 2, and no more chosen ones than there are."
            )
        over_sum = 1e-20 if fields.flag("norm_topk_prob", True) else None
        scale = fields.number("routed_scaling_factor")
        router = Router(chosen, "sigmoid", groups, open_groups, "two", over_sum, scale)
        shared = fields.size("moe_shared_expert_intermediate_size")
        ffn = fields.size("moe_intermediate_size")
        own = Experts(count, Mlp(ffn, activation, gated=False), router, shared)
        if fields.take("moe_latent_size") is None:
            return own
        return replace(own, mixing=LatentExperts(fields.size("moe_latent_size")))

    def check(self, spec: ModelSpec) -> None:
        for name in ("rms_norm_eps", "norm_eps"):
            self.fields.require(name, self.norm.eps)
        head_dim = self.fields.grouped_heads(self.embed)[2]
        self.fields.require("attention_head_dim", head_dim)

    def tied(self) -> bool:
        """False, whatever the config says."""
        return super().tied() and False

    def feed_rows(self, mlp: Mlp | Experts) -> list[Row]:
        if not isinstance(mlp, Experts):
            return super().feed_rows(mlp)
        hf, choice = f"{self.hf}mixer", "router.choice_bias"
        rows = make.linear("router", f"{hf}.gate", "choices embed", bias=False)
        bias = row(choice, "choices", (f"{hf}.gate.e_score_correction_bias", "choices"))
        rows.append(replace(bias, wide=True, fixed=True))
        width = "embed"
        if isinstance(mlp.mixing, LatentExperts):
            rows += mlp.mixing.rows(hf)
            width = "expert_latent"
        for ours, axes in (("up", f"ffn {width}"), ("down", f"{width} ffn")):
            each = f"{hf}.experts.{{x}}.{ours}_proj.weight", axes
            whole = Source(f"{hf}.experts.{ours}_proj", ("experts", *axes.split()))
            own = row(f"experts.{ours}.weight", f"experts {axes}", each)
            rows.append(replace(own, others=(whole,)))
        for ours, axes in (("up", "shared embed"), ("down", "embed shared")):
            rows += make.linear(
                f"shared.{ours}", f"{hf}.shared_experts.{ours}_proj", axes, bias=False
            )
        return rows


def _factors(own: Decoder) -> Factors:
    """Falcon-H1's, of embedded tokens and of logits."""
    embed, logits = (own.fields.number(f"{x}_multiplier") for x in ("embedding", "lm_head"))
    return Factors(embed, logits=logits)


_ALL: dict[str, Any] = {"unused": (r"rotary_emb\.", r"^mtp"), "mlp_bias": "mlp_bias"}
_LOGITS = ("num_logits_to_keep", "logits_to_keep")
_TRAINED = ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
_TRAINED += ("rescale_prenorm_residual", "residual_in_fp32")
_BARE: dict[str, Any] = {
    **_ALL,
    "norm": rms("layer_norm_epsilon"),
    "final_norm": "norm_f",
    "embedding": "embeddings",
}
_BOTH: dict[str, Any] = {
    **_ALL,
    "partial": True,
    "norms": {"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    "final_norm": "final_layernorm",
    "mlp_module": "feed_forward",
}
KINDS = {
    "mamba2": Kind(
        *("Mamba2",),
        **_BARE,
        build=Mamba2,
        norms={"attn_norm": "norm"},
        tensors="backbone.",
        facts={"states": "late"},
        always={"rms_norm": True},
        ignored=(*_TRAINED, *_LOGITS, "norm_before_gate"),  # HF's class gates first
        renames=(("backbone.embeddings.", "backbone.embedding."),),
    ),
    "bamba": Kind(
        *("Bamba",),
        **_BOTH,
        build=Bamba,
        # The last two are of layers that may be none.
        ignored=(
            *(*_LOGITS, "z_loss_coefficient", "layers_block_type", "layer_types"),
            *("mamba_proj_bias", "mamba_conv_bias"),
        ),
    ),
    "falcon_h1": Kind(
        *("FalconH1",),
        **_BOTH,
        build=FalconH1,
        factors=_factors,
        always={"mamba_use_mlp": True, "attn_layer_indices": ([],)},
        ignored=(
            *(*_LOGITS, "mamba_expand", "layers_block_type", "layer_types"),
            "mlp_expansion_factor",
        ),
    ),
    "nemotron_h": Kind(
        *("NemotronH",),
        **_BARE,
        build=NemotronH,
        norms={"attn_norm": "norm", "mlp_norm": "norm"},
        **dict.fromkeys(("attention", "mlp_module"), "mixer"),
        **dict.fromkeys(("qkv_bias", "out_bias"), False),  # HF's reads no such field
        mlp=("up_proj", "down_proj"),
        gated=False,
        ignored=(
            # Its attention knows no positions, and no window.
            *(*_LOGITS, "attention_bias", "rope_theta", "rope_parameters", PART, "sliding_window"),
            *(*_TRAINED, "num_hidden_layers", "hidden_dropout", "expand", "layer_types"),
            *("mamba_proj_bias", "mamba_ssm_cache_dtype", "use_mamba_kernels"),  # not read by HF
            *("hybrid_override_pattern", "num_nextn_predict_layers", "mtp_layers_block_type"),
            *("mtp_hybrid_override_pattern", "output_router_logits", "time_step_limit"),
            *("use_bias", "use_conv_bias"),  # of layers that may be none
            # Of mixtures, where there is none.
            *("moe_shared_expert_overlap", "n_shared_experts", "n_routed_experts", "n_group"),
            *("moe_latent_size", "moe_intermediate_size", "num_experts_per_tok", "topk_group"),
            *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
        ),
        renames=(("model.", "backbone."),),
    ),
}
CLASSES, describe = serve(KINDS)
