"""The torch cache: each layer's static buffers, a row a slot; it grows, keeping what is live."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.nn import functional as F

from ...ops.caches import (
    CacheSpec,
    CacheView,
    Room,
    block_table,
    buffers,
    cache_bytes,
    check_kinds,
    check_room,
    no_room,
)
from ...parallel.agreement import Peers
from .device import free_bytes
from .ops.schemes import CACHE_CODES


class LayerCache(CacheView, Protocol):
    """One layer's buffers, or a view of some of their slots and tokens; its class is the kind.

    A named tuple of the kind's tensors. Nothing here waits for the device, so that steps that write
    and read can be captured.
    """

    @classmethod
    def make(
        cls, spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Finite buffers: a masked value still takes part in the product as 0 * value."""
        ...

    def grown(self, slots: int, tokens: int) -> Self:
        """New buffers of at least this size in both, with the same contents."""
        ...

    def view(self, slots: int, tokens: int) -> Self:
        """The first `slots` slots with room for `tokens` tokens each, in the same memory."""
        ...


class FullCache(NamedTuple):
    """Keys and values of every token, [N, K, S, D] each; of codes their scales, [N, K, S] each."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    kind = "full"

    @property
    def codes(self) -> str | None:
        """See `CacheView.codes`."""
        return codes_of(self.k)

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.k.shape[2]

    @classmethod
    def make(
        cls, spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, dtype, device))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        more = slots - len(self.k), 0, tokens - self.capacity
        return over(self, lambda x: padded(x, more))

    def view(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.view`."""
        return over(self, lambda x: x[:slots, :, :tokens])

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Self:
        """See `CacheView.write`; in place."""
        tokens = k.shape[1]
        for buffer, new in parts(self, k, v):
            buffer[slots, :, :tokens] = new.transpose(1, 2)
            buffer[slots, :, tokens:] = new.new_zeros(())  # of the device: it may be captured
        return self

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> Self:
        """See `CacheView.append`; in place."""
        at = lengths.clamp(max=self.capacity - 1)
        slots = torch.arange(len(k), device=k.device)
        for buffer, new in parts(self, k, v):
            buffer[slots, :, at] = new
        return self

    def kept(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheView.kept`."""
        return kept(self, k, v)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheView.read`; no copy but of codes."""
        if self.k_scale is None:
            return self.k, self.v
        return CACHE_CODES.values(self.k, self.k_scale), CACHE_CODES.values(self.v, self.v_scale)


class BlockCache(NamedTuple):
    """Keys and values in blocks of tokens, [blocks, K, size, D] each, by a table [N, blocks].

    Token s of slot n lies in block table[n, s // size] at place s % size. Of codes there are their
    scales, [blocks, K, size] each.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    kind = "blocks"

    @property
    def codes(self) -> str | None:
        """See `CacheView.codes`."""
        return codes_of(self.k)

    @property
    def _size(self) -> int:
        return self.k.shape[2]

    @property
    def _pools(self) -> FullCache:
        return FullCache(self.k, self.v, self.k_scale, self.v_scale)

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.table.shape[1] * self._size

    @classmethod
    def make(
        cls, spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """See `LayerCache.make`."""
        k, v, table, *scales = zeros(spec, slots, tokens, dtype, device)
        return cls(k, v, table.copy_(torch.from_numpy(block_table(table.shape))), *scales)

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        old, each = self.table.shape, -(-tokens // self._size)
        table = torch.from_numpy(block_table((slots, each), old)).to(self.table.device)
        table[: old[0], : old[1]] = self.table
        more = (table.numel() - self.table.numel(),)
        k, v, *scales = over(self._pools, lambda x: padded(x, more))
        return type(self)(k, v, table, *scales)

    def view(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.view`."""
        return self._replace(table=self.table[:slots, : -(-tokens // self._size)])

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Self:
        """See `CacheView.write`; in place."""
        for pool, new in parts(self, k, v):
            rows = padded(new, (0, self.capacity - new.shape[1])).unflatten(1, (-1, self._size))
            pool[self.table[slots]] = rows.transpose(2, 3)
        return self

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> Self:
        """See `CacheView.append`; in place."""
        at = lengths.clamp(max=self.capacity - 1)
        blocks = self.table[torch.arange(len(k), device=k.device), at // self._size]
        for pool, new in parts(self, k, v):
            pool[blocks, :, at % self._size] = new
        return self

    def kept(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheView.kept`."""
        return kept(self, k, v)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheView.read`; a copy."""
        return over(self._pools, lambda x: x[self.table].transpose(1, 2).flatten(2, 3)).read()


class CrossCache(NamedTuple):
    """What slots keep of an encoder's output: keys, values [N, K, S, D] and how many, int32 [N]."""

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    kind = "cross"
    codes = None

    @property
    def capacity(self) -> int:
        """See `CrossView.capacity`."""
        return self.k.shape[2]

    @classmethod
    def make(
        cls, spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, dtype, device))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        more = slots - len(self.k), 0, tokens - self.capacity
        k, v = (padded(x, more) for x in self[:2])
        return type(self)(k, v, padded(self.lengths, more[:1]))

    def view(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.view`."""
        k, v = (x[:slots, :, :tokens] for x in self[:2])
        return type(self)(k, v, self.lengths[:slots])

    def keep(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
    ) -> Self:
        """See `CrossView.keep`; in place."""
        tokens = k.shape[1]
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer[slots, :, :tokens] = new.transpose(1, 2)
        self.lengths[slots] = lengths.to(self.lengths.dtype)
        return self

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CrossView.read`; no copy."""
        return self.k, self.v


class LatentCache(NamedTuple):
    """What all heads share of every token, [N, S, rank + turning]; it keeps no codes."""

    shared: torch.Tensor
    kind, codes = "latent", None

    @property
    def capacity(self) -> int:
        """See `CacheView.capacity`."""
        return self.shared.shape[1]

    @classmethod
    def make(
        cls, spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, dtype, device))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        return type(self)(padded(self.shared, (slots - len(self.shared), tokens - self.capacity)))

    def view(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.view`."""
        return type(self)(self.shared[:slots, :tokens])

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Self:
        """See `CacheView.write`; in place."""
        tokens = k.shape[1]
        self.shared[slots, :tokens] = k[:, :, 0]
        self.shared[slots, tokens:] = k.new_zeros(())
        return self

    def append(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> Self:
        """See `CacheView.append`; in place."""
        slots = torch.arange(len(k), device=k.device)
        self.shared[slots, lengths.clamp(max=self.capacity - 1)] = k[:, 0]
        return self

    def kept(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheView.kept`."""
        return k, v

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheView.read`; no copy."""
        keys = self.shared[:, None]
        return keys, keys


class StateCache(NamedTuple):
    """What a recurrence keeps: the last tokens that it convolves, [N, taps - 1, C].

    And, if it is a state space, its state, float32 [N, heads, head_dim, state].
    """

    past: torch.Tensor
    state: torch.Tensor | None = None
    kind, codes = "state", None

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """See `StateView.arrays`."""
        return (self.past,) if self.state is None else (self.past, self.state)

    @classmethod
    def make(
        cls, spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """See `LayerCache.make`."""
        return cls(*zeros(spec, slots, tokens, dtype, device))

    def grown(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.grown`."""
        return over(self, lambda x: padded(x, (slots - len(x),)))

    def view(self, slots: int, tokens: int) -> Self:
        """See `LayerCache.view`."""
        return over(self, lambda x: x[:slots])

    def keep(self, slots: torch.Tensor, *arrays: torch.Tensor) -> Self:
        """See `StateView.keep`; in place."""
        for held, new in zip(self.arrays, arrays, strict=True):
            held[slots] = new
        return self

    def move(self, moves: torch.Tensor, *arrays: torch.Tensor) -> Self:
        """See `StateView.move`; in place."""
        for held, new in zip(self.arrays, arrays, strict=True):
            held.copy_(torch.where(moves.view(-1, *[1] * (held.ndim - 1)), new, held))
        return self


KINDS: dict[str, type[Any]] = {  # each a LayerCache, or like one
    "full": FullCache,
    "blocks": BlockCache,
    "cross": CrossCache,
    "latent": LatentCache,
    "state": StateCache,
}


def codes_of(k: torch.Tensor) -> str | None:
    """What keys are kept in where these are codes."""
    return {torch.uint8: "fp8_e4m3", torch.int8: "int8"}.get(k.dtype)


def over(cache: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The cache with each of its arrays changed."""
    return type(cache)(*(x if x is None else change(x) for x in cache))


def size_of(cache: Any) -> int:
    """Bytes of the cache's arrays."""
    return sum(x.nbytes for x in cache if x is not None)


def parts(
    cache: FullCache | BlockCache, k: torch.Tensor, v: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The buffers of keys, values and their scales, each with what new heads [..., D] put there."""
    codes = cache.codes
    if codes is None or cache.k_scale is None or cache.v_scale is None:
        return [(cache.k, k), (cache.v, v)]
    (k, k_scale), (v, v_scale) = (CACHE_CODES.encode(x, codes) for x in (k, v))
    return [(cache.k, k), (cache.v, v), (cache.k_scale, k_scale), (cache.v_scale, v_scale)]


def kept(
    cache: FullCache | BlockCache, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `CacheView.kept`."""
    codes = cache.codes
    return (k, v) if codes is None else (CACHE_CODES.kept(k, codes), CACHE_CODES.kept(v, codes))


def padded(x: torch.Tensor, more: Sequence[int]) -> torch.Tensor:
    """`x` with zeros behind, so many along each of the first axes."""
    sizes = [n for by in reversed((*more, *[0] * (x.ndim - len(more)))) for n in (0, by)]
    return F.pad(x, sizes)


def zeros(
    spec: CacheSpec, slots: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """The buffers of a layer's layout, all zero."""
    return [
        torch.zeros(b.shape, dtype=getattr(torch, b.dtype) if b.dtype else dtype, device=device)
        for b in buffers(spec, slots, tokens)
    ]


class Cache:
    """Every layer's buffers for some room, the cross caches last; smaller buckets are views.

    `peers` have one each, of the same room.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], dtype: torch.dtype, device: torch.device, peers: Peers
    ):
        check_kinds(specs, KINDS, "torch")
        self.specs, self._peers = specs, peers
        self._dtype, self._device = dtype, device
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
        free, where = free_bytes(self._device), str(self._device)
        if self._peers.size > 1:
            where += f" of rank {self._peers.rank}"
        check_room(self._peers, room, needed, free, where)
        with self._peers.together("Making the buffers of a cache"):
            try:
                layers = self._grown(room)
            except torch.OutOfMemoryError as error:  # what is free may lie in pieces
                raise no_room(room, needed, free, where) from error
        self._layers, self.room = layers, room

    def _grown(self, room: Room) -> list[Any]:
        """New buffers with the old contents."""
        slots, where = room.slots, (self._dtype, self._device)
        if self._layers:
            pairs = zip(self.specs, self._layers, strict=True)
            return [layer.grown(slots, room.of(spec)) for spec, layer in pairs]
        return [KINDS[s.kind].make(s, slots, room.of(s), *where) for s in self.specs]

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

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(map(size_of, self._layers))

    def clear(self) -> None:
        """Let go of the buffers."""
        self._layers, self.room = [], Room()
