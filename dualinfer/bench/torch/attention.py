"""Attention, and what prepares it, for `dualinfer bench ops`, beside torch's own kernels."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...backends.torch.cache import KINDS
from ...backends.torch.maths import MATHS
from ...model.spec import Attention
from ...ops.contract import LayerAttention
from ...ops.rotary import rotary as turned
from ..case import OpCase, Shape, heads_of, prompts_work, rows_of
from .inputs import Bench, Op

_THETA = 500000.0
_SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_WIDE_SDPA = {"memory-efficient": SDPBackend.EFFICIENT_ATTENTION}  # the one that takes float32


def decode(bench: Bench, shape: Shape, slots: int, tokens: int) -> Iterator[OpCase]:
    """One new token's attention to `tokens` tokens, itself included, in each of `slots`.

    Ours turns queries and keys and appends to the cache; for SDPA that is done.
    """
    a = Attention(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    past = tokens - 1
    row = sum(a.qkv_sizes)  # as many elements are written: the result, a key and a value
    cached = 2 * past * a.kv_heads * a.head_dim
    moved = slots * ((2 * row + cached) * bench.dtype.itemsize + 8)

    def inputs() -> tuple[Any, ...]:
        draw = bench.draws()
        qkv = draw(slots, 1, row)
        shape = slots, a.kv_heads, tokens, a.head_dim
        cache = KINDS["full"](draw(*shape), draw(*shape))
        lengths = torch.full((slots,), past, device=bench.device)
        layer = _layer(bench, a)
        q, k, v = _turned(layer, qkv, lengths[:, None])
        cache.append(k[:, 0], v[:, 0], lengths)
        return layer, qkv, q.transpose(1, 2).contiguous(), cache, lengths

    def ours(layer: Any, qkv: Any, q: Any, cache: Any, lengths: Any) -> torch.Tensor:
        return bench.ops.attend_token(layer, qkv, None, cache, lengths)[0]

    def theirs(
        backend: SDPBackend, layer: Any, qkv: Any, q: Any, cache: Any, lengths: Any
    ) -> torch.Tensor:
        return _sdpa(backend, a, q, *cache.read(), causal=False)

    description = f"{shape.name}, {slots} x {tokens:,} tokens, {heads_of(a)}"
    flops = 4 * slots * tokens * a.heads * a.head_dim
    op = Op("decode_attention", description, moved, flops, inputs)
    yield op.by("", ours)
    for name, backend in _backends(bench).items():
        yield op.by(f"torch SDPA, {name}", partial(theirs, backend))


def prompts(
    bench: Bench, batch: int, tokens: int, a: Attention, dispatched: bool = False
) -> Iterator[OpCase]:
    """Attention of whole prompts.

    `dispatched` says that the engine leaves it to torch: our kernel is a reference then.
    """

    def inputs() -> tuple[Any, ...]:
        return (bench.draws()(batch, tokens, sum(a.qkv_sizes)),)

    def ours(qkv: torch.Tensor) -> torch.Tensor:
        return bench.ops.attend(LayerAttention(a), qkv, None)[0]

    def our_kernel(qkv: torch.Tensor) -> torch.Tensor:
        from ...kernels.triton.attention import attention
        from ...kernels.triton.attention_choice import tuning_key

        q, k, v = _heads(a, qkv)
        shape = bench.dtype.itemsize, a.head_dim, tokens, batch * a.heads, a.causal
        config = bench.ops.configurations.find(tuning_key(*shape))
        pdl = bench.ops.pdl
        return attention(q, k, v, scale=a.scale, causal=a.causal, config=config, pdl=pdl)

    def theirs(backend: SDPBackend, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in _heads(a, qkv))
        return _sdpa(backend, a, q, k, v, causal=a.causal)

    op = Op("attention", *prompts_work(a, batch, tokens, bench.dtype.itemsize), inputs)
    yield op.by("", ours)
    if a.window or a.softcap:  # which SDPA does not know
        yield op.made("torch flex_attention, compiled", partial(_flex, a))
        return
    if dispatched:
        yield op.by("dualinfer's Triton kernel", our_kernel)
    for name, backend in _backends(bench).items():
        yield op.by(f"torch SDPA, {name}", partial(theirs, backend))


def rotary(bench: Bench, shape: Shape, rows: int) -> Iterator[OpCase]:
    """Rotary embedding of queries and keys, in place, with the append to the cache."""
    a = Attention(shape.heads, shape.kv_heads, shape.head_dim, 1.0)
    row = sum(a.qkv_sizes)

    def inputs() -> tuple[Any, ...]:
        qkv = bench.draws()(1, rows, row)
        buffers = (qkv.new_zeros(1, a.kv_heads, rows, a.head_dim) for _ in range(2))
        positions = torch.arange(rows, device=bench.device)[None]
        return _layer(bench, a), qkv, positions, KINDS["full"](*buffers), positions[0, :1]

    def ours(layer: Any, qkv: Any, positions: Any, cache: Any, slots: Any) -> Any:
        from ...kernels.triton.rotary import rotary_append

        rotary_append(
            qkv,
            positions,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            inv_freq=layer.frequencies,
            cache=cache[:2],
            slots=slots,
            pdl=bench.ops.pdl,
        )
        return *_heads(a, qkv)[:2], *cache.read()

    def theirs(layer: Any, qkv: Any, positions: Any, cache: Any, slots: Any) -> Any:
        q, k, v = _turned(layer, qkv, positions)
        cache.write(slots, k, v)
        return q, k, *cache.read()

    # Queries and keys are read and written, values read; the cache takes keys and values.
    elements = row + sum(a.qkv_sizes[:2]) + sum(a.qkv_sizes[1:])
    moved = rows * (elements * bench.dtype.itemsize + 8)
    heads = f"{a.heads} + 2 x {a.kv_heads} heads x {a.head_dim}"
    op = Op("rotary_append", f"{rows_of(rows)}, {heads}", moved, 0, inputs)
    yield op.by("", ours)
    yield op.by("torch", theirs)


def _backends(bench: Bench) -> dict[str, SDPBackend]:
    return _WIDE_SDPA if bench.dtype == torch.float32 else _SDPA


def _layer(bench: Bench, a: Attention) -> LayerAttention:
    """A layer whose whole heads are turned."""
    pairs = torch.arange(0, a.head_dim, 2, dtype=torch.float32, device=bench.device)
    return LayerAttention(a, frequencies=_THETA ** (-pairs / a.head_dim))


def _turned(
    layer: LayerAttention, qkv: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values by torch, turned by positions [B, T]."""
    assert layer.frequencies is not None
    angles = positions[..., None].float() * layer.frequencies
    q, k, v = _heads(layer.spec, qkv)
    q, k = (turned(MATHS, x, angles.cos(), angles.sin()) for x in (q, k))
    return q, k, v


