"""How Triton kernels are launched: the one place that knows of the interpreter and of PDL.

PDL is Hopper's programmatic dependent launch: a kernel starts while the one before it still runs,
fetches what that one does not write (weights), and waits before it reads anything else. Every
kernel of a chain must call `wait_for_inputs` before its first read of what another kernel writes,
and before its first write.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .operands import Operand, recording_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended and its writes can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel to start once every program of this one has got here."""
    if PDL:
        gdc_launch_dependents()


_FETCH: tl.constexpr = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; "
    "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, $2; }"
)


@triton.jit
def fetch_ahead(at, there, size):
    """Have the L2 cache fetch `size` bytes, a multiple of 16, from each pointer that is `there`.

    Only where there is PDL. Pointers are multiples of 16 bytes, and as many as threads, or some
    would be fetched several times. Nothing depends on it but the time.
    """
    args = [at.to(tl.int64), there.to(tl.int32), size]
    tl.inline_asm_elementwise(_FETCH, "=r,l,r,r", args, tl.int32, False, 1)


@triton.jit
def fetch_line(ptr, COUNT: tl.constexpr, program, PDL: tl.constexpr):
    """Have the L2 cache fetch COUNT elements from `ptr` on; one program asks for all of them.

    Only where there is PDL, before `wait_for_inputs`. Nothing depends on it but the time.
    """
    if PDL:  # noqa: SIM102 - told before the kernel is compiled
        if program == 0:
            PER: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
            at = tl.minimum(tl.arange(0, triton.next_power_of_2(COUNT // PER + 1)) * PER, COUNT - 1)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(ptr + at).to(tl.int64)],
                tl.int32, False, 1,
            )  # fmt: skip


@triton.jit
def _exact(a):
    """In float32; of bfloat16s the interpreter would lose the smallest."""
    if a.dtype == tl.bfloat16:
        a = (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return a.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """a b + acc on the matrix units, acc float32; float32 operands are not rounded to TF32."""
    if _INTERPRETED:  # its product takes bfloat16's bits for integers; float32 holds them exactly
        a = _exact(a)
        b = _exact(b)
    return tl.dot(a, b, acc, input_precision="ieee")


def has_pdl(tensor: Any) -> bool:
    """True if kernels on the tensor's device may be chained by programmatic dependent launch."""
    if INTERPRETED or isinstance(tensor, Operand) or tensor.device.type != "cuda":
        return False
    return _capability(tensor.device.index or 0) >= (9, 0)


_capabilities: dict[int, tuple[int, int]] = {}


def _capability(index: int) -> tuple[int, int]:
    if index not in _capabilities:
        import torch

        _capabilities[index] = torch.cuda.get_device_capability(index)
    return _capabilities[index]


PARSING = threading.RLock()  # for one thread at a time: what CPython 3.11 counts, threads share


def settle(kernel: Any) -> None:
    """Have Triton's key of a kernel, by which it finds code on disk, be the same in all processes.

    Up to 3.6 a function's key has the constants of those that it calls only where these have keys
    already, so that what was launched before decided it. Keys are made here in the order in which
    functions are defined, those of other modules first.
    """
    if getattr(kernel, "hash", "") is None:  # the interpreter has no keys
        with PARSING:
            _settle(sys.modules[kernel.fn.__module__], set())


def _settle(module: ModuleType, seen: set[ModuleType]) -> None:
    seen.add(module)
    functions = [one for one in vars(module).values() if isinstance(one, triton.JITFunction)]
    for function in functions:
        where = sys.modules[function.fn.__module__]
        if where not in seen:
            _settle(where, seen)
    for function in functions:
        _ = function.cache_key


_noting = threading.local()


@contextmanager
def noting(note: Callable[..., None]) -> Iterator[None]:
    """Call `note(kernel, *args, **meta)` in place of each launch that this thread makes within."""
    before = getattr(_noting, "note", None)
    _noting.note = note
    try:
        yield
    finally:
        _noting.note = before


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    pdl: bool = False,
    early: bool | int = True,
    **meta: Any,
) -> None:
    """Launch `kernel`; with `pdl` it may start before the kernel in front of it has ended.

    Its constexpr parameter PDL is set from `pdl`. Without `early` it starts when that one has
    ended, and still lets the one behind it start before its own end. Over operands it is written
    down instead, and in a thread that is `noting` it is noted.
    """
    settle(kernel)
    recording = recording_of(args)
    if recording is not None:
        recording.add(kernel, grid, args, pdl and early, PDL=pdl, **meta)
        return
    if pdl and early:
        meta["launch_pdl"] = True
    if (note := getattr(_noting, "note", None)) is not None:
        note(kernel, *args, PDL=pdl, **meta)
        return
    kernel[grid](*args, PDL=pdl, **meta)


def next_power_of_2(count: int) -> int:
    """The extent of a Triton block that holds `count` elements."""
    return 1 << max(count - 1, 0).bit_length()
