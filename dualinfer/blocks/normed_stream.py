"""Layers whose stream passes each norm, with factors of both parts of a sum (MiniMax-Text-01)."""

from collections.abc import Callable
from dataclasses import dataclass

from ..decoder.attention import attention_of, recurrence
from ..decoder.feed_forward import feed_forward_of
from ..decoder.run import Run, SubLayer
from ..model.spec import Block, Layer
from ..ops.contract import Array


@dataclass(frozen=True)
class NormedStream(Block):
    """Each sub-layer reads y = norm(x), and gives a y + b sublayer(y).

    `mixing` are a and b of attention, or of the recurrence in its place, and `feeding` those of the
    feed-forward.
    """

    mixing: tuple[float, float]
    feeding: tuple[float, float]

    def runs(self, layer: Layer, lends: bool) -> Callable[[Run, Array], Array]:
        """See `Block`."""
        mixing = attention_of(layer.attention, lends) if layer.attention else recurrence
        feed = feed_forward_of(layer, layer.feeding)

        def run_layer(run: Run, x: Array) -> Array:
            x = _step(run, x, "attn_norm", mixing, *self.mixing)
            return _step(run, x, "mlp_norm", feed, *self.feeding)

        return run_layer


def _step(run: Run, x: Array, norm: str, sublayer: SubLayer, kept: float, added: float) -> Array:
    y = run.ops.norm(x, run.norm(norm))
    z = sublayer(run, y, None, None, False)
    return run.ops.add(y if kept == 1 else y * kept, z if added == 1 else z * added)
