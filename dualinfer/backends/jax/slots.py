"""The slots of a JAX runner: caches and state on the devices, and the host's book of them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StepError
from ...ops.caches import CacheSpec, Room, cache_bytes, cache_specs, check_room
from ..base import GRAIN, Piece, Request, Saved
from ..blocks import Lying
from ..slots import LiveSlots, PooledSlots, StateSize, bucket, part_of, parts_of, room_for
from . import sampler
from .cache import Cache, copied, given, grow, least_free_bytes, make_cache, split, taken
from .executables import Executables, Job
from .mesh import WHOLE
from .sampler import SlotState, copy_rows
from .whole import Placed

SMALLEST_EOS = 4
_LOST = "The step before failed and took the cache with it."


_without_ended = jax.jit(sampler.without_ended)  # an update outside of jit takes a millisecond


class Slots(PooledSlots):
    """The slots of one runner, whose `cache` and `state` are on the devices.

    These grow with what is asked for, or have the room of a pool. A step takes both over, and they
    `hold` what it gives back. `specs` are those of one device's caches, `split` says how their
    arrays are split over devices, and `shardings` are those of what all devices have and of these
    arrays. Methods are called in the place's context.

    The state learns of slots that have ended by the next step: one that reads prompts takes them
    in, and before any other the `state` is brought up to date.
    """

    def __init__(self, model: Placed, executables: Executables) -> None:
        self._spec, self._dtype, self._place = model.spec, model.dtype, model.place
        self._peers, self._executables = model.peers, executables
        own = model.tp_plan.shards[0].spec
        specs = cache_specs(own, model.kept) if model.spec.causal else ()
        self._plain, self._knows = tuple(map(model.ops.lies, specs)), model.ops.knows
        self._cache: Cache | None = None
        self._state: SlotState | None = None
        self._ended: set[int] = set()  # slots that the state has yet to learn of
        self.live = LiveSlots()
        self._saved_bytes: dict[int, int] = {}  # of a slot of the pool, by tokens
        self._nothing: dict[int, jax.Array] = {}  # of `hiding`, by rows
        self._lay(self._plain, Lying())

    @property
    def held(self) -> tuple[Cache, SlotState]:
        """Cache and state, as the last step left it; StepError where one that failed took them."""
        if self._cache is None or self._state is None:
            raise StepError(_LOST)
        return self._cache, self._state

    @property
    def cache(self) -> Cache:
        """The cache; StepError as `held`."""
        return self.held[0]

    @property
    def state(self) -> SlotState:
        """A row for each slot, up to date; StepError as `held`."""
        _, state = self.held
        if self._ended:
            kept = self.kept(len(state.active))
            active, length = _without_ended(state.active, state.length, kept)
            self._state, self._ended = state._replace(active=active, length=length), set()
            return self._state
        return state

    def kept(self, count: int) -> np.ndarray:
        """False for those of the first `count` slots that the state has yet to learn of, bool."""
        kept = np.ones(count, bool)
        kept[[slot for slot in self._ended if slot < count]] = False  # others: of a failed prefill
        return kept

    def hold(self, cache: Cache | None, state: SlotState | None) -> None:
        """Have these in the place of what a step took over; None where they are lost.

        The step has told the state of slots that have ended.
        """
        self._cache, self._state, self._ended = cache, state, set()

    @contextlib.contextmanager
    def at_stake(self) -> Iterator[None]:
        """Around a step that takes over cache and state: a failure that used them loses them."""
        try:
            yield
        except BaseException:
            held = jax.tree.leaves((self._cache, self._state))
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in held):
                self.hold(None, None)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the cache on one device."""
        return sum(x.nbytes for x in jax.tree.leaves(self._place.parts(self._cache)))

    def _let_go(self) -> None:
        """See `PooledSlots`."""
        self._wait()
        self.close()

    def _take(self, room: Room) -> None:
        """See `PooledSlots`; `_reserve` makes the cache."""
        self.check_room(room)

    def close(self) -> None:
        """Let go of cache and state."""
        self.hold(None, None)
        self.live, self._saved_bytes, self._nothing = LiveSlots(), {}, {}

    def _wait(self) -> None:
        """Wait for the cache, before it is let go of: else its bytes still count as in use."""
        with contextlib.suppress(Exception):  # of an abandoned step
            jax.block_until_ready(self._cache)

    def _lay(self, specs: Sequence[CacheSpec], lies: Lying) -> None:
        """See `PooledSlots`."""
        self.specs = specs
        self._near = lies.rest * GRAIN  # tokens of a slot in layers that forget, at most
        self.split = split(self.specs, self._place)
        sharding = self._place.sharding
        self.shardings = sharding(), jax.tree.map(sharding, self.split)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Make room for pieces, which are read next."""
        idle = not self.live
        if self._state is None and not idle:
            raise StepError(_LOST)
        if self.live.read(pieces):
            self._reserve(idle)

    def _reserve(self, idle: bool) -> None:
        """Fit cache and state to what the live slots need to start; `idle`: none held before.

        Then the buffers take exactly the bucket's size, since a step reads all of them; with
        something live they only grow.
        """
        room, size = self.live.first_room(self._spec), self.live.state_size()
        hides = size.hides or any(r.hidden_at_first for r in self.live.requests)
        size = size._replace(eos=bucket(size.eos, SMALLEST_EOS), hides=hides)
        old = self._state
        held = None if old is None else StateSize(old.eos.shape[0], old.eos.shape[1], *old.has)
        if idle and self.live.pool is None:
            if self._cache is not None and self._cache.room != room:
                self._wait()
                self._cache = None
            if held != size:
                old = held = None
        if self._cache is not None:
            self._grow(self._cache, room)
        else:
            self.check_room(room)
            self._cache = make_cache(self.specs, room, self._dtype, self._place)
        size = size.joined(held)
        if size == held:
            return  # free rows in it are not active
        state = SlotState.make(size.slots, size.eos, self._spec.vocab, size.hides, size.weighs)
        if old is not None:
            state = copy_rows(old, state)
        self._state = self._place.put(state)

    def check_room(self, room: Room) -> None:
        """Raise OutOfMemoryError where a device has no room for such a cache."""
        blocks = max((spec.blocks for spec in self.specs), default=0)
        free = least_free_bytes(self._place)
        check_room(self._peers, room, self._bytes_of(room), free, self._place.name, blocks)

    def _bytes_of(self, room: Room) -> int:
        return cache_bytes(self.specs, room, jnp.dtype(self._dtype).itemsize)

    def _grow(self, held: Cache, room: Room) -> None:
        """Hold at least `room`; OutOfMemoryError if the new buffers have none.

        The old ones are there until all is copied.
        """
        room = room.joined(held.room)
        if room != held.room:
            self.check_room(room)
            self._cache = grow(held, self.specs, room, self._place)

    def _make_room(self, cache: Cache, reach: int) -> None:
        """Grow the cache to what the live slots reach; that of a pool has all."""
        if reach > cache.tokens and self.live.pool is None:
            self._grow(cache, self.live.room(self._spec, reach))

    def advance(self, steps: int, slots: Sequence[int] | None = None) -> int:
        """Make room for `steps` more of these slots, or of every one; how far they reach then."""
        cache, _ = self.held
        reach = self.live.advance(steps, slots)
        self._make_room(cache, reach)
        return reach

    def begin_drafts(self, slots: Sequence[int], counts: Sequence[int]) -> int:
        """Make room for so many tokens behind what each slot has; how far they reach then."""
        cache, _ = self.held
        reach = self.live.reach_after(counts, slots)
        self._make_room(cache, reach)
        self.live.begin_drafts(slots, counts)
        return reach

    def make_buffers(self, room: Room, eos_width: int) -> tuple[Cache, SlotState]:
        """New buffers for `room`; the state in host memory."""
        cache = make_cache(self.specs, room, self._dtype, self._place)
        return cache, SlotState.make(room.slots, eos_width, self._spec.vocab)

    def shown(self) -> Cache:
        """The cache with the table of blocks as the book has it now; one that is new is NumPy's.

        A step takes it over, and brings it to the device, as it does its other operands.
        """
        cache = self.cache
        table, near = self.live.changed_tables(anew=cache.table is None)
        if table is not None:
            cache = replace(cache, table=self._place.operands(table))
        if near is not None:
            cache = replace(cache, near=self._place.operands(near))
        self._cache = cache
        return cache

    def _shown_from(self, slot: int, tokens: int, start: int) -> Cache:
        """The same, but that a slot's rows begin with the first blocks that are saved of it.

        The next step is shown the tables anew.
        """
        cache, book = self.shown(), self.live.blocks
        first = self.live.first_saved(tokens, start)
        for name, own, n in zip(("table", "near"), (book, book and book.near), first, strict=True):
            if own is not None and n:
                table = own.table.copy()
                table[slot] = np.append(table[slot, n:], np.full(n, own.count, np.int32))
                own.is_changed = True
                cache = replace(cache, **{name: self._place.operands(table)})
        return cache

    def hiding(self, requests: Sequence[Request], count: int) -> Any:
        """The tokens that `count` rows of requests hide, uint32 [2, B, V / 32]: `hidden_words`.

        Where that is none it is an array that stays on the devices. A panel's are a megabyte.
        """
        if any(r.hidden or r.hidden_at_first or r.allowed is not None for r in requests):
            return sampler.hidden_words(requests, count, self._spec.vocab)
        if count not in self._nothing:
            words = sampler.hidden_words((), count, self._spec.vocab)
            self._nothing[count] = self._place.put(words)
        return self._nothing[count]

    def allow(self, slots: Sequence[int], words: np.ndarray) -> None:
        """See `base.Runner`."""
        state = self.state
        if state.hidden is None:
            raise StepError(_LOST)
        count = bucket(len(slots))
        rows = np.full(count, len(state.hidden), np.int32)  # those beyond are dropped
        given = np.zeros((count, words.shape[1]), np.uint32)
        rows[: len(slots)], given[: len(slots)] = slots, words
        hidden = sampler.allow(state.hidden, *self._place.operands((rows, given)))
        self._state = state._replace(hidden=hidden)

    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self.live.remove(slots)
        self._ended |= set(slots)

    def _pool(self) -> Room:
        if self.live.pool is None:
            raise StepError(_LOST)
        return self.live.pool

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `base.Runner`; as many as a step of that many reads."""
        cache, pool = self.cache, self._pool()
        if self.live.blocks is not None:
            self.live.blocks.share(source, target, tokens)
            return
        self._put(self._copy_job(cache, part_of(pool, 1, tokens).tokens, source, target), cache)

    def save(self, slot: int, tokens: int, start: int) -> Saved:
        """See `base.Runner`; it waits for what the device does."""
        part = part_of(self._pool(), 1, tokens - start).tokens
        cache = self._shown_from(slot, tokens, start)
        job = self._save_job(cache, part, slot)
        operands = self._place.operands(job.args[1:])
        own = self._executables.run(job.key, job.function, cache, *operands)
        leaves, tree = jax.tree.flatten(own)
        held = [(np.asarray(x), x.sharding) for x in leaves]
        return Saved(tokens, sum(x.nbytes for x, _ in held), (part, held, tree), start=start)

    def restore(self, slot: int, saved: Saved) -> None:
        """See `base.Runner`."""
        cache = self.cache
        part, held, tree = saved.copies
        if self.live.blocks is not None:
            self.live.put_back(slot, saved.tokens)
            cache = self._shown_from(slot, saved.tokens, saved.start)
        own = jax.tree.unflatten(tree, [jax.device_put(x, lies) for x, lies in held])
        self._put(self._restore_job(cache, own, part, slot), cache, own)

    def _put(self, job: Job, *given: Any) -> None:
        """Run a job that takes over the cache; `given` are its first arguments, on the device."""
        args = *given, *self._place.operands(job.args[len(given) :])
        with self.at_stake():
            self._cache = self._executables.run(job.key, job.function, *args, donate=job.donate)

    def jobs(self) -> list[Job]:
        """The copies that the pool asks for, in each size."""
        cache, pool, jobs = self.shown(), self.live.asked, []
        reaches = sorted({part.tokens for part in parts_of(self._pool())})
        if pool is not None and pool.spare and not pool.blocks:
            jobs += [self._copy_job(cache, tokens, 0, 0) for tokens in reaches]
        if pool is not None and pool.saved:
            for part in reaches:
                own = self._own_of(cache, part)
                jobs += [self._save_job(cache, part, 0), self._restore_job(cache, own, part, 0)]
        return jobs

    def _copy_job(self, cache: Cache, tokens: int, source: int, target: int) -> Job:
        lies = replace(cache, layers=self.split)
        function = self._place.spread(partial(copied, tokens=tokens), (lies, WHOLE), lies)
        args, (whole, layers) = (cache, np.array([source, target], np.int32)), self.shardings
        shardings = replace(cache, layers=layers), whole
        return Job(("copy", tokens, *cache.room), function, args, donate=(0,), shardings=shardings)

    def _save_job(self, cache: Cache, part: int, slot: int) -> Job:
        lies = cache.like(self.split, WHOLE)
        given_back = replace(lies, table=None, near=None)
        run = partial(taken, tokens=part, near=min(part, self._near))
        function = self._place.spread(run, (lies, WHOLE), given_back)
        whole, layers = self.shardings
        shardings = cache.like(layers, whole), whole
        args = cache, np.array(slot, np.int32)
        return Job(("save", part, *cache.key), function, args, shardings=shardings)

    def _restore_job(self, cache: Cache, own: Any, part: int, slot: int) -> Job:
        lies = cache.like(self.split, WHOLE)
        function = self._place.spread(
            given, (lies, replace(lies, table=None, near=None), WHOLE), lies
        )
        whole, layers = self.shardings
        shardings = cache.like(layers, whole), replace(own, layers=layers), whole
        args, key = (cache, own, np.array(slot, np.int32)), ("restore", part, *cache.key)
        return Job(key, function, args, donate=(0,), shardings=shardings)

    def _own_of(self, cache: Cache, part: int) -> Any:
        """The shapes of a slot's first `part` tokens."""
        job = self._save_job(cache, part, 0)
        return jax.eval_shape(job.function, *job.args)

    def saved_bytes(self, tokens: int, start: int) -> int:
        """See `base.Runner`; of all devices, and as many tokens as a step of that many reads."""
        cache, part = self.cache, part_of(self._pool(), 1, tokens - start).tokens
        if part not in self._saved_bytes:  # a trace of all layers
            leaves = jax.tree.leaves(self._own_of(cache, part))
            self._saved_bytes[part] = sum(x.size * x.dtype.itemsize for x in leaves)
        return self._saved_bytes[part]

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes on each device of a cache for `slots` sequences of `tokens` tokens, in buckets."""
        return self._bytes_of(room_for(self._spec, slots, tokens))

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`."""
        specs = [self._plain[number] for number in numbers]
        return cache_bytes(specs, Room(1, GRAIN), jnp.dtype(self._dtype).itemsize)