def _heads(a: Attention, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views [B, T, heads, D] of packed queries, keys and values."""
    q, k, v = (part.unflatten(-1, (-1, a.head_dim)) for part in qkv.split(a.qkv_sizes, dim=-1))
    return q, k, v


def _sdpa(
    backend: SDPBackend,
    a: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    """[B, T, H, D] of q, k and v [B, heads, tokens, D]."""
    grouped = a.heads != a.kv_heads
    if grouped and backend is SDPBackend.EFFICIENT_ATTENTION:  # it does not know groups
        k, v = (x.repeat_interleave(a.heads // a.kv_heads, 1) for x in (k, v))
        grouped = False
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=a.scale, enable_gqa=grouped
        ).transpose(1, 2)


def _flex(a: Attention, qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Causal attention with window or soft cap, by torch's compiler: [B, T, H, D]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        seen = query >= key
        return seen & (query - key < a.window) if a.window else seen

    def capped(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
        return a.softcap * torch.tanh(score / a.softcap) if a.softcap else score

    q, k, v = (x.transpose(1, 2) for x in _heads(a, qkv))
    tokens = qkv.shape[1]
    mask = create_block_mask(visible, None, None, tokens, tokens, device=str(qkv.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    how: dict[str, Any] = {"score_mod": capped if a.softcap else None, "block_mask": mask}
    how |= {"scale": a.scale, "enable_gqa": a.heads != a.kv_heads}
    return lambda: compiled(q, k, v, **how).transpose(1, 2)
