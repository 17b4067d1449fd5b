"""How attention of whole prompts is cut for the GPU, and what else could do it."""

from typing import Any, NamedTuple

import jax


class Config(NamedTuple):
    """How the kernel is cut: queries of a program, keys of a step, warps, steps in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By (greatest head_dim, 16-bit), the best first, as Triton's twin measured on an H100.
_LONG = {
    (64, True): [Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(128, 128, 8, 2)],
    (128, True): [Config(64, 64, 4, 2), Config(128, 128, 8, 2), Config(128, 64, 8, 3)],
    (256, True): [Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 32, 4, 3)],
    (256, False): [Config(16, 16, 8, 2), Config(16, 32, 4, 2), Config(32, 32, 8, 2)],
}
_SHORT = {
    (64, True): [Config(64, 64, 4, 2), Config(16, 128, 4, 1), Config(32, 128, 4, 1)],
    (128, True): [Config(64, 64, 4, 2), Config(16, 64, 4, 2), Config(32, 64, 4, 2)],
    (256, True): [Config(64, 32, 4, 2), Config(16, 64, 4, 2)],
    (256, False): [Config(16, 16, 8, 2), Config(16, 32, 4, 2)],
}
_CUDNN_FROM = 512  # tokens: below, Triton's twin measured quicker
_CUDNN_HEAD = 128  # on Hopper it takes 256 from cuDNN 9.5 on
_CUDNN_DTYPES = ("bfloat16", "float16")


def attention_configs(
    *, itemsize: int, head_dim: int, tokens: int, pairs: int, processors: int = 132
) -> list[Config]:
    """Configurations worth measuring, the default first.

    `pairs` is sequences times query heads. Where blocks of 128 queries would leave processors
    without work, they are smaller.
    """
    few = pairs * -(-tokens // 128) < processors
    table = _SHORT if few else _LONG
    bound = min(dim for dim, half in table if half == (itemsize == 2) and dim >= min(head_dim, 256))
    return list(table[bound, itemsize == 2])


def cudnn_serves(
    q: jax.Array,
    k: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    mask: Any = None,
    segments: Any = None,
    alibi: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    lengths: Any = None,
    windows: bool = False,
) -> bool:
    """Whether JAX's `dot_product_attention` by cuDNN can do what `attention` is asked, and should.

    It is told `is_causal`, and with `windows` may be told `local_window_size=(window - 1, 0)` as
    well. Of q and k only shapes and dtypes are looked at; whether there is a GPU, the caller knows.
    A causal call may leave its `lengths` out: what they hide lies behind each query that counts.
    """
    tokens, heads, dim = q.shape[1:]
    if any(x is not None for x in (mask, segments, alibi, softcap, sinks, lengths)):
        return False
    if window is not None and window < tokens and not (windows and causal):
        return False
    if str(q.dtype) not in _CUDNN_DTYPES or k.dtype != q.dtype:
        return False
    if dim > _CUDNN_HEAD or dim % 8 or heads % k.shape[2]:
        return False
    return tokens >= _CUDNN_FROM
