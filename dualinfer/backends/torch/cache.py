"""The torch cache: each layer's static buffers, a row a slot; it grows, keeping what is live."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.nn import functional as F

from ...parallel.agreement import Peers
from ..caches import (
    CacheSpec,
    CacheView,
    block_table,
    buffers,
    cache_bytes,
    check_kinds,
    check_room,
    no_room,
)
from .device import free_bytes
from .ops.primitives import CACHE_CODES


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


KINDS: dict[str, type[LayerCache]] = {
    "full": FullCache,
    "blocks": BlockCache,
    "latent": LatentCache,
}


def codes_of(k: torch.Tensor) -> str | None:
    """What keys are kept in where these are codes."""
    return {torch.uint8: "fp8_e4m3", torch.int8: "int8"}.get(k.dtype)


def over(cache: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The cache with each of its arrays changed."""
    return type(cache)(*(x if x is None else change(x) for x in cache))


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
    """Every layer's buffers for `slots` sequences of `tokens` tokens; smaller buckets are views.

    `peers` have one each, of the same slots and tokens.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], dtype: torch.dtype, device: torch.device, peers: Peers
    ):
        check_kinds(specs, KINDS, "torch")
        self.specs, self._peers = specs, peers
        self._dtype, self._device = dtype, device
        self._layers: list[LayerCache] = []
        self.slots = self.tokens = 0

    def smaller_than(self, slots: int, tokens: int) -> bool:
        """True if `grow` to this size would allocate."""
        return slots > self.slots or tokens > self.tokens

    def grow(self, slots: int, tokens: int) -> None:
        """Hold at least `slots` by `tokens`; contents stay. A grown cache has new addresses.

        Raises OutOfMemoryError, with the cache as it was, where the device has no room for the new
        buffers beside the old ones; in all of the peers, if one has none.
        """
        if not self.smaller_than(slots, tokens):
            return
        slots, tokens = max(slots, self.slots), max(tokens, self.tokens)
        needed = self.bytes_for(slots, tokens)
        free, where = free_bytes(self._device), str(self._device)
        if self._peers.size > 1:
            where += f" of rank {self._peers.rank}"
        check_room(self._peers, slots, tokens, needed, free, where)
        with self._peers.together("Making the buffers of a cache"):
            try:
                layers = self._grown(slots, tokens)
            except torch.OutOfMemoryError as error:  # what is free may lie in pieces
                raise no_room(slots, tokens, needed, free, where) from error
        self._layers, self.slots, self.tokens = layers, slots, tokens

    def _grown(self, slots: int, tokens: int) -> list[LayerCache]:
        """New buffers with the old contents."""
        if self._layers:
            return [layer.grown(slots, tokens) for layer in self._layers]
        where = self._dtype, self._device
        return [KINDS[spec.kind].make(spec, slots, tokens, *where) for spec in self.specs]

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache of this size."""
        return cache_bytes(self.specs, slots, tokens, self._dtype.itemsize)

    def view(self, slots: int, tokens: int) -> list[LayerCache]:
        """The first `slots` rows and `tokens` positions of every layer."""
        return [layer.view(slots, tokens) for layer in self._layers]

    def layer(self, index: int) -> LayerCache:
        """All of one layer's buffers."""
        return self._layers[index]

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        layers: list[Any] = self._layers
        return sum(x.nbytes for layer in layers for x in layer if x is not None)

    def clear(self) -> None:
        """Let go of the buffers."""
        self._layers, self.slots, self.tokens = [], 0, 0
