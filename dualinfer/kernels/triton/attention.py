"""Attention of whole prompts, with every kind of mask."""

import math
from typing import Any

from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_choice import Config, attention_configs
from .attention_kernel import attention_kernel
from .blocks import slots_and_room, table_arguments
from .codes import scale_arguments
from .decode_attention import check_relative
from .launch import INTERPRETED, has_pdl, launch, next_power_of_2
from .operands import Operand, dtype_name

LARGEST_HEAD = 256


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
    mask: Any = None,
    segments: Any = None,
    alibi: Any = None,
    alibi_scale: float | None = None,
    positions: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    relative: Any = None,
    starts: Any = None,
    slots: Any = None,
    table: Any = None,
    scales: Any = None,
    config: Config | None = None,
    sms: int = 132,
    pdl: bool = False,
) -> Any:
    """Attention of q [B, T, H, D] to the keys 0..T-1 of k and v [B, S, K, D]: [B, T, H, D].

    With int `starts` [B] keys and values are those of a cache, [N, S, K, D]: row b has the keys 0
    to starts[b] + T - 1, as far as there are, of slot slots[b] of int `slots` [B], and its query i
    stands at key starts[b] + i. Where there is no such slot the result is finite. Options as in
    `reference.attention`; `mask` bool, `segments` and `positions` int are [B, S]; `sinks` float32
    [H] are GPT-OSS's; `relative` [H, 2M+1] are T5's, and not beside ALiBi. `segments` must not
    decrease along a row: blocks of keys of other segments are passed over. Keys and values that are
    hidden are read all the same and must be finite. Strides are free but for the last axis. `sms`
    is the device's number of multiprocessors. With `table` int32 [N, blocks] k and v are the pools
    of a cache of blocks (blocks.py), [blocks, K, size, D]; size is a power of 2, and 16 at least.
    With `scales`, a pair float32 of the axes of k and v before D, these are codes (codes.py).
    """
    batch, tokens, heads, dim = q.shape
    by_table = table_arguments(table, k)
    held = (None, None) if scales is None else scale_arguments((k, v), scales, q.dtype)[:2]
    if table is not None:  # then a sequence of the pools is a block
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    _check(q, k, v, table, scale, window, softcap, starts)
    count, room = batch, tokens
    if starts is not None:
        count, room = slots_and_room(k.transpose(1, 2), table)
    for name, x in (("starts", starts), ("slots", slots)):
        _check_option(name, x, (batch,), _INTEGERS)
    if scales is None and not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: expected the same.")
    per_key = {"mask": mask, "segments": segments, "positions": positions}
    for name, x in per_key.items():
        _check_option(name, x, (batch, room), _BOOL if x is mask else _INTEGERS)
    _check_option("alibi", alibi, (heads,), _FLOAT32)
    _check_option("sinks", sinks, (heads,), _FLOAT32)
    most = check_relative(relative, heads)
    if relative is not None and alibi is not None:
        raise ValueError("relative and alibi were given; one of them measures distances.")
    if positions is not None and alibi is None:
        raise ValueError("positions serve alibi only; pass its slopes, or leave positions out.")
    out = q.new_empty(q.shape)
    if not out.numel():
        return out
    itemsize, pairs = q.element_size(), batch * heads
    if config is None:
        shape = {"itemsize": itemsize, "head_dim": dim, "tokens": tokens, "pairs": pairs}
        packed = segments is not None
        config = attention_configs(**shape, processors=sms, packed=packed)[0]
    if relative is not None and config.block_m > 64:  # a bias for each pair takes registers
        config = config._replace(block_m=64)
    if table is not None:
        config = config._replace(block_n=min(config.block_n, by_table[2]))
    main, rest = _split(dim)
    # Of heads of two tiles, rows of a cache by TMA were wrong on an H200 (Triton 3.6).
    plain = table is None and scales is None and not (rest and starts is not None)
    tma = plain and all(_has_descriptor(x) for x in (q, k, v))
    tensors = []
    for x, rows in ((q, config.block_m), (k, config.block_n), (v, config.block_n)):
        end = tokens if x is q else room
        tensors.append(_descriptor(x, rows, main, end) if tma else x)
        tensors.append(None if not rest else _descriptor(x, rows, rest, end) if tma else x)
    group = heads // k.shape[2]
    section = min(pairs, group * max(1, _L2_BYTES // (2 * room * dim * itemsize)))
    factor = scale * _LOG2E
    if softcap is not None:
        factor, softcap = scale / softcap, softcap * _LOG2E
    alibi_scale = None if alibi_scale is None else alibi_scale * _LOG2E
    launch(
        attention_kernel,
        (-(-tokens // config.block_m) * pairs,),
        *tensors, out, mask, segments, positions, alibi, sinks, relative, most,
        *by_table[:2], *held, starts, slots,
        factor, softcap, alibi_scale, window, tokens, room, count, heads, pairs, section,
        *_strides(q), *_strides(k), *_strides(v),
        *(0 if x is None else x.stride(0) for x in per_key.values()),
        GROUP=group, DIM=dim, MAIN=main, REST=rest, CAUSAL=causal,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, TMA=tma, SIZE=by_table[2],
        num_warps=config.warps, num_stages=config.stages, pdl=pdl,
    )  # fmt: skip
    return out


_LOG2E = math.log2(math.e)
_L2_BYTES = 16 << 20  # of keys and values that are read at a time; an H100 has 50 MB
_FLOAT32 = ("float32",)
_DTYPES = (*_FLOAT32, "bfloat16", "float16")
_INTEGERS = ("int32", "int64")
_BOOL = ("bool",)


def _split(dim: int) -> tuple[int, int]:
    """Two block extents that hold a head: 80 is 64 + 16; the second is 0 where one is as good."""
    main = max(1 << (dim.bit_length() - 1), 16)
    rest = 0 if dim <= main else max(next_power_of_2(dim - main), 16)
    return (2 * main, 0) if rest == main else (main, rest)


def _strides(x: Any) -> tuple[int, int, int]:
    return x.stride(0), x.stride(2), x.stride(1)


def _has_descriptor(x: Any) -> bool:
    """True if TMA can read x [B, T, heads, D]: Hopper, addresses that are multiples of 16 bytes."""
    if isinstance(x, Operand) or not (INTERPRETED or has_pdl(x)) or x.data_ptr() % 16:
        return False
    steps = (n for n, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1)
    return all(n > 0 and n * x.element_size() % 16 == 0 for n in steps)


def _descriptor(x: Any, rows: int, columns: int, end: int) -> TensorDescriptor:
    """Blocks [rows, columns] of one head of x, of which `end` tokens exist."""
    batch, _, heads, dim = x.shape
    # An axis of one element may have any stride; TMA wants multiples of 16 bytes even there.
    steps = [n if size > 1 else 16 for n, size in zip(x.stride(), x.shape, strict=True)]
    strides = [steps[0], steps[2], steps[1], 1]
    return TensorDescriptor(x, [batch, heads, end, dim], strides, [1, 1, rows, columns])


def _check(
    q: Any,
    k: Any,
    v: Any,
    table: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    starts: Any,
) -> None:
    batch, tokens, heads, dim = q.shape
    if table is not None and (k.shape[1] < 16 or k.shape[1] & (k.shape[1] - 1)):
        raise ValueError(f"blocks of {k.shape[1]} tokens: expected a power of 2 from 16 on.")
    count, room = k.shape[:2] if table is None else slots_and_room(k.transpose(1, 2), table)
    whole = count == batch and room >= tokens
    if (
        not (whole or starts is not None)
        or k.shape != v.shape
        or k.shape[3] != dim
        or heads % k.shape[2]
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: expected [B, T, H, D] "
            "and twice [B, S, K, D], or with starts those of a cache, and H a multiple of K."
        )
    if dim > LARGEST_HEAD:
        raise ValueError(f"head_dim {dim}: at most {LARGEST_HEAD}. Use torch's attention for it.")
    if dtype_name(q.dtype) not in _DTYPES:
        raise ValueError(f"q is {q.dtype}: expected one of {_DTYPES}.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last axis; expected 1.")
    for name, x in (("scale", scale), ("window", window), ("softcap", softcap)):
        if x is not None and not x > 0:
            raise ValueError(f"{name}={x}: expected a positive number, or None for no {name}.")


def _check_option(name: str, x: Any, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """A row of `x` may be longer than `shape` says."""
    if x is None:
        return
    fits = x.dim() == len(shape) and x.shape[:-1] == shape[:-1]
    if not fits or x.shape[-1] < shape[-1] or (len(shape) == 1 and x.shape != shape):
        raise ValueError(f"{name} {tuple(x.shape)}: expected {list(shape)}.")
    if dtype_name(x.dtype) not in dtypes:
        raise ValueError(f"{name} is {x.dtype}; expected {' or '.join(dtypes)}.")
    if x.numel() and x.stride(-1) != 1:
        raise ValueError(f"{name} has stride {x.stride(-1)} in its last axis; expected 1.")
