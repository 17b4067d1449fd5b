"""Attention: which keys a query sees, what is added to scores, and attention by all of these."""

from collections.abc import Sequence
from typing import Any

from ..model.spec import Attention
from .caches import CacheView
from .contract import Array, Seen
from .maths import KeyScoring, Maths, halves, heads, named


@named("attention")
def attention(
    m: Maths,
    q: Array,
    k: Array,
    v: Array,
    scoring: KeyScoring,
    *,
    causal: bool,
    window: int | None = None,
    mask: Array | None = None,
    segments: Array | None = None,
    positions: Array | None = None,
) -> Array:
    """Attention of whole sequences: q [B, T, H, D], k and v [B, T, K, D] to [B, T, H, D].

    Values may have another width than keys, and then the result has it. `mask` bool [B, T] hides
    keys, `segments` int [B, T] separates packed sequences. A query that would see nothing sees
    itself, so that it stays finite. `positions` int [B, T] are what slopes count, if there are any;
    else tokens count from 0. k and v may be float32 where q is not, as a cache in codes keeps them.
    """
    tokens = q.shape[1]
    window = None if window is None or window >= tokens else window

    def bias(rows: Array | None) -> Array:
        at = positions if scoring.alibi is not None else None
        at = m.arange(tokens, q)[None] if at is None else at
        return bias_of(m, scoring, at, at if rows is None else at[:, rows])

    visible = _visible(m, q, causal, window, mask, segments)
    added = bias if _adds(scoring) else None
    return m.attention(q, k, v, scoring, causal=causal, visible=visible, bias=added)


def _adds(scoring: KeyScoring) -> bool:
    """True if distances add to scores."""
    return scoring.alibi is not None or scoring.relative is not None


def _visible(
    m: Maths,
    q: Array,
    causal: bool,
    window: int | None,
    mask: Array | None,
    segments: Array | None,
) -> Any:
    """`visible` of `Maths.attention`; None where it is the framework's own way."""
    if window is None and mask is None and segments is None:
        return None

    def visible(rows: Array | None) -> Array:
        """bool [B or 1, R, T]: whether a query at `rows`, None for all, sees a key."""
        at = m.arange(q.shape[1], q)
        own = (at if rows is None else rows)[:, None]
        shown = at <= own if causal else None
        for one in _others(at, own, rows):
            shown = one if shown is None else shown & one
        assert shown is not None
        shown = shown if shown.ndim == 3 else shown[None]
        if mask is None:
            return shown
        return shown | ((at == own) & ~shown.any(-1, keepdims=True))

    def _others(at: Array, own: Array, rows: Array | None) -> Any:
        if window is not None:
            yield at > own - window
            if not causal:
                yield at < own + window
        if mask is not None:
            yield mask[:, None, :]
        if segments is not None:
            ours = segments if rows is None else segments[:, rows]
            yield ours[:, :, None] == segments[:, None, :]

    return visible


def alibi_bias(m: Maths, slopes: Array, keys: Array, queries: Array, scale: float | None) -> Array:
    """The bias of ALiBi, float32 [B, H, T, S], of int positions [B, S] and [B, T].

    Slopes [H] times how far a key lies ahead; with `scale` its product with the difference of
    slopes times positions, both rounded to bfloat16.
    """
    if scale is None:
        return slopes[:, None, None] * (keys[:, None, :] - queries[:, :, None])[:, None]

    def at(positions: Array) -> Array:
        rounded = m.rounded(positions, m.bfloat16)
        return m.rounded(slopes[:, None] * rounded[:, None], m.bfloat16)

    return (at(keys)[:, :, None, :] - at(queries)[..., None]) * scale


def bias_of(m: Maths, scoring: KeyScoring, keys: Array, queries: Array) -> Array:
    """What slopes or a table add to scores, [B, H, T, S], of int positions [B, S] and [B, T]."""
    if scoring.alibi is None:
        return relative_bias(scoring.relative, keys, queries)
    return alibi_bias(m, scoring.alibi, keys, queries, scoring.alibi_scale)


def relative_bias(table: Array, keys: Array, queries: Array) -> Array:
    """The bias of distances, [B, H, T, S], of int positions [B, S] and [B, T].

    Column M + n of the table [H, 2M+1] is for keys that lie n tokens behind the query; the first
    and the last are also for those that lie farther.
    """
    most = table.shape[1] // 2
    away = (keys[:, None, :] - queries[:, :, None]).clip(-most, most) + most
    return table[:, away].swapaxes(0, 1)


@named("attention")
def placed_attention(
    m: Maths,
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None,
    *,
    scale: float,
    mask: Array | None,
    segments: Array | None,
) -> Array:
    """Attention of whole sequences to whose products `bias` adds: [B, T, H, D] as q, k and v.

    `mask` and `segments` are as in `attention`. Scores are float32.
    """
    scores = m.scores("bthd,bshd->bhts", q, k)
    scores = (scores if bias is None else scores + bias) * scale
    if (visible := _visible(m, q, False, None, mask, segments)) is not None:
        scores = m.where(visible(None)[:, None], scores, -float("inf"))
    return m.einsum("bhts,bshd->bthd", m.cast(m.softmax(scores), v.dtype), v)


