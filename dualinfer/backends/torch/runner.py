"""The torch runner: forward passes, prefill into the cache, decode steps over static buffers."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ... import decoder
from ...arrays import on_its_way
from ...errors import StepError, UnsupportedError
from ...model.load_plan import LoadPlan, TensorSource
from ...model.weights import count_leaves
from ...ops import sampling
from ...ops.caches import (
    AS_COMPUTED,
    KeptIn,
    Room,
    cache_bytes,
    cache_specs,
    describe_caches,
    in_blocks,
    served,
)
from ...ops.contract import Tokens
from ...ops.pooling import contrast
from ...parallel.agreement import Peers
from ...parallel.shard import Shard
from ...system.patience import told_if_slow
from ...system.progress import track
from ..base import (
    GRAIN,
    MAX_STEPS,
    NO_TOKEN,
    ForwardInputs,
    Piece,
    Pool,
    Request,
    SamplingFeatures,
    Saved,
)
from ..blocks import Blocks, books_of, checked
from ..held import describe_weights
from ..profiling import Stopwatch
from ..slots import (
    PANELS,
    LiveSlots,
    parts_of,
    room_for,
    room_of,
    sampling_rows,
)
from . import sampler
from .cache import Cache, size_of
from .compiling import compile_options
from .device import device_name, free_bytes, in_order, upload
from .graphs import StepGraphs, graph_facts
from .maths import MATHS
from .ops.plain import PlainOps
from .ops.schemes import SCHEMES
from .params import Params, refresh_params
from .precision import own_precision
from .profiling import make_stopwatch, span
from .prompts import Prompts
from .sampler import SlotState
from .scores import ScoreCalls
from .streaming import LayerStream
from .threads import few_threads, threads_note
from .whole import WholePasses

# The kinds of steps that are captured ahead: requests that draw nothing, and those that do.
_GREEDY, _DRAWN = SamplingFeatures(), SamplingFeatures(noise=True, filters=True)


class PendingTokens:
    """Tokens on their way to the host; on CUDA the copy runs beside later steps."""

    def __init__(self, tokens: torch.Tensor, ops: PlainOps, told: torch.Tensor | None = None):
        self._exchange, self._given_up = ops.exchange, None
        if tokens.is_cuda:
            if self._exchange is not None:
                self._given_up = on_its_way(self._exchange.given_up)
        else:
            tokens = tokens.clone()  # the next call's steps write there again
            told = None if told is None else told.clone()
        self._tokens = on_its_way(tokens)
        self._told = None if told is None else on_its_way(told)

    def fetch(self) -> np.ndarray:
        """int32 [steps, columns]."""
        if self._exchange is not None and self._given_up is not None and self._given_up().any():
            raise self._exchange.error()
        return self._tokens().astype(np.int32)

    def told(self) -> np.ndarray | None:
        """See `base.PendingTokens`."""
        return None if self._told is None else self._told()


class TorchRunner(ScoreCalls):
    """One model, or a rank's share of it, on one torch device.

    `spec` is the share's: its heads and its MLP's width are this rank's own.
    """

    def __init__(
        self,
        shard: Shard,
        params: Params,
        dtype: torch.dtype,
        ops: PlainOps,
        device: torch.device,
        peers: Peers,
        decode_graphs: bool,
        forward_graphs: bool = False,
        kept: KeptIn = AS_COMPUTED,
    ) -> None:
        spec = shard.spec
        self.spec, self.params, self.ops, self._shard = spec, params, ops, shard
        self._stream = LayerStream(params.layers, params.blocks, device) if params.blocks else None
        self.dtype, self.device = dtype, device
        self._parameters = count_leaves(params.leaves())["parameters"]
        self.notes = params.notes + threads_note(device, self._parameters)
        self.kernels, self.verifies = ops.kernels, spec.verifies
        specs = cache_specs(spec, kept) if spec.causal else ()
        self._specs, self._peers = specs, peers
        self._cache = Cache(specs, dtype, device, peers)
        self._state: SlotState | None = None
        self._tokens = self._row = torch.empty(0)  # of the steps of a call, by step and slot
        self._told = torch.empty(0)  # of the steps of a call, where a request wants to know
        self._scores = torch.empty(0)  # of the last step, where the host chooses tokens
        self._chosen = torch.empty(0)  # bool: the slots of that step
        self._live = LiveSlots()
        self._pool: Pool | None = None
        decode_graphs = decode_graphs and self._stream is None
        self._graphs = StepGraphs() if decode_graphs and device.type == "cuda" else None
        prompt_graphs = None if self._graphs is None else StepGraphs()
        self._prompts = Prompts(spec, params, ops, prompt_graphs)
        self.last_work: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        how = self._parameters, self._graphs is not None, forward_graphs
        self._whole = WholePasses(spec, ops, dtype, device, *how)

    lost: str | None = None

    @property
    def blocks(self) -> Blocks | None:
        """See `base.Runner`."""
        return self._live.blocks

    def lacks(self, steps: int) -> int:
        """See `base.Runner`."""
        return self._live.lacks(steps)

    @property
    def _passed(self) -> Params:
        """The weights as passes take them, on the device."""
        if self._stream is None:
            return self.params
        return self.params._replace(layers=self._stream)

    @contextmanager
    def _own_settings(self, tokens: int) -> Iterator[None]:
        """The engine's precision and threads around a pass over `tokens`."""
        threads = few_threads(self.device, self._parameters, tokens)
        with threads, own_precision(self.dtype, self.device):
            yield

    @in_order
    @torch.no_grad()
    def forward(self, inputs: ForwardInputs) -> dict[str, Any]:
        """Outputs of whole sequences; see `base.Runner`."""
        if self.spec.towers and inputs.tokens.source is not None:
            texts, images = map(self.forward, inputs.towers())
            vectors, w = (texts["pooler_output"], images["pooler_output"]), self.params.outer
            scale = w["logit_scale"], w.get("logit_bias")
            with self._own_settings(prod(inputs.tokens.shape)):
                return decoder.joined_towers(texts, images, *contrast(MATHS, *vectors, *scale))
        with self._own_settings(prod(inputs.tokens.shape)), span("forward"):
            result = self._whole.run(self._passed, inputs)
        self._check_exchange()
        return result

    def prefill(self, requests: Sequence[Request], slots: Sequence[int]) -> PendingTokens:
        """Fill the cache of `slots` and sample the first token of each request."""
        return self.extend(list(map(Piece.whole, requests, slots)))

    @in_order
    @torch.inference_mode()
    def open(self, pool: Pool | None, prepare: bool = False) -> None:
        """See `base.Runner`."""
        if self._live:
            raise StepError("A pool was opened or closed while sequences are under way.")
        specs = self._specs
        if pool is not None and pool.blocks:
            lies = checked(pool, self.spec)
            specs = in_blocks(specs, pool.blocks, lies.near, lies.forgets)
        self._forget_steps()
        self._cache.clear()
        self._state, self._pool, self._live = None, None, LiveSlots()
        self._cache = Cache(specs, self.dtype, self.device, self._peers)
        if pool is None:
            return
        room = room_of(pool, self.spec)
        try:
            self._cache.grow(room_of(pool, self.spec, whole=True))
            self._pool, self._live = pool, LiveSlots(room, books_of(pool, self.spec))
            self._reserve(True)
            if prepare and self._graphs is not None:
                self._prepare_pool(room)
        except BaseException:
            self.open(None)
            raise

    def _prepare_pool(self, room: Room) -> None:
        """Capture every step over the pool that no request has to itself, and every panel."""
        ways = {self.ops.launches_of(features): features for features in (_GREEDY, _DRAWN)}
        assert self._state is not None
        for part in track(parts_of(room), "Capturing"):
            view = self._state.view(part.slots), self._cache.view(part)
            for features in ways.values():
                self._row.zero_()
                with self._own_settings(part.slots):
                    self._replay(*self._step_of(*view, part, features))
        if self._prompts.packs:
            with self._own_settings(PANELS[-1]):
                self._prompts.prepare(self._passed, self._cache)

    # Inference mode, not no_grad, wherever state is written: a caller's own inference mode would
    # otherwise make buffers that no later call outside of it may write.
    @in_order
    @torch.inference_mode()
    def extend(self, pieces: Sequence[Piece]) -> PendingTokens:
        """See `base.Runner`."""
        rows, logits = self._fill(pieces)
        ended = [p.request for p in pieces if p.ends]
        features, state = SamplingFeatures.of(ended), self._state
        assert state is not None
        if not len(rows):
            return PendingTokens(rows[None], self.ops)
        part = state.take(rows)
        part.active = torch.ones_like(part.active)
        scores = self._shown(ended, logits)
        if features.weighs:
            scores = part.weighed(scores)
        token = self.ops.sample(scores, part, part.length, features)
        part.last = token
        sampler.count(part, token)
        for name in ("active", "last", "new", "remaining"):
            getattr(state, name)[rows] = getattr(part, name)
        state.see(rows, token)
        if state.counts is not None:
            state.counts[rows, token] += 1
        told = sampling.tell(MATHS, logits, token)[None] if features.tells else None
        return PendingTokens(token[None], self.ops, told)

    def _fill(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        """Pieces read: the slots [B] of those that end, not active, and the logits [B, V] behind.

        A slot's length is what it has: a step of other slots writes its own token behind that.
        """
        idle = not self._live
        if new := self._live.read(pieces):
            self._begin([p.request for p in new], [p.slot for p in new], idle)
        self._cache.show(self._live.changed_tables())
        state = self._state
        assert state is not None
        rows = upload([p.slot for p in pieces], self.device)
        state.length[rows] = upload([p.stop for p in pieces], self.device)
        read = sum(p.stop - p.start for p in pieces) + sum(p.request.encoded for p in new)
        with self._own_settings(read):
            last = self._read(pieces, rows)
            ends = [i for i, p in enumerate(pieces) if p.ends]
            if len(ends) < len(pieces):
                where = upload(ends, self.device, torch.int64)
                rows, last = rows[where], last[where]
            if not ends:
                return rows, last
            scores = decoder.logits(self.spec, self.params, self.ops, last, wide=True)
        ended = [pieces[i] for i in ends]
        if SamplingFeatures.of([p.request for p in ended]).penalty:
            # Not before, as steps of others mark the last token that a slot had.
            self._mark_seen([p.request for p in ended], [p.slot for p in ended])
        return rows, scores

    def _shown(self, requests: Sequence[Request], logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of first tokens, -inf where a request hides one."""
        hidden = [[*r.hidden, *r.hidden_at_first] for r in requests]
        allowed = {i: r.allowed for i, r in enumerate(requests) if r.allowed is not None}
        if not any(hidden) and not allowed:
            return logits
        logits = logits.clone()
        for row, ids in enumerate(hidden):
            logits[row, ids] = -torch.inf
        if allowed:
            rows = upload(list(allowed), self.device)
            kept = sampler.unpacked(np.stack(list(allowed.values())), self.spec.vocab, self.device)
            logits[rows] = logits[rows].masked_fill(~kept, -torch.inf)
        return logits

    def _read(self, pieces: Sequence[Piece], rows: torch.Tensor) -> torch.Tensor:
        """The states [B, E] of the pieces' last tokens; keys and values go to slots `rows` [B]."""
        where, requests = (self._passed, self._cache), [p.request for p in pieces]
        prompts = [r.prompt for r in requests]
        is_whole = all(p.is_whole for p in pieces)
        if self._live.pool is not None and (
            self._prompts.packs_these(pieces)
            or (self._live.forgets and not (is_whole and self._prompts.takes_whole(prompts)))
        ):
            return self._prompts.packed(*where, pieces, self._pass_of)
        if self._live.forgets:
            self._live.begin_pass(pieces, goes_on=False)
            self._cache.show(self._live.changed_tables())
        if is_whole:
            sources = None if self.spec.encoder is None else [r.source for r in requests]
            how: Any = {"sources": sources, "is_encoded": requests[0].is_encoded}
            return self._prompts.run(*where, prompts, rows, **how)
        starts, stops = [p.start for p in pieces], [p.stop for p in pieces]
        return self._prompts.go_on(*where, prompts, rows, starts, stops)

    @contextmanager
    def _pass_of(self, rows: Sequence[Piece]) -> Iterator[None]:
        """Around a pass over rows: their slots have room for it, and keep what later ones see."""
        self._live.begin_pass(rows)
        self._cache.show(self._live.changed_tables())
        yield
        self._live.end_pass(rows)

    def _begin(self, requests: Sequence[Request], slots: Sequence[int], idle: bool) -> None:
        """Make room for requests in slots, and write their rows of the state, not active."""
        self._reserve(idle)
        state = self._state
        assert state is not None
        rows = upload(slots, self.device)
        columns = sampling_rows(requests, max(len(r.eos_ids) for r in requests))
        state.write(rows, {"new": np.zeros(len(requests), np.int64), **columns})
        state.hide(slots, [r.hidden for r in requests])
        state.weigh(slots, requests)

    @in_order
    @torch.inference_mode()
    def prefill_scores(self, requests: Sequence[Request], slots: Sequence[int]) -> torch.Tensor:
        """Fill the cache of `slots`; the logits of the first token of each request."""
        self._live.cover_whole(requests, slots)
        _, scores = self._fill(list(map(Piece.whole, requests, slots)))
        self._check_exchange()
        return self._shown(requests, scores)

    @in_order
    @torch.inference_mode()
    def decode_scores(self, slots: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """The logits after `tokens` in `slots`; see `base.Runner`."""
        state, cache, room = self._views(1, slots)
        rows = upload(slots, self.device)
        state.last[rows] = upload(tokens, self.device)
        count, size = state.active.shape[0], self.spec.vocab
        if self._scores.shape[0] < count:
            self._forget_steps()
            assert self._state is not None
            self._scores = torch.empty(self._state.active.shape[0], size, device=self.device)
            self._chosen = torch.empty_like(self._state.active)
        out, chosen = self._scores[:count], self._chosen[:count]
        chosen.zero_()
        chosen[rows] = True

        def run() -> None:
            out.copy_(state.shown(self._next_logits(state, cache, chosen)))

        with self._own_settings(count):
            self._replay((count, room, "scores"), run)
        state.length[rows] += 1
        self._check_exchange()
        return out[rows]

    @in_order
    @torch.inference_mode()
    def decode_several(self, slots: Sequence[int], tokens: np.ndarray) -> torch.Tensor:
        """See `base.Runner`."""
        state, x = self._read_on(slots, tokens, keeps=False)
        with self._own_settings(tokens.size):
            flat = decoder.logits(self.spec, self.params, self.ops, x.flatten(0, 1), wide=True)
        scores = flat.unflatten(0, tokens.shape)
        if state.hidden is not None:
            hidden = state.hidden[upload(slots, self.device)]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        self._check_exchange()
        return scores

    @in_order
    @torch.inference_mode()
    def keep(self, slots: Sequence[int], tokens: np.ndarray) -> None:
        """See `base.Runner`; keys and values are there, states of recurrences are not."""
        state = self._state
        assert state is not None
        if self.spec.state_numbers:
            self._read_on(slots, tokens, keeps=True)
        rows = upload(slots, self.device)
        self._live.advance(tokens.shape[1], slots)
        state.length[rows] += tokens.shape[1]
        state.last[rows] = upload(tokens[:, -1], self.device, torch.int64)

    def _read_on(
        self, slots: Sequence[int], tokens: np.ndarray, keeps: bool
    ) -> tuple[SlotState, torch.Tensor]:
        """The slots' state, and the hidden states [B, K, E] of tokens [B, K] behind what they have.

        States of recurrences change if it `keeps` them.
        """
        assert self._state is not None
        reach = self._live.reach_after(tokens.shape[1], slots)
        room = self._live.room(self.spec, reach)
        if self._cache.smaller_than(room):
            self._forget_steps()
        self._cache.grow(room)
        self._live.begin_drafts(slots, tokens.shape[1])
        self._cache.show(self._live.changed_tables())
        rows = upload(slots, self.device)
        ids = upload(tokens, self.device, torch.int64)
        held = [self._cache.number(n) for n in self.spec.state_numbers.values()]
        before = [[x[rows] for x in own.arrays] for own in held] if not keeps else []
        with self._own_settings(tokens.size):
            where = self._passed, self._cache, ids, rows, self._state.length[rows], reach
            x = self._prompts.every(*where)
        if not keeps:
            for own, arrays in zip(held, before, strict=True):
                own.keep(rows, *arrays)
            # A step of others writes the last token of every slot anew, in its next place.
            self._state.last[rows] = ids[:, 0]
        return self._state, x

    def _check_exchange(self) -> None:
        """Raise DistributedError if an exchange was given up; waits for the device."""
        if self.ops.exchange is not None and self.ops.exchange.given_up.any():
            raise self.ops.exchange.error()

    @in_order
    @torch.inference_mode()
    def decode(self, steps: int) -> PendingTokens:
        """Up to `steps` tokens for every live slot."""
        state, cache, room = self._views(steps)
        slots = state.active.shape[0]
        features = SamplingFeatures.of(self._live.requests)
        if features.tells and self._told.shape[1:2] != self._tokens.shape[1:]:
            self._forget_steps()
            width = 1 + 2 * min(sampling.TOP, self.spec.vocab)
            self._told = torch.empty(*self._tokens.shape, width, device=self.device)
        key, run = self._step_of(state, cache, room, features)
        out = self._tokens[:, :slots]
        out.fill_(NO_TOKEN)
        self._row[:slots].zero_()
        with self._own_settings(slots):
            for _ in range(steps):
                # On a GPU the question waits for the device; copies of weights go on meanwhile.
                asks = self.device.type == "cpu" or self._stream is not None
                if asks and not state.active.any():
                    break
                self._replay(key, run)
        told = self._told[:steps, :slots] if features.tells else None
        return PendingTokens(out[:steps], self.ops, told)

    def _step_of(
        self, state: SlotState, cache: list[Any], room: Room, features: SamplingFeatures
    ) -> tuple[Hashable, Callable[[], None]]:
        """The key of a step's graph, and the step."""
        slots = state.active.shape[0]
        out, row = self._tokens[:, :slots], self._row[:slots]
        key = slots, room, self.ops.launches_of(features), features.weighs, features.tells
        return key, partial(self._step, state, cache, features, out, row)

    def _views(
        self, steps: int, slots: Sequence[int] | None = None
    ) -> tuple[SlotState, list[Any], Room]:
        """State and cache, grown for `steps` more of these slots, or of every one, and its room.

        They are views that cover the live slots.
        """
        assert self._state is not None and self._live
        self._live.advance(steps, slots)
        reach = self._live.reach if slots is None else self._live.reach_beside(slots)
        room = self._live.room(self.spec, reach)
        if self._cache.smaller_than(room):
            self._forget_steps()
        self._cache.grow(room)
        self._cache.show(self._live.changed_tables())
        return self._state.view(room.slots), self._cache.view(room), room

    def _replay(self, key: Hashable, run: Callable[[], None]) -> None:
        """Do `run` once, from the key's graph where there are graphs."""
        if self._graphs is None:
            run()
        elif key in self._graphs:
            self._graphs.replay(key)
        else:
            with told_if_slow("kernels and a graph are made for sizes that are new"):
                run()
                self._graphs.capture(key, run)

    def _step(
        self,
        state: SlotState,
        cache: list[Any],
        features: SamplingFeatures,
        out: torch.Tensor,
        step: torch.Tensor,
    ) -> None:
        """One token for each active slot, all in place: ready for capture."""
        logits = self._next_logits(state, cache, state.active)
        scores = state.shown(logits)
        moves, row = state.active, step
        if features.weighs:
            scores, moves = state.weighed(scores), moves.clone()
        if features.tells:
            row = row.clone()
        self.ops.advance(scores, state, features, out, step)
        if features.weighs:
            state.count(moves)
        if features.tells:
            told = sampling.tell(MATHS, logits, state.last)[None]
            self._told[:, : len(row)].scatter_(0, row[None, :, None].expand_as(told), told)

    def _next_logits(self, state: SlotState, cache: list[Any], moves: torch.Tensor) -> torch.Tensor:
        """Logits float32 [N, V] after each slot's last token, which goes into the cache.

        States of recurrences change in the slots that bool `moves` [N] says.
        """
        params = self._passed
        model = self.spec, params, self.ops
        ids, positions = state.last[:, None], state.length[:, None]
        angles = self.ops.angles(self.spec, params, positions, state.length)
        numbers, crossing = self.spec.cache_numbers, self.spec.cross_numbers
        states = self.spec.state_numbers

        def attend(i: int, qkv: torch.Tensor) -> torch.Tensor:
            layer, own = self.ops.layer_attention(self.spec, params, i), cache[numbers[i]]
            return self.ops.attend_token(layer, qkv, angles, own, state.length)[0]

        def across(i: int, q: torch.Tensor) -> torch.Tensor:
            a = self.spec.layers[i].cross
            assert a is not None
            return self.ops.attend_kept(a, q, cache[crossing[i]])

        def recur(i: int, x: torch.Tensor) -> torch.Tensor:
            own = self.spec.layers[i].recurrence
            assert own is not None
            return self.ops.recur_token(own, params.layers[i], x, cache[states[i]], moves)[0]

        mixers = decoder.Mixers(attend, across, recur)
        x = decoder.hidden_states(*model, Tokens(ids, positions), mixers)[-1]
        return decoder.logits(*model, x[:, 0], wide=True)

    def forget_graphs(self) -> None:
        """Drop every graph: of steps, of prompts and of whole calls."""
        self._forget_steps()
        self._whole.forget()

    def _forget_steps(self) -> None:
        """Drop the graphs of the loop, before buffers whose addresses they hold are replaced."""
        if self._graphs is not None:
            self._graphs.clear()
        self._prompts.clear()

    def _reserve(self, idle: bool) -> None:
        """Grow cache and state to what the live slots need to start; `idle`: none held before."""
        pool, requests = self._pool, self._live.requests
        eos_width = max(1, *(len(r.eos_ids) for r in requests), pool.eos if pool else 0)
        hides = self._live.hides or (pool is not None and pool.hides)
        if pool is None:
            room = self._live.room(self.spec, self._live.reserved)
        else:
            room = room_of(pool, self.spec, whole=True)
        count = room.slots if pool is None else pool.slots
        if self._cache.smaller_than(room):
            self._forget_steps()
            if idle:
                self._cache.clear()  # nothing to keep: free the old buffers before the new ones
        self._cache.grow(room)
        old, weighs = self._state, self._live.weighs or (pool is not None and pool.weighs)
        hides = hides or (old is not None and old.hidden is not None)
        weighs = weighs or (old is not None and old.bias is not None)
        fits = old is not None and (old.hidden is not None, old.bias is not None) == (hides, weighs)
        if old is None or not fits or old.active.shape[0] < count or old.eos.shape[1] < eos_width:
            if old is not None:
                count = max(count, old.active.shape[0])
                eos_width = max(eos_width, old.eos.shape[1])
            self._forget_steps()
            what = count, eos_width, self.spec.vocab, self.device, hides, weighs
            self._state = SlotState.make(*what)
            integers = {"dtype": torch.int64, "device": self.device}
            self._tokens = torch.empty(MAX_STEPS, count, **integers)
            self._row = torch.empty(count, **integers)
            if old is not None:
                self._state.copy_from(old)

    def _mark_seen(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        """Note the prompts' tokens for the repetition penalty."""
        state = self._state
        assert state is not None
        for slot, request in zip(slots, requests, strict=True):
            state.seen[slot] = False
            ids = upload(request.tokens, self.device, torch.int64)
            state.see(ids.new_full((), slot), ids)

    @in_order
    @torch.inference_mode()
    def allow(self, slots: Sequence[int], words: np.ndarray) -> None:
        """See `base.Runner`."""
        assert self._state is not None and self._state.hidden is not None
        rows = upload(slots, self.device)
        kept = sampler.unpacked(words, self.spec.vocab, self.device)
        self._state.hidden[rows] = ~kept

    @in_order
    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `base.Runner`."""
        if self.blocks is not None:
            self.blocks.share(source, target, tokens)
        else:
            self._cache.copy(source, target, tokens)

    @in_order
    @torch.inference_mode()
    def save(self, slot: int, tokens: int, start: int = 0) -> Saved:
        """See `base.Runner`; on a GPU in pinned memory, and without a wait."""
        self._cache.show(self._live.changed_tables())
        layers = self._cache.save(slot, tokens, self._live.first_saved(tokens, start))
        return Saved(tokens, sum(map(size_of, layers)), layers, start=start)

    def saved_bytes(self, tokens: int, start: int = 0) -> int:
        """See `base.Runner`."""
        return self._cache.saved_bytes(tokens, self._live.first_saved(tokens, start))

    @in_order
    @torch.inference_mode()
    def restore(self, slot: int, saved: Saved) -> None:
        """See `base.Runner`."""
        if self.blocks is not None:
            self._live.put_back(slot, saved.tokens)
            self._cache.show(self._live.changed_tables())
        first = self._live.first_saved(saved.tokens, saved.start)
        self._cache.restore(slot, saved.copies, first)

    @in_order
    @torch.inference_mode()
    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self._live.remove(slots)
        if self._state is not None:
            size = self._state.active.shape[0]  # a prefill that failed may not have got so far
            rows = [slot for slot in slots if slot < size]
            where = upload(rows, self.device, torch.int64)
            # An index with a number in the place of a tensor would wait for the device.
            self._state.active.index_fill_(0, where, False)
            self._state.length.index_fill_(
                0, where, 0
            )  # steps of others read what a slot seems to have

    @in_order
    @torch.inference_mode()
    def refresh(self, plan: LoadPlan, source: TensorSource) -> None:
        """Read the plan's rows again, in place; graphs go where a weight must lie elsewhere now."""
        lent = self.params.lent
        try:
            self.params = refresh_params(self.params, self._shard, plan, source)
        finally:
            if self._stream is not None:
                self._stream.forget()
            if self.params.lent != lent:
                self.forget_graphs()

    def draw_seeds(self, count: int) -> list[int]:
        """Seeds from torch's global generator, so that `torch.manual_seed` governs them."""
        return torch.randint(0, 2**63 - 1, (count,), device="cpu").tolist()

    def stopwatch(self, use_cuda_events: bool) -> Stopwatch:
        """CUDA events where asked for on CUDA, else the clock around completed work."""
        return make_stopwatch(self.device, use_cuda_events)

    @property
    def is_compiled(self) -> bool:
        """True if forward is compiled."""
        return self._whole.is_compiled

    def compile(self, backend: Any, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile forward with torch.compile when it is next called; the second time, do nothing.

        `backend` None is torch's default. Decoding stays as it is: replayed from graphs.
        """
        if self.is_compiled:
            return
        compile_options(backend, compile_kwargs)  # which refuses what is not known
        if self._stream is not None:
            raise UnsupportedError(
                "compile(): layers are streamed from the host's memory (keep_module_on_host), and "
                "torch.compile would take those of one pass for all. Leave one of them out."
            )
        self._whole.compile(backend, compile_kwargs)

    def probe(self) -> None:
        """See `base.Runner`."""
        torch.ones(1, device=self.device).add_(1).item()

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated on the device; None if that is unknown."""
        return free_bytes(self.device)

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache for `slots` sequences of `tokens` tokens, in the buckets it takes."""
        return self._cache.bytes_for(room_for(self.spec, slots, tokens))

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`."""
        specs = [self._specs[number] for number in numbers]
        return cache_bytes(specs, Room(1, GRAIN), self.dtype.itemsize)

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`."""
        leaves = self.params.leaves()
        inner = {f"{i}.{n}": w for i, g in enumerate(self.params.layers) for n, w in g.items()}
        ways = self.ops.implementations, PlainOps.implementations
        knows = self.ops.knows if self.ops.cache_kinds else None
        own: dict[str, Any] = {"spec": self.spec, "layers": self.params.layers}
        left_plain = self.ops.left_plain(**own)
        ops = served(*ways, knows, self._cache.specs, left_plain)
        return {
            "device": str(self.device),
            "device_name": device_name(self.device),
            "ops": {
                **ops,
                **SCHEMES.implementations(leaves, partial(self.ops.reads_codes, **own)),
            },
            "weights": describe_weights({**self.params.outer, **inner}),
            **count_leaves(leaves),
            "streamed_bytes": sum(block.nbytes for block in self.params.blocks.values()),
            "cache_bytes": self._cache.bytes,
            "cache": describe_caches(self._cache.specs),
            **graph_facts(self._graphs, self._prompts.graphs, self._whole.calls, self._whole.texts),
        }

    def close(self) -> None:
        """Let go of parameters, graphs, cache and state."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self._close()
                torch.cuda.empty_cache()
        else:
            self._close()

    def _close(self) -> None:
        self.forget_graphs()
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._whole.close()
        self.ops.clear()
        self._cache.clear()
        self._state = None
        self._tokens = self._row = self._told = self._scores = self._chosen = torch.empty(0)
        self.last_work = None
        self._live, self._pool = LiveSlots(), None
        self.params = Params({}, [], {}, {})
