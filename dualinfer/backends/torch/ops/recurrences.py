"""Recurrences in torch: what keeps a state of fixed size in the place of keys and values."""

import torch
from torch.nn import functional as F

from ....model.spec import Recurrence, ShortConvolution, StateSpace
from ....ops.caches import StateView
from ....ops.contract import Weights
from ..parallel import Split
from ..profiling import named
from . import primitives

_CHUNK = 64  # tokens whose pairs are scored at a time


@named("recurrence")
def recur(
    own: Recurrence,
    w: Weights,
    x: torch.Tensor,
    split: Split | None,
    mask: torch.Tensor | None,
    segments: torch.Tensor | None,
    cache: StateView | None,
    slots: torch.Tensor | None,
    lengths: torch.Tensor | None,
    goes_on: bool,
) -> tuple[torch.Tensor, StateView | None]:
    """See `contract.Ops.recur`; the cache is written in place."""
    held: tuple[torch.Tensor | None, ...] = (None, None)
    if goes_on:
        assert cache is not None and slots is not None
        held = tuple(array[slots] for array in cache.arrays)
    if isinstance(own, ShortConvolution):
        first, gate, third = x.chunk(3, -1)
        given = first * third
        y, wide = convolve_past(own, w, _shown(given, mask), held[0], segments)
        y, states = (gate * y).to(x.dtype), ()
    else:
        gate, given, steps = _parted(own, x)
        y, wide = convolve_past(own, w, _shown(given, mask), held[0], segments)
        steps, decays = _steps(own, w, steps)
        if lengths is not None:
            real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            mask = real if mask is None else mask & real
        if mask is not None:  # other tokens leave a state as it is
            steps, decays = (a.masked_fill(~mask[..., None], 0.0) for a in (steps, decays))
        if segments is not None:
            anew = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))[..., None]
            decays = decays.masked_fill(anew, -torch.inf)
        parts = _heads(own, primitives.activation(y, own.activation))
        y, state = scan(own, *parts, steps, decays, held[1])
        y, states = _out(own, w, y, parts[0], gate, split), (state,)
    if cache is not None:
        assert slots is not None and lengths is not None
        cache = cache.keep(slots, last_tokens(own, wide, lengths), *states)
    return y, cache


@named("recurrence")
def recur_token(
    own: Recurrence,
    w: Weights,
    x: torch.Tensor,
    split: Split | None,
    cache: StateView,
    moves: torch.Tensor,
) -> tuple[torch.Tensor, StateView]:
    """See `contract.Ops.recur_token`; the cache is written in place."""
    if isinstance(own, ShortConvolution):
        first, gate, third = x.chunk(3, -1)
        y, wide = convolve_past(own, w, first * third, cache.arrays[0])
        return (gate * y).to(x.dtype), cache.move(moves, wide[:, 1:])
    gate, given, steps = _parted(own, x)
    y, wide = convolve_past(own, w, given, cache.arrays[0])
    steps, decays = _steps(own, w, steps[:, 0])
    value, b, c = _heads(own, primitives.activation(y[:, 0], own.activation))
    each = own.heads // own.groups
    b, c = (part[:, :, None].expand(-1, -1, each, -1).flatten(1, 2) for part in (b, c))
    old = cache.arrays[1] * decays.exp()[..., None, None]
    state = torch.addcmul(old, (value * steps[..., None])[..., None], b[:, :, None])
    y = _out(own, w, (state * c[:, :, None]).sum(-1), value, gate[:, 0], split)
    return y[:, None], cache.move(moves, wide[:, 1:], state)


