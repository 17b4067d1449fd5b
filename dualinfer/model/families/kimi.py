"""Kimi Linear and Ling 3: Kimi Delta Attention, latent attention in some layers, and experts.

HF sources: models/kimi_linear and models/bailing_hybrid.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...blocks.delta_rule import KERNELS, READS, DeltaRule
from ...errors import ModelError, shown
from ..spec import Rope
from ..weights import Row
from .decoders import Hybrid, Kind, serve
from .deepseek import LatentDecoder
from .fields import ConfigFields

# HF's names of DeepSeek's fields, and what configs have in their place.
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


class Ling(Hybrid, LatentDecoder):
    """Kimi Delta Attention beside latent attention, which is gated."""

    def changes(self, fields: ConfigFields) -> Mapping[str, Any]:
        return {ours: fields.take(theirs) for ours, theirs in _NAMES.items()}

    def recurrence(self) -> DeltaRule:
        fields = self.fields
        floor, own = fields.take("kda_lower_bound", -5.0), self.delta_rule()
        if not fields.flag("kda_safe_gate", True):
            return own
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not -1e4 < floor < 0:
            raise ModelError(
                f"config.json has kda_lower_bound={shown(floor)}; expected a number below 0."
            )
        return replace(own, floor=float(floor))

    def delta_rule(self) -> DeltaRule:
        """Kimi Delta Attention by what both have."""
        heads, head_dim = self.fields.heads("linear_num_heads"), self.fields.size("linear_head_dim")
        taps = self.fields.size("linear_conv_kernel_dim")
        activation = self.fields.activation("hidden_act")
        return DeltaRule(
            *(heads, heads, head_dim, head_dim, taps, activation, self.norm),
            by_channel=True,
            gate="sigmoid",
        )

    def recurrent_rows(self, recurrence: DeltaRule) -> list[Row]:
        """The rows of Kimi Delta Attention, whose files have three convolutions."""
        names = ["q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "forget_gate.f_proj"]
        if recurrence.decay_rank:
            names[3], names[5] = "g_a_proj", "forget_gate.f_a_proj"
        return recurrence.rows(
            f"{self.hf}self_attn",
            list(zip(names, READS, strict=True)),
            kernels=KERNELS,
            gate_up="g_b_proj",
            decay_up="forget_gate.f_b_proj",
            decay="forget_gate",
            stored_scale="one one delta_heads one" if recurrence.decay_rank else "delta_heads",
            norm="o_norm",
            out="o_proj",
        )

    def tied(self) -> bool:
        """False, whatever the config says."""
        return super().tied() and False


class Kimi(Ling):
    """Kimi Delta Attention beside latent attention that knows no positions."""

    def changes(self, fields: ConfigFields) -> Mapping[str, Any]:
        """Fields of the config as other types have them, without those that say nothing here."""
        return {**super().changes(fields), **dict.fromkeys(("rope_theta", "head_dim"))}

    def parameters(self) -> Any:
        """HF's rope_parameters, of which the config has none."""
        return {"rope_type": "default", "rope_theta": 1e4}

    def rope(self, parameters: Any, head_dim: int) -> Rope:
        """A rotary embedding by which nothing turns."""
        rope = super().rope(parameters, head_dim)
        return replace(rope, inv_freq=(0.0,) * len(rope.inv_freq), interleaved=False)

    def recurrence(self) -> DeltaRule:
        own = self.delta_rule()
        return replace(own, decay_rank=own.key_dim, gate_rank=own.key_dim)

    def tied(self) -> bool:
        return self.fields.flag("tie_word_embeddings", False)


_KIMI: dict[str, Any] = {
    "interleaved": "rope_interleave",
    "unused": (r"rotary_emb\.",),
    "always": {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
    # Of the makers' own code; what HF folds into lists of layers; and layers of a second token.
    "ignored": (
        *("linear_attn_config", "first_k_dense_replace", "layer_group_size", "use_grouped_topk"),
        *("short_conv_kernel_size", "num_nextn_predict_layers", "mtp_loss_scaling_factor"),
    ),
}
KINDS = {
    "kimi_linear": Kind("KimiLinear", build=Kimi, **_KIMI),
    "bailing_hybrid": Kind(
        *("BailingHybrid",), **_KIMI, build=Ling, gate="sigmoid", attn_gate="g_proj", gates="heads"
    ),
}
CLASSES, describe = serve(KINDS)
