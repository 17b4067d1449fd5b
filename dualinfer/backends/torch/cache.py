"""The torch KV cache: one pair of buffers a layer, a row a slot; grows, keeping what is live."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base import CacheSpec, cache_bytes, no_room
from .device import free_bytes


class LayerCache(NamedTuple):
    """A view of one layer's keys and values, [N, K, S, D] each."""

    k: torch.Tensor
    v: torch.Tensor


class KVCache:
    """Static buffers for `slots` sequences of `tokens` tokens; smaller buckets are views."""

    def __init__(self, specs: Sequence[CacheSpec], dtype: torch.dtype, device: torch.device):
        self._specs = specs
        self._dtype, self._device = dtype, device
        self._layers: list[LayerCache] = []
        self.slots = self.tokens = 0

    def smaller_than(self, slots: int, tokens: int) -> bool:
        """True if `grow` to this size would allocate."""
        return slots > self.slots or tokens > self.tokens

    def grow(self, slots: int, tokens: int) -> None:
        """Hold at least `slots` by `tokens`; contents stay. A grown cache has new addresses.

        Raises OutOfMemoryError, with the cache as it was, where the device has no room for the new
        buffers beside the old ones.
        """
        if not self.smaller_than(slots, tokens):
            return
        slots, tokens = max(slots, self.slots), max(tokens, self.tokens)
        needed = self.bytes_for(slots, tokens)
        free = free_bytes(self._device)
        if free is not None and needed > free:
            raise no_room(slots, tokens, needed, free, str(self._device))
        try:
            self._layers = self._grown(slots, tokens)
        except torch.OutOfMemoryError as error:  # what is free may lie in pieces
            raise no_room(slots, tokens, needed, free, str(self._device)) from error
        self.slots, self.tokens = slots, tokens

    def _grown(self, slots: int, tokens: int) -> list[LayerCache]:
        """New buffers with the old contents."""
        kept, layers = self._layers, []

        def zeros(heads: int, dim: int) -> torch.Tensor:
            # Zeros, since a masked value still takes part in the product as 0 * value.
            shape = slots, heads, tokens, dim
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        for i, spec in enumerate(self._specs):
            layer = LayerCache(
                zeros(spec.kv_heads, spec.key_dim), zeros(spec.kv_heads, spec.value_dim)
            )
            if kept:
                layer.k[: self.slots, :, : self.tokens] = kept[i].k
                layer.v[: self.slots, :, : self.tokens] = kept[i].v
            layers.append(layer)
        return layers

    def bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache of this size."""
        return cache_bytes(self._specs, slots, tokens, self._dtype.itemsize)

    def view(self, slots: int, tokens: int) -> list[LayerCache]:
        """The first `slots` rows and `tokens` positions of every layer."""
        return [LayerCache(c.k[:slots, :, :tokens], c.v[:slots, :, :tokens]) for c in self._layers]

    def layer(self, index: int) -> LayerCache:
        """All of one layer's buffers."""
        return self._layers[index]

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for layer in self._layers for t in layer)

    def clear(self) -> None:
        """Let go of the buffers."""
        self._layers, self.slots, self.tokens = [], 0, 0
