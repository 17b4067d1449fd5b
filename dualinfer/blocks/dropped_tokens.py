"""Tokens whose embedding is zero, as dropout in training made it (ESM-2)."""

from dataclasses import dataclass, replace
from typing import Any

from ..model.spec import Entry, ModelSpec, Positions
from ..ops.contract import Array, BlockOps, Seen, Weights
from ..ops.embedding import places_of

_KEPT = 1 - 0.15 * 0.8  # of tokens, in training


@dataclass(frozen=True)
class DroppedTokens(Entry):
    """The embedding of the id `dropped`, if there is one, is zero.

    Those of a sequence's other tokens are times 0.88 over the share that these have in it. Rows of
    positions are not dropped with their tokens. What a mask hides enters the first layer as zeros.
    """

    dropped: int | None
    blanks = True

    def embed(
        self, ops: BlockOps, spec: ModelSpec, w: Weights, ids: Array, where: Any, seen: Seen
    ) -> Array:
        """See `Entry`."""
        if self.dropped is None:
            return super().embed(ops, spec, w, ids, where, seen)
        x = ops.embed(replace(spec, positions=Positions()), w, ids, *where)
        is_dropped = (ids == self.dropped) * 1.0
        if seen.segments is not None:
            same = (seen.segments[:, :, None] == seen.segments[:, None, :]) * 1.0
            found, tokens = (same * is_dropped[:, None]).sum(-1), same.sum(-1)
        else:
            found = is_dropped.sum(-1)[:, None]
            # Rows that fill a bucket up have no token.
            tokens = ids.shape[1]
            if seen.mask is not None:
                tokens = (seen.mask * 1.0).sum(-1)[:, None].clip(1)
        scale = (1 - is_dropped) * _KEPT / (1 - found / tokens)
        x = ops.maths.cast(x * scale[..., None], x.dtype)
        if spec.positions.rows:
            at = places_of(ops.maths, spec, where[0])
            x = x + ops.schemes.embed(at, w["positions.weight"])
        return x
