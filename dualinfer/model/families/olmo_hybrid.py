"""OLMo Hybrid: gated delta rules, and OLMo 3's attention in some of the layers.

HF source: models/olmo_hybrid. Its two kinds of layers have their norms at different places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...blocks.delta_rule import KERNELS, READS, DeltaRule
from ..spec import Attention, Experts, Layer, Mlp
from ..weights import Row
from .decoders import Decoder, Hybrid, Kind, Sight, alike, serve
from .qwen3_next import delta_rule
from .sights import unturned

_EPS = 1e-5  # of the norms of what states give, whatever the config says
_READS = "q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"


def _turning_if_any(own: Decoder) -> Sight:
    """All layers see all of the past, and turn where there is a base of angles."""
    given = own.fields.take("rope_parameters")
    if isinstance(given, Mapping) and given.get("rope_theta") is not None:
        return alike(own)
    return unturned(own)


class OlmoHybrid(Hybrid):
    """Norms lie before recurrences, and behind attention."""

    def check_rope(self, parameters: Mapping[str, object]) -> None:
        """Nothing: no field says it again."""

    def recurrence(self) -> DeltaRule:
        own = delta_rule(self.fields, replace(self.norm, eps=_EPS))
        return replace(own, doubled=self.fields.flag("linear_allow_neg_eigval", True))

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        layers = super().layers(attentions, feeds)
        return [replace(x, placement="behind") if x.attention else x for x in layers]

    def rows(self, layer: Layer) -> list[Row]:
        behind = "post_attention_layernorm", "post_feedforward_layernorm"
        first, second = behind if layer.attention else ("input_layernorm", behind[0])
        rows = self.norm_rows("attn_norm", f"{self.hf}{first}")
        rows += self.norm_rows("mlp_norm", f"{self.hf}{second}")
        return rows + self.mixing_rows(layer) + self.feed_rows(layer.feeding)

    def recurrent_rows(self, recurrence: DeltaRule) -> list[Row]:
        names = {"kernels": KERNELS, "norm": "o_norm", "out": "o_proj"}
        reads = list(zip(_READS, READS, strict=True))
        return recurrence.rows(f"{self.hf}linear_attn", reads, **names)


KINDS = {
    "olmo_hybrid": Kind(
        *("OlmoHybrid",),
        build=OlmoHybrid,
        sees=_turning_if_any,
        qk_norm=True,
        qk_norm_over="all",
        ignored=(  # of training's start
            *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
            "linear_dt_init_floor",
        ),
        unused=(r"rotary_emb\.",),
        renames=(
            (".input_layernorm.", ".attention_layer_norm."),
            (".post_attention_layernorm.", ".feedforward_layer_norm."),
        ),
    )
}
CLASSES, describe = serve(KINDS)
