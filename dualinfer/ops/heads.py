"""Changes of packed queries, keys and values before attention takes them."""

from ..model.spec import Attention
from .contract import Array, NormOf
from .maths import Maths, flat, heads
from .norms import plain_norm


def norm_values(m: Maths, a: Attention, qkv: Array, norm: NormOf) -> Array:
    """Packed qkv [B, T, (H+2K) D] with each head's value normed; it may be overwritten."""
    values = heads(qkv[..., -a.qkv_sizes[2] :], width=a.head_dim)
    return m.replace_last(qkv, flat(plain_norm(m, values, norm)))


def with_keys_of(m: Maths, a: Attention, q: Array, qkv: Array) -> Array:
    """The first H D elements of q, and the keys and values of packed qkv behind them, anew."""
    queries = a.qkv_sizes[0]
    return m.join((q[..., :queries], qkv[..., queries:]), -1)