@named("cross_attention")
def cross_attention(
    m: Maths,
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None,
    scoring: KeyScoring,
) -> Array:
    """Attention to other sequences: q [B, T, H, D], k and v [B, K, S, D] to [B, T, H, D].

    bool `visible` [B, S] shows keys, None all. No distances add to scores.
    """
    shown = None if visible is None else (lambda rows: visible[:, None])
    return m.attention(q, k, v, scoring, visible=shown, by_head=True)


def weigh_across(
    m: Maths, a: Attention, q: Array, kv: Array, of: Sequence[int], mask: Array | None = None
) -> list[Array]:
    """The weights of the heads `of`, float32 [B, T, S] each, as in `Ops.attend_across`.

    On one device, which has all heads.
    """
    q, k = heads(q, width=a.head_dim), heads(halves(kv)[0], width=a.head_dim)
    found = []
    for head in of:
        query, key = q[:, :, head] * a.scale, k[:, :, head * k.shape[2] // q.shape[2]]
        scores = m.scores("btd,bsd->bts", query, key)
        scores = scores if mask is None else m.where(mask[:, None], scores, -float("inf"))
        found.append(m.softmax(scores))
    return found


@named("decode_attention")
def decode_attention(
    m: Maths,
    q: Array,
    cache: CacheView,
    lengths: Array,
    scoring: KeyScoring,
    *,
    window: int | None = None,
    chunk: int | None = None,
    reach: int | None = None,
) -> Array:
    """Attention of one query a slot, q [N, H, D], to the `lengths` [N] cached tokens: [N, H, D].

    The query is the last of them, and sees those of its own `chunk` of tokens. Of the cache these
    are the first slots, and of each the first `reach` tokens are read; None for all.
    """
    cache = cache.view(len(q), reach or cache.capacity)
    keys, values = cache.read()
    at, count = m.arange(cache.capacity, q)[None], lengths[:, None]
    visible = at < count
    if window is not None:
        visible = visible & (at >= count - window)
    if chunk is not None:
        visible = visible & (at >= (count - 1) // chunk * chunk)
    keys, values = (written_alone(m, x, visible) for x in (keys, values))

    def bias(rows: Array | None) -> Array:
        return bias_of(m, scoring, at, count - 1)

    added, shown = bias if _adds(scoring) else None, lambda rows: visible[:, None]
    return m.attention(q, keys, values, scoring, visible=shown, bias=added, by_head=True)


def written_alone(m: Maths, x: Array, written: Array) -> Array:
    """Keys or values [B, K, S, D] with zeros at places that bool `written` [B, S] has not.

    An earlier sequence may have left NaN there, or another one where layers forget what lies behind
    a window, which a weight of 0 does not hide.
    """
    return m.where(written[:, None, :, None], x, 0.0)


@named("attention")
def attend_rows(
    m: Maths,
    q: Array,
    keys: Array,
    values: Array,
    starts: Array,
    lengths: Array,
    scoring: KeyScoring,
    *,
    window: int | None = None,
    chunk: int | None = None,
) -> Array:
    """Attention of rows q [B, T, H, D] to cached keys and values [B, K, S, D]: [B, T, H, D].

    Query t of a row stands at key starts[b] + t of int `starts` [B], and sees itself and the keys
    before, of those its `window` and its own `chunk` of tokens; `lengths` [B] are real, and the
    rest is padding.
    """
    at, tokens = m.arange(keys.shape[2], q)[None], m.arange(q.shape[1], q)
    written = at < (starts + lengths)[:, None]
    if (sight := chunk if window is None else window) is not None:  # before it is what others have
        written = written & (at > starts[:, None] - sight)
    keys, values = (written_alone(m, x, written) for x in (keys, values))

    def own(rows: Array | None) -> Array:
        own = starts[:, None] + (tokens if rows is None else rows)[None]
        return own.clip(max=keys.shape[2] - 1)  # padding behind the last place sees keys as well

    def visible(rows: Array | None) -> Array:
        ours = own(rows)[..., None]
        shown = at[:, None] <= ours
        if window is not None:
            shown = shown & (at[:, None] > ours - window)
        if chunk is not None:
            shown = shown & (at[:, None] >= ours // chunk * chunk)
        return shown

    def bias(rows: Array | None) -> Array:
        return bias_of(m, scoring, at, own(rows))

    added = bias if _adds(scoring) else None
    return m.attention(q, keys, values, scoring, visible=visible, bias=added, by_head=True)


def chunks(
    m: Maths,
    a: Attention,
    shape: tuple[int, int],
    seen: Seen,
    like: Array,
) -> Seen:
    """`seen` with segments for the chunks of whole sequences, where the layer sees chunks of them.

    These are of `a.chunk` tokens each, from the first that its mask shows. Within given segments
    they lie where HF has them, by the place in the row.
    """
    (batch, keys), (mask, segments) = shape, seen
    if a.chunk is None or keys <= a.chunk:
        return seen
    at = m.arange(keys, like)[None]
    if mask is not None:
        at = m.cast(at - (mask.cumsum(-1) == 0).sum(-1, keepdims=True), at.dtype)
    own = at // a.chunk
    own = own if segments is None else segments * keys + own
    return seen._replace(segments=m.broadcast(own, (batch, keys)))
