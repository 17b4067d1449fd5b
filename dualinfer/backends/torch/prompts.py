"""Prompts into the cache: short ones replayed from a graph, long ones perhaps in pieces.

A short prompt takes the device less time than its launches take Python; padded to a multiple of
GRAIN tokens it is one launch. A long one would need memory for all of its tokens' activations.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import decoder
from ...model.spec import Experts, ModelSpec
from ...ops.contract import CacheRows, StateRows, Tokens
from ..base import Piece
from ..kernels import is_wide
from ..slots import GRAIN, PANELS, SMALLEST_CACHE, bucket, in_grains, panel_for, share_rows
from .ahead import Ahead
from .cache import Cache
from .device import fill, upload
from .graphs import MOST_STEPS, StepGraphs
from .ops.plain import PlainOps
from .params import Params

# Tokens of all prompts of a call that are replayed from a graph: always, and where a token is
# multiplied by few parameters. Parameters times tokens of 8e12 take an H100 about 25 ms, and the
# launches of thirty layers from Python as long; many experts have many launches.
_MOST_REPLAYED, _MOST_REPLAYED_OF_FEW = 1024, 4096
_MOST_WORK = 1 << 43
_MOST_PAIRS = 64  # of a token and an expert: plain ops launch products for each in a graph
_MOST_FRAMES = 1 << 15  # of all spectrograms, which have one length: a graph serves every one
_MOST_AT_ONCE = 32768


class _Rows(NamedTuple):
    """Prompts that a pass reads, or pieces of them, a row each.

    These are `ids` [B, T], or embeddings [B, T, W], of `slots` [B], and `last` [B] is the place of
    each row's last real token. Pieces begin at place `starts` [B] of what their slots have, and
    `wholes` [B] are the last positions of the prompts that they are of. An encoder reads `source`
    [B, S] up to `source_last` [B], ids, spectrograms, or what it gave before.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    starts: torch.Tensor | None = None
    wholes: torch.Tensor | None = None
    source: torch.Tensor | None = None
    source_last: torch.Tensor | None = None

    def fill(self, *arrays: np.ndarray) -> None:
        """Put arrays into the first of these, which a graph reads."""
        for own, array in zip(self, arrays, strict=False):
            assert own is not None
            fill(own, array)


class _Buffers(NamedTuple):
    """The arrays that a graph reads and writes: the hidden states [B, E] of last tokens."""

    rows: _Rows
    out: torch.Tensor


