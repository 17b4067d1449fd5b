"""Parameters on a JAX device: an nnx model for people, split once into a pytree for the step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...arrays import kind_of, to_jax
from ...checkpoint.reader import Found, RowReader
from ...errors import ArgumentError
from ...model.spec import ModelSpec
from ...model.weights import LoadPlan, Row, TensorSource, Weight
from ...parallel.sharding import Plan, Shard
from .mesh import Place

Weights = dict[str, Weight]

jax.tree_util.register_dataclass(
    Weight, data_fields=["data", "scale", "zero"], meta_fields=["axes", "scheme"]
)


class Params(NamedTuple):
    """The weights outside the layers, and those of each layer: what the compiled steps see.

    With them, where kernels exchange, int32 [ranks, ...]: the table of `exchange.Mailboxes`.
    """

    outer: Weights
    layers: tuple[Weights, ...]
    mailboxes: jax.Array | None = None

    def weights(self) -> list[Weight]:
        """Every leaf."""
        return [w for group in _groups(self) for w in group.values()]


def _groups(params: Params) -> tuple[Weights, ...]:
    return (params.outer, *params.layers)


def _describe(weight: Weight) -> str:
    sizes = zip(weight.axes, weight.data.shape, strict=True)
    return f"{weight.data.dtype}[{', '.join(f'{axis}={size}' for axis, size in sizes)}]"


def make_tree(params: Params) -> dict[str, Any]:
    """The arrays themselves, by the parts of their names: tree["layers"][0]["qkv"]["weight"]."""

    def nest(weights: Weights) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, weight in weights.items():
            *parts, last = name.split(".")
            inner = tree
            for part in parts:
                inner = inner.setdefault(part, {})
            inner[last] = weight.data
        return tree

    return {**nest(params.outer), "layers": [nest(layer) for layer in params.layers]}


def read_tree(tree: Any, like: Params) -> Params:
    """Params of a tree such as `make_tree(like)`; dicts and lists of any kind, NumPy arrays too.

    Raises ArgumentError that names each array that is missing, unknown, or of another shape or
    dtype than that of `like`.
    """
    found = _flatten(tree)
    groups = [("", like.outer), *((f"layers.{i}.", g) for i, g in enumerate(like.layers))]
    expected = {prefix + name: w for prefix, group in groups for name, w in group.items()}
    unfit = []
    for name in found.keys() & expected.keys():
        data, array = expected[name].data, found[name]
        if kind_of(array) not in ("jax", "numpy"):
            unfit.append(f"{name} is a {type(array).__name__}, no array")
        elif (array.shape, array.dtype) != (data.shape, data.dtype):
            unfit.append(
                f"{name} is {array.dtype}{list(array.shape)}, expected "
                f"{data.dtype}{list(data.shape)}"
            )
    problems = [
        f"{what} {len(names)}: {', '.join(sorted(names)[:8])}" + (" ..." if len(names) > 8 else "")
        for what, names in (
            ("missing", expected.keys() - found.keys()),
            ("unknown", found.keys() - expected.keys()),
            ("not fitting", unfit),
        )
        if names
    ]
    if problems:
        raise ArgumentError(
            f"params are not those of this engine: {'; '.join(problems)}. Expected is the "
            "structure, the shapes and the dtype of engine.params."
        )
    outer, *layers = (
        {
            name: dataclasses.replace(w, data=jnp.asarray(found[prefix + name]))
            for name, w in group.items()
        }
        for prefix, group in groups
    )
    return Params(outer, tuple(layers))


def _flatten(tree: Any) -> dict[str, Any]:
    """The leaves of nested mappings and sequences by their path, its parts joined by dots."""
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {"": tree}
    return {
        f"{key}.{path}" if path else str(key): leaf
        for key, value in items
        for path, leaf in _flatten(value).items()
    }


class Part(nnx.Module):
    """A named group of parameters, such as one projection: `weight`, perhaps `bias`."""

    def put(self, path: list[str], param: nnx.Param) -> None:
        """Hang `param` at `path` below this part, making the parts on the way."""
        if len(path) == 1:
            setattr(self, path[0], param)
            return
        if not hasattr(self, path[0]):
            setattr(self, path[0], Part())
        getattr(self, path[0]).put(path[1:], param)


class Layer(Part):
    """One decoder layer. `qkv` is fused; `q`, `k` and `v` are slices of it made on access.

    Of several devices, each one's blocks follow those of the one before: H and K are then what all
    of them hold together, padding and copies included.
    """

    qkv: Any

    def __init__(self, sizes: tuple[int, int, int], devices: int):
        self.sizes, self.devices = sizes, devices

    def _rows(self, index: int) -> jax.Array:
        start = sum(self.sizes[:index])
        weight = self.qkv.weight[...]
        blocks = weight.reshape(self.devices, -1, weight.shape[-1])
        return blocks[:, start : start + self.sizes[index]].reshape(-1, weight.shape[-1])

    @property
    def q(self) -> jax.Array:
        """Query projection [H*D, E]."""
        return self._rows(0)

    @property
    def k(self) -> jax.Array:
        """Key projection [K*D, E]."""
        return self._rows(1)

    @property
    def v(self) -> jax.Array:
        """Value projection [K*D, E]."""
        return self._rows(2)


class Model(Part):
    """A whole model to inspect, as `model.layers[0].qkv.weight`; shares the engine's buffers."""

    def __init__(self, spec: ModelSpec, devices: int):
        sizes = [layer.attention.qkv_sizes for layer in spec.layers]
        self.layers = nnx.List([Layer(size, devices) for size in sizes])

    def __repr__(self) -> str:
        """Names, axes and dtypes, those of equal layers once; no values."""
        outer, *layers = [
            [f"{name}: {_describe(weight)}" for name, weight in group.items()]
            for group in _groups(split_model(self))
        ]
        lines, first = list(outer), 0
        while first < len(layers):
            end = first
            while end < len(layers) and layers[end] == layers[first]:
                end += 1
            lines.append(f"layers[{first}]:" if end == first + 1 else f"layers[{first}:{end}]:")
            lines += [f"  {line}" for line in layers[first]]
            first = end
        return "\n  ".join([f"{type(self).__name__}(", *lines]) + "\n)"


