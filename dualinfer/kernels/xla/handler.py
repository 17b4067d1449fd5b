"""The custom call by which XLA runs launches of Triton kernels: a handler of XLA's FFI, in Python.

XLA calls it where it captures a command buffer (a CUDA graph), and replays what it launched. Only
within one call can a kernel start before the one in front of it has ended. A program is known by a
number made of its content, so that an executable which XLA kept on disk finds it again in another
process: tracing, which comes first in any process, makes it anew. Other processes compile its
kernels meanwhile, which takes some seconds of a model's first step; `finish` waits for them.
"""

import ctypes
import hashlib
import threading
import traceback
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax

from ..triton.ahead import POINTER, Code, begin, code
from ..triton.ahead import prepare as prepare
from ..triton.operands import Launch, Pointer
from .ffi import (
    ADDRESS,
    INT64,
    Buffer,
    ErrorCreate,
    Extension,
    Frame,
    LaunchAttribute,
    LaunchConfig,
    Metadata,
    Scalar,
    StreamGet,
)

TARGET = "dualinfer_triton_launches"

_METADATA = 1  # the extension by which XLA asks what a handler can do
_CAPTURABLE = 1
_VERSION = 32  # byte of the API where its version stands, two ints
_FUNCTIONS = 48  # byte of the API where its functions begin
_ERROR_CREATE, _STREAM_GET = 0, 4  # their numbers
_INTERNAL = 13  # XLA_FFI_Error_Code
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_UNASKED = 48 << 10  # bytes that every kernel may have
_TYPES = {POINTER: ADDRESS, "i32": ctypes.c_int32, "i64": INT64, "fp32": ctypes.c_float}


class _Ready(NamedTuple):
    """A launch with what the driver takes: `places` are buffers, offsets and where they go."""

    code: Code
    function: Any
    config: LaunchConfig
    values: list[Any]
    pointers: Any
    places: list[tuple[int, int, Any]]


class _Program:
    """Launches in their order, and their code.

    XLA calls for each device from a thread of its own, and no device waits here for another one: a
    launch may take until kernels in front have ended, which wait for kernels of other devices.
    Where they do, `load` has loaded the code before.
    """

    def __init__(self, launches: tuple[Launch, ...], capability: int) -> None:
        self.launches, self._capability = launches, capability
        self._ready: dict[int, tuple[threading.Lock, list[_Ready]]] = {}  # by device

    @cached_property
    def codes(self) -> tuple[Code, ...]:
        """The code of each launch; waits until Triton has it."""
        return tuple(code(launch, self._capability) for launch in self.launches)

    def run(self, stream: int, buffers: list[int]) -> None:
        """Launch them all; `buffers` are addresses."""
        device = _device()
        turn, prepared = self._ready.setdefault(device, (threading.Lock(), []))
        with turn:
            if not prepared:
                prepared += [*map(_prepared, self.launches, self.codes)]
                for code in set(self.codes):
                    _allow_shared(code, device)
            for ready in prepared:
                ready.config.stream = stream
                for number, offset, value in ready.places:
                    value.value = buffers[number] + offset
                config = ctypes.byref(ready.config)
                _check(_cuda().cuLaunchKernelEx(config, ready.function, ready.pointers, None))


def _prepared(launch: Launch, code: Code) -> _Ready:
    given, values = dict(launch.arguments), []
    places: list[tuple[int, int, Any]] = []
    for name, kind in code.parameters:
        argument = given[name]
        value = _TYPES[kind]()
        if isinstance(argument, Pointer):
            places.append((argument.buffer, argument.offset, value))
        else:
            value.value = argument
        values.append(value)
    values += [ADDRESS(), ADDRESS()]  # Triton's scratch
    pointers = (ADDRESS * len(values))(*(ctypes.addressof(value) for value in values))
    config = LaunchConfig(launch.grid, (code.threads, 1, 1), code.shared)
    if launch.early:
        attribute = (LaunchAttribute * 1)()
        attribute[0].id, attribute[0].value[0] = _SERIALIZATION, 1
        config.attributes, config.count = attribute, 1
    return _Ready(code, _function(code), config, values, pointers, places)


@cache
def _function(code: Code) -> Any:
    """The kernel, loaded for every device of the process."""
    library, function = ADDRESS(), ADDRESS()
    none = (None, None, 0, None, None, 0)
    _check(_cuda().cuLibraryLoadData(ctypes.byref(library), code.cubin, *none))
    _check(_cuda().cuLibraryGetKernel(ctypes.byref(function), library, code.name.encode()))
    return function


@cache
def _allow_shared(code: Code, device: int) -> None:
    if code.shared > _SHARED_UNASKED:
        _check(_cuda().cuKernelSetAttribute(_MAX_SHARED, code.shared, _function(code), device))


