"""Prompts in passes: which pieces go together, and the step that reads them.

As many go at once as have room for the activations of all their tokens. Into a pool they go in
panels of few sizes, whoever's they are: as rows of GRAIN tokens, or where a row's own keys or
states are made in the pass, a piece as one row.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from ...model.spec import Experts, ModelSpec
from ...ops.caches import LATENTS, CacheSpec, Room
from ..base import Piece, Request, SamplingFeatures
from ..slots import GRAIN, bucket, in_grains, panel_for, part_of, share_rows, weight_rows
from .ops.plain import PlainOps
from .packing import pack, unpack
from .params import Params
from .sampler import (
    SMALLEST_PROMPT,
    SlotState,
    bits_of,
    mode_of,
    piece_rows,
    prompt_embeds,
    prompt_rows,
    source_rows,
    without_ended,
)
from .steps import PrefillOptions, Prompts, Steps

MOST_BYTES = 2 << 30  # of what a pass over prompts computes on the way
_MOST_TOKENS = 1 << 15


class Step(NamedTuple):
    """A step that takes over cache and state, before it is tied to such.

    `key` is what fixes it beside their shapes; `function` takes parameters, cache, state and
    `args`, which are in host memory, but for what stays on the devices from step to step. One that
    `ends` slots tells the state of those that have ended before it.
    """

    key: tuple[Any, ...]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    ends: bool = False


class Pass(NamedTuple):
    """Pieces that one step reads, and for each the number of the prompt that it ends, or -1.

    Ids have this `shape`, or are in buckets; with `reach` no piece has a place beyond. `is_whole`
    is one of prompts from their start to their end, which attend to themselves.
    """

    pieces: list[Piece]
    numbers: list[int]
    is_whole: bool
    shape: tuple[int, int] | None = None
    reach: int | None = None


class Passes:
    """The cutting and joining of a runner's prompts; `most_of` says `most_tokens` of a width."""

    def __init__(
        self,
        spec: ModelSpec,
        ops: PlainOps,
        specs: Sequence[CacheSpec],
        most_of: Callable[[int], int],
    ) -> None:
        self._spec, self._ops, self._most_of = spec, ops, cache(most_of)  # of few widths
        read = [own for own in specs if own.kind != "cross"]
        attends = all(own.kind != "state" for own in read)
        self._makes_keys = any(own.kind in LATENTS for own in read)
        has_grains = attends and not ops.makes_keys(spec, GRAIN)
        ways = (True, has_grains), (False, self._makes_keys or not has_grains)
        #: True for panels of rows of GRAIN tokens, False for those of one row; there may be both.
        self._ways = [in_rows for in_rows, is_there in ways if is_there]
        self._by_reach = any(not ops.knows(own) for own in read if own.kind != "state")

    def of(self, pieces: Sequence[Piece], pool: Room | None) -> list[Pass]:
        """The passes that read these pieces, in order; into a `pool` those of few sizes."""
        if pool is not None and self._spec.reads_pieces:
            return self._in_panels(pieces, pool)
        whole, rest, found = [], [], []
        for numbered in enumerate(pieces):
            (whole if numbered[1].is_whole else rest).append(numbered)
        for some in (whole, rest):
            if not some:
                continue
            sizes = [p.stop - p.start for _, p in some]
            width = max(len(p.request.prompt) for _, p in some)
            for group in panels(sizes, self._most_of(bucket(width, SMALLEST_PROMPT))):
                found += self._cut([some[i] for i in group])
        return found

    def _cut(self, group: list[tuple[int, Piece]]) -> list[Pass]:
        """The group, or one after another the parts of a piece that is too long for a pass."""
        parts = [group]
        if len(group) == 1 and self._spec.reads_pieces:
            ((number, piece),) = group
            most = self._most_of(bucket(len(piece.request.prompt), SMALLEST_PROMPT))
            parts = [[(number, part)] for part in cut_piece(piece, most)]
        return [_pass(part, all(p.is_whole for _, p in part)) for part in parts]

    def sizes(self, pool: Room) -> list[tuple[tuple[int, int], int | None]]:
        """Shape and reach of every panel into a pool."""
        found: dict[tuple[tuple[int, int], int | None], None] = {}
        for tokens in range(GRAIN, pool.tokens + 1, GRAIN):
            reach = part_of(pool, 1, tokens).tokens
            for rest in range(GRAIN, self._most(reach) + 1, GRAIN):
                size = panel_for(rest, self._most(reach))
                for in_rows in self._ways:
                    shape = _panel_shape(size, in_rows)
                    found[shape, reach if self._is_by_reach(in_rows) else None] = None
        return list(found)

    def _is_by_reach(self, in_rows: bool) -> bool:
        """Kernels read what a query sees; others, and who makes keys, all up to a reach."""
        return self._by_reach or (self._makes_keys and not in_rows)

    def _most(self, reach: int) -> int:
        return min(self._most_of(reach), panel_for(1 << 30, 1 << 30))

    def _in_panels(self, pieces: Sequence[Piece], pool: Room) -> list[Pass]:
        reach = part_of(pool, 1, max(p.stop for p in pieces)).tokens
        in_rows = self._ways[0] and share_rows(self._spec, self._ops, pieces)
        seen, most = reach if self._is_by_reach(in_rows) else None, self._most(reach)
        grains, found = in_grains(pieces), []
        while grains:
            rows = grains
            if not in_rows:
                rows = [pair for pair in grains if pair[0] == grains[0][0]]
            size = panel_for(GRAIN * len(rows), most)
            rows = rows[: size // GRAIN]
            grains = grains[len(rows) :]
            if not in_rows:
                rows = [(rows[0][0], replace(rows[0][1], stop=rows[-1][1].stop))]
            found.append(_pass(rows, False, _panel_shape(size, in_rows), seen))
        return found


def _panel_shape(size: int, in_rows: bool) -> tuple[int, int]:
    return (size // GRAIN, GRAIN) if in_rows else (1, size)


def _pass(group: list[tuple[int, Piece]], is_whole: bool, *size: Any) -> Pass:
    pieces = [piece for _, piece in group]
    return Pass(pieces, [i if piece.ends else -1 for i, piece in group], is_whole, *size)


class Rows(NamedTuple):
    """The slots that a step over prompts is made for: their `state`, and what it is to learn.

    Neither the cache nor the state has slot `free`. bool `kept` [N] and `hiding` are those of
    `Slots`: the slots that have not ended meanwhile, and what requests hide.
    """

    state: SlotState
    free: int
    kept: np.ndarray
    hiding: Callable[[Sequence[Request], int], Any]


def prefill_step(steps: Steps, own: Pass, slots: Rows, vocab: int, choose: bool) -> Step:
    """The step of a pass over rows of slots; unless it is to `choose` it gives logits."""
    state, free, kept, hiding = slots
    eos_width = state.eos.shape[1]
    pieces, requests = own.pieces, [piece.request for piece in own.pieces]
    needs = SamplingFeatures.of(requests)
    mode = mode_of(needs)
    is_encoded, tells = requests[0].is_encoded, choose and needs.tells
    options = PrefillOptions(choose, is_encoded, own.reach, tells)
    rows = prompt_rows(pieces, free, eos_width, own.shape)
    ids = rows[0]
    hides = None if state.hidden is None else hiding(requests, len(ids))
    source = source_rows(requests, len(ids), steps.of_one_length)
    parts = () if own.is_whole else piece_rows(pieces, len(ids), free)
    weights = None
    if state.bias is not None:
        weights = weight_rows([*requests, *requests[:1] * (len(ids) - len(requests))])
    arrays = *rows, np.array(mode, "i4"), kept, source, parts, weights
    embeds = prompt_embeds(pieces, ids.shape)

    def step(
        params: Params,
        cache: Any,
        state: Any,
        packed: jax.Array,
        hides: jax.Array | None,
        embeds: jax.Array | None,
        *part: Any,
    ) -> Any:
        ids, slots, rows, mode, kept, source, *rest = unpack(packed, arrays)
        active, length = without_ended(state.active, state.length, kept)
        state = state._replace(active=active, length=length)
        first = None
        if hides is not None:
            hidden, first = bits_of(hides[0], vocab), bits_of(hides[1], vocab)
            rows = rows._replace(hidden=hidden)
        prompts = Prompts._make((ids, slots, rows, source, first, *rest, embeds))
        return steps.prefill(params, cache, state, prompts, mode, options, *part)

    given = embeds.shape if embeds is not None else source[0].shape if source else None
    key = "rows" if parts else "prefill", ids.shape, given, *options
    if weights is not None:
        key = *key, *(x.shape for x in weights)
    return Step(key, step, (pack(arrays), hides, embeds), ends=True)


def most_tokens(spec: ModelSpec, itemsize: int, width: int, scores: bool, outputs: int = 0) -> int:
    """Tokens of a pass, a power of two, of sequences of `width` tokens.

    With `scores` attention holds those of all pairs of tokens. `outputs` are the values that the
    pass gives back for each token: they are there twice while they are put to those of others.
    """
    most = 1
    for layer in spec.all_layers:
        values, beside, mlp = 2 * spec.embed + outputs, 0, layer.mlp
        if isinstance(mlp, Experts):  # hidden values and results of all pairs lie side by side
            values += mlp.per_token * (mlp.ffn + spec.embed) + 3 * mlp.shared
        elif mlp is not None:
            values += mlp.ffn * (3 if mlp.gated else 2)
        if layer.attention is not None:
            a = layer.attention.widened
            values += sum(a.qkv_sizes) + a.heads * a.head_dim
            beside += 8 * a.heads * width if scores else 0
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
