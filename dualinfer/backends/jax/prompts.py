"""Prompts in panels: as many at once as have room for the activations of all their tokens."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ...model.spec import Experts, ModelSpec
from ..base import Piece
from ..slots import bucket
from .sampler import SMALLEST_PROMPT

MOST_BYTES = 2 << 30  # of what a pass over prompts computes on the way
_MOST_TOKENS = 1 << 15


def most_tokens(spec: ModelSpec, itemsize: int, width: int, scores: bool, outputs: int = 0) -> int:
    """Tokens of a pass, a power of two, of sequences of `width` tokens.

    With `scores` attention holds those of all pairs of tokens. `outputs` are the values that the
    pass gives back for each token: they are there twice while they are put to those of others.
    """
    most = 1
    for layer in spec.all_layers:
        a, mlp = layer.attention.widened, layer.mlp
        up = mlp.ffn * (3 if mlp.gated else 2)
        if isinstance(mlp, Experts):  # hidden values and results of all pairs lie side by side
            up = mlp.per_token * (mlp.ffn + spec.embed) + 3 * mlp.shared
        values = 2 * spec.embed + sum(a.qkv_sizes) + a.heads * a.head_dim + up + outputs
        beside = 8 * a.heads * width if scores else 0
        if layer.recurrence is not None:
            beside += 12 * layer.recurrence.passing
        most = max(most, values * itemsize + beside)
    return bucket(min(_MOST_TOKENS, MOST_BYTES // most) // 2 + 1)


def cut_piece(piece: Piece, most: int) -> list[Piece]:
    """The piece, or where it takes more than `most` tokens several, one after another."""
    if bucket(piece.stop - piece.start, SMALLEST_PROMPT) <= most:
        return [piece]
    bounds = [*range(piece.start, piece.stop, most), piece.stop]
    return [replace(piece, start=a, stop=b) for a, b in pairwise(bounds)]


def panels(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Numbers of the prompts that go together, so that a pass in buckets has `most` tokens.

    One that is longer goes alone. Prompts of like lengths go together, the longest first.
    """
    order = list(range(len(lengths)))
    if bucket(len(lengths)) * bucket(max(lengths), SMALLEST_PROMPT) <= most:
        return [order]
    order.sort(key=lambda i: -lengths[i])
    groups = []
    while order:
        count = max(1, most // bucket(lengths[order[0]], SMALLEST_PROMPT))
        groups.append(order[:count])
        order = order[count:]
    return groups
