"""Module mode on JAX: a Flax module of the caller's, cast, placed, compiled per signature."""

import enum
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import errors as flax_errors
from flax import nnx

from ....arrays import kind_of, to_numpy
from ....errors import ArgumentError, ModelError, UnsupportedError, a_type
from ...profiling import Profiler
from ..executables import Clock, Executables, check_compile, check_untraced
from ..mesh import ManyDevices, in_place
from .parts import Parts, Target, is_array, join, take_apart

_NEED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_NO_WEIGHTS = (flax_errors.ScopeParamNotFoundError, flax_errors.ScopeCollectionNotFound)
_SCALARS = (bool, int, float, complex, str, bytes)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Constant:
    """A part of a result that is no array: it passes through compilation as it is."""

    value: Any


class JaxModuleRunner:
    """One Flax module on the devices of one place.

    `module` is a cast copy in evaluation mode, to inspect: the compiled forward does not follow
    changes to it. It shares the buffers that needed neither cast nor move, so that the caller must
    not donate those. What a call changes in its state is discarded: batch statistics stay, and
    random numbers are the same in every call.
    """

    is_compiled = True

    def __init__(
        self,
        module: Any,
        target: Target,
        options: Mapping[str, str | bool] | None = None,
    ) -> None:
        self.dtype, self._place = target.dtype, target.place
        self.device = self._place.device
        self._target = target
        is_nnx = isinstance(module, nnx.Module)
        self._given = weakref.ref(module) if is_nnx else None
        self._parts = take_apart(module, target)
        self.module: Any = self._parts.make(self._parts.arrays)
        self.notes = self._parts.notes
        self._name = type(self.module).__name__
        self._executables = Executables(options)
        self._profiler: Profiler | None = None

    @property
    def compilations(self) -> int:
        """Executables compiled so far: one for each signature."""
        return self._executables.compilations

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module and return its result, arrays as JAX arrays.

        Compiled once for each signature: shapes and dtypes of the arrays (of JAX, NumPy or torch,
        anywhere in dicts, lists and other pytrees), and the values of all else: flags, strings,
        Python numbers, functions. A number that varies goes in as an array, or each of its values
        is compiled; the last 128 signatures are kept. Raises ArgumentError for an argument that is
        neither, UnsupportedError if Python control flow needs the values of arrays, or if they are
        traced; ModelError if a Linen module lacks variables.
        """
        return self._timed(self._forward, args, kwargs)

    def _timed(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        return self._profiler.run(work, args, kwargs) if self._profiler else work(args, kwargs)

    @in_place
    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays: list[jax.Array | None] = []
        signature: list[Any] = []
        for i, leaf in enumerate(leaves):
            array = self._put(leaf) if is_array(leaf) else None
            arrays.append(array)
            if array is not None:
                signature.append((array.shape, array.dtype, getattr(array, "weak_type", False)))
            elif isinstance(leaf, float | complex):
                signature.append((type(leaf), repr(leaf)))  # tells 0.0 from -0.0
            elif isinstance(leaf, (*_SCALARS, np.dtype, enum.Enum)) or callable(leaf):
                signature.append((type(leaf), leaf))
            else:
                raise _bad_argument(args, kwargs, i)
        check_untraced(arrays)
        key = (tree, tuple(signature))
        try:
            hash(key)
        except TypeError as error:
            raise ArgumentError(
                f"An argument of {self._name} cannot be part of a signature ({error}): a pytree's "
                "own fields, and functions, must be hashable."
            ) from error
        make, name = self._parts.make, self._name
        flags = [x if a is None else None for x, a in zip(leaves, arrays, strict=True)]

        def call(weights: list[Any], arrays: list[Any]) -> Any:
            args, kwargs = jax.tree.unflatten(tree, join(arrays, flags))
            with jax.named_scope(f"dualinfer/{name}"):
                result = make(weights)(*args, **kwargs)
            return jax.tree.map(_seal, result)

        try:
            with jax.profiler.TraceAnnotation("dualinfer/forward"):
                how = self._place.sharding() if isinstance(self._place, ManyDevices) else None
                weights = self._parts.arrays
                result = self._executables.run(key, call, weights, arrays, results=how)
        except _NEED_VALUES as error:
            raise UnsupportedError(
                f"{name} decides in Python by the values of an array, which are not known while it "
                f"is compiled ({type(error).__name__}). Use jax.lax.cond or jnp.where there, or "
                "pass that argument as a Python value: each value is compiled on its own."
            ) from error
        except _NO_WEIGHTS as error:
            raise ModelError(
                f"The variables of {name} lack what it reads: {error} Pass all of its collections, "
                'as {"params": ..., "batch_stats": ...}.'
            ) from error
        opened = jax.tree.map(_open, result, is_leaf=lambda x: isinstance(x, _Constant))
        return self._place.local(opened)

    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own `generate` as it is, on a fresh copy.

        To a profiler it is one entry: the forward passes within may be one compiled loop.
        """
        return self._timed(self._generate, args, kwargs)

    @in_place
    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = jax.tree.map(lambda x: self._put(x) if is_array(x) else x, (args, kwargs))
        with jax.profiler.TraceAnnotation("dualinfer/generate"):
            result = self._parts.make(self._parts.arrays).generate(*args, **kwargs)
        return self._place.local(result)

    def _put(self, array: Any) -> jax.Array:
        """The caller's array in place; of host memory a copy, since the caller may write it.

        64-bit ones become 32-bit, unless JAX's x64 is on.
        """
        if kind_of(array) != "jax":
            array = np.array(to_numpy(array))
        return self._place.put(array)

    @in_place
    def refresh(self) -> None:
        """Take the arrays that the caller's nnx module has now; no executable is compiled.

        Raises UnsupportedError for a Linen module, whose variables are values, and ModelError where
        the module is gone or has other parts, shapes or flags than before.
        """
        if self._given is None:
            raise UnsupportedError(
                f"{self._name} is a Linen module, whose variables are values: others are another "
                "model. Make an engine of them with init_inference()."
            )
        module = self._given()
        if module is None:
            raise ModelError(
                f"The {self._name} that this engine was made of is gone, so that nothing can be "
                "read again. Keep it as long as refresh() is to be called, or make a new engine."
            )
        parts = take_apart(module, self._target)
        if parts.form != self._parts.form:
            raise ModelError(
                f"The {self._name} has other parts, shapes or flags than when this engine was made "
                "of it, and refresh() takes new values alone. Make a new engine."
            )
        self._parts = replace(self._parts, arrays=parts.arrays)
        self.module = self._parts.make(self._parts.arrays)

    def watch(self, profiler: Profiler) -> None:
        """Follow `profiler`: each forward, and each generate, is one entry while it is enabled."""
        self._profiler = profiler

    def stopwatch(self, use_cuda_events: bool) -> Clock:
        """A running clock; JAX has no events, so that both forms time to completion."""
        return Clock(self._executables)

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Nothing to do, since forward is compiled; UnsupportedError for another compiler."""
        check_compile(backend, compile_kwargs)

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`."""
        return {
            "device": self._place.name,
            "device_name": self.device.device_kind,
            "ops": {"forward": "the module's own, compiled by XLA"},
            "parameters": self._parts.parameters,
            "parameter_bytes": self._parts.parameter_bytes,
            **self._executables.facts,
            "cache_bytes": 0,
        }

    def close(self) -> None:
        """Let go of the module and the executables."""
        self.module = self._profiler = None
        self._parts = Parts([], [], _closed, 0, 0)
        self._executables.clear()


def _seal(leaf: Any) -> Any:
    """A leaf of a result as compiled code can return it."""
    if is_array(leaf):
        return leaf
    if leaf is None or isinstance(leaf, (*_SCALARS, np.dtype, enum.Enum)):
        return _Constant(leaf)
    raise UnsupportedError(
        f"The module returns {a_type(leaf)}, which JAX does not know as a container. "
        "Return a dict or a tuple, or make the class a flax.struct.dataclass."
    )


def _open(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Constant) else leaf


def _bad_argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> ArgumentError:
    path, leaf = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][index]
    name = f"argument {path[1].idx}" if path[0].idx == 0 else str(path[1].key)
    name += jax.tree_util.keystr(path[2:])
    return ArgumentError(
        f"{name} is {a_type(leaf)}; expected an array of JAX, NumPy or torch, or a flag: "
        "a Python number, string, dtype, enum or function."
    )


def _closed(leaves: list[Any]) -> Any:
    raise AssertionError("closed")