def _shown(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x if mask is None else x * mask[..., None]


def convolve_past(
    own: Recurrence,
    w: Weights,
    x: torch.Tensor,
    past: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel of x [B, T, C] over itself and what came before, and x with that in front.

    The first is float32. `past` [B, taps - 1, C] came before; None for zeros. The second result is
    [B, taps - 1 + T, C].
    """
    tokens, before = x.shape[1], own.taps - 1
    wide = F.pad(x, (0, 0, before, 0)) if past is None else torch.cat((past, x), 1)
    owners = None if segments is None else F.pad(segments, (before, 0), value=-1)
    kernel, bias = w["recurrence_kernel"].float(), w.get("recurrence_kernel_bias")
    total = x.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    for i in range(own.taps):
        near = wide[:, i : i + tokens]
        if owners is not None:
            near = near * (owners[:, i : i + tokens] == segments)[..., None]
        total = total + near * kernel[:, i]
    return total, wide


def last_tokens(own: Recurrence, wide: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The taps - 1 tokens before the end of each sequence, of `convolve_past`'s second result."""
    at = lengths[:, None] + torch.arange(own.taps - 1, device=wide.device)
    return wide.gather(1, at[..., None].expand(-1, -1, wide.shape[-1]))


def _parted(own: StateSpace, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates [..., width], what is convolved [..., C], and the heads' numbers [..., heads]."""
    if own.scales is not None:
        sizes = own.width, own.width, own.shared, own.shared, own.heads
        parts = zip(x.split(sizes, -1), own.scales, strict=True)
        x = torch.cat([part * scale for part, scale in parts], -1)
    gate, given, steps = x.split((own.width, own.channels, own.heads), -1)
    return gate, given, steps


def _steps(own: StateSpace, w: Weights, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A head's step, and the logarithm of what its state is times: float32 [..., heads] each."""
    steps = F.softplus(numbers.float() + w["state_step_bias"])
    if own.limits != (0.0, float("inf")):
        steps = steps.clamp(*own.limits)
    return steps, -steps * w["state_decay"].exp()


def _heads(own: StateSpace, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs [..., heads, head_dim], and B and C [..., groups, state], of what was convolved."""
    value, b, c = x.split((own.width, own.shared, own.shared), -1)
    b, c = (part.unflatten(-1, (own.groups, -1)) for part in (b, c))
    return value.unflatten(-1, (own.heads, -1)), b, c


def scan(
    own: StateSpace,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: torch.Tensor,
    decays: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What states give of sequences, [B, T, heads, head_dim], and the last ones; all float32.

    `x`, `b` and `c` as `_heads` gives them, `steps` and `decays` as `_steps`; `state` [B, heads,
    head_dim, state] is the one before, None for zeros. Of a chunk of tokens all pairs are scored,
    and a state goes from chunk to chunk.
    """
    if state is None:
        state = x.new_zeros(len(x), own.heads, own.head_dim, own.state)
    by_group, found = (own.groups, own.heads // own.groups), []
    last = state.unflatten(1, by_group)
    x = x * steps[..., None]
    pieces = (part.split(_CHUNK, 1) for part in (x, b, c, decays))
    for value, b, c, decay in zip(*pieces, strict=True):
        value, own_decay = value.unflatten(2, by_group), decay.transpose(1, 2)
        size = decay.shape[1]
        below = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        # Sums of decays between two tokens, each by itself: differences of sums would round.
        spans = own_decay[..., None].expand(*own_decay.shape, size)
        spans = spans.masked_fill(~below.tril(-1), 0.0).cumsum(-2).masked_fill(~below, -torch.inf)
        spans = spans.exp().unflatten(1, by_group)
        scores = torch.einsum("blgs,bmgs->bglm", c, b)[:, :, None] * spans
        y = torch.einsum("bgrlm,bmgrp->blgrp", scores, value)
        since = decay.cumsum(1).exp().unflatten(2, by_group)
        found.append(y + torch.einsum("blgs,bgrps->blgrp", c, last) * since[..., None])
        left = value * spans[..., -1, :].permute(0, 3, 1, 2)[..., None]
        last = last * since[:, -1, ..., None, None] + torch.einsum("bmgrp,bmgs->bgrps", left, b)
    return torch.cat(found, 1).flatten(2, 3), last.flatten(1, 2)


def _out(
    own: StateSpace,
    w: Weights,
    y: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    split: Split | None,
) -> torch.Tensor:
    """What heads give, y and x float32 [..., heads, head_dim], gated and normed: [..., width]."""
    y = (y + x * w["state_skip"][:, None]).flatten(-2)
    gates = primitives.activation(gate.float(), "silu")
    if not own.gated_last:
        y = y * gates
    if own.norm is not None:
        if own.width < own.normed:  # devices share what is normed
            assert split is not None
            mean = split.sum(y.square().sum(-1, keepdim=True)) / own.normed
            y = y * (mean + own.norm.eps).rsqrt()
        else:
            parts = y.unflatten(-1, (-1, own.normed))
            mean = parts.square().mean(-1, keepdim=True)
            y = (parts * (mean + own.norm.eps).rsqrt()).flatten(-2)
        y = y * w["state_norm.weight"].float()
    if own.gated_last:
        y = y * gates
    return (y if own.out_scale == 1 else y * own.out_scale).to(gate.dtype)
