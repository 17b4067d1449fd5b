"""The JAX runner: compiled forward, prefill and decode; the donated cache never leaves it."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from ...model.weights import count_leaves
from ...ops.caches import (
    Room,
    describe_caches,
    served,
)
from ..base import (
    MAX_STEPS,
    NO_TOKEN,
    Piece,
    Pool,
    Request,
    SamplingFeatures,
    Saved,
)
from ..blocks import Blocks
from ..held import describe_weights
from ..slots import (
    below,
    bucket,
    room_for,
)
from . import ahead
from .cache import Cache, least_free_bytes
from .executables import Clock, Job, Lowered
from .mesh import in_place
from .ops.plain import PlainOps
from .ops.schemes import SCHEMES
from .params import Params
from .pending import PendingPanels, PendingSteps, PendingTokens
from .prompts import Pass, Passes, Rows, Step, prefill_step
from .sampler import BEST, SlotState, mode_of, rows_of
from .scores import ScoreCalls
from .slots import SMALLEST_EOS, Slots
from .whole import Placed, WholePasses

# Columns of a pass over drafts, at least: fewer cost a GPU as much, and a program each.
_DRAFTS = 8


class JaxRunner(WholePasses, ScoreCalls):
    """A model that generates: its cache and the state of its slots, and the steps over them."""

    is_compiled = True

    def __init__(self, model: Placed) -> None:
        super().__init__(model)
        spec = model.spec
        self._peers, self.verifies = model.peers, spec.verifies and model.streaming is None
        self._slots = Slots(model, self._executables)
        self._fit_passes()
        self._longest = 1  # chunk of steps since the first of what is live began
        self._alone: bool | None = None  # whether the last step was no loop; None before the first

    def prefill(
        self, requests: Sequence[Request], slots: Sequence[int]
    ) -> PendingTokens | PendingPanels:
        """Fill the cache of `slots` and sample the first token of each request."""
        return self.extend(list(map(Piece.whole, requests, slots)))

    @in_place
    def open(self, pool: Pool | None, prepare: bool = False) -> None:
        """See `base.Runner`."""
        try:
            self._slots.open(pool)
        finally:
            self._fit_passes()
        if pool is not None and prepare:
            try:
                self._prepare_pool()
            except BaseException:
                self.open(None)
                raise

    def _fit_passes(self) -> None:
        """Cut prompts for the caches as they are now."""
        own = self.steps
        self._passes = Passes(own.spec, own.ops, self._slots.specs, self._most_tokens_of)

    lost: str | None = None

    @property
    def blocks(self) -> Blocks | None:
        """See `base.Runner`."""
        return self._slots.live.blocks

    def lacks(self, steps: int) -> int:
        """See `base.Runner`."""
        return self._slots.live.lacks(steps)

    def _prepare_pool(self) -> None:
        """Compile every step over the pool, and every panel of ids where it is read in panels."""
        slots, room, steps = self._slots, self._slots.live.pool, []
        assert room is not None
        if self.spec.reads_pieces:  # what takes XLA longest comes first
            request = Request(np.zeros(1, np.int32), 1)
            pieces = [Piece.whole(request, 0)]
            for size in self._passes.sizes(room):
                own = Pass(pieces, [0], False, *size)
                steps.append(self._prefill_step(own))
        steps += [self._decode_step(1, True, BEST, part=part) for part in slots.live.parts()]
        cache = slots.shown()
        jobs = [self._job(step, cache, slots.state) for step in steps] + slots.jobs()
        self._executables.prepare([ahead.abstract(j, self.device) for j in jobs], "Compiling")

    @in_place
    def extend(self, pieces: Sequence[Piece]) -> PendingTokens | PendingPanels:
        """See `base.Runner`."""
        self._open(pieces)
        live, done = self._slots.live, []
        passes = self._passes.of(pieces, live.pool)
        for own in passes:
            live.begin_pass(own.pieces)
            with jax.profiler.TraceAnnotation("dualinfer/prefill"):
                results = self._advance(self._prefill_step(own), self._compile_decode)
            live.end_pass(own.pieces)
            columns = len(own.pieces)
            done.append(PendingTokens(results[0], 1, columns, self._exchange, results[1]))
        if len(done) == 1 and all(n >= 0 for n in passes[0].numbers):
            return done[0]
        return PendingPanels(done, [own.numbers for own in passes])

    def _open(self, pieces: Sequence[Piece]) -> None:
        """Make room for pieces, which are read next."""
        if not self._slots.live:
            self._longest = 1
        self._slots.read(pieces)

    @in_place
    def prefill_scores(
        self, requests: Sequence[Sequence[Request]], slots: Sequence[Sequence[int]]
    ) -> list[jax.Array]:
        """Fill the cache of `slots`; the logits of the first tokens; see `base.Runner`."""
        every, where = list(chain(*requests)), list(chain(*slots))
        pieces = list(map(Piece.whole, every, where))
        live, passes, numbers = self._slots.live, [], []
        live.choose(every, where)
        self._open(pieces)
        for own in self._passes.of(pieces, live.pool):
            live.begin_pass(own.pieces)
            with jax.profiler.TraceAnnotation("dualinfer/prefill"):
                scores, flags = self._advance(self._prefill_step(own, choose=False))
            live.end_pass(own.pieces)
            self._check(flags)
            passes.append(scores[: len(own.pieces)])
            numbers += own.numbers
        if len(passes) == len(slots) == 1 and numbers == sorted(set(numbers) - {-1}):
            return passes
        order = iter(np.argsort(numbers)[numbers.count(-1) :].astype(np.int32))
        rows = [np.array([next(order) for _ in own], np.int32) for own in slots]
        scores = passes[0] if len(passes) == 1 else jnp.concatenate(passes)
        return [rows_of(scores, own) for own in rows]

    @in_place
    def decode_scores(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> list[jax.Array]:
        """The logits after `tokens` in `slots`; see `base.Runner`."""
        every = list(chain(*slots))
        reach, part = self._slots.advance(1, every), None
        count, live = self._slots.state.active.shape[0], self._slots.live
        if live.pool is not None:
            part = live.room(self.spec, reach)[:2]
            count = part[0]
        chosen = np.full(count, NO_TOKEN, np.int32)
        chosen[every] = list(chain(*tokens))
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            run = partial(self.steps.decode_scores, part=part)
            scores, flags = self._advance(Step(("scores", part), run, (chosen,)))
        self._check(flags)
        return [rows_of(scores, np.array(own, np.int32)) for own in slots]

    @in_place
    def decode_several(
        self, slots: Sequence[Sequence[int]], tokens: Sequence[np.ndarray]
    ) -> list[jax.Array]:
        """See `base.Runner`; few widths and numbers of calls are compiled."""
        found: list[Any] = [None] * len(slots)
        for part in _passes_of(slots):
            every, (ids, counts) = (
                [s for i in part for s in slots[i]],
                below([tokens[i] for i in part]),
            )
            scores, row = self._read_on(every, ids, counts, keeps=False), 0
            for i in part:
                own = np.arange(row, row + len(slots[i]), dtype=np.int32)
                row += len(own)
                mine = scores if len(part) == 1 else rows_of(scores, own)
                found[i] = mine[:, : tokens[i].shape[1]]
        return found

    @in_place
    def keep(self, slots: Sequence[Sequence[int]], tokens: Sequence[np.ndarray]) -> None:
        """See `base.Runner`."""
        for part in _passes_of(slots):
            every, (ids, counts) = (
                [s for i in part for s in slots[i]],
                below([tokens[i] for i in part]),
            )
            self._read_on(every, ids, counts, keeps=True)
            self._slots.live.advance(counts, every)

    def _read_on(
        self, slots: Sequence[int], tokens: np.ndarray, counts: list[int], keeps: bool
    ) -> jax.Array:
        """The result of `Steps.decode_several` for the first `counts` [N] of tokens [N, K]."""
        reach = self._slots.begin_drafts(slots, counts)
        live, seen = self._slots.live, self._slots.cache.tokens
        if live.pool is not None:
            seen = live.room(self.spec, reach).tokens
        width = bucket(tokens.shape[1], _DRAFTS)
        ids = np.zeros((len(tokens), width + 1), np.int32)
        ids[:, : tokens.shape[1]], ids[:, -1] = tokens, counts
        run = partial(self.steps.decode_several, reach=seen, keeps=keeps)
        step = Step(("several", ids.shape, seen, keeps), run, (ids, np.array(slots, np.int32)))
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            scores, flags = self._advance(step)
        self._check(flags)
        return scores

    def prefill_jobs(
        self, requests: Sequence[Request], slots: Sequence[int], cache: Any, state: Any
    ) -> list[Job]:
        """The steps that read prompts; see `ahead.Steps`."""
        passes = self._passes.of(list(map(Piece.whole, requests, slots)), None)
        return [self._job(self._prefill_step(own, (cache, state)), cache, state) for own in passes]

    def _prefill_step(self, own: Pass, held: Any = None, choose: bool = True) -> Step:
        """See `prompts.prefill_step`; `held`, cache and state, unset: the slots'."""
        cache, state = held or self._slots.held
        rows = Rows(state, cache.slots, self._slots.kept(len(state.active)), self._slots.hiding)
        return prefill_step(self.steps, own, rows, self.spec.vocab, choose)

    def decode_job(self, steps: int, alone: bool, mode: int, cache: Any, state: Any) -> Job:
        """Up to `steps` steps for every slot, or one `alone`; see `ahead.Steps`."""
        return self._job(self._decode_step(steps, alone, mode), cache, state)

    def _decode_step(
        self, steps: int, alone: bool, mode: int, tells: bool = False, part: Room | None = None
    ) -> Step:
        """Up to `steps` steps, or one `alone`, which may be over a `part` of the cache."""
        more, how = (("tells",), {"tells": True}) if tells else ((), {})
        if part is not None:
            run = partial(self.steps.decode_one, part=part[:2], **how)
            return Step(("one", *part[:2], *more), run, (np.int32(mode),))
        if alone:
            return Step(("one", *more), partial(self.steps.decode_one, **how), (np.int32(mode),))
        limits = np.array([steps, mode], np.int32)
        return Step(("decode", *more), partial(self.steps.decode, **how), (limits,))

    def _job(self, step: Step, cache: Cache, state: Any) -> Job:
        """A step that takes over cache and state."""
        key = (*step.key, *cache.key, *state.eos.shape, *state.parts)
        args = (self._leaves, cache, state, *step.args)
        whole, layers = self._slots.shardings
        shardings = whole, cache.like(layers, whole), *(whole,) * (len(args) - 2)
        part = self._tree, self._specs, self._slots.split
        function = self._of_leaves(step.function, cached=True, part=part)
        return Job(key, function, args, donate=(1, 2), shardings=shardings)

    def _advance(
        self, step: Step, beside: Callable[[], None] | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Tokens and flags of a step that takes over cache and state; what it gives back is kept.

        A step that fails once it runs has consumed them; the next prefill then makes new ones.
        `beside` is called where the step is compiled.
        """
        slots = self._slots
        job = self._job(step, slots.shown(), slots.held[1] if step.ends else slots.state)
        args = *job.args[:3], *self._place.operands(job.args[3:])
        with slots.at_stake():
            cache, state, tokens, flags = self._executables.run(
                job.key, job.function, *args, donate=job.donate, beside=beside
            )
            slots.hold(cache, state)
        self._note(flags)
        return self._place.local(tokens), flags

    @in_place
    def decode(self, steps: int) -> PendingTokens | PendingSteps:
        """Up to `steps` tokens, at most MAX_STEPS, for each live slot; ends early on the device."""
        live = self._slots.live
        assert live and steps <= MAX_STEPS
        reach = self._slots.advance(steps)
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            tokens = self._take_steps(steps, reach)
        size = self._slots.cache.tokens
        if live.pool is None and live.may_outgrow(size):  # beside the steps of this size
            self._begin(2 * size)
        return tokens

    def _take_steps(self, steps: int, reach: int) -> PendingTokens | PendingSteps:
        """The steps of `decode`, dispatched; over a pool the host waits for none of them."""
        live, taken = self._slots.live, []
        needs = SamplingFeatures.of(live.requests)
        if live.pool is not None:
            part = live.room(self.spec, reach)
            step = self._decode_step(1, True, mode_of(needs), needs.tells, part)
            for _ in range(steps):
                results = self._advance(step)
                taken.append(PendingTokens(results[0], 1, part.slots, self._exchange, results[1]))
            return PendingSteps(taken, part.slots)
        # The single step that ends a call of longer chunks is no stream's: their loop serves it.
        self._longest = max(self._longest, steps)
        alone = self._alone = self._longest == 1
        how = steps, alone, mode_of(needs), needs.tells
        slots = self._slots.state.active.shape[0]
        results = self._advance(self._decode_step(*how))
        return PendingTokens(results[0], steps, slots, self._exchange, results[1])

    def _compile_decode(self) -> None:
        """Begin to compile what follows a prefill of a new size, if the last call says what."""
        live = self._slots.live
        if live.pool is not None:
            return
        if self._alone is not None and any(r.max_new_tokens > 1 for r in live.requests):
            self._begin(self._slots.cache.tokens)

    def _begin(self, tokens: int) -> None:
        """Begin to compile a decode step over a cache of `tokens`, as the last one was.

        That takes some two seconds on a GPU. Not where processes share the model, whose compilers
        may wait for each other, nor where kernels wait for those of another GPU: a compiler tries
        kernels out, and to load them waits until a GPU is idle.
        """
        cache, state = self._slots.held
        if self._peers.size > 1 or self._exchange is not None or state.parts:
            return
        eos, alone = state.eos.shape, self._alone
        room = cache.room._replace(tokens=tokens)
        key = "one" if alone else "decode", *room, *eos
        self._executables.begin(key, partial(self._lower_decode, room, eos[1], alone))

    @in_place
    def _lower_decode(self, *sizes: Any) -> Lowered:
        return self._executables.lower(ahead.decode(self, *sizes))

    def make_buffers(self, room: Room, eos_width: int) -> tuple[Cache, SlotState]:
        """New buffers for `room`; the state in host memory."""
        return self._slots.make_buffers(room, eos_width)

    @in_place
    def allow(self, slots: Sequence[int], words: np.ndarray) -> None:
        """See `base.Runner`."""
        self._slots.allow(slots, words)

    @in_place
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `base.Runner`; as many as a step of that many reads."""
        self._slots.copy(source, target, tokens)

    @in_place
    def save(self, slot: int, tokens: int, start: int = 0) -> Saved:
        """See `base.Runner`; it waits for what the device does."""
        return self._slots.save(slot, tokens, start)

    @in_place
    def restore(self, slot: int, saved: Saved) -> None:
        """See `base.Runner`."""
        self._slots.restore(slot, saved)

    def saved_bytes(self, tokens: int, start: int = 0) -> int:
        """See `base.Runner`; of all devices, and as many tokens as a step of that many reads."""
        return self._slots.saved_bytes(tokens, start)

    @in_place
    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self._slots.release(slots)

    def draw_seeds(self, count: int) -> list[int]:
        """Seeds from the operating system."""
        return [secrets.randbits(63) for _ in range(count)]

    def free_bytes(self) -> int | None:
        """Bytes that each device here can still allocate; None if one does not say."""
        return least_free_bytes(self._place)

    @property
    def cache_bytes(self) -> int:
        """See `base.Runner`."""
        return self._slots.nbytes

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes on each device of a cache for `slots` sequences of `tokens` tokens, in buckets."""
        return self._slots.bytes_for(slots, tokens)

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`."""
        return self._slots.block_bytes(numbers)

    def stopwatch(self, use_cuda_events: bool) -> Clock:
        """A running clock; JAX has no events, so that both forms time to completion."""
        return Clock(self._executables)

    @in_place
    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the steps that `compile_kwargs` names before they are needed (`ahead.Wanted`)."""
        wanted = ahead.Wanted.of(backend, compile_kwargs)
        if wanted is None:
            return
        if not self.spec.can_generate:
            raise UnsupportedError(
                f"compile_kwargs={dict(compile_kwargs or {})!r} name steps of generation, and the "
                f"{self.spec.family} model does not generate. Call compile() without arguments."
            )
        if self.spec.encoder:
            raise UnsupportedError(
                f"compile_kwargs={dict(compile_kwargs or {})!r}: the steps of an encoder-decoder "
                "depend on the lengths of both sequences, and are compiled as they come. Call "
                "compile() without arguments."
            )
        wanted.check_length(self._most_tokens)
        most = max(wanted.batch_sizes), max(wanted.prompt_lengths) + wanted.new_tokens - 1
        self._slots.check_room(room_for(self.spec, *most))
        self._executables.prepare(ahead.jobs(self, wanted, SMALLEST_EOS), "Compiling")

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`; counts and bytes are those of one device."""
        params = self._place.parts(self.params)
        leaves = params.leaves()
        inner = {f"{i}.{n}": w for i, g in enumerate(params.layers) for n, w in g.items()}
        ways = self.steps.ops.implementations, PlainOps.implementations
        knows = self.steps.ops.knows if self.steps.ops.cache_kinds else None
        own: dict[str, Any] = {"spec": self.spec, "layers": params.layers}
        left_plain = self.steps.ops.left_plain(**own, caches=self._slots.specs)
        return {
            "device": self._place.name,
            "device_name": self.device.device_kind,
            "ops": {
                **served(*ways, knows, self._slots.specs, left_plain),
                **SCHEMES.implementations(leaves, partial(self.steps.ops.reads_codes, **own)),
            },
            "weights": describe_weights({**params.outer, **inner}),
            **count_leaves(leaves),
            "streamed_bytes": self._streaming.streamed if self._streaming else 0,
            **self._executables.facts,
            "cache": describe_caches(self._slots.specs),
            "cache_bytes": self.cache_bytes,
        }

    def close(self) -> None:
        """Let go of parameters, cache, state, executables and mailboxes."""
        self._slots.close()
        self.module = None
        self.params, self._leaves = Params({}, ()), []
        self._executables.clear()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = self.steps.ops.exchange = None


def _passes_of(slots: Sequence[Sequence[int]]) -> list[list[int]]:
    """Which calls share a pass, by number: those of one slot by powers of two, others alone.

    A program is compiled for each number of rows.
    """
    singles = [i for i, own in enumerate(slots) if len(own) == 1]
    found = [[i] for i, own in enumerate(slots) if len(own) != 1]
    while singles:
        count = 1 << (len(singles).bit_length() - 1)
        found.append(singles[:count])
        singles = singles[count:]
    return found
