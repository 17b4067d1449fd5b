"""Launches compiled for a kind of GPU without one, as Triton's own launcher would compile them.

JAX asks for their code by `begin` and `code`. Launches of torch's tensors are Triton's own, which
compiles a kernel when it is first launched: `expected` knows which ones these will be, and has
Triton find them on disk.
"""

import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

from triton import AsyncCompileMode

from . import norm
from .compiling import Absent, Task, compiled
from .launch import noting
from .operands import Launch, Pointer, Recording
from .processes import MOST, Compilers, Workers, cores, is_ending

_TYPES = {"bool": "i1", "int8": "i8", "uint8": "u8", "int32": "i32", "uint32": "u32"}
_TYPES |= {"int64": "i64", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_TYPES |= {"float64": "fp64"}
_PROCESSES = min(MOST, cores() - 1)  # one processor is left to who waits
_MOST = 4096
_MANY = 4  # processes that compile what is not needed yet beside what is
_ALIGNED = [["tt.divisibility", 16]]
POINTER = "pointer"


class Code(NamedTuple):
    """A kernel for one kind of GPU; `shared` bytes and `threads` of a program.

    `parameters` are the names of its arguments and how each is passed: POINTER, "i32", "i64" or
    "fp32". Behind them Triton has two pointers for scratch memory, which may be null.
    """

    name: str
    cubin: bytes
    threads: int
    shared: int
    parameters: tuple[tuple[str, str], ...]


class _Kind(NamedTuple):
    """All that the code of a launch depends on."""

    kernel: Any
    facts: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    capability: int


_codes: dict[_Kind, "Future[Code]"] = {}
_lock = threading.Lock()


def code(launch: Launch, capability: int) -> Code:
    """The code of a launch for GPUs of `capability`, 90 on Hopper; Triton keeps it on disk.

    It waits where threads make it already, as by `begin`.
    """
    kind = _kind(launch, capability)
    while True:
        coming, is_new = _find(kind)
        if is_new:
            _make(kind, coming)
        with suppress(CancelledError):  # an interrupt stopped another thread
            return coming.result()


def begin(launches: Sequence[Launch], capability: int) -> None:
    """Have the `code` of each made, several at a time.

    Where several are new processes of their own compile them, or threads where there can be none:
    see `processes`. Where that fails `code` raises the error, or makes it anew.
    """
    for kind in dict.fromkeys(_kind(launch, capability) for launch in launches):
        coming, is_new = _find(kind)
        if is_new:
            try:
                _workers().submit(partial(_make, kind, coming))
            except RuntimeError:  # the process can have no more threads, or ends
                _make(kind, coming)


def _find(kind: _Kind) -> tuple["Future[Code]", bool]:
    """Its code, coming or there; True if it is for the caller to make."""
    with _lock:
        if kind not in _codes and len(_codes) >= _MOST:
            _codes.clear()
        is_new = kind not in _codes
        return _codes.setdefault(kind, Future()), is_new


def _make(kind: _Kind, coming: "Future[Code]") -> None:
    try:
        if is_ending():
            raise RuntimeError("The process ends.")
        coming.set_result(_compiled(kind))
    except BaseException as error:
        is_ours = isinstance(error, Exception)
        with _lock:
            _codes.pop(kind, None)
        coming.set_exception(error if is_ours else CancelledError())
        if not is_ours:
            raise


@cache
def _workers() -> Workers:
    return Workers(max(1, _PROCESSES))


@cache
def _compilers() -> Compilers:
    return Compilers(_PROCESSES)


def prepare(capability: int) -> None:
    """Have Triton look once at all that its keys and compilers are made of, which takes a second.

    That is a hash of its own library and the versions of its tools; a later `code` finds it done.
    Where Triton has nothing on disk, processes that compile are started, as all else will be new.
    """
    recording = Recording()
    x, weight = (recording.operand(shape, "float16") for shape in ((1, 16), (16,)))
    norm.rms_norm(x, weight, 1e-6)
    kind = _kind(recording.launches[0], capability)
    try:
        compiled(kind.kernel, _task(kind)[0], only_kept=True)
    except Absent:
        _compilers().start()
        _new_here.set()
    code(recording.launches[0], capability)


_new_here = threading.Event()


def is_cold() -> bool:
    """True once `prepare` has found that Triton has nothing on disk, if many processes compile.

    Fewer would compile what nobody waits for before what somebody does.
    """
    return _new_here.is_set() and _compilers().usable and _compilers().most >= _MANY


class _Asked(Exception):
    """Ends a launch that was only asked about, with what Triton would have compiled for it."""


class _Asking(AsyncCompileMode):
    """Triton's mode in which others compile what it launches; this one has nobody compile it."""

    def __init__(self) -> None:
        super().__init__(None)  # pyright: ignore[reportArgumentType]
        self._seen: set[str] = set()

    def submit(self, key: Any, compile_fn: Any, *_: Any, **__: Any) -> Any:
        """Raise what is new of what is to be compiled, so that nothing stands for its code."""
        is_new = key not in self._seen
        self._seen.add(key)
        raise _Asked(inspect.getclosurevars(compile_fn).nonlocals if is_new else None)


class _Memory:
    """Answers Triton's launcher as a tensor does, for one without memory."""

    def __init__(self, tensor: Any) -> None:
        self.dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """An address that is as aligned as that of a tensor would be."""
        return self._offset


def expected(run: Callable[[], Any], memoryless: type) -> list["Future[None]"]:
    """Have processes compile what Triton does not find on disk of the launches of `run()`.

    No launch is made. `run` calls functions of this package on tensors, of which those of the type
    `memoryless` have no memory. Each result is done when Triton would find the code of a kernel.
    Nothing is told of what fails: a launch compiles it then, and fails as it does.
    """
    coming: list[Future[None]] = []

    def note(kernel: Any, *args: Any, **meta: Any) -> None:
        given = (_Memory(x) if isinstance(x, memoryless) else x for x in args)
        try:
            kernel.run(*given, grid=(1,), warmup=True, **meta)
        except _Asked as error:
            if (found := error.args[0]) is None:
                return
            source, options, target = (found[name] for name in ("src", "options", "target"))
            facts = source.signature, source.constants, source.attrs
            where = kernel.fn.__module__, kernel.fn.__name__
            task = Task(*where, *facts, dict(vars(options)), target.arch)
            if (line := task.line) is not None:
                coming.append(_expect(task, line))

    with _Asking(), noting(note):
        run()
    return coming


_expected: dict[bytes, "Future[None]"] = {}


def _expect(task: Task, line: bytes) -> "Future[None]":
    with _lock:
        if line not in _expected:
            try:
                _expected[line] = _workers().submit(partial(_leave_on_disk, task, line))
            except RuntimeError:  # a launch compiles it
                _expected[line] = Future()
                _expected[line].set_result(None)
        return _expected[line]


def _leave_on_disk(task: Task, line: bytes) -> None:
    if is_ending():
        return
    with suppress(Exception):
        for _ in range(2):
            try:
                compiled(task.kernel_found, task, only_kept=True)
                return
            except Absent:
                if not _compilers().compile(line, least=1):
                    return
        _compilers().give_up()


def _fact(value: Any) -> Any:
    """What code depends on: of a pointer its type, and whether it is a multiple of 16 bytes."""
    if isinstance(value, Pointer):
        return Pointer(0, value.offset % 16, value.dtype)
    # 1, 1.0 and True are equal, but not the same constants.
    return type(value), value


def _kind(launch: Launch, capability: int) -> _Kind:
    facts = tuple((name, _fact(value)) for name, value in launch.arguments)
    return _Kind(launch.kernel, facts, launch.options, capability)


def _compiled(kind: _Kind) -> Code:
    """Its code, from Triton's cache on disk if that has it."""
    task, parameters = _task(kind)
    try:
        made, _ = compiled(kind.kernel, task, only_kept=True)
    except Absent:
        made = _new(kind.kernel, task)
    found = made.metadata
    if found.global_scratch_size or found.profile_scratch_size:
        raise ValueError(f"{found.name} wants scratch memory of Triton's, which nobody gives it.")
    threads = 32 * task.options["num_warps"]
    return Code(found.name, made.asm["cubin"], threads, found.shared, parameters)


def _new(kernel: Any, task: Task) -> Any:
    """Compile a kernel in another process, or here where none does."""
    line = task.line if task.kernel_found is kernel else None
    is_there = line is not None and _compilers().compile(line)
    if is_ending():
        raise RuntimeError("The process ends.")
    made, is_new = compiled(kernel, task)
    if is_there and is_new:  # the other one keeps its code elsewhere, or its modules are others
        _compilers().give_up()
    return made


def _task(made_for: _Kind) -> tuple[Task, tuple[tuple[str, str], ...]]:
    """Make the task that Triton's own launcher would make, and tell the code's parameters."""
    kernel, facts, options, capability = made_for
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    parameters: list[tuple[str, str]] = []
    for i, ((name, fact), parameter) in enumerate(zip(facts, kernel.params, strict=True)):
        if isinstance(fact, Pointer):
            signature[name] = f"*{_TYPES[fact.dtype]}"
            parameters.append((name, POINTER))
            if not fact.offset:  # buffers begin at multiples of far more
                attributes[i,] = _ALIGNED
            continue
        value = fact[1]
        special = not parameter.do_not_specialize
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if parameter.is_constexpr or not number or (special and type(value) is int and value == 1):
            signature[name], constants[i,] = "constexpr", value
            continue
        kind = "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"
        signature[name] = kind
        parameters.append((name, kind))
        if special and kind != "fp32" and value % 16 == 0:
            attributes[i,] = _ALIGNED
    chosen = {"num_warps": 4, "num_stages": 3} | dict(options)
    where = kernel.fn.__module__, kernel.fn.__name__
    task = Task(*where, signature, constants, attributes, chosen, capability)
    return task, tuple(parameters)
