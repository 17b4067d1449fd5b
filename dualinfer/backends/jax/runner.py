"""The JAX runner: compiled forward, prefill and decode; the donated cache never leaves it."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StepError, UnsupportedError
from ...model.weights import count_leaves
from ...ops.caches import (
    Room,
    cache_bytes,
    cache_specs,
    check_room,
    describe_caches,
    in_blocks,
    served,
)
from ..base import (
    GRAIN,
    MAX_STEPS,
    NO_TOKEN,
    Piece,
    Pool,
    Request,
    SamplingFeatures,
    Saved,
)
from ..blocks import Blocks, Lying, books_of, checked
from ..held import describe_weights
from ..slots import (
    LiveSlots,
    bucket,
    part_of,
    parts_of,
    room_for,
    room_of,
)
from . import ahead, sampler
from .cache import Cache, copied, given, grow, least_free_bytes, make_cache, split, taken
from .executables import Clock, Job
from .mesh import WHOLE, in_place
from .ops.plain import PlainOps
from .ops.schemes import SCHEMES
from .params import Params
from .pending import PendingPanels, PendingSteps, PendingTokens
from .prompts import Pass, Passes, Step, prefill_step
from .sampler import BEST, SlotState, copy_rows, mode_of
from .scores import ScoreCalls
from .whole import Placed, WholePasses

_SMALLEST_EOS = 4
_LOST = "The step before failed and took the cache with it."


@jax.jit  # an update outside of jit takes the host a millisecond
def _kept(active: jax.Array, length: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
    return active & kept, jnp.where(kept, length, 0)


class JaxRunner(WholePasses, ScoreCalls):
    """A model that generates: its cache and the state of its slots, and the steps over them."""

    is_compiled = True

    def __init__(self, model: Placed) -> None:
        super().__init__(model)
        spec = model.spec
        self._peers, self.verifies = model.peers, spec.verifies and model.streaming is None
        own = model.tp_plan.shards[0].spec
        specs = cache_specs(own, model.kept) if spec.causal else ()
        self._plain_specs = tuple(map(model.ops.lies, specs))
        self._cache: Cache | None = None
        self._state: SlotState | None = None
        self._live = LiveSlots()
        self._pool: Pool | None = None
        self._saved_bytes: dict[int, int] = {}  # of a slot of the pool, by tokens
        self._count_in(None, Lying())
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
        if self._live:
            raise StepError("A pool was opened or closed while sequences are under way.")
        lies = Lying() if pool is None else checked(pool, self.spec)
        with contextlib.suppress(Exception):  # of an abandoned step
            jax.block_until_ready(self._cache)  # else its bytes still count as in use
        self._cache = self._state = None
        self._live, self._pool, self._saved_bytes = LiveSlots(), None, {}
        self._count_in(pool, lies)
        if pool is None:
            return
        room = room_of(pool, self.spec)
        try:
            self._check_room(room_of(pool, self.spec, whole=True))
            self._live, self._pool = LiveSlots(room, books_of(pool, self.spec)), pool
            self._reserve(True)
            if prepare:
                self._prepare_pool(room)
        except BaseException:
            self.open(None)
            raise

    def _count_in(self, pool: Pool | None, lies: Lying) -> None:
        """Let caches be made of a pool's blocks for all slots; without such they are rectangles."""
        own, where = self.steps, (self._place, self._most_tokens_of)
        specs, self._lies = self._plain_specs, lies
        if pool is not None and pool.blocks:
            specs = in_blocks(specs, pool.blocks, lies.near, lies.forgets)
        self._cache_specs, self._split = specs, split(specs, where[0])
        self._shardings = where[0].sharding(), jax.tree.map(where[0].sharding, self._split)
        self._passes = Passes(own.spec, own.ops, specs, where[1])

    lost: str | None = None

    @property
    def blocks(self) -> Blocks | None:
        """See `base.Runner`."""
        return self._live.blocks

    def lacks(self, steps: int) -> int:
        """See `base.Runner`."""
        return self._live.lacks(steps)

    def _shown(self) -> Cache:
        """The cache with the table of blocks as the book has it now."""
        assert self._cache is not None
        table, near = self._live.changed_tables(anew=self._cache.table is None)
        if table is not None:
            self._cache = replace(self._cache, table=self._place.put(table))
        if near is not None:
            self._cache = replace(self._cache, near=self._place.put(near))
        return self._cache

    def _shown_from(self, slot: int, tokens: int, start: int) -> Cache:
        """The same, but that a slot's rows begin with the first blocks that are saved of it.

        The next step is shown the tables anew.
        """
        cache, book = self._shown(), self._live.blocks
        first = self._live.first_saved(tokens, start)
        for name, own, n in zip(("table", "near"), (book, book and book.near), first, strict=True):
            if own is not None and n:
                table = own.table.copy()
                table[slot] = np.append(table[slot, n:], np.full(n, own.count, np.int32))
                own.is_changed = True
                cache = replace(cache, **{name: self._place.put(table)})
        return cache

    def _prepare_pool(self, room: Room) -> None:
        """Compile every step over the pool, and every panel of ids where it is read in panels."""
        steps = [self._decode_step(1, True, BEST, part=part) for part in parts_of(room)]
        if self.spec.reads_pieces:
            request = Request(np.zeros(1, np.int32), 1)
            pieces = [Piece.whole(request, 0)]
            for size in self._passes.sizes(room):
                own = Pass(pieces, [0], False, *size)
                steps.append(self._prefill_step(own))
        cache, pool = self._shown(), self._pool
        jobs = [self._job(step, cache, self._state) for step in steps]
        if pool is not None and pool.spare and not pool.blocks:
            reaches = {part.tokens for part in parts_of(room)}
            jobs += [self._copy_job(cache, tokens, 0, 0) for tokens in sorted(reaches)]
        if pool is not None and pool.saved:
            for part in sorted({part.tokens for part in parts_of(room)}):
                own = self._own_of(cache, part)
                jobs += [self._save_job(cache, part, 0)]
                jobs += [self._restore_job(cache, own, part, 0)]
        self._executables.prepare([ahead.abstract(j, self.device) for j in jobs], "Compiling")

    @in_place
    def extend(self, pieces: Sequence[Piece]) -> PendingTokens | PendingPanels:
        """See `base.Runner`."""
        self._open(pieces)
        done = []
        passes = self._passes.of(pieces, self._live.pool)
        for own in passes:
            self._live.begin_pass(own.pieces)
            with jax.profiler.TraceAnnotation("dualinfer/prefill"):
                results = self._advance(self._prefill_step(own), self._compile_decode)
            self._live.end_pass(own.pieces)
            columns = len(own.pieces)
            done.append(PendingTokens(results[0], 1, columns, self._exchange, results[1]))
        if len(done) == 1 and all(n >= 0 for n in passes[0].numbers):
            return done[0]
        return PendingPanels(done, [own.numbers for own in passes])

    def _open(self, pieces: Sequence[Piece]) -> None:
        """Book the requests of first pieces in their slots, and make room for them."""
        idle = not self._live
        if idle:
            self._longest = 1
        if self._state is None and not idle:
            raise StepError(_LOST)
        if self._live.read(pieces):
            self._reserve(idle)

    @in_place
    def prefill_scores(self, requests: Sequence[Request], slots: Sequence[int]) -> jax.Array:
        """Fill the cache of `slots`; the logits of the first token of each request."""
        pieces = list(map(Piece.whole, requests, slots))
        self._live.cover_whole(requests, slots)
        self._open(pieces)
        passes, numbers = [], []
        for own in self._passes.of(pieces, self._live.pool):
            self._live.begin_pass(own.pieces)
            with jax.profiler.TraceAnnotation("dualinfer/prefill"):
                scores, flags = self._advance(self._prefill_step(own, choose=False))
            self._live.end_pass(own.pieces)
            self._check(flags)
            passes.append(scores[: len(own.pieces)])
            numbers += own.numbers
        if len(passes) == 1 and numbers == sorted(set(numbers) - {-1}):
            return passes[0]
        order = np.argsort(numbers)[numbers.count(-1) :]
        return jnp.concatenate(passes)[order]

    @in_place
    def decode_scores(self, slots: Sequence[int], tokens: Sequence[int]) -> jax.Array:
        """The logits after `tokens` in `slots`; see `base.Runner`."""
        if self._state is None or self._cache is None:
            raise StepError(_LOST)
        self._live.advance(1, slots)
        reach, part = self._live.reach_beside(slots), None
        self._make_room(self._cache, reach)
        count = self._state.active.shape[0]
        if self._live.pool is not None:
            part = self._live.room(self.spec, reach)[:2]
            count = part[0]
        chosen = np.full(count, NO_TOKEN, np.int32)
        chosen[list(slots)] = tokens
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            run = partial(self.steps.decode_scores, part=part)
            scores, flags = self._advance(Step(("scores", part), run, (chosen,)))
        self._check(flags)
        return scores[np.array(slots)]

    @in_place
    def decode_several(self, slots: Sequence[int], tokens: np.ndarray) -> jax.Array:
        """See `base.Runner`; few widths are compiled."""
        scores = self._read_on(slots, tokens, keeps=False)
        return scores[:, : tokens.shape[1]]

    @in_place
    def keep(self, slots: Sequence[int], tokens: np.ndarray) -> None:
        """See `base.Runner`."""
        self._read_on(slots, tokens, keeps=True)
        self._live.advance(tokens.shape[1], slots)

    def _read_on(self, slots: Sequence[int], tokens: np.ndarray, keeps: bool) -> jax.Array:
        """The result of `Steps.decode_several` for tokens [B, K], in a bucket of columns."""
        if self._state is None or self._cache is None:
            raise StepError(_LOST)
        reach = self._live.reach_after(tokens.shape[1], slots)
        self._make_room(self._cache, reach)
        self._live.begin_drafts(slots, tokens.shape[1])
        seen = (
            self._cache.tokens if self._live.pool is None else self._live.room(self.spec, reach)[1]
        )
        width = bucket(tokens.shape[1])
        ids = np.zeros((len(tokens), width + 1), np.int32)
        ids[:, : tokens.shape[1]], ids[:, -1] = tokens, tokens.shape[1]
        run = partial(self.steps.decode_several, reach=seen, keeps=keeps)
        step = Step(("several", ids.shape, seen, keeps), run, (ids, np.array(slots, np.int32)))
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            scores, flags = self._advance(step)
        self._check(flags)
        return scores

    def _make_room(self, cache: Cache, reach: int) -> None:
        """Grow the cache to what the live slots reach; that of a pool has all."""
        if reach > cache.tokens and self._live.pool is None:
            self._grow(cache, self._live.room(self.spec, reach))

    def prefill_jobs(
        self, requests: Sequence[Request], slots: Sequence[int], cache: Any, state: Any
    ) -> list[Job]:
        """The steps that read prompts; see `ahead.Steps`."""
        passes = self._passes.of(list(map(Piece.whole, requests, slots)), None)
        return [self._job(self._prefill_step(own, (cache, state)), cache, state) for own in passes]

    def _prefill_step(self, own: Pass, held: Any = None, choose: bool = True) -> Step:
        """See `prompts.prefill_step`; `held`, cache and state, unset: the runner's."""
        cache, state = held or (self._cache, self._state)
        assert cache is not None and state is not None
        return prefill_step(self.steps, own, state, cache.slots, self.spec.vocab, choose)

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
        whole, layers = self._shardings
        shardings = whole, cache.like(layers, whole), *(whole,) * (len(args) - 2)
        function = self._of_leaves(step.function, cached=True)
        return Job(key, function, args, donate=(1, 2), shardings=shardings)

    def _advance(
        self, step: Step, beside: Callable[[], None] | None = None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Tokens and flags of a step that takes over cache and state; what it gives back is kept.

        A step that fails once it runs has consumed them; the next prefill then makes new ones.
        `beside` is called where the step is compiled.
        """
        job = self._job(step, self._shown(), self._state)
        args = *job.args[:3], *self._place.operands(job.args[3:])
        with self._at_stake():
            self._cache, self._state, tokens, flags = self._executables.run(
                job.key, job.function, *args, donate=job.donate, beside=beside
            )
        self._note(flags)
        return self._place.local(tokens), flags

    @contextlib.contextmanager
    def _at_stake(self) -> Iterator[None]:
        """Around a step that takes over cache and state: a failure that used them loses them."""
        try:
            yield
        except BaseException:
            if any(x.is_deleted() for x in jax.tree.leaves((self._cache, self._state))):
                self._cache = self._state = None
            raise

    @in_place
    def decode(self, steps: int) -> PendingTokens | PendingSteps:
        """Up to `steps` tokens, at most MAX_STEPS, for each live slot; ends early on the device."""
        assert self._live and steps <= MAX_STEPS
        if self._state is None or self._cache is None:
            raise StepError(_LOST)
        self._live.advance(steps)
        self._make_room(self._cache, self._live.reach)
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            tokens = self._take_steps(steps)
        is_fixed = self._live.pool is not None
        if not is_fixed and self._live.may_outgrow(
            self._cache.tokens
        ):  # beside the steps of this size
            self._begin(2 * self._cache.tokens)
        return tokens

    def _take_steps(self, steps: int) -> PendingTokens | PendingSteps:
        """The steps of `decode`, dispatched; over a pool the host waits for none of them."""
        assert self._state is not None
        needs = SamplingFeatures.of(self._live.requests)
        if self._live.pool is not None:
            part = self._live.room(self.spec, self._live.reach)
            step, taken = self._decode_step(1, True, mode_of(needs), needs.tells, part), []
            for _ in range(steps):
                results = self._advance(step)
                taken.append(PendingTokens(results[0], 1, part.slots, self._exchange, results[1]))
            return PendingSteps(taken, part.slots)
        # The single step that ends a call of longer chunks is no stream's: their loop serves it.
        self._longest = max(self._longest, steps)
        alone = self._alone = self._longest == 1
        how = steps, alone, mode_of(needs), needs.tells
        slots = self._state.active.shape[0]
        results = self._advance(self._decode_step(*how))
        return PendingTokens(results[0], steps, slots, self._exchange, results[1])

    def _compile_decode(self) -> None:
        """Begin to compile what follows a prefill of a new size, if the last call says what."""
        assert self._cache is not None
        if self._live.pool is not None:
            return
        if self._alone is not None and any(r.max_new_tokens > 1 for r in self._live.requests):
            self._begin(self._cache.tokens)

    def _begin(self, tokens: int) -> None:
        """Begin to compile a decode step over a cache of `tokens`, as the last one was.

        That takes some two seconds on a GPU. Not where processes share the model, whose compilers
        may wait for each other, nor where kernels wait for those of another GPU: a compiler tries
        kernels out, and to load them waits until a GPU is idle.
        """
        assert self._cache is not None and self._state is not None
        if self._peers.size > 1 or self._exchange is not None or self._state.parts:
            return
        eos, alone = self._state.eos.shape, self._alone
        room = self._cache.room._replace(tokens=tokens)
        key = "one" if alone else "decode", *room, *eos
        self._executables.begin(key, partial(self._lower_decode, room, eos[1], alone))

    @in_place
    def _lower_decode(self, *sizes: Any) -> jax.stages.Lowered:
        return self._executables.lower(ahead.decode(self, *sizes))

    def make_buffers(self, room: Room, eos_width: int) -> tuple[Cache, SlotState]:
        """New buffers for `room`; the state in host memory."""
        cache = make_cache(self._cache_specs, room, self.dtype, self._place)
        return cache, SlotState.make(room.slots, eos_width, self.spec.vocab)

    def _reserve(self, idle: bool) -> None:
        """Fit cache and state to what the live slots need to start; `idle`: none held before.

        Then the buffers take exactly the bucket's size, since a step reads all of them; with
        something live they only grow.
        """
        requests, pool = self._live.requests, self._pool
        eos_width = bucket(max((len(r.eos_ids) for r in requests), default=1), _SMALLEST_EOS)
        old, hides = self._state, self._live.hides or any(r.hidden_at_first for r in requests)
        weighs = self._live.weighs
        if pool is None:
            room = self._live.room(self.spec, self._live.reserved)
        else:
            room = room_of(pool, self.spec, whole=True)
            hides, weighs = hides or pool.hides, weighs or pool.weighs
            eos_width = max(eos_width, bucket(pool.eos, _SMALLEST_EOS))
        count = room.slots if pool is None else pool.slots
        if idle and pool is None:
            held = self._cache
            if held is not None and held.room != room:
                with contextlib.suppress(Exception):  # of an abandoned step
                    jax.block_until_ready(held)  # else its bytes still count as in use
                self._cache = held = None
            fits = old is not None and old.has == (hides, weighs)
            if old is not None and (old.eos.shape != (count, eos_width) or not fits):
                old = None
        if self._cache is not None:
            self._grow(self._cache, room)
        else:
            self._check_room(room)
            self._cache = make_cache(self._cache_specs, room, self.dtype, self._place)
        if old is not None:
            count = max(count, old.active.shape[0])
            eos_width = max(eos_width, old.eos.shape[1])
            hides, weighs = hides or old.has[0], weighs or old.has[1]
            if old.eos.shape == (count, eos_width) and old.has == (hides, weighs):
                return  # free rows in it are not active
        state = SlotState.make(count, eos_width, self.spec.vocab, hides, weighs)
        if old is not None:
            state = copy_rows(old, state)
        self._state = self._place.put(state)

    def _check_room(self, room: Room) -> None:
        needed = cache_bytes(self._cache_specs, room, jnp.dtype(self.dtype).itemsize)
        blocks = max((spec.blocks for spec in self._cache_specs), default=0)
        check_room(self._peers, room, needed, self.free_bytes(), self._place.name, blocks)

    def _grow(self, held: Cache, room: Room) -> None:
        """Hold at least `room`; OutOfMemoryError if the new buffers have none.

        The old ones are there until all is copied.
        """
        room = room.joined(held.room)
        if room != held.room:
            self._check_room(room)
            self._cache = grow(held, self._cache_specs, room, self._place)

    @in_place
    def allow(self, slots: Sequence[int], words: np.ndarray) -> None:
        """See `base.Runner`."""
        if self._state is None or self._state.hidden is None:
            raise StepError(_LOST)
        count = bucket(len(slots))
        rows = np.full(count, len(self._state.hidden), np.int32)  # those beyond are dropped
        given = np.zeros((count, words.shape[1]), np.uint32)
        rows[: len(slots)], given[: len(slots)] = slots, words
        operands = self._place.operands((rows, given))
        hidden = sampler.allow(self._state.hidden, *operands)
        self._state = self._state._replace(hidden=hidden)

    @in_place
    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `base.Runner`; as many as a step of that many reads."""
        if self._cache is None or self._live.pool is None:
            raise StepError(_LOST)
        if self.blocks is not None:
            self.blocks.share(source, target, tokens)
            return
        tokens = part_of(self._live.pool, 1, tokens).tokens
        job = self._copy_job(self._cache, tokens, source, target)
        args = job.args[0], *self._place.operands(job.args[1:])
        with self._at_stake():
            self._cache = self._executables.run(job.key, job.function, *args, donate=job.donate)

    def _copy_job(self, cache: Cache, tokens: int, source: int, target: int) -> Job:
        lies = replace(cache, layers=self._split)
        function = self._place.spread(partial(copied, tokens=tokens), (lies, WHOLE), lies)
        args, (whole, layers) = (cache, np.array([source, target], np.int32)), self._shardings
        shardings = replace(cache, layers=layers), whole
        return Job(("copy", tokens, *cache.room), function, args, donate=(0,), shardings=shardings)

    @in_place
    def save(self, slot: int, tokens: int, start: int = 0) -> Saved:
        """See `base.Runner`; it waits for what the device does."""
        cache = self._cache
        if cache is None or self._live.pool is None:
            raise StepError(_LOST)
        part = part_of(self._live.pool, 1, tokens - start).tokens
        job = self._save_job(cache := self._shown_from(slot, tokens, start), part, slot)
        operands = self._place.operands(job.args[1:])
        own = self._executables.run(job.key, job.function, cache, *operands)
        leaves, tree = jax.tree.flatten(own)
        held = [(np.asarray(x), x.sharding) for x in leaves]
        return Saved(tokens, sum(x.nbytes for x, _ in held), (part, held, tree), start=start)

    @in_place
    def restore(self, slot: int, saved: Saved) -> None:
        """See `base.Runner`."""
        cache = self._cache
        if cache is None:
            raise StepError(_LOST)
        part, held, tree = saved.copies
        if self.blocks is not None:
            self._live.put_back(slot, saved.tokens)
            cache = self._shown_from(slot, saved.tokens, saved.start)
        own = jax.tree.unflatten(tree, [jax.device_put(x, lies) for x, lies in held])
        job = self._restore_job(cache, own, part, slot)
        args = cache, own, *self._place.operands(job.args[2:])
        with self._at_stake():
            self._cache = self._executables.run(job.key, job.function, *args, donate=job.donate)

    def _save_job(self, cache: Cache, part: int, slot: int) -> Job:
        lies = cache.like(self._split, WHOLE)
        given_back = replace(lies, table=None, near=None)
        run = partial(taken, tokens=part, near=min(part, self._lies.rest * GRAIN))
        function = self._place.spread(run, (lies, WHOLE), given_back)
        whole, layers = self._shardings
        shardings = cache.like(layers, whole), whole
        args = cache, np.array(slot, np.int32)
        return Job(("save", part, *cache.key), function, args, shardings=shardings)

    def _restore_job(self, cache: Cache, own: Any, part: int, slot: int) -> Job:
        lies = cache.like(self._split, WHOLE)
        function = self._place.spread(
            given, (lies, replace(lies, table=None, near=None), WHOLE), lies
        )
        whole, layers = self._shardings
        shardings = cache.like(layers, whole), replace(own, layers=layers), whole
        args, key = (cache, own, np.array(slot, np.int32)), ("restore", part, *cache.key)
        return Job(key, function, args, donate=(0,), shardings=shardings)

    def _own_of(self, cache: Cache, part: int) -> Any:
        """The shapes of a slot's first `part` tokens."""
        job = self._save_job(cache, part, 0)
        return jax.eval_shape(job.function, *job.args)

    def saved_bytes(self, tokens: int, start: int = 0) -> int:
        """See `base.Runner`; of all devices, and as many tokens as a step of that many reads."""
        if self._cache is None or self._live.pool is None:
            raise StepError(_LOST)
        part = part_of(self._live.pool, 1, tokens - start).tokens
        if part not in self._saved_bytes:  # a trace of all layers
            leaves = jax.tree.leaves(self._own_of(self._cache, part))
            self._saved_bytes[part] = sum(x.size * x.dtype.itemsize for x in leaves)
        return self._saved_bytes[part]

    @in_place
    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self._live.remove(slots)
        if self._state is not None and slots:
            active, length = self._state.active, self._state.length
            kept = np.ones(active.shape, bool)
            kept[[slot for slot in slots if slot < len(kept)]] = False  # of a failed prefill
            # Without a length, as steps of others read what a slot seems to have.
            active, length = _kept(active, length, kept)
            self._state = self._state._replace(active=active, length=length)

    def draw_seeds(self, count: int) -> list[int]:
        """Seeds from the operating system."""
        return [secrets.randbits(63) for _ in range(count)]

    def free_bytes(self) -> int | None:
        """Bytes that each device here can still allocate; None if one does not say."""
        return least_free_bytes(self._place)

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes on each device of a cache for `slots` sequences of `tokens` tokens, in buckets."""
        room = room_for(self.spec, slots, tokens)
        return cache_bytes(self._cache_specs, room, jnp.dtype(self.dtype).itemsize)

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`."""
        specs = [self._plain_specs[number] for number in numbers]
        return cache_bytes(specs, Room(1, GRAIN), jnp.dtype(self.dtype).itemsize)

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
        self._check_room(room_for(self.spec, *most))
        self._executables.prepare(ahead.jobs(self, wanted, _SMALLEST_EOS), "Compiling")

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`; counts and bytes are those of one device."""
        params = self._place.parts(self.params)
        leaves = params.leaves()
        inner = {f"{i}.{n}": w for i, g in enumerate(params.layers) for n, w in g.items()}
        ways = self.steps.ops.implementations, PlainOps.implementations
        knows = self.steps.ops.knows if self.steps.ops.cache_kinds else None
        own: dict[str, Any] = {"spec": self.spec, "layers": params.layers}
        left_plain = self.steps.ops.left_plain(**own, caches=self._cache_specs)
        return {
            "device": self._place.name,
            "device_name": self.device.device_kind,
            "ops": {
                **served(*ways, knows, self._cache_specs, left_plain),
                **SCHEMES.implementations(leaves, partial(self.steps.ops.reads_codes, **own)),
            },
            "weights": describe_weights({**params.outer, **inner}),
            **count_leaves(leaves),
            "streamed_bytes": self._streaming.streamed if self._streaming else 0,
            **self._executables.facts,
            "cache": describe_caches(self._cache_specs),
            "cache_bytes": sum(x.nbytes for x in jax.tree.leaves(self._place.parts(self._cache))),
        }

    def close(self) -> None:
        """Let go of parameters, cache, state, executables and mailboxes."""
        self._cache = self._state = self.module = self._pool = None
        self._live = LiveSlots()
        self.params, self._leaves = Params({}, ()), []
        self._executables.clear()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = self.steps.ops.exchange = None
