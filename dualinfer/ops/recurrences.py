"""The common parts of recurrences: their states in a cache, and the convolution before most."""

from ..model.spec import Recurrence
from .caches import StateView
from .contract import Array, BlockOps, Seen, StateRows, Weights
from .maths import Maths, named
from .recurrence_kernels import StateStep, SteppedRecurrence


@named("recurrence")
def recur(
    ops: BlockOps,
    own: Recurrence,
    w: Weights,
    x: Array,
    seen: Seen,
    rows: StateRows,
) -> tuple[Array, StateView | None]:
    """See `contract.Ops.recur`."""
    held, (cache, slots, lengths, starts) = None, rows
    if starts is not None:
        assert cache is not None and slots is not None
        before = _wide(ops.maths, own, cache.arrays, slots)
        held = tuple(_going_on(ops.maths, array, starts) for array in before)
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
    before = _wide(ops.maths, own, cache.view(len(x), 0).arrays)
    y, states = own.token(ops, w, x, before)
    return y, cache.move(moves, *states)


def _wide(
    m: Maths, own: Recurrence, arrays: tuple[Array, ...], slots: Array | None = None
) -> tuple[Array, ...]:
    """The arrays of slots, or of all, as the recurrence computes: states may be kept in 16 bits."""
    kinds = [kept.dtype for kept in own.layout(1)]
    held = arrays if slots is None else tuple(array[slots] for array in arrays)
    return tuple(m.wide(x) if kind == "float32" else x for kind, x in zip(kinds, held, strict=True))


def step_token(
    ops: BlockOps, own: SteppedRecurrence, w: Weights, x: Array, states: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """The `token` of a `spec.Recurrence` whose token is a `StateStep`."""
    *rest, state = states
    step, finish, kept = own.stepped(ops, w, x, tuple(rest))
    y, state = take_in(ops.maths, step, state)
    return finish(y), (*kept, state)


def take_in(m: Maths, step: StateStep, state: Array) -> tuple[Array, Array]:
    """Put a token of each sequence into its states: results [N, H, V] and the new states, float32.

    A head's state [N, H, V, K] is times the exponential of its decay, v k^T is added for its value
    and key, and the state times the query is what it gives. With `steps` b it is by the delta rule:
    states are [N, H, K, V], and k u^T is added, where u = b (v - S^T k) for the decayed state S.
    """
    queries, keys, values, steps, decays = step
    old = state.reshape(*values.shape[:3], *state.shape[2:])
    if steps is None:
        added = keys[:, :, None, None]
        new = m.add_product(old * m.exp(decays)[..., None, :], values[..., None], added)
        y = (new * queries[:, :, None, None]).sum(-1)
    else:
        old = old * m.exp(decays)[..., None]
        u = (values - m.einsum("ngrkv,ngk->ngrv", old, keys)) * steps[..., None]
        new = m.add_product(old, keys[:, :, None, :, None], u[..., None, :])
        y = m.einsum("ngrkv,ngk->ngrv", new, queries)
    return y.reshape(len(y), -1, y.shape[-1]), new.reshape(state.shape)


def _going_on(m: Maths, held: Array, starts: Array) -> Array:
    """States [B, ...] that rows begin from: those of slots, zeros where int `starts` [B] is 0."""
    return m.where((starts > 0).reshape(-1, *[1] * (held.ndim - 1)), held, 0.0)


def visible(x: Array, mask: Array | None) -> Array:
    """x [B, T, C], and zeros for the tokens that bool `mask` [B, T] hides."""
    return x if mask is None else x * mask[..., None]


def counted(m: Maths, x: Array, mask: Array | None, lengths: Array | None) -> Array | None:
    """The tokens of x [B, T, ...] that change a state, bool [B, T]: those shown, within lengths.

    None for all.
    """
    if lengths is None:
        return mask
    real = m.arange(x.shape[1], x) < lengths[:, None]
    return real if mask is None else mask & real


def begins_anew(m: Maths, segments: Array) -> Array:
    """The tokens that begin a packed sequence behind another, bool [B, T]."""
    return m.pad(segments[:, 1:] != segments[:, :-1], 1, 1, 0)


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


def scan_decaying(
    m: Maths, x: Array, b: Array, c: Array, decays: Array, state: Array | None, size: int
) -> tuple[Array, Array]:
    """Results of heads' states over sequences, [B, T, H, P], and the last ones [B, H, P, S].

    A state is times the exponential of the head's float32 `decays` [B, T, H] at each token, and
    x b^T is added; the state times c is a token's result. x is float32 [B, T, H, P]; b and c [B, T,
    G, S] are those of as many heads in a row for each of G groups. `state` is the one before, None
    for zeros. Of a chunk of `size` tokens all pairs are scored, and a state goes from chunk to
    chunk.
    """
    rows, tokens, count, width = x.shape
    by_group = b.shape[2], count // b.shape[2]
    shape = width, b.shape[3]
    if state is None:
        first = m.zeros((rows, *by_group, *shape), m.float32, x)
    else:
        first = state.reshape(rows, *by_group, *shape)

    def advance(last: Array, value: Array, b: Array, c: Array, decay: Array) -> tuple[Array, Array]:
        at = m.arange(value.shape[1], value)
        before, upto = at[:, None] > at, at[:, None] >= at
        # Sums of decays between two tokens, each by itself: differences of sums would round.
        spans = m.where(before, m.moveaxis(decay, 1, -1)[..., None], 0.0).cumsum(-2)
        spans = m.exp(m.where(upto, spans, -float("inf")))
        scores = m.einsum("blgs,bmgs->bglm", c, b)[:, :, None] * spans
        y = m.einsum("bgrlm,bmgrp->blgrp", scores, value)
        since = m.exp(decay.cumsum(1))
        y = y + m.einsum("blgs,bgrps->blgrp", c, last) * since[..., None]
        left = value * m.moveaxis(spans[..., -1, :], -1, 1)[..., None]
        added = m.einsum("bmgrp,bmgs->bgrps", left, b)
        return last * since[:, -1, ..., None, None] + added, y

    x, decays = x.reshape(rows, tokens, *by_group, -1), decays.reshape(rows, tokens, *by_group)
    y, last = m.scan(advance, first, (x, b, c, decays), size)
    return y.reshape(rows, tokens, count, -1), last.reshape(rows, count, *shape)