_loaded: defaultdict[int, set[int]] = defaultdict(set)  # numbers of programs, by device
_loading = threading.Lock()


def load(devices: Collection[int]) -> None:
    """Load the code of every finished program that is new for CUDA's `devices`, before a run.

    To load code takes CUDA's lock and waits until the device is idle. A kernel that waits for one
    of another device, whose launch waits for that lock, would wait forever.
    """
    if all(len(_loaded[device]) == len(_finished) for device in devices):
        return
    with _loading:
        for device in devices:
            for number in _finished - _loaded[device]:
                _load(_programs[number], device)
                _loaded[device].add(number)


def _load(program: _Program, device: int) -> None:
    cuda, context = _cuda(), ADDRESS()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))  # JAX holds it for good
    try:
        _check(cuda.cuCtxPushCurrent_v2(context))
        for code in set(program.codes):
            function = ADDRESS()
            _allow_shared(code, device)
            _check(cuda.cuKernelGetFunction(ctypes.byref(function), _function(code)))
            if hasattr(cuda, "cuFuncLoad"):  # of CUDA 12.4
                _check(cuda.cuFuncLoad(function))
        _check(cuda.cuCtxPopCurrent_v2(ctypes.byref(context)))
    finally:
        _check(cuda.cuDevicePrimaryCtxRelease_v2(device))


def _device() -> int:
    device = ctypes.c_int()
    _check(_cuda().cuCtxGetDevice(ctypes.byref(device)))
    return device.value


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver answered {code} to a launch of Triton's kernels.")


@cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


_programs: dict[int, _Program] = {}
_finished: set[int] = set()  # numbers of those whose code is there
_noting = threading.local()


def program(launches: tuple[Launch, ...], capability: int) -> int:
    """The number by which the custom call knows these launches, for GPUs of `capability`.

    Processes compile what is new of them; who has not said by `noted` that it will `finish` waits.
    """
    _register()
    begin(launches, capability)
    digest = hashlib.sha256(str(capability).encode())
    for launch in launches:
        digest.update(_source(launch.kernel) + repr(launch[1:]).encode())
    number = int.from_bytes(digest.digest()[:8], "little") >> 1
    _programs.setdefault(number, _Program(launches, capability))
    if (numbers := getattr(_noting, "numbers", None)) is None:
        finish([number])
    else:
        numbers.append(number)
    return number


@contextmanager
def noted() -> Iterator[list[int]]:
    """The numbers of the programs that this thread asks for within, for `finish`."""
    before, _noting.numbers = getattr(_noting, "numbers", None), []
    try:
        yield _noting.numbers
    finally:
        _noting.numbers = before


def finish(numbers: Iterable[int]) -> None:
    """Wait until these programs have their code; raise what Triton raised for one of them."""
    for number in numbers:
        if number not in _finished:
            _ = _programs[number].codes
            _finished.add(number)


@cache
def _source(kernel: Any) -> bytes:
    """A digest by which kernels differ: of the place that each is from, and of its text."""
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    return hashlib.sha256(f"{name} {kernel.src}".encode()).digest()


@ctypes.CFUNCTYPE(ADDRESS, ctypes.POINTER(Frame))
def _handler(pointer: Any) -> int | None:
    frame = pointer.contents
    try:
        if frame.extension:
            extension = Extension.from_address(frame.extension)
            if extension.type == _METADATA:
                metadata = Metadata.from_address(extension.metadata)
                version = (ctypes.c_int * 2).from_address(frame.api + _VERSION)
                metadata.major, metadata.minor = version  # whatever XLA has
                metadata.traits = _CAPTURABLE
                return None
        got = StreamGet(ctypes.sizeof(StreamGet), None, frame.ctx, None)
        if _api(frame, _STREAM_GET)(ctypes.addressof(got)):
            raise RuntimeError("XLA gave no stream.")
        at = [frame.args[i] for i in range(frame.args_size)]
        at += [frame.rets[i] for i in range(frame.rets_size)]
        number = Scalar.from_address(frame.attrs[0]).value[0]
        _programs[number].run(got.stream, [Buffer.from_address(a).data or 0 for a in at])
    except BaseException:  # XLA would go on with what is not there
        text = traceback.format_exc().encode()
        error = ErrorCreate(ctypes.sizeof(ErrorCreate), None, text, _INTERNAL)
        return _api(frame, _ERROR_CREATE)(ctypes.addressof(error))
    return None


def _api(frame: Frame, number: int) -> Any:
    """A function of XLA's."""
    address: Any = ADDRESS.from_address(frame.api + _FUNCTIONS + 8 * number).value
    return ctypes.CFUNCTYPE(ADDRESS, ADDRESS)(address)


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="CUDA")
