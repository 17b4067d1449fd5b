"""Attention as data: heads, positions and what is done to queries, keys and scores."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .by_length import ByLength
from .distances import Distances
from .parts import Norm
from .wiring import Wiring


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first R elements of a head; the rest passes unturned.

    `inv_freq` holds R/2 angular frequencies (radians per position, float32 values); cos and sin
    are multiplied by `scaling` (yarn's attention factor, else 1). Element i turns with i + R/2;
    `interleaved`, 2i turns with 2i + 1 (GPT-J). Frequencies may change `by_length` of the sequence,
    as that says. Cos and sin are float32, or if they are `rounded` have the precision of queries
    and keys, as in the table that HF's RoFormer reads; only where nothing is cached.
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0
    interleaved: bool = False
    by_length: ByLength | None = None
    rounded: bool = False

    @property
    def tables(self) -> tuple[tuple[float, ...], ...] | tuple[float, ...]:
        """`inv_freq`, and that of long sequences behind it where there are two."""
        long = self.by_length.long if self.by_length else ()
        return (self.inv_freq, long) if long else self.inv_freq

    @property
    def original(self) -> int:
        """Tokens beyond which frequencies change; 0 where they never do."""
        return self.by_length.original if self.by_length else 0

    @property
    def stretch(self) -> float:
        """The factor by which lengths stretch frequencies, as `ByLength` has it."""
        return self.by_length.stretch if self.by_length else 0.0


@dataclass(frozen=True)
class Latent:
    """The form of latent attention's keys and values (DeepSeek-V2, arXiv:2405.04434).

    A token has one latent vector of `rank` elements, normed by `norm`, and `turning` elements of a
    key that all heads share and that the rotary embedding turns. A head's key is its own projection
    of the latent vector, and the shared elements behind it; a head's value, of `value_dim`
    elements, is another projection. Queries have turning elements at their end likewise. They come
    from a normed projection to `query_rank` elements, or, where that is 0, from the input itself.
    """

    rank: int
    turning: int
    value_dim: int
    norm: Norm
    query_rank: int = 0

    @property
    def width(self) -> int:
        """Elements kept of a token: the latent vector and the shared part of a key."""
        return self.rank + self.turning


@dataclass(frozen=True)
class RelativeBias:
    """A learned number for each head and bucket of distances, added to scaled scores (T5).

    Distances of `most` tokens and more are alike. One bucket of `buckets` serves each of the first
    distances, and those behind share the rest by their logarithm; with `both_ways` half of them are
    for keys behind the query, else those have the bucket of distance 0.
    """

    buckets: int
    most: int
    both_ways: bool

    @property
    def by_distance(self) -> tuple[int, ...]:
        """The bucket of each key that lies -most to most tokens behind the query.

        HF's `_relative_position_bucket`, in the same float32 arithmetic.
        """
        buckets = self.buckets // 2 if self.both_ways else self.buckets
        exact, found = buckets // 2, []
        steps = np.float32(math.log(self.most / exact))
        for behind in range(-self.most, self.most + 1):
            away = abs(behind) if self.both_ways else max(-behind, 0)
            bucket = away
            if away >= exact:
                part = np.log(np.float32(away) / np.float32(exact)) / steps
                bucket = exact + int(part * np.float32(buckets - exact))
            first = buckets if self.both_ways and behind > 0 else 0
            found.append(first + min(bucket, buckets - 1))
        return tuple(found)


class Chunk(NamedTuple):
    """How many tokens are a chunk, of which each sees its own alone.

    They are counted from the first token that is no padding.
    """

    tokens: int


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, to its own sequence or across to another one.

    `near` counts the visible tokens, the query's own included, or is the `Chunk` in which they are;
    without `causal` it counts as many on either side, the query's own in both (ModernBERT).
    `softcap` c makes a scaled score c * tanh(score / c). `alibi` has a slope for each query head:
    the score of a key that lies n tokens before the query falls by n times that. `alibi_rounded`,
    each of both positions, and then a slope times it, is rounded to bfloat16, and the difference
    scaled as the product of query and key is (Falcon). Queries, keys and values lie within `clip`,
    behind the norm of queries and keys if there is one. `qk_norm` is over each `head` with weights
    that heads share, over each with its `own`, or over `all` heads as one, before the rotation, or
    over each `turned` head after it. With `growth` (b, n, a) the query at position p is times 1 + b
    ln(1 + floor((p + a) / n)). `distances` add to scores. With `latent` each head has a key and a
    value of its own, made of latent vectors; `head_dim` is that of queries and keys. `value_norm`
    is over each head's value, without weights. With a `wiring` queries, keys and values are made
    otherwise, or what heads give is used otherwise, as that says. A layer with a `lender` projects
    to queries alone: its keys and values are those that the layer of this number has projected and
    whose values it has normed.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool = True
    near: int | Chunk | None = None
    rope: Rope | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "own", "all", "turned"] = "head"
    clip: float | None = None
    growth: tuple[float, float, int] | None = None
    alibi: tuple[float, ...] | None = None
    alibi_rounded: bool = False
    softcap: float | None = None
    distances: RelativeBias | Distances | None = None
    latent: Latent | None = None
    value_norm: Norm | None = None
    lender: int | None = None
    wiring: Wiring | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Elements of the axes of its weights, by their names."""
        q, k, v = self.qkv_sizes
        found = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        found |= {"q": q, "k": k, "v": v}
        found["given"] = self.heads * self.head_widths[2]  # by heads, to a product
        found["buckets"] = self.bias.buckets if self.bias else 0
        if self.wiring is not None:
            found |= self.wiring.axes(self)
        if (own := self.latent) is not None:
            found |= {"latent": own.width, "rank": own.rank, "query_rank": own.query_rank}
        return found

    @property
    def bias(self) -> RelativeBias | None:
        """The learned numbers of distances."""
        return self.distances if isinstance(self.distances, RelativeBias) else None

    @property
    def places(self) -> Distances | None:
        """What distances add by products with queries and keys."""
        return self.distances if isinstance(self.distances, Distances) else None

    @property
    def norm_turned(self) -> bool:
        """True if queries and keys are normed once they have turned."""
        return self.qk_norm_over == "turned"

    @property
    def clips_normed(self) -> bool:
        """True if a norm lies between the projection and the clipping."""
        return self.clip is not None and self.qk_norm is not None

    @property
    def window(self) -> int | None:
        """The tokens that are visible from each; None where that is not so."""
        return None if isinstance(self.near, Chunk) else self.near

    @property
    def chunk(self) -> int | None:
        """The tokens of a chunk, of which a token sees its own; None without."""
        return self.near.tokens if isinstance(self.near, Chunk) else None

    @property
    def reach(self) -> int | None:
        """The most tokens that a causal query sees; None for all of the past."""
        return self.chunk if self.window is None else self.window

    @property
    def rope_pairs(self) -> int:
        """Pairs of elements of a head that turn."""
        return len(self.rope.inv_freq) if self.rope else 0

    @property
    def head_widths(self) -> tuple[int, int, int]:
        """Elements of one head in the projections to queries, keys and values, in that order."""
        if self.latent is None:
            value = self.wiring.value_dim(self) if self.wiring else self.head_dim
            return self.head_dim, self.head_dim, value
        return self.head_dim, self.head_dim - self.latent.turning, self.latent.value_dim

    @property
    def halves(self) -> int:
        """Parts of the heads, of which devices share what stands beside each other."""
        return self.wiring.halves if self.wiring else 1

    @property
    def widened(self) -> "Attention":
        """This attention as caches and ops have it, without a wiring."""
        return self.wiring.widened(self) if self.wiring else self

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value blocks in projections, in that order."""
        q, k, v = self.head_widths
        return self.heads * q, self.kv_heads * k, self.kv_heads * v
