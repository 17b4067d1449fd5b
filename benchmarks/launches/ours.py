"""Our Triton kernels launched from JAX without jax_triton: compiled here, in one of two ways.

`ptx_call` hands XLA one kernel's PTX. `program_call` is a custom call whose handler, a function of
ours that ctypes makes callable, launches several kernels in a row; XLA captures what it does. Only
there can a kernel start before the one in front of it has ended. A prototype: a program is known
by its number in this process, which an executable kept on disk must not hold.
"""

import ctypes
import functools
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dualinfer.kernels.xla.ffi import (
    ADDRESS,
    Buffer,
    Extension,
    Frame,
    LaunchAttribute,
    LaunchConfig,
    Metadata,
    Scalar,
    StreamGet,
)


class Compiled(NamedTuple):
    """A kernel for one kind of GPU."""

    name: str
    ptx: str
    cubin: bytes
    threads: int
    shared: int


@functools.lru_cache(maxsize=256)
def compiled(
    kernel: Any, args: tuple[tuple[str, Any], ...], warps: int, early: bool, capability: int = 90
) -> Compiled:
    """`args` are names and, for pointers, their types, for all else the constants they become."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (name, value) in enumerate(args):
        if isinstance(value, str) and value.startswith("*"):
            signature[name] = value
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(i,)] = "constexpr", value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 3, "launch_pdl": early}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    found = done.metadata
    if found.global_scratch_size or found.profile_scratch_size or found.shared > 48 << 10:
        raise ValueError(
            f"{found.name} wants scratch, or more shared memory than is given unasked."
        )
    return Compiled(found.name, done.asm["ptx"], done.asm["cubin"], 32 * warps, found.shared)


def _escaped(text: str) -> str:
    for character, code in (("\\", "5C"), ("\n", "0A"), ("\t", "09"), ('"', "22")):
        text = text.replace(character, "\\" + code)
    return text


def ptx_call(
    kernel: Compiled,
    grid: tuple[int, int, int],
    args: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    places: Sequence[int],
) -> Sequence[jax.Array]:
    """Outputs of a kernel whose parameters are `args` in order, with `out` at `places` among them.

    Two more follow, for scratch memory of Triton's that these kernels do not use: any pointers do.
    """
    sizes = {"grid_x": grid[0], "grid_y": grid[1], "grid_z": grid[2]}
    sizes |= {"block_x": kernel.threads, "block_y": 1, "block_z": 1}
    sizes["shared_mem_bytes"] = kernel.shared
    numbers = ", ".join(f"{name} = {size} : i32" for name, size in sizes.items())
    indices = ", ".join(f"{place} : i32" for place in places)
    config = (
        f'{{name = "{kernel.name}", kernel_type = "ptx", kernel_data = "{_escaped(kernel.ptx)}", '
        f"{numbers}, output_indices = [{indices}]}}"
    )
    call = jax.ffi.ffi_call(
        "__gpu$xla.gpu.ptx",
        list(out),
        custom_call_api_version=2,
        legacy_backend_config=config,
    )
    return call(*args, args[0], args[0])


_METADATA = 1  # the extension by which XLA asks what a handler can do
_CAPTURABLE = 1
_VERSION = 32  # byte of the API where its version stands, two ints
_STREAM_GET_AT = 48 + 8 * 4  # byte of its fifth function
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Launch(NamedTuple):
    """A kernel on buffers: numbers of the call's arguments, then of its results behind them."""

    kernel: Compiled
    grid: tuple[int, int, int]
    buffers: tuple[int, ...]
    early: bool


class _Program:
    """Launches, with all that can be made once."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.launches, self.ready = launches, []

    def run(self, stream: int, buffers: Sequence[int]) -> None:
        if not self.ready:
            self.ready = [_prepared(launch) for launch in self.launches]
        for launch, (function, config, values, pointers) in zip(
            self.launches, self.ready, strict=True
        ):
            config.stream = stream
            for i, number in enumerate(launch.buffers):
                values[i] = buffers[number]
            _check(_cuda().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))


def _prepared(launch: Launch) -> tuple[Any, ...]:
    count = len(launch.buffers) + 2  # and Triton's two for scratch, null
    values = (ADDRESS * count)()
    pointers = (ADDRESS * count)(*(ctypes.addressof(values) + 8 * i for i in range(count)))
    attribute = (LaunchAttribute * 1)()
    attribute[0].id, attribute[0].value[0] = _SERIALIZATION, 1
    config = LaunchConfig(launch.grid, (launch.kernel.threads, 1, 1), launch.kernel.shared)
    if launch.early:
        config.attributes, config.count = attribute, 1
    return _function(launch.kernel), config, values, pointers


@functools.lru_cache(maxsize=256)
def _function(kernel: Compiled) -> Any:
    """The kernel, loaded for every device of the process."""
    library, function = ADDRESS(), ADDRESS()
    none = (None, None, 0, None, None, 0)
    _check(_cuda().cuLibraryLoadData(ctypes.byref(library), kernel.cubin, *none))
    _check(_cuda().cuLibraryGetKernel(ctypes.byref(function), library, kernel.name.encode()))
    return function


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver said {code}")


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


_programs: list[_Program] = []
_lock = threading.Lock()  # XLA calls for each device from a thread of its own
calls, spent = 0, 0.0  # of the handler, for the table


@ctypes.CFUNCTYPE(ADDRESS, ctypes.POINTER(Frame))
def _handler(pointer: Any) -> None:
    global calls, spent
    frame = pointer.contents
    try:
        if frame.extension:
            extension = Extension.from_address(frame.extension)
            if extension.type == _METADATA:
                metadata = Metadata.from_address(extension.metadata)
                version = (ctypes.c_int * 2).from_address(frame.api + _VERSION)
                metadata.major, metadata.minor = (
                    version  # whatever XLA has: we use what never moved
                )
                metadata.traits = _CAPTURABLE
                return
        started = time.perf_counter()
        get = ctypes.CFUNCTYPE(ADDRESS, ADDRESS)(
            ADDRESS.from_address(frame.api + _STREAM_GET_AT).value
        )
        got = StreamGet(ctypes.sizeof(StreamGet), None, frame.ctx, None)
        if get(ctypes.addressof(got)):
            raise RuntimeError("XLA gave no stream")
        at = [frame.args[i] for i in range(frame.args_size)]
        at += [frame.rets[i] for i in range(frame.rets_size)]
        number = Scalar.from_address(frame.attrs[0]).value[0]
        with _lock:
            _programs[number].run(got.stream, [Buffer.from_address(a).data for a in at])
        calls, spent = calls + 1, spent + time.perf_counter() - started
    except BaseException:  # XLA would go on with what is not there
        traceback.print_exc()
        os._exit(1)


@functools.cache
def _register() -> None:
    jax.ffi.register_ffi_target("dualinfer_launches", jax.ffi.pycapsule(_handler), platform="CUDA")


def program(launches: Sequence[Launch]) -> int:
    """The number by which `program_call` knows these launches."""
    _programs.append(_Program(launches))
    return len(_programs) - 1


def program_call(
    number: int,
    args: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Results of a program; `aliases` maps arguments to results in the same memory."""
    _register()
    given = dict(aliases or {})
    call = jax.ffi.ffi_call("dualinfer_launches", list(out), input_output_aliases=given)
    return call(*args, program=np.int64(number))
