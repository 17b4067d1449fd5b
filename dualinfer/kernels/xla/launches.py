"""Functions of kernels/triton on JAX arrays: a primitive that stands for their launches."""

import functools
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ..triton.operands import Buffer, Launch, Operand, Recording

launches_p = Primitive("triton_launches")
launches_p.multiple_results = True


def capability_of(device: jax.Device) -> int:
    """A GPU's, 90 on Hopper; of another device one that the interpreter goes by."""
    return int(str(getattr(device, "compute_capability", "9.0")).replace(".", ""))


class _Array(NamedTuple):
    """An array of a call by its number: of those given, or of the results that are `made`."""

    number: int
    shape: tuple[int, ...]
    made: bool = False


class _Recorded(NamedTuple):
    """The launches of a call over buffers, whatever arrays these are.

    `out` are its results: memory that is new, and then what is changed, whose arguments `aliases`
    name. `changed` are the numbers of results that arrays come back as, and `result` is what the
    function gives.
    """

    launches: tuple[Launch, ...]
    out: tuple[Buffer, ...]
    aliases: tuple[tuple[int, int], ...]
    changed: tuple[int, ...]
    result: Any


def call(
    function: Callable[..., Any],
    *args: Any,
    capability: int,
    written: Sequence[Any] = (),
    **kwargs: Any,
) -> tuple[Any, list[jax.Array]]:
    """What `function` of kernels/triton gives for JAX arrays in place of tensors; then `written`.

    `written` are those arrays among its arguments that it changes in place: they come back as they
    are afterwards, in the same memory if nothing else needs them as they were. `capability` is
    that of the GPU, 90 on Hopper. Interpreted, where Triton is, it runs on any device. A function
    of a module is asked once for its launches over arguments of the same kind, and not for each
    layer of a model.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    numbers: dict[int, int] = {}
    arrays: list[Any] = []
    for x in leaves:
        if isinstance(x, jax.Array | np.ndarray) and id(x) not in numbers:
            numbers[id(x)] = len(arrays)
            arrays.append(x)
    shown = [_Array(numbers[id(x)], x.shape) if id(x) in numbers else x for x in leaves]
    kinds = tuple((x.shape, np.dtype(x.dtype)) for x in arrays)
    changed = tuple(numbers[id(x)] for x in written)
    recorded = _recorded(function, tree, tuple(shown), kinds, changed)
    bound = launches_p.bind(
        *arrays,
        launches=recorded.launches,
        out=recorded.out,
        aliases=recorded.aliases,
        capability=capability,
    )

    def array(x: Any) -> Any:
        if not isinstance(x, _Array):
            return x
        whole = bound[x.number] if x.made else arrays[x.number]
        return whole.reshape(x.shape)

    result = jax.tree.map(array, recorded.result, is_leaf=lambda x: isinstance(x, _Array))
    return result, [bound[number] for number in recorded.changed]


_MOST_KNOWN = 4096
_KNOWN: dict[Any, _Recorded] = {}


def _recorded(
    function: Any, tree: Any, leaves: tuple[Any, ...], kinds: Any, written: tuple[int, ...]
) -> _Recorded:
    """As `_record`, from before where a function of a module had such arguments."""
    given = function, tree, leaves, kinds, written
    if not isinstance(function, FunctionType) or "<" in function.__qualname__:
        return _record(*given)
    # 1 and True are equal, and so are 0.0 and -0.0, but not for a kernel.
    exact = tuple((type(x), x.hex() if isinstance(x, float) else x) for x in leaves)
    key = function, tree, exact, kinds, written
    try:
        known = _KNOWN.get(key)
    except TypeError:  # an argument has no hash
        return _record(*given)
    if known is None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[key] = _record(*given)
    return known


def _record(
    function: Any, tree: Any, leaves: tuple[Any, ...], kinds: Any, written: tuple[int, ...]
) -> _Recorded:
    """The launches of a function, whose arguments are a `tree` of `leaves`.

    Those that are arrays are named by their numbers: `kinds` are the shapes and dtypes of all
    arrays, and `written` the numbers of those that it changes.
    """
    recording = Recording()
    operands = [recording.operand(shape, dtype) for shape, dtype in kinds]
    given = len(operands)
    leaves = tuple(operands[x.number] if isinstance(x, _Array) else x for x in leaves)
    args, kwargs = jax.tree.unflatten(tree, leaves)
    result = function(*args, **kwargs)
    # Outputs: what was made, then what is changed. The kernels see the latter by their outputs.
    total = len(recording.buffers)
    made = total - given
    numbers = {n: n for n in range(total)} | {b: total + i for i, b in enumerate(written)}
    results = {b: made + i for i, b in enumerate(written)}  # a buffer's number among the outputs
    results |= {b: b - given for b in range(given, total)}

    def array(x: Any) -> Any:
        if not isinstance(x, Operand):
            return x
        whole = recording.buffers[x.buffer].shape
        if x.offset or x.numel() != math.prod(whole) or not x.is_contiguous():
            raise ValueError("A function of kernels/triton gave a part of a buffer.")
        shape = tuple(x.shape)
        return _Array(results.get(x.buffer, x.buffer), shape, made=x.buffer in results)

    return _Recorded(
        launches=tuple(launch.over(numbers) for launch in recording.launches),
        out=tuple(recording.buffers[n] for n in (*range(given, total), *written)),
        aliases=tuple((b, made + i) for i, b in enumerate(written)),
        changed=tuple(made + i for i in range(len(written))),
        result=jax.tree.map(array, result, is_leaf=lambda x: isinstance(x, Operand)),
    )


@launches_p.def_abstract_eval
def _abstract(*_: Any, out: tuple[Buffer, ...], **__: Any) -> list[Any]:
    return [ShapedArray(b.shape, jnp.dtype(b.dtype)) for b in out]


@launches_p.def_impl
def _run(*arrays: Any, **params: Any) -> Any:
    return _jitted(tuple(params.items()))(*arrays)


@functools.lru_cache(maxsize=256)
def _jitted(params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda *arrays: launches_p.bind(*arrays, **dict(params)))


def _on_gpu(
    *arrays: jax.Array,
    launches: tuple[Launch, ...],
    out: tuple[Buffer, ...],
    aliases: tuple[tuple[int, int], ...],
    capability: int,
) -> Sequence[jax.Array]:
    from . import handler  # which imports Triton

    number = handler.program(launches, capability)
    results = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in out]
    run = jax.ffi.ffi_call(handler.TARGET, results, input_output_aliases=dict(aliases))
    return run(*arrays, program=np.int64(number))


def _on_host(
    *arrays: jax.Array,
    launches: tuple[Launch, ...],
    out: tuple[Buffer, ...],
    aliases: tuple[tuple[int, int], ...],
    capability: int,
) -> Sequence[jax.Array]:
    from ..triton.launch import INTERPRETED

    if not INTERPRETED:
        raise NotImplementedError("Triton's kernels need a GPU, or TRITON_INTERPRET=1.")
    from . import interpreter

    results = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in out]
    run = functools.partial(interpreter.run, launches, out, aliases)
    return jax.pure_callback(run, results, *arrays)


for _platform, _rule in (("cuda", _on_gpu), ("cpu", _on_host)):
    mlir.register_lowering(launches_p, mlir.lower_fun(_rule, True), platform=_platform)
