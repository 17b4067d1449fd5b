"""The slots of a torch runner: caches and state on the device, and the host's book of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from ...model.spec import ModelSpec
from ...ops.caches import AS_COMPUTED, CacheSpec, KeptIn, Room, cache_bytes, cache_specs
from ...parallel.agreement import Peers
from ..base import GRAIN, MAX_STEPS, Piece, Request, Saved
from ..blocks import Lying
from ..slots import LiveSlots, PooledSlots, room_for, sampling_rows
from .cache import Cache, size_of
from .device import upload
from .sampler import SlotState


class View(NamedTuple):
    """What a step over the first slots reads and writes: `state` and `cache` have the `room`'s.

    The steps of a call write `tokens` int64 [MAX_STEPS, N], each in the row that `rows` int64 [N]
    says of a slot; both have all slots of the state.
    """

    state: SlotState
    cache: list[Any]
    room: Room
    tokens: torch.Tensor
    rows: torch.Tensor


class Slots(PooledSlots):
    """The slots of one runner, whose `cache` and `state` are on the device.

    Both grow with what is asked for, or have the room of a pool. `forget` is called before buffers
    are replaced, whose addresses graphs hold. Methods write buffers that a runner's steps read:
    they are called in inference mode, in the order of the device's work.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
        forget: Callable[[], None],
        knows: Callable[[CacheSpec], bool],
        kept: KeptIn = AS_COMPUTED,
    ) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._peers, self._forget, self._knows = peers, forget, knows
        self._plain = tuple(cache_specs(spec, kept)) if spec.causal else ()
        self.cache = Cache(self._plain, dtype, device, peers)
        self.live = LiveSlots()
        self._state: SlotState | None = None
        self._tokens = self._rows = torch.empty(0)  # see `View`

    @property
    def state(self) -> SlotState:
        """A row for each slot, once a request or a pool has made it."""
        assert self._state is not None
        return self._state

    def _let_go(self) -> None:
        """See `PooledSlots`: graphs first, which hold addresses."""
        self._forget()
        self.close()

    def _lay(self, specs: Sequence[CacheSpec], lies: Lying) -> None:
        """See `PooledSlots`."""
        self.cache = Cache(specs, self._dtype, self._device, self._peers)

    def _take(self, room: Room) -> None:
        """See `PooledSlots`."""
        self.cache.grow(room)

    def close(self) -> None:
        """Let go of cache and state."""
        self.cache.clear()
        self._state, self.live = None, LiveSlots()
        self._tokens = self._rows = torch.empty(0)

    def read(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, list[Request]]:
        """Make room for pieces, which are read next: their slots int64 [B], and who begins.

        Slots of first pieces get rows of the state, not active. A slot's length is what it will
        have: a step of other slots writes its own token behind that.
        """
        idle = not self.live
        if new := self.live.read(pieces):
            self._begin([p.request for p in new], [p.slot for p in new], idle)
        self.show()
        rows = upload([p.slot for p in pieces], self._device)
        self.state.length[rows] = upload([p.stop for p in pieces], self._device)
        return rows, [p.request for p in new]

    def _begin(self, requests: Sequence[Request], slots: Sequence[int], idle: bool) -> None:
        """Make room for requests in slots, and write their rows of the state, not active."""
        self._reserve(idle)
        rows = upload(slots, self._device)
        columns = sampling_rows(requests, max(len(r.eos_ids) for r in requests))
        self.state.write(rows, {"new": np.zeros(len(requests), np.int64), **columns})
        self.state.hide(slots, [r.hidden for r in requests])
        self.state.weigh(slots, requests)

    def _reserve(self, idle: bool) -> None:
        """Grow cache and state to what the live slots need to start; `idle`: none held before."""
        room = self.live.first_room(self._spec)
        if idle and self.cache.smaller_than(room):
            self._forget()
            self.cache.clear()  # nothing to keep: free the old buffers before the new ones
        self._grow(room)
        old = self._state
        size = self.live.state_size().joined(None if old is None else old.size)
        if old is None or size != old.size:
            self._forget()
            how = size.hides, size.weighs
            self._state = SlotState.make(size.slots, size.eos, self._spec.vocab, self._device, *how)
            integers = {"dtype": torch.int64, "device": self._device}
            self._tokens = torch.empty(MAX_STEPS, size.slots, **integers)
            self._rows = torch.empty(size.slots, **integers)
            if old is not None:
                self._state.copy_from(old)

    def _grow(self, room: Room) -> None:
        if self.cache.smaller_than(room):
            self._forget()
        self.cache.grow(room)

    def show(self) -> None:
        """Show the device the tables of blocks as the book has them now."""
        self.cache.show(self.live.changed_tables())

    def begin_pass(self, rows: Sequence[Piece], goes_on: bool = True) -> None:
        """See `LiveSlots.begin_pass`."""
        self.live.begin_pass(rows, goes_on)
        self.show()

    @contextmanager
    def pass_of(self, rows: Sequence[Piece]) -> Iterator[None]:
        """Around a pass over rows: their slots have room for it, and keep what later ones see."""
        self.begin_pass(rows)
        yield
        self.live.end_pass(rows)

    def advance(self, steps: int, slots: Sequence[int] | None = None) -> View:
        """Make room for `steps` more of these slots, or of every one; what the steps read."""
        assert self.live
        room = self.live.room(self._spec, self.live.advance(steps, slots))
        self._grow(room)
        self.show()
        return self.view(room)

    def view(self, room: Room) -> View:
        """What a step over this room reads."""
        state, cache = self.state.view(room.slots), self.cache.view(room)
        return View(state, cache, room, self._tokens, self._rows)

    def begin_drafts(self, slots: Sequence[int], counts: Sequence[int]) -> int:
        """Make room for so many tokens behind what each slot has; how far they reach then."""
        reach = self.live.reach_after(counts, slots)
        self._grow(self.live.room(self._spec, reach))
        self.live.begin_drafts(slots, counts)
        self.show()
        return reach

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `base.Runner`."""
        if self.live.blocks is not None:
            self.live.blocks.share(source, target, tokens)
        else:
            self.cache.copy(source, target, tokens)

    def save(self, slot: int, tokens: int, start: int) -> Saved:
        """See `base.Runner`; on a GPU in pinned memory, and without a wait."""
        self.show()
        layers = self.cache.save(slot, tokens, self.live.first_saved(tokens, start))
        return Saved(tokens, sum(map(size_of, layers)), layers, start=start)

    def saved_bytes(self, tokens: int, start: int) -> int:
        """See `base.Runner`."""
        return self.cache.saved_bytes(tokens, self.live.first_saved(tokens, start))

    def restore(self, slot: int, saved: Saved) -> None:
        """See `base.Runner`."""
        if self.live.blocks is not None:
            self.live.put_back(slot, saved.tokens)
            self.show()
        first = self.live.first_saved(saved.tokens, saved.start)
        self.cache.restore(slot, saved.copies, first)

    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self.live.remove(slots)
        if self._state is not None:
            size = self._state.size.slots  # a prefill that failed may not have got so far
            rows = [slot for slot in slots if slot < size]
            where = upload(rows, self._device, torch.int64)
            # An index with a number in the place of a tensor would wait for the device.
            self._state.active.index_fill_(0, where, False)
            # Steps of others read what a slot seems to have.
            self._state.length.index_fill_(0, where, 0)

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache for `slots` sequences of `tokens` tokens, in the buckets it takes."""
        return self.cache.bytes_for(room_for(self._spec, slots, tokens))

    def block_bytes(self, numbers: Sequence[int]) -> int:
        """See `base.Runner`."""
        specs = [self._plain[number] for number in numbers]
        return cache_bytes(specs, Room(1, GRAIN), self._dtype.itemsize)
