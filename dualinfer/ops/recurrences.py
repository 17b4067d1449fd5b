"""What recurrences have in common: their states in a cache, and the convolution before most."""

from ..model.spec import Recurrence
from .caches import StateView
from .contract import Array, BlockOps, Seen, Weights
from .maths import Maths, named


@named("recurrence")
def recur(
    ops: BlockOps,
    own: Recurrence,
    w: Weights,
    x: Array,
    seen: Seen,
    cache: StateView | None,
    slots: Array | None,
    lengths: Array | None,
    starts: Array | None,
) -> tuple[Array, StateView | None]:
    """See `contract.Ops.recur`."""
    held = None
    if starts is not None:
        assert cache is not None and slots is not None
        held = tuple(_going_on(ops.maths, array[slots], starts) for array in cache.arrays)
    y, states = own.sequence(ops, w, x, held, seen, lengths)
    if cache is not None:
        assert slots is not None
        cache = cache.keep(slots, *states)
    return y, cache


@named("recurrence")
def recur_token(
    ops: BlockOps, own: Recurrence, w: Weights, x: Array, cache: StateView, moves: Array
) -> tuple[Array, StateView]:
    """See `contract.Ops.recur_token`."""
    y, states = own.token(ops, w, x, cache.view(len(x), 0).arrays)
    return y, cache.move(moves, *states)


def _going_on(m: Maths, held: Array, starts: Array) -> Array:
    """States [B, ...] that rows begin from: those of slots, zeros where int `starts` [B] is 0."""
    return m.where((starts > 0).reshape(-1, *[1] * (held.ndim - 1)), held, 0.0)


def visible(x: Array, mask: Array | None) -> Array:
    """x [B, T, C], and zeros for the tokens that bool `mask` [B, T] hides."""
    return x if mask is None else x * mask[..., None]


def convolve_past(
    m: Maths, w: Weights, x: Array, past: Array | None = None, segments: Array | None = None
) -> tuple[Array, Array]:
    """Each channel of x [B, T, C] over itself and what came before, and x with that in front.

    The first is float32, by the layer's `recurrence_kernel` [C, taps]. `past` [B, taps - 1, C] came
    before; None for zeros. The second result is [B, taps - 1 + T, C].
    """
    kernel, bias = m.wide(w["recurrence_kernel"]), w.get("recurrence_kernel_bias")
    tokens, taps = x.shape[1], kernel.shape[-1]
    wide = m.pad(x, 1, taps - 1, 0) if past is None else m.join((past, x), 1)
    owners = None if segments is None else m.pad(segments, 1, taps - 1, 0, -1)
    total = m.zeros((), m.float32, x) if bias is None else m.wide(bias)
    for i in range(taps):
        near = wide[:, i : i + tokens]
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        total = total + near * kernel[:, i]
    return total, wide


def last_tokens(m: Maths, w: Weights, wide: Array, lengths: Array) -> Array:
    """The taps - 1 tokens before the end of each sequence, of `convolve_past`'s second result."""
    before = w["recurrence_kernel"].shape[-1] - 1
    return m.places(wide, lengths[:, None] + m.arange(before, wide))
