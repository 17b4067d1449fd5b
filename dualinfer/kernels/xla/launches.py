"""Functions of kernels/triton on JAX arrays: a primitive that stands for their launches."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    that of the GPU, 90 on Hopper. Interpreted, where Triton is, it runs on any device.
    """
    recording = Recording()
    operands: dict[int, Operand] = {}
    arrays: list[Any] = []

    def operand(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        if id(x) not in operands:
            operands[id(x)] = recording.operand(x.shape, x.dtype)
            arrays.append(x)
        return operands[id(x)]

    args, kwargs = jax.tree.map(operand, (args, kwargs))
    result = function(*args, **kwargs)
    given = len(arrays)
    changed = [operands[id(x)].buffer for x in written]
    # Outputs: what was made, then what is changed. The kernels see the latter by their outputs.
    made = range(given, len(recording.buffers))
    total = len(recording.buffers)
    numbers = {n: n for n in range(total)} | {b: total + i for i, b in enumerate(changed)}
    out = (*(recording.buffers[n] for n in made), *(recording.buffers[b] for b in changed))
    bound = launches_p.bind(
        *arrays,
        launches=tuple(launch.over(numbers) for launch in recording.launches),
        out=out,
        aliases=tuple((b, len(made) + i) for i, b in enumerate(changed)),
        capability=capability,
    )

    afterwards = dict(zip(changed, bound[len(made) :], strict=True))

    def array(x: Any) -> Any:
        if not isinstance(x, Operand):
            return x
        whole = afterwards.get(x.buffer)
        if whole is None:
            whole = bound[x.buffer - given] if x.buffer >= given else arrays[x.buffer]
        if x.offset or x.numel() != whole.size or not x.is_contiguous():
            raise ValueError("A function of kernels/triton gave a part of a buffer.")
        return whole.reshape(x.shape)

    leaves = jax.tree.map(array, result, is_leaf=lambda x: isinstance(x, Operand))
    return leaves, bound[len(made) :]


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