class Prompts:
    """The prompts' pass of one runner; `ahead` knows kernels of a pass before it runs."""

    def __init__(
        self,
        spec: ModelSpec,
        params: Params,
        ops: PlainOps,
        graphs: StepGraphs | None,
        ahead: Ahead | None = None,
    ) -> None:
        self._spec, self._ops, self.graphs, self._ahead = spec, ops, graphs, ahead
        self._buffers: OrderedDict[Hashable, _Buffers] = OrderedDict()
        self._panels: dict[Hashable, _Buffers] = {}
        # Where a row's own keys or states are made in a pass, a piece is a row.
        attends = all(own.recurrence is None for own in spec.layers)
        self.packs = spec.reads_pieces and attends and not ops.makes_keys(spec, GRAIN)
        self._most_replayed = _most_replayed(spec, params, ops)

    def run(
        self,
        params: Params,
        cache: Cache,
        tokens: list[np.ndarray],
        slots: torch.Tensor,
        sources: list[Any] | None = None,
        is_encoded: bool = False,
    ) -> torch.Tensor:
        """The last tokens' hidden states [B, E]; keys and values go to the cache's `slots` [B].

        `tokens` are ids [T] of each prompt, or embeddings [T, W]; `sources` are what an encoder
        reads for it, ids [S], or what it gave, if it `is_encoded`.
        """
        longest = max(map(len, tokens))
        width = min(-(-longest // GRAIN) * GRAIN, cache.tokens)
        read, most = 0, 0 if sources is None else max(map(len, sources))
        count, replays = len(tokens), len(tokens) * width <= self._most_replayed
        if sources is not None and self._spec.encoder is not None and self._spec.encoder.one_length:
            read, replays = most, replays and count * most <= _MOST_FRAMES
        elif sources is not None:
            read = -(-most // GRAIN) * GRAIN
            replays = count * (width + read) <= self._most_replayed
        if slots.is_cuda and replays:
            return self._replayed(params, cache, tokens, slots, width, sources, read, is_encoded)
        if sources is not None:
            at_once = max(1, _MOST_AT_ONCE // (longest + most))
            parts = []
            for first in range(0, len(tokens), at_once):
                group = slice(first, first + at_once)
                put = partial(upload, device=slots.device)
                ids, last = map(put, _padded(tokens[group], max(map(len, tokens[group]))))
                given = _padded(sources[group], max(map(len, sources[group])))
                read = _Rows(ids, slots[group], last, None, None, *map(put, given))
                parts.append(self._pass(params, cache, read, is_encoded=is_encoded))
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        at_once = max(1, _MOST_AT_ONCE // longest)
        parts = []
        for first in range(0, len(tokens), at_once):
            group = tokens[first : first + at_once]
            rows = slots[first : first + at_once]
            if len(group[0]) > _MOST_AT_ONCE and self._spec.reads_pieces:
                parts.append(self.go_on(params, cache, group, rows, [0], [len(group[0])]))
                continue
            ids, last = _padded(group, max(map(len, group)))
            put = partial(upload, device=slots.device)
            parts.append(self._pass(params, cache, _Rows(put(ids), rows, put(last))))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def packs_these(self, pieces: Sequence[Piece]) -> bool:
        """True if grains of pieces go side by side: several, or one that a graph has room for.

        A long one by itself goes as a row, which attention of whole prompts may serve.
        """
        grains = sum(-(-(p.stop - p.start) // GRAIN) for p in pieces)
        few = len(pieces) > 1 or grains * GRAIN <= self._most_replayed
        return self.packs and few and share_rows(self._spec, self._ops, pieces)

    def takes_whole(self, prompts: Sequence[np.ndarray]) -> bool:
        """True if `run` reads each of these prompts in one pass."""
        return max(map(len, prompts)) <= _MOST_AT_ONCE

    def packed(
        self,
        params: Params,
        cache: Cache,
        pieces: Sequence[Piece],
        around: Callable[[Sequence[Piece]], AbstractContextManager[None]],
    ) -> torch.Tensor:
        """As `go_on`, of pieces that go side by side in rows of GRAIN tokens, whoever's they are.

        What differs is data, so that a graph serves every panel of a size. `around` each panel is
        what makes room for its rows.
        """
        grains, device = in_grains(pieces), cache.device
        at_once = max(1, _MOST_AT_ONCE // GRAIN)
        replays = device.type == "cuda" and self._most_replayed >= PANELS[0]
        # A panel is filled up by rows of a slot that there is not, which plain ops do not take.
        replays = replays and all(self._ops.knows(x) and not is_wide(x) for x in cache.specs)
        parts, ends = [], {number: i for i, (number, _) in enumerate(grains)}
        while grains:
            left = GRAIN * len(grains)
            size = panel_for(left, self._most_replayed)
            if not replays or left > 2 * PANELS[-1]:
                size = min(left, at_once * GRAIN)
            size = min(size, PANELS[-1]) if any(x.forgets for x in cache.specs) else size
            rows = [piece for _, piece in grains[: size // GRAIN]]
            grains = grains[len(rows) :]
            with around(rows):
                x = self._panel(params, cache, rows, size if replays else 0)
            parts.append(x[: len(rows)].clone() if grains else x)
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        return x[upload(list(ends.values()), device)]

    def _panel(
        self, params: Params, cache: Cache, rows: Sequence[Piece], size: int
    ) -> torch.Tensor:
        """The states [R, E] of the rows' last tokens; from a graph of this `size` of a panel."""
        prompts = [p.request.prompt[p.start : p.stop] for p in rows]
        ids, last = _padded(prompts, GRAIN)
        numbers = [(p.slot, p.start, len(p.request.prompt) - 1) for p in rows]
        slots, starts, wholes = map(np.ascontiguousarray, np.array(numbers).T)
        reach = max(p.stop for p in rows)
        if not size or size > self._most_replayed:
            put = partial(upload, device=cache.device)
            given = _Rows(*map(put, (ids, slots, last, starts, wholes)))
            return self._pass(params, cache, given, reach)
        count, given = size // GRAIN, ids.shape[2:]
        key = "panel", count, given
        b, is_new = self._panel_buffers(params, cache, key)
        if count > len(rows):  # rows of a slot that there is not
            more = count - len(rows)
            ids = np.concatenate([ids, np.zeros((more, *ids.shape[1:]), ids.dtype)])
            last, starts, wholes = (np.append(x, [0] * more) for x in (last, starts, wholes))
            slots = np.append(slots, [cache.room.slots] * more)
        b.rows.fill(ids, slots, last, starts, wholes)
        self._replay_panel(params, cache, key, b, captures=not is_new)
        return b.out

    def _panel_buffers(self, params: Params, cache: Cache, key: Any) -> tuple[_Buffers, bool]:
        """The arrays that the panel's graph reads and writes; True if they are new."""
        _, count, given = key
        if (b := self._panels.get(key)) is not None:
            return b, False
        embed = params.outer["embed.weight"]
        integers = partial(torch.zeros, dtype=torch.int64, device=cache.device)
        floats = partial(torch.zeros, dtype=embed.dtype, device=cache.device)
        ids = floats(count, GRAIN, *given) if given else integers(count, GRAIN)
        slots, last, starts, wholes = (integers(count) for _ in range(4))
        slots += cache.room.slots
        rows = _Rows(ids, slots, last, starts, wholes)
        b = _Buffers(rows, floats(count, self._spec.embed))
        self._panels[key] = b
        return b, True

    def _replay_panel(
        self, params: Params, cache: Cache, key: Any, b: _Buffers, captures: bool
    ) -> None:
        graphs = self.graphs
        if graphs is not None and key in graphs:
            graphs.replay(key)
            return

        def work() -> None:
            b.out.copy_(self._pass(params, cache, b.rows, cache.tokens))

        work()
        if graphs is not None and captures:
            graphs.capture(key, work)

    def prepare(self, params: Params, cache: Cache) -> None:
        """Capture every panel of ids that is replayed."""
        for size in PANELS:
            if size <= self._most_replayed:
                key = "panel", size // GRAIN, ()
                b, _ = self._panel_buffers(params, cache, key)
                self._replay_panel(params, cache, key, b, captures=True)

    def clear(self) -> None:
        """Let go of the graphs and their buffers."""
        if self.graphs is not None:
            self.graphs.clear()
        self._buffers.clear()
        self._panels.clear()

    def _replayed(
        self,
        params: Params,
        cache: Cache,
        tokens: list[np.ndarray],
        slots: torch.Tensor,
        width: int,
        sources: list[Any] | None,
        read: int,
        is_encoded: bool,
    ) -> torch.Tensor:
        """Padded to `width`: without graphs too, so that these change no bit.

        A size whose buffers went, as others came since, is new again: where prompts come in more
        sizes than there are graphs, none of them is captured over and over.
        """
        graphs = self.graphs
        given = tokens[0].shape[1:]
        key = "prompts", len(tokens), width, given, read, is_encoded
        b = self._buffers.get(key)
        is_new = b is None
        if b is not None:
            self._buffers.move_to_end(key)
        else:
            if len(self._buffers) >= MOST_STEPS:
                oldest, _ = self._buffers.popitem(last=False)
                if graphs is not None:
                    graphs.drop(oldest)
            count = len(tokens)
            integers = partial(torch.empty, dtype=torch.int64, device=slots.device)
            dtype = params.outer["embed.weight"].dtype
            floats = partial(torch.empty, dtype=dtype, device=slots.device)
            rows = _Rows(
                floats(count, width, *given) if given else integers(count, width),
                integers(count),
                integers(count),
                source=self._source_buffer(sources, read, integers, floats),
                source_last=integers(count) if sources else None,
            )
            self._buffers[key] = b = _Buffers(rows, floats(count, self._spec.embed))
        ids, last = _padded(tokens, width)
        fill(b.rows.ids, ids)
        fill(b.rows.last, last)
        b.rows.slots.copy_(slots)
        if sources and b.rows.source is not None and b.rows.source_last is not None:
            source, source_last = _padded(sources, read)
            fill(b.rows.source, source)
            fill(b.rows.source_last, source_last)
        if graphs is not None and key in graphs:
            graphs.replay(key)
            return b.out

        def work() -> None:
            b.out.copy_(self._pass(params, cache, b.rows, is_encoded=is_encoded))

        work()
        if graphs is not None and not is_new:  # a size that comes a second time is worth a capture
            graphs.capture(key, work)
        return b.out

    def _source_buffer(
        self, sources: list[Any] | None, read: int, integers: Any, floats: Any
    ) -> torch.Tensor | None:
        """Room for ids [B, S], spectrograms, or what an encoder gave; None without an encoder."""
        if sources is None:
            return None
        shape = len(sources), read, *sources[0].shape[1:]
        return floats(*shape) if len(shape) > 2 else integers(*shape)

    def go_on(
        self,
        params: Params,
        cache: Cache,
        prompts: list[np.ndarray],
        slots: torch.Tensor,
        starts: Sequence[int],
        stops: Sequence[int],
    ) -> torch.Tensor:
        """As `run`, of the pieces starts[i] to stops[i] of prompts: their last tokens' states.

        What lies before a piece is in its slot. A cut changes no answer beyond rounding, and none
        of a recurrence's state at multiples of 64: a long piece is cut.
        """
        starts, size = list(starts), _MOST_AT_ONCE // 2
        for i, stop in enumerate(stops):
            is_long = stop - starts[i] > _MOST_AT_ONCE
            while is_long and stop - starts[i] > size:
                cut = starts[i] + size
                self.go_on(params, cache, [prompts[i]], slots[i : i + 1], [starts[i]], [cut])
                starts[i] = cut
        parts, order = [], []
        put = partial(upload, device=slots.device)
        for is_later in (False, True):
            group = [i for i, start in enumerate(starts) if (start > 0) == is_later]
            while group:
                longest = max(stops[i] - starts[i] for i in group)
                at_once = max(1, _MOST_AT_ONCE // longest)
                own, group = group[:at_once], group[at_once:]
                pieces = [prompts[i][starts[i] : stops[i]] for i in own]
                ids, last = map(put, _padded(pieces, max(map(len, pieces))))
                wholes = put([len(prompts[i]) - 1 for i in own])
                begins, reach = None, 0
                if is_later:
                    begins = put([starts[i] for i in own])
                    reach = max(starts[i] for i in own) + ids.shape[1]
                rows = _Rows(ids, slots[own], last, begins, wholes)
                parts.append(self._pass(params, cache, rows, reach))
                order += own
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        return x if order == sorted(order) else x[put(np.argsort(order))]

    def every(
        self,
        params: Params,
        cache: Cache,
        ids: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        last: torch.Tensor,
        reach: int,
    ) -> torch.Tensor:
        """The states [B, T, E] of tokens `ids` [B, T] that go on from place `starts` [B] of slots.

        Those up to column `last` [B] are real, and none reaches place `reach`.
        """
        return self._pass(params, cache, _Rows(ids, slots, last, starts), reach, every=True)

    def _pass(
        self,
        params: Params,
        cache: Cache,
        rows: _Rows,
        reach: int = 0,
        is_encoded: bool = False,
        every: bool = False,
    ) -> torch.Tensor:
        """One pass over rows: the hidden state [B, E] of each one's last token.

        Or of `every` one [B, T, E]. Of rows with starts none reaches place `reach`. What layers
        need of a source goes to the cache; where it `is_encoded` the encoder has run before.
        """
        ids, slots, last, starts, wholes, source, source_last = rows
        shape = ids.shape[:2]
        if self._ahead is not None and source is None:
            # What kernels depend on, or nearly.
            sizes = (bucket(max(n, 1)) for n in (*shape, reach))
            key = "pass", *sizes, starts is None, every

            def read(spec: ModelSpec, params: Params, ops: PlainOps) -> None:
                Prompts(spec, params, ops, None)._pass(params, cache, rows, reach, every=every)

            self._ahead.meet(key, params, read, waits=True)
        at = positions = torch.arange(shape[1], device=ids.device).expand(shape)
        if starts is not None:
            at = positions = positions + starts[:, None]
            if self._spec.positions.rows:  # of which padding may lie beyond the last
                at = positions.clamp(max=self._spec.max_positions - 1)
            reach = min(bucket(reach, SMALLEST_CACHE), cache.tokens)
        embeds = ids.to(params.outer["embed.weight"].dtype) if ids.ndim > 2 else None
        angles = self._ops.angles(self._spec, params, positions, last if wholes is None else wholes)

        numbers = self._spec.cache_numbers

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            layer, own = self._ops.layer_attention(self._spec, params, i), cache.number(numbers[i])
            if starts is None:
                return self._ops.attend(layer, qkv, angles, cache=own, slots=slots)[0]
            into = CacheRows(own, slots, starts, lengths, reach)
            return self._ops.attend_rows(layer, qkv, angles, into)[0]

        states, lengths = self._spec.state_numbers, last + 1

        def recur(i: int, x: torch.Tensor) -> torch.Tensor:
            layer, own = self._spec.layers[i].recurrence, cache.number(states[i])
            assert layer is not None
            rows = StateRows(own, slots, lengths, starts)
            return self._ops.recur(layer, params.layers[i], x, rows=rows)[0]

        model = self._spec, params, self._ops
        across = None
        if source is not None and source_last is not None:
            across = self._across(params, cache, source, slots, source_last, is_encoded)
        mixers = decoder.Mixers(attend, across, recur)
        x = decoder.hidden_states(*model, Tokens(ids, at, embeds=embeds), mixers)[-1]
        if every:
            return x
        return x[torch.arange(len(ids), device=ids.device), last]

    def _across(
        self,
        params: Params,
        cache: Cache,
        source: torch.Tensor,
        slots: torch.Tensor,
        last: torch.Tensor,
        is_encoded: bool,
    ) -> decoder.Attend:
        """Attention to what the encoder gives of `source`, which the cache keeps in `slots`."""
        model, mask, numbers = (self._spec, params, self._ops), None, self._spec.cross_numbers
        dtype, encoder = params.outer["embed.weight"].dtype, self._spec.encoder
        assert encoder is not None
        if is_encoded:
            states = source.to(dtype)
            if not encoder.one_length:
                mask = torch.arange(source.shape[1], device=source.device)[None] <= last[:, None]
        else:
            ids, embeds = (source, None) if source.ndim == 2 else (None, source.to(dtype))
            places = torch.arange(source.shape[1] // encoder.stride, device=source.device)
            last = last // encoder.stride
            if embeds is not None and encoder.marks:
                mask = source[..., -1] > 0
                last = mask.sum(1) - 1
            elif not encoder.one_length:
                mask = places[None] <= last[:, None]
            at = places.expand(len(source), -1)
            states = decoder.encoded(*model, Tokens(ids, at, mask, embeds=embeds))[-1]

        def across(i: int, q: torch.Tensor) -> torch.Tensor:
            a = self._spec.layers[i].cross
            assert a is not None
            kv = decoder.cross_keys(params.layers[i], self._ops, states)
            own = cache.number(numbers[i])
            how: dict[str, Any] = {"cache": own, "slots": slots, "lengths": last + 1}
            return self._ops.attend_across(a, q, kv, mask, **how)[0]

        return across


def _most_replayed(spec: ModelSpec, params: Params, ops: PlainOps) -> int:
    """Tokens of prompts whose launches take longer than their work; see above."""
    layers = spec.layers
    mixtures = {i: own.mlp for i, own in enumerate(layers) if isinstance(own.mlp, Experts)}
    left = ops.left_plain(spec, params.layers)
    if mixtures and (not ops.kernels or "experts" in left):
        return _MOST_PAIRS // max(mixture.router.chosen for mixture in mixtures.values())
    if not ops.kernels or "attention" in left:  # graphs would keep a score of each pair of tokens
        return _MOST_REPLAYED
    read = 0.0  # parameters by which a token is multiplied
    for i, weights in enumerate(params.layers[: len(layers)]):
        mixture = mixtures.get(i)
        share = mixture.router.chosen / mixture.count if mixture else 1.0
        for name, leaf in weights.items():
            read += prod(leaf.shape) * (share if name.startswith("experts.") else 1.0)
    return min(max(int(_MOST_WORK / max(read, 1)), _MOST_REPLAYED), _MOST_REPLAYED_OF_FEW)


def _padded(tokens: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, width], zeros behind each prompt, and the place of each one's last token [B].

    int64; embeddings [B, width, W] are as they were. Padding needs no mask: a causal query sees no
    later key.
    """
    given = tokens[0].shape[1:]
    ids = np.zeros((len(tokens), width, *given), np.float32 if given else np.int64)
    for i, row in enumerate(tokens):
        ids[i, : len(row)] = row
    return ids, np.array([len(row) - 1 for row in tokens])
