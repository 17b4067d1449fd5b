"""Every implementation of the ops behind one face: NumPy in, NumPy out. A new one is added here."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from dualinfer import ops
from dualinfer.model.weights import Weight
from dualinfer.ops import exact, sampling
from dualinfer.ops.cache_kinds import kinds_over
from dualinfer.ops.maths import KeyScoring
from dualinfer.ops.schemes import BlockArithmetic

from .cases import GARBAGE

MATRIX_OPS = ("matmul", "embed")  # of schemes


def _functions() -> dict[str, Callable]:
    """What `ops/` has over Maths, by name."""
    found = {}
    for info in pkgutil.iter_modules(ops.__path__, f"{ops.__name__}."):
        for name, value in vars(importlib.import_module(info.name)).items():
            is_own = inspect.isfunction(value) and value.__module__ == info.name
            if is_own and [*inspect.signature(value).parameters][:1] == ["m"]:
                found[name] = value
    return found


FUNCTIONS = _functions()


def op_of(name: str, maths: Any) -> Callable:
    """An op by its name, over a framework's Maths."""
    if name == "append":
        return lambda cache, k, v, lengths: cache.append(k, v, lengths)
    if name in MATRIX_OPS:
        return getattr(BlockArithmetic(maths), name)
    if name not in FUNCTIONS:
        raise AttributeError(name)
    return partial(FUNCTIONS[name], maths)


def over_arrays(change: Callable[[np.ndarray], Any], value: Any) -> Any:
    """`value` with `change` applied to each array in it."""
    if isinstance(value, np.ndarray):
        return change(value)
    if isinstance(value, Weight):
        return dataclasses.replace(value, data=change(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(over_arrays(change, v) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(over_arrays(change, v) for v in value)
    if isinstance(value, dict):
        return {k: over_arrays(change, v) for k, v in value.items()}
    return value


class Implementation:
    """The ops of one framework; `run` calls one of its functions on NumPy arrays."""

    maths: Any
    layer_cache: Any

    def __init__(self) -> None:
        self._ops: dict[str, Callable] = {}

    def __getattr__(self, name: str) -> Callable:
        if name not in self._ops:
            self._ops[name] = op_of(name, self.maths)
        return partial(self._call, name, self._ops[name])

    def _call(self, op: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call with arrays in the places of Weight and FullCache; parameters' names tell where.

        What a `scoring` holds is given by its names.
        """
        if op in ("gumbel", "threefry2x32"):
            args = over_arrays(lambda a: a.astype(np.uint32), args)
        signature = inspect.signature(function)
        if "scoring" in signature.parameters:
            own = {name: kwargs.pop(name) for name in KeyScoring._fields if name in kwargs}
            kwargs["scoring"] = KeyScoring(**own)
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name == "weight" and op in MATRIX_OPS:
                bound.arguments[name] = Weight(value, axes=())
            elif name == "cache":
                bound.arguments[name] = self.layer_cache(*value)
        return self.run(function, *bound.args, **bound.kwargs)

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def sample(
        self, logits: np.ndarray, state: Any, position: np.ndarray, features: Any
    ) -> np.ndarray:
        raise NotImplementedError


class Torch(Implementation):
    """`backends.torch` on its default device."""

    def __init__(self) -> None:
        super().__init__()
        from dualinfer.arrays import to_numpy
        from dualinfer.backends.torch import cache, default_device, maths, sampler

        self.maths, self._sampler = maths.MATHS, sampler
        self.layer_cache = cache.KINDS["full"]
        self._device, self._to_numpy = default_device(), to_numpy

    def put(self, array: np.ndarray) -> Any:
        import torch

        if array.dtype == ml_dtypes.bfloat16:
            return torch.tensor(array.view(np.int16), device=self._device).view(torch.bfloat16)
        if array.dtype.kind in "iu":  # 32-bit words too: torch has no arithmetic on uint32
            array = array.astype(np.int64)
        return torch.tensor(array, device=self._device)

    def _put_cache(self, cache: Any) -> Any:
        """As the runner passes it: a view of the first slots and positions of larger buffers."""
        views = []
        for array in (cache.k, cache.v):  # a cache in codes has scales, too
            larger = np.pad(array, [(0, 2), (0, 0), (0, 3), (0, 0)], constant_values=GARBAGE)
            views.append(self.put(larger)[: array.shape[0], :, : array.shape[2]])
        return type(cache)(*views)

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        args = tuple(
            self._put_cache(a) if isinstance(a, self.layer_cache) else over_arrays(self.put, a)
            for a in args
        )
        result = function(*args, **over_arrays(self.put, kwargs))
        if isinstance(result, tuple):
            return tuple(self._to_numpy(r) for r in result if r is not None)
        return self._to_numpy(result)

    def sample(self, logits: np.ndarray, state: Any, position: np.ndarray, features: Any) -> Any:
        columns = self._sampler.SlotState(**over_arrays(self.put, vars(state)))
        return self.run(self._sampler.sample, logits, columns, position, features)


class Jax(Implementation):
    """`backends.jax` on its default device, compiled."""

    def __init__(self) -> None:
        super().__init__()
        from dualinfer.backends.jax import cache, maths, sampler

        self.maths, self._sampler = maths.MATHS, sampler
        self.layer_cache = cache.KINDS["full"]
        self._compiled: dict[tuple[Callable, str], Callable] = {}

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        import jax

        arrays: list[np.ndarray] = []
        over_arrays(arrays.append, (args, kwargs))

        def call(traced: list[jax.Array]) -> Any:
            taken: Iterator[jax.Array] = iter(traced)
            its_args, its_kwargs = over_arrays(lambda _: next(taken), (args, kwargs))
            return function(*its_args, **its_kwargs)

        arrays = [a.astype(np.int32) if a.dtype == np.int64 else a for a in arrays]
        rest = repr(over_arrays(lambda _: "array", (args, kwargs)))
        compiled = self._compiled.setdefault((function, rest), jax.jit(call))
        result = jax.tree.map(np.asarray, compiled(arrays))
        is_cache = isinstance(result, tuple)
        return tuple(r for r in result if r is not None) if is_cache else result

    def sample(self, logits: np.ndarray, state: Any, position: np.ndarray, features: Any) -> Any:
        words = {name: getattr(state, name).astype(np.uint32) for name in self._sampler.WORDS}
        columns = self._sampler.SlotState(**(vars(state) | words))
        mode = self._sampler.mode_of(features)
        return self.run(self._sampler.sample, logits, columns, position, mode)

    def filter_logits(self, *args: np.ndarray) -> np.ndarray:
        return self.run(self._sampler.filter_logits, *args)  # its own, without a sort


class Exact(Implementation):
    """The same text in NumPy and float64, rounded to float32 at the end."""

    maths = exact.MATHS
    layer_cache = kinds_over(exact.MATHS)["full"]

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return over_arrays(lambda a: a.astype("float32") if a.dtype.kind == "f" else a, result)

    def sample(self, logits: np.ndarray, state: Any, position: np.ndarray, features: Any) -> Any:
        with np.errstate(invalid="ignore"):  # a row without a finite logit
            return sampling.sample(self.maths, logits, state, position, features)


meaning = Exact()  # what kernels are judged by; `oracles.py` says by what it is judged itself
IMPLEMENTATIONS: dict[str, type[Implementation]] = {"torch": Torch, "jax": Jax, "exact": Exact}
