"""Module mode on JAX: a Flax module of the caller's, cast, placed, compiled per signature."""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors as flax_errors
from flax import linen, nnx
from flax.core.scope import LazyRng

from ...arrays import kind_of, to_numpy
from ...errors import ArgumentError, ModelError, UnsupportedError
from ...profiling import Profiler
from .graphs import Clock, Executables, check_compile, check_concrete

FORMS = "a flax nnx.Module, a bound Linen module (module.bind(variables)) or (module, variables)"
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


@dataclass(frozen=True)
class Parts:
    """A module taken apart into arrays and other leaves, each list with None in the other's places.

    `build` makes the module from all leaves.
    """

    arrays: list[Any]
    others: list[Any]
    build: Callable[[list[Any]], Any]
    parameters: int
    parameter_bytes: int
    notes: tuple[str, ...] = ()

    def make(self, arrays: list[Any]) -> Any:
        """The module with `arrays` for its own."""
        return self.build(_join(arrays, self.others))


class JaxModuleRunner:
    """One Flax module on one JAX device.

    `module` is a cast copy in evaluation mode, to inspect: the compiled forward does not follow
    changes to it. It shares the buffers that needed neither cast nor move, so that the caller must
    not donate those. What a call changes in its state is discarded: batch statistics stay, and
    random numbers are the same in every call.
    """

    is_compiled = True

    def __init__(
        self,
        module: Any,
        dtype: Any,
        device: jax.Device,
        options: Mapping[str, str | bool] | None = None,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._parts = take_apart(module, dtype, device)
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
        """What the module returns, its arrays as JAX arrays.

        Compiled once for each signature: shapes and dtypes of the arrays (of JAX, NumPy or torch,
        anywhere in dicts, lists and other pytrees), and the values of all else: flags, strings,
        Python numbers, functions. A number that varies goes in as an array, or each of its values
        is compiled; the last 64 signatures are kept. Raises ArgumentError for an argument that is
        neither, UnsupportedError if Python control flow needs the values of arrays, or if they are
        traced; ModelError if a Linen module lacks variables.
        """
        return self._timed(self._forward, args, kwargs)

    def _timed(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        return self._profiler.run(work, args, kwargs) if self._profiler else work(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays: list[jax.Array | None] = []
        signature: list[Any] = []
        for i, leaf in enumerate(leaves):
            array = self._put(leaf) if _is_array(leaf) else None
            arrays.append(array)
            if array is not None:
                signature.append((array.shape, array.dtype, getattr(array, "weak_type", False)))
            elif isinstance(leaf, float | complex):
                signature.append((type(leaf), repr(leaf)))  # tells 0.0 from -0.0
            elif isinstance(leaf, (*_SCALARS, np.dtype, enum.Enum)) or callable(leaf):
                signature.append((type(leaf), leaf))
            else:
                raise _bad_argument(args, kwargs, i)
        check_concrete(arrays)
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
            args, kwargs = jax.tree.unflatten(tree, _join(arrays, flags))
            with jax.named_scope(f"dualinfer/{name}"):
                result = make(weights)(*args, **kwargs)
            return jax.tree.map(_seal, result)

        try:
            with jax.profiler.TraceAnnotation("dualinfer/forward"):
                result = self._executables.run(key, call, self._parts.arrays, arrays)
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
        return jax.tree.map(_open, result, is_leaf=lambda x: isinstance(x, _Constant))

    def generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's own `generate` returns, run as it is on a fresh copy.

        To a profiler it is one entry: the forward passes within may be one compiled loop.
        """
        return self._timed(self._generate, args, kwargs)

    def _generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = jax.tree.map(lambda x: self._put(x) if _is_array(x) else x, (args, kwargs))
        with jax.profiler.TraceAnnotation("dualinfer/generate"):
            return self._parts.make(self._parts.arrays).generate(*args, **kwargs)

    def _put(self, array: Any) -> jax.Array:
        """The caller's array on the device; of host memory a copy, since the caller may write it.

        64-bit ones become 32-bit, unless JAX's x64 is on.
        """
        if kind_of(array) != "jax":
            array = np.array(to_numpy(array))
        return jax.device_put(array, self.device)

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
            "device": f"{self.device.platform}:{self.device.id}",
            "device_name": self.device.device_kind,
            "ops": {"forward": "the module's own, compiled by XLA"},
            "parameters": self._parts.parameters,
            "parameter_bytes": self._parts.parameter_bytes,
            "compilations": self.compilations,
            "cache_bytes": 0,
        }

    def close(self) -> None:
        """Let go of the module and the executables."""
        self.module = self._profiler = None
        self._parts = Parts([], [], _closed, 0, 0)
        self._executables.clear()


def take_apart(module: Any, dtype: Any, device: jax.Device) -> Parts:
    """A Flax module's parts, on `device`, floating point in `dtype`; nnx ones set to evaluate.

    The module itself stays as it is. Raises ModelError if it is none, or its weights are missing.
    """
    if isinstance(module, nnx.Module):
        return _take_nnx(module, dtype, device)
    if isinstance(module, tuple) and len(module) == 2 and isinstance(module[0], linen.Module):
        inner, variables = module
        if not isinstance(variables, Mapping):
            raise ModelError(
                f"variables of {type(inner).__name__} is a {type(variables).__name__}; expected a "
                'mapping of collections, as {"params": ...}.'
            )
        if inner.scope is not None:
            inner, _ = inner.unbind()
        return _take_linen(inner, _with_params(variables), None, False, dtype, device)
    if isinstance(module, linen.Module):
        if module.scope is None:
            raise ModelError(
                f"The Linen module {type(module).__name__} has no variables. Pass "
                "(module, variables), or module.bind(variables)."
            )
        scope = module.scope
        rngs = {name: LazyRng.create(rng).as_jax_rng() for name, rng in scope.rngs.items()}
        return _take_linen(*module.unbind(), rngs, scope.mutable, dtype, device)
    raise ModelError(f"model is a {type(module).__name__}; expected {FORMS} for backend='jax'.")


def _take_nnx(module: nnx.Module, dtype: Any, device: jax.Device) -> Parts:
    if not callable(module):
        raise ModelError(f"{type(module).__name__} has no __call__, so there is no forward to run.")
    graph, state = nnx.split(module)
    copy = nnx.merge(graph, _cast(state, dtype, device))
    copy.eval()
    pinned = _settle_dtypes(module, copy, dtype)
    graph, state = nnx.split(copy)
    leaves, tree = jax.tree.flatten(state)

    def build(leaves: list[Any]) -> nnx.Module:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    notes = (f"parts that compute in a dtype of their own: {', '.join(pinned)}",) if pinned else ()
    return Parts(*_split(leaves), build, *_sizes(nnx.state(copy, nnx.Param)), notes)


def _settle_dtypes(module: nnx.Module, copy: nnx.Module, dtype: Any) -> list[str]:
    """The parts of `copy` that compute in a dtype of their own, whatever that of the weights."""
    pinned = []
    for (path, old), (_, new) in zip(nnx.iter_modules(module), nnx.iter_modules(copy), strict=True):
        own = _floating_dtype(getattr(old, "dtype", None))
        if isinstance(old, nnx.Embed) and isinstance(new, nnx.Embed) and own == old.embedding.dtype:
            new.dtype = new.embedding.dtype  # its default, which it took when it was made
        elif own is not None and own != dtype:
            pinned.append(f"{'.'.join(map(str, path)) or 'the module'} ({own})")
    return pinned


def _floating_dtype(value: Any) -> Any:
    """A part's `dtype` attribute as a dtype; None for what else authors call so."""
    try:
        dtype = None if value is None or _is_array(value) else jnp.dtype(value)
    except (TypeError, ValueError):
        return None
    return dtype if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else None


def _with_params(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables by collection, also where the parameters came alone, without their "params".

    A module may have no parameters at all: a collection by another name stays what it is, unless
    it holds arrays or names of its parts, as only parameters do.
    """
    if "params" in variables or {"batch_stats", "cache"} & set(variables):
        return variables
    keys = {
        str(getattr(key, "key", ""))
        for path, _ in jax.tree_util.tree_flatten_with_path(dict(variables))[0]
        for key in path
    }
    if (
        any(not isinstance(part, Mapping) for part in variables.values())
        or keys & {"kernel", "bias", "scale", "embedding"}
        or any(re.fullmatch(r"[A-Z]\w*_\d+", name) for name in variables)
    ):
        return {"params": variables}
    return variables


def _take_linen(
    module: linen.Module,
    variables: Mapping[str, Any],
    rngs: Mapping[str, Any] | None,
    mutable: Any,
    dtype: Any,
    device: jax.Device,
) -> Parts:
    cast = _cast(dict(variables), dtype, device)
    leaves, tree = jax.tree.flatten((cast, _cast(dict(rngs or {}), dtype, device)))

    def build(leaves: list[Any]) -> linen.Module:
        variables, rngs = jax.tree.unflatten(tree, leaves)
        return module.bind(variables, rngs=rngs, mutable=mutable)

    note = "Linen has no eval(): flags such as train or deterministic are up to the caller"
    return Parts(*_split(leaves), build, *_sizes(cast.get("params", {})), (note,))


def _cast(tree: Any, dtype: Any, device: jax.Device) -> Any:
    """The pytree on `device`, floating-point arrays in `dtype`, sharing what needs neither."""

    def cast(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ModelError(
                f"The weights are missing: {jax.tree_util.keystr(path)} is abstract "
                f"({leaf.dtype}{list(leaf.shape)}). Load the weights first, with orbax for example."
            )
        if not _is_array(leaf):
            return leaf
        if kind_of(leaf) != "jax":
            leaf = np.array(to_numpy(leaf))  # XLA may use host memory as it is
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(dtype)
        return jax.device_put(leaf, device)

    return jax.tree_util.tree_map_with_path(cast, tree)


def _sizes(tree: Any) -> tuple[int, int]:
    """Number of values, and bytes, of a pytree's arrays."""
    arrays = [x for x in jax.tree.leaves(tree) if _is_array(x)]
    return sum(x.size for x in arrays), sum(x.nbytes for x in arrays)


def _is_array(value: Any) -> bool:
    kind = kind_of(value)
    return kind in ("jax", "torch") or (kind == "numpy" and value.dtype.kind not in "OUSmM")


def _split(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """The arrays, and all else, each with None in the other's places."""
    arrays = [x if _is_array(x) else None for x in leaves]
    return arrays, [None if _is_array(x) else x for x in leaves]


def _join(arrays: list[Any], others: list[Any]) -> list[Any]:
    """What `_split` took apart."""
    return [y if x is None else x for x, y in zip(arrays, others, strict=True)]


def _seal(leaf: Any) -> Any:
    """A leaf of a result as compiled code can return it."""
    if _is_array(leaf):
        return leaf
    if leaf is None or isinstance(leaf, (*_SCALARS, np.dtype, enum.Enum)):
        return _Constant(leaf)
    raise UnsupportedError(
        f"The module returns a {type(leaf).__name__}, which JAX does not know as a container. "
        "Return a dict or a tuple, or make the class a flax.struct.dataclass."
    )


def _open(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Constant) else leaf


def _bad_argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> ArgumentError:
    path, leaf = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][index]
    name = f"argument {path[1].idx}" if path[0].idx == 0 else str(path[1].key)
    name += jax.tree_util.keystr(path[2:])
    return ArgumentError(
        f"{name} is a {type(leaf).__name__}; expected an array of JAX, NumPy or torch, or a flag: "
        "a Python number, string, dtype, enum or function."
    )


def _closed(leaves: list[Any]) -> Any:
    raise AssertionError("closed")
