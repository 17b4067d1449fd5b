"""Recurrences in torch: what keeps a state of fixed size in the place of keys and values."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ....model.spec import Recurrence
from ...caches import StateView
from ...contract import Weights
from ..profiling import named


@named("recurrence")
def recur(
    own: Recurrence,
    w: Weights,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
    cache: StateView | None,
    slots: torch.Tensor | None,
    lengths: torch.Tensor | None,
    goes_on: bool,
) -> tuple[torch.Tensor, StateView | None]:
    """See `contract.Ops.recur`; the cache is written in place."""
    held = None
    if goes_on:
        assert cache is not None and slots is not None
        held = tuple(array[slots] for array in cache.arrays)
    first, gate, third = x.chunk(3, -1)
    x = first * third
    if mask is not None:
        x = x * mask[..., None]
    y, wide = convolve_past(own, w, x, held[0] if held else None, segments)
    if cache is not None:
        assert slots is not None and lengths is not None
        cache = cache.keep(slots, last_tokens(own, wide, lengths))
    return gate * y, cache


@named("recurrence")
def recur_token(
    own: Recurrence, w: Weights, x: torch.Tensor, cache: StateView, moves: torch.Tensor
) -> tuple[torch.Tensor, StateView]:
    """See `contract.Ops.recur_token`; the cache is written in place."""
    first, gate, third = x.chunk(3, -1)
    y, wide = convolve_past(own, w, first * third, cache.arrays[0])
    return gate * y, cache.move(moves, wide[:, 1:])


def convolve_past(
    own: Recurrence,
    w: Weights,
    x: torch.Tensor,
    past: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    then: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel of x [B, T, C] over itself and what came before, and x with that in front.

    `past` [B, taps - 1, C] came before; None for zeros. Sums, and what `then` makes of them, are
    float32. The second result is [B, taps - 1 + T, C].
    """
    tokens, before = x.shape[1], own.taps - 1
    wide = F.pad(x, (0, 0, before, 0)) if past is None else torch.cat((past, x), 1)
    owners = None if segments is None else F.pad(segments, (before, 0), value=-1)
    kernel, total = w["recurrence_kernel"].float(), x.new_zeros((), dtype=torch.float32)
    for i in range(own.taps):
        near = wide[:, i : i + tokens]
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        total = total + near * kernel[:, i]
    if (bias := w.get("recurrence_kernel_bias")) is not None:
        total = total + bias.float()
    return (then(total) if then else total).to(x.dtype), wide


def last_tokens(own: Recurrence, wide: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The taps - 1 tokens before the end of each sequence, of `convolve_past`'s second result."""
    at = lengths[:, None] + torch.arange(own.taps - 1, device=wide.device)
    return wide.gather(1, at[..., None].expand(-1, -1, wide.shape[-1]))
