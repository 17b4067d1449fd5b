"""The torch cache: each layer's static buffers, a row a slot; it grows, keeping what is live."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...ops.cache_kinds import LayerCache, kinds_over
from ...ops.caches import (
    Buffer,
    CacheSpec,
    Room,
    buffers,
    cache_bytes,
    check_kinds,
    check_room,
    for_one,
    no_room,
)
from ...parallel.agreement import Peers
from ..base import GRAIN
from .device import fill, free_bytes
from .maths import MATHS

KINDS = kinds_over(MATHS)


def size_of(cache: Any) -> int:
    """Bytes of the cache's arrays."""
    return sum(x.nbytes for x in cache if x is not None)


def made(
    spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """A layer's new cache; finite: a masked value still takes part in a product as 0 * value."""

    def new(b: Buffer) -> torch.Tensor:
        if b.first is not None:
            return torch.from_numpy(b.first(b.shape)).to(device)
        own = getattr(torch, b.dtype) if b.dtype else dtype
        return torch.zeros(b.shape, dtype=own, device=device)

    return KINDS[spec.kind](*map(new, buffers(spec, slots, tokens)))


class Cache:
    """Every layer's buffers for some room, the cross caches last; smaller buckets are views.

    `peers` have one each, of the same room. Layers whose blocks are those of all slots have one
    table.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], dtype: torch.dtype, device: torch.device, peers: Peers
    ):
        check_kinds(specs, KINDS, "torch")
        self.specs, self._peers = specs, peers
        self._dtype, self.device = dtype, device
        self._layers: list[Any] = []
        self.room = Room()

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that have room."""
        return self.room.tokens

    def smaller_than(self, room: Room) -> bool:
        """True if `grow` to this size would allocate."""
        return not room.within(self.room)

    def grow(self, room: Room) -> None:
        """Hold at least `room`; contents stay. A grown cache has new addresses.

        Raises OutOfMemoryError, with the cache as it was, where the device has no room for the new
        buffers beside the old ones; in all of the peers, if one has none.
        """
        if not self.smaller_than(room):
            return
        room = room.joined(self.room)
        needed = self.bytes_for(room)
        free, where = free_bytes(self.device), str(self.device)
        if self._peers.size > 1:
            where += f" of rank {self._peers.rank}"
        blocks = max((spec.blocks for spec in self.specs), default=0)
        check_room(self._peers, room, needed, free, where, blocks)
        with self._peers.together("Making the buffers of a cache"):
            try:
                layers = self._grown(room)
            except torch.OutOfMemoryError as error:  # what is free may lie in pieces
                raise no_room(room, needed, free, where, blocks) from error
        if any(spec.blocks for spec in self.specs):
            pairs = list(zip(self.specs, layers, strict=True))
            tables = {spec.forgets: layer.table for spec, layer in reversed(pairs)}
            layers = [layer._replace(table=tables[spec.forgets]) for spec, layer in pairs]
        self._layers, self.room = layers, room

    def show(self, tables: Sequence[np.ndarray | None]) -> None:
        """Put other tables of blocks in the places of those that layers have, if there are some.

        The second is that of layers that forget.
        """
        for forgets, table in enumerate(tables):
            if table is not None:
                pairs = zip(self.specs, self._layers, strict=True)
                own = (x for spec, x in pairs if spec.blocks and spec.forgets == bool(forgets))
                if (layer := next(own, None)) is not None:
                    fill(layer.table, table)

    def _grown(self, room: Room) -> list[Any]:
        """New buffers with the old contents."""
        slots, where = room.slots, (self._dtype, self.device)
        if self._layers:
            pairs = zip(self.specs, self._layers, strict=True)
            return [layer.grown(slots, room.of(spec)) for spec, layer in pairs]
        return [made(s, slots, room.of(s), *where) for s in self.specs]

    def bytes_for(self, room: Room) -> int:
        """Bytes of a cache of this size."""
        return cache_bytes(self.specs, room, self._dtype.itemsize)

    def view(self, room: Room) -> list[Any]:
        """The first slots and positions of every layer; the cross caches last."""
        pairs = zip(self.specs, self._layers, strict=True)
        return [layer.view(room.slots, room.of(spec)) for spec, layer in pairs]

    def number(self, number: int) -> Any:
        """All the buffers of the cache with this number, as `ModelSpec` has it."""
        return self._layers[number]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one slot to another."""
        for layer in self._layers:
            layer.given(target, layer.taken(source, tokens))

    def save(self, slot: int, tokens: int, first: Sequence[int] = (0, 0)) -> list[Any]:
        """The first tokens of a slot in the host's memory, a cache of one slot for each layer.

        Of a pool of blocks those from block `first[0]` on, of layers that forget from `first[1]`.
        """

        def saved(x: torch.Tensor | None) -> torch.Tensor | None:
            if x is None:
                return None
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
            return host.copy_(x, non_blocking=True)  # done before work that is enqueued later

        ways = self._from(first)
        taken = [layer.taken(slot, tokens - skipped) for layer, skipped in ways]
        if any(spec.blocks for spec in self.specs):
            taken = [own._replace(table=None) for own in taken]
        return [type(own)(*map(saved, own)) for own in taken]

    def saved_bytes(self, tokens: int, first: Sequence[int] = (0, 0)) -> int:
        """Bytes that `save` of so many tokens takes."""
        far = [spec for spec in self.specs if not spec.forgets]
        near = [spec for spec in self.specs if spec.forgets]
        sizes = (far, tokens - first[0] * GRAIN), (near, tokens - first[1] * GRAIN)
        return sum(cache_bytes(*for_one(*own), self._dtype.itemsize) for own in sizes)

    def _from(self, first: Sequence[int]) -> list[tuple[Any, int]]:
        """Each layer's cache from a block on, as `save` has them; and the tokens before."""
        at = [first[spec.forgets] for spec in self.specs]
        pairs = list(zip(self._layers, at, strict=True))
        return [(x._replace(table=x.table[:, n:]) if n else x, n * GRAIN) for x, n in pairs]

    def restore(self, slot: int, saved: Sequence[Any], first: Sequence[int] = (0, 0)) -> None:
        """Put back what `save` gave, into any slot."""
        for (layer, _), own in zip(self._from(first), saved, strict=True):
            there = [None if x is None else x.to(self.device, non_blocking=True) for x in own]
            layer.given(slot, type(own)(*there))

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(map(size_of, self._layers))

    def clear(self) -> None:
        """Let go of the buffers."""
        self._layers, self.room = [], Room()
