"""A Flax module of the caller's taken apart: its arrays, cast and placed, and how to build it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core.scope import LazyRng
from jax.sharding import PartitionSpec

from ....arrays import kind_of, to_numpy
from ....errors import ModelError, a_type
from ..mesh import WHOLE, Place
from .sharded import policy_notes, read_policy

FORMS = "a flax nnx.Module, a bound Linen module (module.bind(variables)) or (module, variables)"


@dataclass(frozen=True)
class Parts:
    """A module taken apart into arrays and other leaves, each list with None in the other's places.

    `build` makes the module from all leaves; what `form` says of an nnx module is all but values.
    """

    arrays: list[Any]
    others: list[Any]
    build: Callable[[list[Any]], Any]
    parameters: int
    parameter_bytes: int
    notes: tuple[str, ...] = ()
    form: Any = None

    def make(self, arrays: list[Any]) -> Any:
        """The module with `arrays` for its own."""
        return self.build(join(arrays, self.others))


class Target(NamedTuple):
    """The form that a module's arrays are to take: floating point in `dtype`, at `place`.

    `policy` says which parameters the devices there share.
    """

    dtype: Any
    place: Place
    policy: Mapping[Any, Any] | None


def take_apart(module: Any, target: Target) -> Parts:
    """A Flax module's parts, cast and placed; nnx ones set to evaluate.

    The module itself stays as it is. Raises ModelError if it is none, or its weights are missing,
    and ConfigError for a policy that does not fit it.
    """
    if isinstance(module, nnx.Module):
        return _take_nnx(module, target)
    if isinstance(module, tuple) and len(module) == 2 and isinstance(module[0], linen.Module):
        inner, variables = module
        if not isinstance(variables, Mapping):
            raise ModelError(
                f"variables of {type(inner).__name__} is {a_type(variables)}; expected a "
                'mapping of collections, as {"params": ...}.'
            )
        if inner.scope is not None:
            inner, _ = inner.unbind()
        return _take_linen(inner, _with_params(variables), None, False, target)
    if isinstance(module, linen.Module):
        if module.scope is None:
            raise ModelError(
                f"The Linen module {type(module).__name__} has no variables. Pass "
                "(module, variables), or module.bind(variables)."
            )
        scope = module.scope
        rngs = {name: LazyRng.create(rng).as_jax_rng() for name, rng in scope.rngs.items()}
        return _take_linen(*module.unbind(), rngs, scope.mutable, target)
    raise ModelError(f"model is {a_type(module)}; expected {FORMS} for backend='jax'.")


def _take_nnx(module: nnx.Module, target: Target) -> Parts:
    if not callable(module):
        raise ModelError(f"{type(module).__name__} has no __call__, so there is no forward to run.")
    specs = read_policy(target.policy, _shapes(nnx.state(module, nnx.Param)), target.place)
    graph, state = nnx.split(module)
    copy = nnx.merge(graph, _cast(state, target, specs))
    copy.eval()
    pinned = _settle_dtypes(module, copy, target.dtype)
    graph, state = nnx.split(copy)
    leaves, tree = jax.tree.flatten(state)

    def build(leaves: list[Any]) -> nnx.Module:
        return nnx.merge(graph, jax.tree.unflatten(tree, leaves))

    notes = policy_notes(specs, target.place)
    if pinned:
        notes += (f"parts that compute in a dtype of their own: {', '.join(pinned)}",)
    arrays, others = _split(leaves)
    sizes = _sizes(nnx.state(copy, nnx.Param), target.place)
    shapes = [None if x is None else (x.shape, x.dtype) for x in arrays]
    return Parts(arrays, others, build, *sizes, notes, (graph, tree, shapes, others))


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
        dtype = None if value is None or is_array(value) else jnp.dtype(value)
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
    target: Target,
) -> Parts:
    specs = read_policy(target.policy, _shapes(variables.get("params", {})), target.place)
    cast = _cast(dict(variables), target, {f"params.{name}": s for name, s in specs.items()})
    leaves, tree = jax.tree.flatten((cast, _cast(dict(rngs or {}), target, {})))

    def build(leaves: list[Any]) -> linen.Module:
        variables, rngs = jax.tree.unflatten(tree, leaves)
        return module.bind(variables, rngs=rngs, mutable=mutable)

    note = "Linen has no eval(): flags such as train or deterministic are up to the caller"
    notes = (note, *policy_notes(specs, target.place))
    return Parts(*_split(leaves), build, *_sizes(cast.get("params", {}), target.place), notes)


def _name(path: Any) -> str:
    """A path in a pytree as names joined by dots, without the attributes of boxes around arrays."""
    return ".".join(str(key.key) for key in path if hasattr(key, "key"))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a pytree's arrays, by name."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_name(path): tuple(x.shape) for path, x in leaves if hasattr(x, "shape")}


def _cast(tree: Any, target: Target, specs: Mapping[str, PartitionSpec]) -> Any:
    """The pytree cast and placed, sharing what needs neither; `specs` are by name."""

    def cast(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ModelError(
                f"The weights are missing: {jax.tree_util.keystr(path)} is abstract "
                f"({leaf.dtype}{list(leaf.shape)}). Load the weights first, with orbax for example."
            )
        if not is_array(leaf):
            return leaf
        if kind_of(leaf) != "jax":
            leaf = np.array(to_numpy(leaf))  # XLA may use host memory as it is
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(target.dtype)
        return target.place.share(leaf, specs.get(_name(path), WHOLE))

    return jax.tree_util.tree_map_with_path(cast, tree)


def _sizes(tree: Any, place: Place) -> tuple[int, int]:
    """Number of values, and bytes, of a pytree's arrays on each device."""
    arrays = place.parts([x for x in jax.tree.leaves(tree) if is_array(x)])
    return sum(x.size for x in arrays), sum(x.nbytes for x in arrays)


def is_array(value: Any) -> bool:
    """True for arrays that JAX can hold."""
    kind = kind_of(value)
    return kind in ("jax", "torch") or (kind == "numpy" and value.dtype.kind not in "OUSmM")


def _split(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """The arrays, and all else, each with None in the other's places."""
    arrays = [x if is_array(x) else None for x in leaves]
    return arrays, [None if is_array(x) else x for x in leaves]


def join(arrays: list[Any], others: list[Any]) -> list[Any]:
    """Put together again what `_split` took apart."""
    return [y if x is None else x for x, y in zip(arrays, others, strict=True)]
