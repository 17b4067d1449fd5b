"""Decoders of Mamba-1: Mamba, FalconMamba, and Jamba, some of whose layers attend.

HF sources: models/mamba, models/falcon_mamba and models/jamba.
"""

from collections.abc import Sequence
from typing import Any

from ...blocks.selective_scan import SelectiveScan
from ..spec import Experts, Mlp, ModelSpec
from ..weights import Row
from . import sights
from .decoders import Hybrid, Kind, Recurrent, rms, serve


class Mamba(Recurrent):
    """Mamba-1 in each layer."""

    def eps(self) -> float | None:
        """The epsilon of norms within a layer, None for none."""
        return None

    def recurrence(self) -> SelectiveScan:
        return SelectiveScan(
            self.fields.size("intermediate_size"),  # whatever `expand` says, as HF's layers have it
            *(self.fields.size(name) for name in ("time_step_rank", "state_size", "conv_kernel")),
            activation=self.fields.activation("hidden_act"),
            eps=self.eps(),
        )

    def recurrent_rows(self, recurrence: SelectiveScan) -> list[Row]:
        biased = self.fields.flag("use_bias", False), self.fields.flag("use_conv_bias", True)
        return recurrence.rows(f"{self.hf}mixer", *biased)

    def check(self, spec: ModelSpec) -> None:
        """Refuse fields of the makers' own configs that say other than the spec."""
        width = self.recurrence().width
        for name, value in {"d_inner": width, "d_model": self.embed, "n_layer": self.count}.items():
            self.fields.require(name, value)


class FalconMamba(Mamba):
    """Norms within layers."""

    def eps(self) -> float | None:
        return self.fields.number("mixer_rms_eps")


class Jamba(Hybrid):
    """Mamba-1 beside attention, which one layer of each period has."""

    def kinds(self) -> list[str]:
        period = self.fields.size("attn_layer_period")
        offset = self.fields.take("attn_layer_offset", 0)
        return [(self.recurring + self.attending)[i % period == offset] for i in range(self.count)]

    def feeds(self) -> Sequence[Mlp | Experts]:
        mixed = self.fields.size("num_experts") > 1
        return super().feeds() if mixed else [self.dense()] * self.count

    def recurrence(self) -> SelectiveScan:
        return SelectiveScan(
            self.embed * self.fields.size("mamba_expand"),
            *(self.fields.size(f"mamba_{name}") for name in ("dt_rank", "d_state", "d_conv")),
            activation=self.fields.activation("hidden_act"),
            eps=self.norm.eps,
            normed="weighted",
        )

    def recurrent_rows(self, recurrence: SelectiveScan) -> list[Row]:
        fields = self.fields
        biased = fields.flag("mamba_proj_bias", False), fields.flag("mamba_conv_bias", True)
        return recurrence.rows(f"{self.hf}mamba", *biased)


_WAYS = ("use_mambapy", "use_falcon_mambapy", "use_associative_scan", "use_mamba_kernels")
_MAMBA: dict[str, Any] = {
    "norm": rms("layer_norm_epsilon"),
    "norms": {"attn_norm": "norm"},
    "final_norm": "norm_f",
    "embedding": "embeddings",
    "tensors": "backbone.",
    "tied": True,
    "facts": {"states": "late"},
    "always": {"rms_norm": True},
    "ignored": (
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "expand"),
        *("time_step_init_scheme", "rescale_prenorm_residual", "residual_in_fp32", "layer_types"),
        *("fused_add_norm", "pad_vocab_size_multiple", *_WAYS),
    ),
    "unused": (),
    "renames": (("backbone.embeddings.", "backbone.embedding."),),
}
KINDS = {
    "mamba": Kind("Mamba", build=Mamba, **_MAMBA),
    "falcon_mamba": Kind("FalconMamba", build=FalconMamba, **_MAMBA),
    "jamba": Kind(
        *("Jamba",),
        build=Jamba,
        sees=sights.unturned,
        **dict.fromkeys(("qkv_bias", "out_bias"), False),
        norms={"attn_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
        final_norm="final_layernorm",
        mlp_module="feed_forward",
        always={"mamba_inner_layernorms": True},
        ignored=(
            *("layer_types", "layers_block_type", "layers_num_experts", "n_ctx", *_WAYS),
            *("mamba_proj_bias", "mamba_conv_bias"),  # of layers that may be none
            *("expert_layer_period", "expert_layer_offset", "num_experts_per_tok"),
            *("output_router_logits", "router_aux_loss_coef", "sliding_window"),
            *("calc_logits_for_entire_prompt", "num_logits_to_keep"),
        ),
        unused=(),
        predicts=False,
    ),
}
CLASSES, describe = serve(KINDS)