def load_model(
    place: Place, tp_plan: Plan, plan: LoadPlan, source: TensorSource, dtype: Any
) -> tuple[Model, tuple[str, ...]]:
    """The plan's rows in `dtype`: each device's share read, fused and transposed on the device.

    A weight is one array over all devices, with their blocks one after another. Beside the model,
    notes for people: how much was read, and how fast.
    """
    model = Model(tp_plan.shards[0].spec, tp_plan.size)
    return model, read_into(model, place, tp_plan, plan, source, dtype)


def read_into(
    model: Model,
    place: Place,
    tp_plan: Plan,
    plan: LoadPlan,
    source: TensorSource,
    dtype: Any,
    shown: bool = True,
) -> tuple[str, ...]:
    """Put the plan's rows into `model`, in the place of those there; gives `load_model`'s notes.

    One old array goes for each new one, if nothing else holds it. `shown`: with a progress bar.
    """
    own = [tp_plan.shards[rank] for rank in place.ranks]
    with RowReader(own, plan, source, shown=shown and jax.process_index() == 0) as reader:
        for row, found in reader:
            by_rank = dict(zip(place.ranks, found, strict=True))

            def make(rank: int, device: jax.Device, row: Row = row, of: Any = by_rank) -> jax.Array:
                parts = of.get(rank) or next(iter(of.values()))  # of what all hold, any's
                return _assemble(tp_plan.shards[rank], row, parts, dtype, device)

            array = place.join(make, tp_plan.shards[0].split_axis(row))
            # Only then may the host's parts go, and torch write to what it has lent.
            param = nnx.Param(array.block_until_ready(), axes=row.axes)
            part = model if row.layer is None else model.layers[row.layer]
            part.put(row.local_name.split("."), param)
    return reader.notes()


def split_model(model: Model) -> Params:
    """The model's parameters as a plain pytree of Weight leaves over the same buffers."""
    _, state = nnx.split(model)
    params = Params({}, tuple({} for _ in model.layers))
    for keys, param in nnx.to_flat_state(state):
        (data,) = jax.tree.leaves(param)  # also where a transformation of nnx has left no array
        weight = Weight(data, param.axes)
        path = [str(key) for key in keys]
        if path[0] == "layers":
            params.layers[int(path[1])][".".join(path[2:])] = weight
        else:
            params.outer[".".join(path)] = weight
    return params


def _assemble(
    shard: Shard, row: Row, found: Sequence[Found], dtype: Any, device: jax.Device
) -> jax.Array:
    if not row.sources:
        return jnp.full(shard.shape(row), row.constant, dtype, device=device)
    blocks = []
    for read, part in found:
        array = to_jax(part, device).transpose(read.order).astype(dtype)
        shapes = shard.block_shapes(row, read)
        for block, shape in zip(shard.blocks(row, read, array), shapes, strict=True):
            blocks.append(_padded(block, shape))
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=row.join_axis)


def _padded(block: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`block` with zeros behind its elements, up to `shape`."""
    if block.shape == shape:
        return block
    return jnp.pad(block, [(0, n - m) for n, m in zip(shape, block.shape, strict=True)])


def split_notes(place: Place, tp_plan: Plan, leaves: Sequence[jax.Array]) -> tuple[str, ...]:
    """Notes for people on what each of several devices holds; `leaves` are the weights."""
    if place.size == 1:
        return ()
    listed = tp_plan.shards[0].describe()
    copied = sum(x.nbytes for x in leaves if x.sharding.is_fully_replicated)
    return (
        f"tensor parallel over {place.size} devices; each holds, padding included, {listed}, and "
        f"{copied:,} bytes of weights that all have",
    )
