"""MiniMax-Text-01 and M1: lightning attention, and attention in some of the layers; mixtures.

HF source: models/minimax. MiniMax-M2 is among the relatives of Llama.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...blocks.lightning import Lightning
from ...blocks.normed_stream import NormedStream
from ..spec import Attention, Experts, Layer, Mlp, ModelSpec
from ..weights import Row
from . import sights
from .decoders import Hybrid, Kind, serve

_EPS = 1e-6  # of the norm behind lightning attention, which no config names
_TABLES = r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$"  # of numbers known without them


class MiniMax(Hybrid):
    """Lightning attention, whose slopes go by the layer; factors of both parts of each sum."""

    def recurrence(self) -> Lightning:
        heads, _, head_dim = self.fields.grouped_heads(self.embed)
        activation = self.fields.activation("hidden_act")
        return Lightning(heads, head_dim, activation, _EPS, heads * head_dim)

    def layers(
        self, attentions: Sequence[Attention], feeds: Sequence[Mlp | Experts]
    ) -> Sequence[Layer]:
        feeding = self._factors("mlp")
        linear, full = (
            NormedStream(self._factors(f"{x}_attn"), feeding) for x in ("linear", "full")
        )
        layers = super().layers(attentions, feeds)
        return [replace(x, block=full if x.attention else linear) for x in layers]

    def _factors(self, name: str) -> tuple[float, float]:
        """Of what a sub-layer reads and of what it gives, in their sum."""
        kept, added = (
            self.fields.optional_number(f"{name}_{letter}_factor") for letter in ("alpha", "beta")
        )
        return (1.0 if kept is None else kept, 1.0 if added is None else added)

    def check(self, spec: ModelSpec) -> None:
        """Refuse a part of heads: HF turns whole ones."""
        self.fields.require("rotary_dim", self.fields.grouped_heads(self.embed)[2])

    def all_rows(self, layers: Sequence[Layer]) -> list[tuple[Row, ...]]:
        """The rows of each layer."""
        found = []
        for i, layer in enumerate(layers):  # of which the first ones forget most
            self.forgets = 1 - i / (len(layers) - 1 + 1e-5) + 1e-5
            found.append(tuple(self.rows(layer)))
        return found

    def recurrent_rows(self, recurrence: Lightning) -> list[Row]:
        return recurrence.rows(f"{self.hf}self_attn", self.forgets)


KINDS = {
    "minimax": Kind(
        *("MiniMax",),
        build=MiniMax,
        sees=sights.one_window,
        ffn="",
        qkv_bias=False,
        out_bias=False,
        ignored=("block_size",),  # how HF cuts a sum, which is the same
        unused=(r"rotary_emb\.", _TABLES),
        predicts=False,
    )
}
CLASSES, describe = serve(KINDS)
