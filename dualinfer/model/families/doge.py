"""Doge: keys whose scores have a bias of the token's values, and residuals with learned factors.

HF source: models/doge. Of a sequence longer than `keep_window_size` HF's layers see the keys of the
largest biases alone, which is not served; nor are mixtures, whose router in HF mixes tokens.
"""

from dataclasses import replace
from typing import Any

from ...blocks.doge import BiasedKeys, KeptStream
from ..spec import Attention, Experts, Layer, Mlp
from ..weights import Row
from . import sights
from .decoders import Decoder, Kind, serve

_KEPT = ("attn", "input"), ("mlp", "post_attention")


class Doge(Decoder):
    """Keys with biases, and a stream that is kept in part."""

    def attention_facts(self) -> dict[str, Any]:
        keys = BiasedKeys(self.fields.size("keep_window_size"))
        return super().attention_facts() | {"wiring": keys}

    def layer(self, attention: Attention, mlp: Mlp | Experts) -> Layer:
        layer = super().layer(attention, mlp)
        return replace(layer, edits=(*layer.edits, KeptStream()))

    def qkv_rows(self, a: Attention, hf: str, bias: bool) -> list[Row]:
        """The rows of queries, keys and values, of their norms, and of biases."""
        assert isinstance(a.wiring, BiasedKeys)
        return super().qkv_rows(a, hf, bias) + a.wiring.rows(f"{hf}.", bias)

    def rows(self, layer: Layer) -> list[Row]:
        kept = (KeptStream().rows(x, self.hf + y) for x, y in _KEPT)
        return super().rows(layer) + [row for rows in kept for row in rows]


KINDS = {
    "doge": Kind(
        *("Doge",),
        build=Doge,
        sees=sights.one_window,
        qk_norm=True,
        mlp_bias="mlp_bias",
        always={"is_moe": False},
        ignored=(
            *("num_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits"),
            *("router_aux_loss_coef", "hidden_dropout"),
        ),
        unused=(),
    )
}
CLASSES, describe = serve(KINDS)
