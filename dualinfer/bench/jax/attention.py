"""Attention for `dualinfer bench ops`, beside XLA's dense one and cuDNN's."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...backends.jax.cache import KINDS
from ...backends.jax.maths import MATHS
from ...backends.jax.ops.cudnn import cudnn_serves
from ...backends.jax.ops.plain import PlainOps
from ...model.spec import Attention, Rope
from ...ops.cache_kinds import FullCache
from ...ops.contract import EVERY, LayerAttention
from ...ops.rotary import rotary, turns
from ..case import OpCase, Shape, heads_of, prompts_work
from .inputs import Bench, Op

_THETA = 500000.0
_CUDNN = "cudnn"
_CUDNN_DTYPES = ("bfloat16", "float16")
_CUDNN_HEAD = 128  # with room for every version that JAX 0.9 and later may come with
_MOST_SCORES = 8 << 30  # bytes of the float32 scores that dense attention writes


def _turns(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return turns(MATHS, rope, jnp.array(rope.tables, jnp.float32), positions)


def decode(bench: Bench, shape: Shape, slots: int, tokens: int) -> Iterator[OpCase]:
    """One new token's attention to `tokens` tokens, itself included, in each of `slots`.

    Ours and XLA's turn queries and keys and append to the cache; for cuDNN that is done, and its
    cache has the order of axes that it wants.
    """
    frequencies = tuple(_THETA ** (-i / shape.head_dim) for i in range(0, shape.head_dim, 2))
    rope = Rope(frequencies) if shape.gated else None  # GPT-2 has none
    a = Attention(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, rope=rope)
    layer = LayerAttention(a)
    past = tokens - 1
    row = sum(a.qkv_sizes)  # as many elements are written: the result, a key and a value
    cached = 2 * past * a.kv_heads * a.head_dim
    moved = slots * ((2 * row + cached) * bench.dtype.itemsize + 4)

    def inputs() -> tuple[FullCache, tuple[Any, ...]]:
        draw = bench.draws()
        qkv, shape = draw(slots, 1, row), (slots, a.kv_heads, tokens, a.head_dim)
        cache = KINDS["full"](draw(*shape), draw(*shape))
        return cache, (qkv, jnp.full(slots, past, jnp.int32, device=bench.device))

    def ready() -> tuple[None, tuple[Any, ...]]:
        cache, (qkv, lengths) = inputs()
        q, k, v = _heads(a, qkv)
        if rope is not None:
            turned = _turns(rope, lengths[:, None])
            q, k = (rotary(MATHS, x, *turned) for x in (q, k))
        cache = cache.append(k[:, 0], v[:, 0], lengths)
        return None, (q, *(jnp.asarray(x.swapaxes(1, 2)) for x in cache.read()))

    def run(ops: PlainOps, cache: FullCache, qkv: Any, lengths: Any) -> tuple[Any, Any]:
        angles: Any = lengths[:, None]  # by which kernels turn; XLA by cosines and sines
        if not ops.kernels:
            angles = {rope: _turns(rope, angles)} if rope else {}
        return ops.attend_token(layer, qkv, angles, cache, lengths)

    def cudnn(ops: None, state: None, q: Any, k: Any, v: Any) -> tuple[Any, None]:
        y = jax.nn.dot_product_attention(q, k, v, scale=a.scale, implementation=_CUDNN)
        return y.reshape(slots, 1, -1), state

    description = f"{shape.name}, {slots} x {tokens:,} tokens, {heads_of(a)}"
    flops = 4 * slots * tokens * a.heads * a.head_dim
    op = Op(bench, "decode_attention", description, moved, flops, inputs)
    yield op.by_kernels("", run)
    yield op.by_plain(run)
    if bench.dtype in _CUDNN_DTYPES:
        op = Op(bench, "decode_attention", description, moved, flops, ready)
        yield op.by_gpu("cuDNN", cudnn)


def prompts(bench: Bench, batch: int, tokens: int, a: Attention) -> Iterator[OpCase]:
    """Attention of whole prompts; where the engine leaves it to cuDNN, beside our kernel too.

    The engine's and XLA's begin with queries, keys and values in one array, others with three.
    """
    layer = LayerAttention(a)

    def inputs() -> tuple[None, tuple[Any, ...]]:
        return None, (bench.draws()(batch, tokens, sum(a.qkv_sizes)),)

    def ready() -> tuple[None, tuple[Any, ...]]:
        _, (qkv,) = inputs()
        return None, tuple(_heads(a, qkv))

    def run(ops: PlainOps, state: None, qkv: Any) -> tuple[jax.Array, None]:
        return ops.attend(layer, qkv, None)[0], state

    def our_kernel(ops: PlainOps, state: None, q: Any, k: Any, v: Any) -> tuple[jax.Array, None]:
        from ...kernels.triton import attention, attention_choice

        shape = bench.dtype.itemsize, a.head_dim, tokens, batch * a.heads, a.causal
        how: dict[str, Any] = {"scale": a.scale, "causal": a.causal, "sms": bench.kernels.sms}
        how |= {"config": bench.kernels.configurations.find(attention_choice.tuning_key(*shape))}
        how |= {"pdl": bench.kernels.starts_early(batch * tokens)}
        y = bench.launch(attention.attention, q, k, v, **how)
        return y.reshape(batch, tokens, -1), state

    def cudnn(ops: None, state: None, q: Any, k: Any, v: Any) -> tuple[jax.Array, None]:
        how: dict[str, Any] = {"scale": a.scale, "is_causal": a.causal}
        if a.window:
            how["local_window_size"] = (a.window - 1, 0)
        y = jax.nn.dot_product_attention(q, k, v, implementation=_CUDNN, **how)
        return y.reshape(batch, tokens, -1), state

    about = bench, "attention", *prompts_work(a, batch, tokens, bench.dtype.itemsize)
    op, opened = Op(*about, inputs), Op(*about, ready)
    yield op.by_kernels("", run)
    _, (qkv,) = jax.eval_shape(inputs)
    if cudnn_serves(layer, qkv, EVERY):
        yield opened.by_kernels("dualinfer's Triton kernel", our_kernel)
    if 4 * batch * a.heads * tokens * tokens <= _MOST_SCORES:
        yield op.by_plain(run)
    if bench.dtype in _CUDNN_DTYPES and not a.softcap and a.head_dim <= _CUDNN_HEAD:
        yield opened.by_gpu("cuDNN", cudnn)


def _heads(a: Attention, qkv: jax.Array) -> list[jax.Array]:
    """Queries, keys and values [B, T, heads, D] of packed ones."""
    query, key, _ = a.qkv_sizes
    parts = jnp.split(qkv, (query, query + key), axis=-1)
    return [part.reshape(*part.shape[:2], -1, a.head_dim) for part in parts]
