"""The torch KV cache: one pair of buffers a layer, a row a slot; grows, keeping what is live."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base import CacheSpec


class LayerCache(NamedTuple):
    """A view of one layer's keys and values, [N, K, S, D] each."""

    k: torch.Tensor
    v: torch.Tensor


class KVCache:
    """Static buffers for `slots` sequences of `tokens` tokens; views of smaller buckets share them."""

    def __init__(self, specs: Sequence[CacheSpec], dtype: torch.dtype, device: torch.device):
        self._specs = specs
        self._dtype, self._device = dtype, device
        self._layers: list[LayerCache] = []
        self.slots = self.tokens = 0

    def smaller_than(self, slots: int, tokens: int) -> bool:
        """True if `grow` to this size would allocate."""
        return slots > self.slots or tokens > self.tokens

    def grow(self, slots: int, tokens: int) -> None:
        """Hold at least `slots` by `tokens`; contents stay. A grown cache has new addresses."""
        if not self.smaller_than(slots, tokens):
            return
        slots, tokens = max(slots, self.slots), max(tokens, self.tokens)
        kept, self._layers = self._layers, []
        for i, spec in enumerate(self._specs):
            # Zeros, since a masked value still takes part in the product as 0 * value.
            layer = LayerCache(
                torch.zeros(
                    slots, spec.kv_heads, tokens, spec.key_dim, dtype=self._dtype, device=self._device
                ),
                torch.zeros(
                    slots, spec.kv_heads, tokens, spec.value_dim, dtype=self._dtype, device=self._device
                ),
            )
            if kept:
                layer.k[: self.slots, :, : self.tokens] = kept[i].k
                layer.v[: self.slots, :, : self.tokens] = kept[i].v
            self._layers.append(layer)
        self.slots, self.tokens = slots, tokens

    def view(self, slots: int, tokens: int) -> list[LayerCache]:
        """The first `slots` rows and `tokens` positions of every layer."""
        return [LayerCache(c.k[:slots, :, :tokens], c.v[:slots, :, :tokens]) for c in self._layers]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [B, T, K, D] of whole prompts to the start of `slots` [B]."""
        tokens = k.shape[1]
        cache = self._layers[layer]
        cache.k[slots, :, :tokens] = k.transpose(1, 2)
        cache.v[slots, :, :tokens] = v.transpose(1, 2)

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for layer in self._layers for t in layer)

    def clear(self) -> None:
        """Let go of the buffers."""
        self._layers, self.slots, self.tokens = [], 0, 0
