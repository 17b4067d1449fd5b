"""Heads as caches and attention take them: values as wide as keys, and one value for each head."""

import torch
from torch.nn import functional as F

from ....model.spec import LAMBDAS, Attention
from ....ops.contract import Weights
from ..profiling import named
from . import primitives


@named("heads")
def widen(a: Attention, qkv: torch.Tensor) -> torch.Tensor:
    """See `BlockOps.widen_heads`."""
    if a.difference is not None:
        return _doubled(a, qkv)
    others, values = qkv.split((sum(a.qkv_sizes[:2]), a.qkv_sizes[2]), -1)
    values = values.unflatten(-1, (a.kv_heads, -1)) * a.value_scale
    values = F.pad(values, (0, a.head_dim - values.shape[-1]))
    return torch.cat((others, values.flatten(-2)), -1)


@named("heads")
def narrow(a: Attention, y: torch.Tensor, w: Weights) -> torch.Tensor:
    """See `BlockOps.narrow_heads`."""
    if a.difference is not None:
        return _subtracted(a, y, w)
    return y.unflatten(-1, (a.heads, -1))[..., : a.value_dim or a.head_dim].flatten(-2)


@named("heads")
def bias_keys(a: Attention, qkv: torch.Tensor, numbers: torch.Tensor, w: Weights) -> torch.Tensor:
    """See `BlockOps.bias_keys`."""
    assert a.qk_norm is not None
    q, k, v = (part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split(a.qkv_sizes, -1))
    q = primitives.rms_norm(q, w["q_norm.weight"], a.qk_norm.eps)
    k = primitives.rms_norm(k, w["k_norm.weight"], a.qk_norm.eps)
    bias = torch.exp(w["key_factor"] * F.softplus(numbers.float())).to(qkv.dtype)
    q, v = F.pad(q, (0, 1), value=1 / a.scale), F.pad(v, (0, 1))
    k = torch.cat((k, bias[..., None]), -1)
    return torch.cat([part.flatten(-2) for part in (q, k, v)], -1)


def _doubled(a: Attention, qkv: torch.Tensor) -> torch.Tensor:
    """Each head twice, for the two values that it reads."""
    heads = qkv.unflatten(-1, (-1, a.head_dim))
    q, k, v = heads.split((a.heads, a.kv_heads, a.kv_heads), -2)
    q = q.unflatten(-2, (a.kv_heads, 1, -1)).expand(*q.shape[:-2], a.kv_heads, 2, -1, -1)
    k = k[..., None, :].expand(*k.shape[:-1], 2, -1)
    v = v.unflatten(-2, (2, -1)).transpose(-2, -3)
    parts = q.flatten(-4), k.flatten(-3), torch.cat((v, v), -3).flatten(-3)
    return torch.cat(parts, -1)


def _subtracted(a: Attention, y: torch.Tensor, w: Weights) -> torch.Tensor:
    """The first half of heads minus a part of the second, each of both its values."""
    assert a.difference is not None
    q1, k1, q2, k2 = (w[name] for name in LAMBDAS)
    less, more = ((q * k).float().sum(-1).exp().to(y.dtype) for q, k in ((q2, k2), (q1, k1)))
    y = y.unflatten(-1, (a.kv_heads, 2, -1, a.head_dim)).transpose(-2, -3)
    first, second = y.flatten(-2).flatten(-3, -2).chunk(2, -2)
    left = first - (more - less + a.difference) * second
    ones = left.new_ones(2 * a.head_dim)
    normed = primitives.rms_norm(left, ones, a.difference_eps)
    return ((1 - a.difference) * normed).flatten(-2)
