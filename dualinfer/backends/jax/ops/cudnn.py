"""When JAX's attention by cuDNN serves a layer."""

import jax

from ....ops.contract import LayerAttention, Seen

_FROM = 512  # tokens: below, our kernel measured quicker
_HEAD = 128  # on Hopper it takes 256 from cuDNN 9.5 on
_DTYPES = ("bfloat16", "float16")


def cudnn_serves(layer: LayerAttention, qkv: jax.Array, seen: Seen) -> bool:
    """True if `jax.nn.dot_product_attention` by cuDNN can do what `attend` is asked, and should.

    `qkv` is [B, T, (H + 2K) D]. Whether there is a GPU, the caller knows.
    """
    a, tokens = layer.spec, qkv.shape[1]
    if any(x is not None for x in (*seen, layer.slopes, a.softcap, layer.bias, layer.sinks)):
        return False
    if a.window is not None and a.window < tokens:
        return False
    return (
        str(qkv.dtype) in _DTYPES
        and a.head_dim <= _HEAD
        and a.head_dim % 8 == 0
        and tokens >= _FROM
    )
