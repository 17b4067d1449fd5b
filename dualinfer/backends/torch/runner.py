"""The torch runner: forward passes, prefill into the cache, decode steps over static buffers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch

from ... import decoder
from ...errors import UnsupportedError
from ...model.load_plan import LoadPlan, TensorSource
from ...model.spec import ModelSpec
from ...model.weights import count_leaves
from ...ops import sampling
from ...ops.caches import (
    AS_COMPUTED,
    KeptIn,
    describe_caches,
    served,
)
from ...ops.pooling import contrast
from ...parallel.agreement import Peers
from ...parallel.shard import Shard
from ...system.progress import track
from ..base import (
    ForwardInputs,
    Piece,
    Pool,
    Request,
    SamplingFeatures,
    Saved,
)
from ..blocks import Blocks
from ..held import describe_weights
from ..profiling import Stopwatch
from ..slots import (
    PANELS,
    below,
)
from . import sampler
from .ahead import Ahead
from .compiling import compile_options
from .device import device_name, free_bytes, in_order, upload
from .graphs import StepGraphs, graph_facts
from .maths import MATHS
from .ops.plain import PlainOps
from .ops.schemes import SCHEMES
from .params import Params, refresh_params
from .pending import PendingTokens
from .precision import own_precision
from .profiling import make_stopwatch, span
from .prompts import Prompts
from .scores import ScoreCalls
from .slots import Slots
from .steps import Steps
from .streaming import LayerStream
from .threads import few_threads, threads_note
from .whole import WholePasses

# The kinds of steps that are captured ahead: requests that draw nothing, and those that do.
_GREEDY, _DRAWN = SamplingFeatures(), SamplingFeatures(noise=True, filters=True)


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
        self._slots = Slots(spec, dtype, device, peers, self._forget_steps, ops.knows, kept)
        decode_graphs = decode_graphs and self._stream is None
        has_graphs = decode_graphs and device.type == "cuda"
        graphs, prompt_graphs = (StepGraphs() if has_graphs else None for _ in range(2))
        self._ahead = None
        if ops.kernels and shard.size == 1 and self._stream is None:
            self._ahead = Ahead(spec, ops)
            self._ahead.then = self._expect_steps
        self._steps = Steps(spec, ops, graphs, self._forget_steps, self._ahead)
        self._prompts = Prompts(spec, params, ops, prompt_graphs, self._ahead)
        self.last_work: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        how = self._parameters, has_graphs, forward_graphs, self._ahead and Ahead(spec, ops)
        self._whole = WholePasses(spec, ops, dtype, device, *how)

    lost: str | None = None

    @property
    def blocks(self) -> Blocks | None:
        """See `base.Runner`."""
        return self._slots.live.blocks

    def lacks(self, steps: int) -> int:
        """See `base.Runner`."""
        return self._slots.live.lacks(steps)

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
        self._slots.open(pool)
        if pool is not None and prepare and self._steps.graphs is not None:
            try:
                self._prepare_pool()
            except BaseException:
                self._slots.open(None)
                raise

    def _expect_steps(self) -> None:
        """Have kernels compiled of what follows on a first prompt: its token, and steps.

        Those of draws as well, which a later call may want.
        """
        assert self._ahead is not None
        count, state = max(1, len(self._slots.live.requests)), self._slots.state
        view = self._slots.view(self._slots.cache.room)
        for features in (_GREEDY, _DRAWN):

            def first(
                spec: ModelSpec,
                params: Params,
                ops: PlainOps,
                features: SamplingFeatures = features,
            ) -> None:
                x = torch.empty(count, spec.embed, dtype=self.dtype, device=self.device)
                rows = torch.zeros(count, dtype=torch.int64, device=self.device)
                part, scores = state.take(rows), decoder.logits(spec, params, ops, x, wide=True)
                ops.sample(scores, part, part.length, features)

            key = "first", count, self.ops.launches_of(features)
            self._ahead.meet(key, self._passed, first, waits=False)
            self._steps.expect(self._passed, view, features)

    def _prepare_pool(self) -> None:
        """Capture every step over the pool that no request has to itself, and every panel."""
        ways = {self.ops.launches_of(features): features for features in (_GREEDY, _DRAWN)}
        assert self._slots.live.pool is not None
        parts = self._slots.live.parts()
        for part in parts:
            for features in ways.values():
                self._steps.expect(self._passed, self._slots.view(part), features)
        for part in track(parts, "Capturing"):
            view = self._slots.view(part)
            for features in ways.values():
                with self._own_settings(part.slots):
                    self._steps.prepare(self._passed, view, features)
        if self._prompts.packs:
            with self._own_settings(PANELS[-1]):
                self._prompts.prepare(self._passed, self._slots.cache)

    # Inference mode, not no_grad, wherever state is written: a caller's own inference mode would
    # otherwise make buffers that no later call outside of it may write.
    @in_order
    @torch.inference_mode()
    def extend(self, pieces: Sequence[Piece]) -> PendingTokens:
        """See `base.Runner`."""
        rows, logits = self._fill(pieces)
        ended = [p.request for p in pieces if p.ends]
        features, state = SamplingFeatures.of(ended), self._slots.state
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
        """Read pieces: slots [B] of those that end, not active yet, and logits [B, V] behind."""
        rows, new = self._slots.read(pieces)
        read = sum(p.stop - p.start for p in pieces) + sum(r.encoded for r in new)
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
        where, requests = (self._passed, self._slots.cache), [p.request for p in pieces]
        prompts, live = [r.prompt for r in requests], self._slots.live
        is_whole = all(p.is_whole for p in pieces)
        if live.pool is not None and (
            self._prompts.packs_these(pieces)
            or (live.forgets and not (is_whole and self._prompts.takes_whole(prompts)))
        ):
            return self._prompts.packed(*where, pieces, self._slots.pass_of)
        if live.forgets:
            self._slots.begin_pass(pieces, goes_on=False)
        if is_whole:
            sources = None if self.spec.encoder is None else [r.source for r in requests]
            how: Any = {"sources": sources, "is_encoded": requests[0].is_encoded}
            return self._prompts.run(*where, prompts, rows, **how)
        starts, stops = [p.start for p in pieces], [p.stop for p in pieces]
        return self._prompts.go_on(*where, prompts, rows, starts, stops)

    @in_order
    @torch.inference_mode()
    def prefill_scores(
        self, requests: Sequence[Sequence[Request]], slots: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Fill the cache of `slots`; the logits of the first tokens; see `base.Runner`."""
        every, where = list(chain(*requests)), list(chain(*slots))
        self._slots.live.choose(every, where)
        _, scores = self._fill(list(map(Piece.whole, every, where)))
        self._check_exchange()
        return list(self._shown(every, scores).split([len(own) for own in slots]))

    @in_order
    @torch.inference_mode()
    def decode_scores(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """The logits after `tokens` in `slots`; see `base.Runner`."""
        every = list(chain(*slots))
        view, rows = self._slots.advance(1, every), upload(every, self.device)
        view.state.last[rows] = upload(list(chain(*tokens)), self.device)
        with self._own_settings(view.room.slots):
            found = self._steps.scores(self._passed, view, rows)
        view.state.length[rows] += 1
        self._check_exchange()
        return list(found.split([len(own) for own in slots]))

    @in_order
    @torch.inference_mode()
    def decode_several(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[np.ndarray]
    ) -> list[torch.Tensor]:
        """See `base.Runner`; one pass."""
        every, (ids, counts) = list(chain(*slots)), below(tokens)
        x, state = self._read_on(every, ids, counts, keeps=False), self._slots.state
        with self._own_settings(ids.size):
            flat = decoder.logits(self.spec, self.params, self.ops, x.flatten(0, 1), wide=True)
            scores = flat.unflatten(0, ids.shape)
        if state.hidden is not None:
            hidden = state.hidden[upload(every, self.device)]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
        self._check_exchange()
        parts = zip(scores.split([len(own) for own in slots]), tokens, strict=True)
        return [part[:, : own.shape[1]] for part, own in parts]

    @in_order
    @torch.inference_mode()
    def keep(self, slots: Sequence[Sequence[int]], tokens: Sequence[np.ndarray]) -> None:
        """See `base.Runner`; keys and values are there, states of recurrences are not."""
        every, (ids, counts) = list(chain(*slots)), below(tokens)
        if self.spec.state_numbers:
            self._read_on(every, ids, counts, keeps=True)
        state, rows = self._slots.state, upload(every, self.device)
        self._slots.live.advance(counts, every)
        state.length[rows] += upload(counts, self.device, state.length.dtype)
        last = ids[np.arange(len(ids)), np.array(counts) - 1]
        state.last[rows] = upload(last, self.device, torch.int64)

    def _read_on(
        self, slots: Sequence[int], tokens: np.ndarray, counts: list[int], keeps: bool
    ) -> torch.Tensor:
        """The hidden states [N, K, E] of the first `counts` [N] of tokens [N, K] behind slots' own.

        States of recurrences change if it `keeps` them.
        """
        reach = self._slots.begin_drafts(slots, counts)
        cache, state = self._slots.cache, self._slots.state
        rows, kind = upload(slots, self.device), state.length.dtype
        last = upload([count - 1 for count in counts], self.device, kind)
        ids = upload(tokens, self.device, torch.int64)
        held = [cache.number(n) for n in self.spec.state_numbers.values()]
        before = [[x[rows] for x in own.arrays] for own in held] if not keeps else []
        with self._own_settings(tokens.size):
            x = self._prompts.every(self._passed, cache, ids, rows, state.length[rows], last, reach)
        if not keeps:
            for own, arrays in zip(held, before, strict=True):
                own.keep(rows, *arrays)
            # A step of others writes the last token of every slot anew, in its next place.
            state.last[rows] = ids[:, 0]
        return x

    def _check_exchange(self) -> None:
        """Raise DistributedError if an exchange was given up; waits for the device."""
        if self.ops.exchange is not None and self.ops.exchange.given_up.any():
            raise self.ops.exchange.error()

    @in_order
    @torch.inference_mode()
    def decode(self, steps: int) -> PendingTokens:
        """Up to `steps` tokens for every live slot."""
        view = self._slots.advance(steps)
        features = SamplingFeatures.of(self._slots.live.requests)
        # On a GPU the question waits for the device; copies of weights go on meanwhile.
        asks = self.device.type == "cpu" or self._stream is not None
        with self._own_settings(view.room.slots):
            found = self._steps.take(steps, self._passed, view, features, asks)
        return PendingTokens(found[0], self.ops, found[1])

    def forget_graphs(self) -> None:
        """Drop every graph: of steps, of prompts and of whole calls."""
        self._forget_steps()
        self._whole.forget()

    def _forget_steps(self) -> None:
        """Drop the graphs of the loop, before buffers whose addresses they hold are replaced."""
        if self._steps.graphs is not None:
            self._steps.graphs.clear()
        self._prompts.clear()

    def _mark_seen(self, requests: Sequence[Request], slots: Sequence[int]) -> None:
        """Note the prompts' tokens for the repetition penalty."""
        state = self._slots.state
        for slot, request in zip(slots, requests, strict=True):
            state.seen[slot] = False
            ids = upload(request.tokens, self.device, torch.int64)
            state.see(ids.new_full((), slot), ids)

    @in_order
    @torch.inference_mode()
    def allow(self, slots: Sequence[int], words: np.ndarray) -> None:
        """See `base.Runner`."""
        hidden = self._slots.state.hidden
        assert hidden is not None
        kept = sampler.unpacked(words, self.spec.vocab, self.device)
        hidden[upload(slots, self.device)] = ~kept

    @in_order
    @torch.inference_mode()
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `base.Runner`."""
        self._slots.copy(source, target, tokens)

    @in_order
    @torch.inference_mode()
    def save(self, slot: int, tokens: int, start: int = 0) -> Saved:
        """See `base.Runner`; on a GPU in pinned memory, and without a wait."""
        return self._slots.save(slot, tokens, start)

    def saved_bytes(self, tokens: int, start: int = 0) -> int:
        """See `base.Runner`."""
        return self._slots.saved_bytes(tokens, start)

    @in_order
    @torch.inference_mode()
    def restore(self, slot: int, saved: Saved) -> None:
        """See `base.Runner`."""
        self._slots.restore(slot, saved)

    @in_order
    @torch.inference_mode()
    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self._slots.release(slots)

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

    @property
    def cache_bytes(self) -> int:
        """See `base.Runner`."""
        return self._slots.cache.bytes

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache for `slots` sequences of `tokens` tokens, in the buckets it takes."""
        return self._slots.bytes_for(slots, tokens)

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`."""
        return self._slots.block_bytes(numbers)

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`."""
        leaves = self.params.leaves()
        inner = {f"{i}.{n}": w for i, g in enumerate(self.params.layers) for n, w in g.items()}
        ways = self.ops.implementations, PlainOps.implementations
        knows = self.ops.knows if self.ops.cache_kinds else None
        own: dict[str, Any] = {"spec": self.spec, "layers": self.params.layers}
        left_plain = self.ops.left_plain(**own)
        graphs = self._steps.graphs, self._prompts.graphs
        ops = served(*ways, knows, self._slots.cache.specs, left_plain)
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
            "cache_bytes": self.cache_bytes,
            "cache": describe_caches(self._slots.cache.specs),
            **graph_facts(*graphs, self._whole.calls, self._whole.texts),
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
        self._slots.close()
        self._steps.close()
        self.last_work = None
        self.params = Params({}, [], {}, {})
