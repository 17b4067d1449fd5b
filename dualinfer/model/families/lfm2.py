"""LFM2: short gated convolutions, and attention in some of the layers; with mixtures of experts.

HF sources: models/lfm2 and models/lfm2_moe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...blocks.short_convolution import ShortConvolution
from ..spec import Activation, Experts, Mlp, ModelSpec
from ..weights import Row
from .decoders import Hybrid, Kind, rms, serve


class Lfm2(Hybrid):
    """Short convolutions beside attention; HF rounds the width of feed-forwards."""

    recurring = ("conv",)

    def check_rope(self, parameters: Mapping[str, Any]) -> None:
        """Refuse fields of the makers' own code that say other than rope_parameters."""
        for name in ("theta", "rope_theta"):
            self.fields.require(name, parameters.get("rope_theta"))

    def activation(self) -> Activation:
        return "silu"

    def dense(self) -> Mlp:
        fields, own = self.fields, super().dense()
        grain = fields.size("block_multiple_of", 256)
        factor = fields.optional_number("block_ffn_dim_multiplier")
        if not self.adjusts():
            return own
        ffn = int((factor or 1.0) * int(2 * own.ffn / 3))
        return replace(own, ffn=grain * -(-ffn // grain))

    def adjusts(self) -> bool:
        """True if widths are rounded."""
        return self.fields.flag("block_auto_adjust_ff_dim", True)

    def recurrence(self) -> ShortConvolution:
        return ShortConvolution(self.embed, self.fields.size("conv_L_cache"))

    def recurrent_rows(self, recurrence: ShortConvolution) -> list[Row]:
        return recurrence.rows(f"{self.hf}conv", self.says("conv_bias"))

    def check(self, spec: ModelSpec) -> None:
        """Refuse fields of the makers' own code that say other than the spec."""
        heads, _, _ = self.fields.grouped_heads(self.embed)
        for name, value in {
            **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), self.embed),
            **{"block_norm_eps": self.norm.eps, "num_heads": heads},
        }.items():
            self.fields.require(name, value)


class Lfm2Moe(Lfm2):
    """Mixtures in some of the layers, and widths as the config says."""

    def adjusts(self) -> bool:
        return False

    def feeds(self) -> Sequence[Mlp | Experts]:
        if self.mixture and not self.fields.flag("use_expert_bias", True):
            self.mixture = replace(self.mixture, choice_bias=None)
        return super().feeds()


_LFM2: dict[str, Any] = {
    "norm": rms("norm_eps"),
    "norms": {"attn_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    "final_norm": "embedding_norm",
    "qk_norm": True,
    "qk_names": ("q_layernorm", "k_layernorm"),
    **{"qkv_bias": False, "out_bias": False, "out": "out_proj"},
    **{"mlp_module": "feed_forward", "mlp": ("w1", "w3", "w2"), "tied": True},
    "always": {"block_use_swiglu": True, "use_pos_enc": True},
    # Of the makers' own code: how training began, and what HF folds into layer_types.
    "ignored": (
        *("full_attn_idxs", "block_mlp_init_scale", "block_out_init_scale"),
        *("block_use_xavier_init", "conv_use_xavier_init", "conv_bias"),
    ),
    "unused": (r"rotary_emb\.",),
    "predicts": False,
}
KINDS = {
    "lfm2": Kind("Lfm2", build=Lfm2, **_LFM2),
    "lfm2_moe": Kind("Lfm2Moe", build=Lfm2Moe, **_LFM2),
}
CLASSES, describe = serve(KINDS)
