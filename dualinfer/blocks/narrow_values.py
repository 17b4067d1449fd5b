"""Attention whose values are narrower than its keys (MiMo)."""

from dataclasses import dataclass

from ..decoder.attention import Projected
from ..decoder.run import Run
from ..model.spec import Attention, Wiring
from ..ops.contract import Array
from ..ops.maths import Maths, cut, flat, heads, named


@dataclass(frozen=True)
class NarrowValues(Wiring):
    """A head's value has `width` elements, and is times `scale`."""

    width: int
    scale: float

    def value_dim(self, a: Attention) -> int:
        """See `Wiring`."""
        return self.width

    def widen(self, run: Run, qkv: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return _filled(run.ops.maths, run.layer.attending, qkv, self.scale)

    def narrow(self, run: Run, y: Array, made: Projected) -> Array:
        """See `Wiring`."""
        return flat(heads(y, run.layer.attending.heads)[..., : self.width])


@named("heads")
def _filled(m: Maths, a: Attention, qkv: Array, scale: float) -> Array:
    others, values = cut(qkv, sum(a.qkv_sizes[:2]), a.qkv_sizes[2])
    values = heads(values, a.kv_heads) * scale
    values = m.pad(values, -1, 0, a.head_dim - values.shape[-1])
    return m.join((others, flat(values)), -1)
