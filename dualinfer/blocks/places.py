"""Vectors of distances that meet queries and keys (DeBERTa, arXiv:2006.03654)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..model import rows as make
from ..model.spec import Attention, Distances, Norm
from ..model.weights import Row, row
from ..ops.contract import Array, BlockOps, NormOf, Projection, Weights
from ..ops.maths import Maths, heads
from ..ops.projection import project_by


class PlaceWeights(NamedTuple):
    """The weights that make keys and queries of distances.

    `table` [E, 2M+1] has the vector of keys that lie -M to M tokens behind the query, before its
    `norm`. `keys` and `queries` are a projection each, or None.
    """

    table: Array
    norm: NormOf | None
    keys: Projection | None
    queries: Projection | None


@dataclass(frozen=True)
class Places(Distances):
    """Vectors of distances that all layers share, 2 `span` of the embedding's width.

    They pass a `norm` if there is one. A layer's projection of the vector of a query's distance
    from a key to a key of its own meets the query if `keys`, one to a query meets the key if
    `queries`; both are added to the product of the two, before the scale. If `shared`, the
    projections are those of tokens. Distances have a vector each, or, where `most` is not 0, the
    near half of `span`, and the others share the rest by their logarithm up to `most`.
    """

    span: int
    most: int
    keys: bool
    queries: bool
    shared: bool
    norm: Norm | None = None

    @property
    def farthest(self) -> int:
        """The tokens from which on distances are alike."""
        return self.most or self.span

    @property
    def by_distance(self) -> tuple[int, ...]:
        """The vector of each key that lies -farthest to farthest tokens behind the query.

        HF's `make_log_bucket_position`, in the same float32 arithmetic.
        """
        middle, far = self.span // 2, range(-self.farthest, self.farthest + 1)
        found = np.array(far, np.int64)
        if self.most:
            away = np.maximum(np.abs(found), middle)
            part = np.log(away.astype(np.float32) / np.float32(middle))
            part /= np.log(np.float32((self.most - 1) / middle))
            shared = np.ceil(part * np.float32(middle - 1)).astype(np.int64) + middle
            found = np.where(away == middle, found, np.sign(found) * shared)
        return tuple(np.clip(self.span - found, 0, 2 * self.span - 1).tolist())

    @property
    def axes(self) -> Mapping[str, int]:
        """See `Distances`."""
        return {"places": 2 * self.span}

    def outer_rows(self, hf: str) -> list[Row]:
        """The table, and its norm, of the encoder that HF calls `hf`."""
        table = row("places", "embed places", (f"{hf}rel_embeddings.weight", "places embed"))
        rows = [replace(table, picks=self.by_distance)]
        return rows + (make.norm(self.norm, "places_norm", f"{hf}LayerNorm") if self.norm else [])

    def rows(self, keys: str, queries: str, bias: bool) -> list[Row]:
        """A layer's own projections, which HF calls so; that to keys may have no `bias`."""
        rows = []
        if self.keys and not self.shared:
            rows += make.linear("place_keys", keys, "k embed", bias=bias)
        if self.queries and not self.shared:
            rows += make.linear("place_queries", queries, "q embed")
        return rows

    def weights(self, w: Weights, outer: Weights) -> PlaceWeights:
        """See `Distances`."""
        norm = NormOf.named(self.norm, outer, "places_norm") if self.norm else None
        names = ("qkv", "qkv") if self.shared else ("place_keys", "place_queries")
        keys, queries = (
            Projection.named(w, name) if has else None
            for name, has in zip(names, (self.keys, self.queries), strict=True)
        )
        return PlaceWeights(outer["places"], norm, keys, queries)

    def added(
        self, ops: BlockOps, a: Attention, weights: PlaceWeights, q: Array, k: Array
    ) -> Array | None:
        """See `Distances`."""
        m, near, farthest = ops.maths, min(q.shape[1] - 1, self.farthest), self.farthest
        rows = weights.table[:, farthest - near : farthest + near + 1].T
        if weights.norm is not None:
            rows = ops.norm(m.whole(rows), weights.norm)

        def of_places(made: Projection | None, part: int) -> Array | None:
            """Keys or queries [H, 2 near + 1, D] of distances."""
            if made is None:
                return None
            y = project_by(ops, made, rows)
            if self.shared:
                width = a.heads * a.head_dim
                y = y[:, part * width : (part + 1) * width]
            return heads(y, width=a.head_dim).swapaxes(0, 1)

        return _sums(m, q, k, of_places(weights.keys, 1), of_places(weights.queries, 0))


def _sums(m: Maths, q: Array, k: Array, keys: Array | None, queries: Array | None) -> Array | None:
    """Products of q and k [B, T, H, D] with those of distances: float32 [B, H, T, T], or None.

    Keys and queries [H, 2N+1, D] are of keys that lie -N to N tokens behind the query, or farther.
    """
    at = m.arange(q.shape[1], q)

    def added(x: Array, table: Array, away: Array) -> Array:
        """Each row of x [B, T, H, D] with the row of the table of each distance: [B, H, T, T]."""
        near = table.shape[1] // 2
        products = m.scores("bthd,hpd->bhtp", x, table)
        return m.along(products, (away.clip(-near, near) + near)[None, None])

    found = None if keys is None else added(q, keys, at - at[:, None])
    if queries is None:
        return found
    other = added(k, queries, at[:, None] - at).swapaxes(-1, -2)
    return other if found is None else found + other
