"""Parameters on JAX devices: a pytree for the steps, and an nnx model for people that shows it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...arrays import kind_of, to_jax
from ...checkpoint.reader import RowReader
from ...errors import ArgumentError, a_type
from ...model.load_plan import LoadPlan, TensorSource
from ...model.spec import Layer as LayerSpec
from ...model.spec import ModelSpec
from ...model.weights import (
    Leaf,
    Row,
    Weight,
    encoder_weights,
    make_leaf,
    named_arrays,
    part_name,
    parts_of,
    put_leaf,
    with_parts,
)
from ...parallel.shard import Found, Shard, fit_blocks
from ...parallel.sharding import ShardingPlan
from ...quantization.scheme import padding
from ..streaming import Streaming
from .mesh import Place
from .ops.schemes import SCHEMES
from .streaming import to_device, to_host

Weights = dict[str, Leaf]

jax.tree_util.register_dataclass(
    Weight,
    data_fields=["data", "beside", "pieces"],
    meta_fields=["axes", "scheme", "stands_for", "blocks"],
)


class Params(NamedTuple):
    """The weights outside the layers, and those of each layer: what the compiled steps see.

    With them, where kernels exchange, int32 [ranks, ...]: the table of an `Exchange`.
    """

    outer: Weights
    layers: tuple[Weights, ...]
    mailboxes: jax.Array | None = None

    def group(self, row: Row) -> Weights:
        """The weights of the row's layer, or those outside the layers."""
        return self.outer if row.layer is None else self.layers[row.layer]

    def of_encoder(self, decoder: int) -> "Params":
        """The weights of the encoder, whose layers follow those of a `decoder` of so many."""
        outer = encoder_weights(self.outer)
        return self._replace(outer=outer, layers=self.layers[decoder:])

    def leaves(self) -> list[Leaf]:
        """Every leaf."""
        return [leaf for group in (self.outer, *self.layers) for leaf in group.values()]


def make_tree(params: Params) -> dict[str, Any]:
    """The arrays themselves, by the parts of their names: tree["layers"][0]["qkv"]["weight"].

    What a quantized weight's codes need lies beside them: "weight_scale", "weight_zero".
    """

    def nest(weights: Weights) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, array in named_arrays(weights).items():
            *parts, last = name.split(".")
            inner = tree
            for part in parts:
                inner = inner.setdefault(part, {})
            inner[last] = array
        return tree

    return {**nest(params.outer), "layers": [nest(layer) for layer in params.layers]}


def read_tree(tree: Any, like: Params) -> Params:
    """Params of a tree such as `make_tree(like)`; dicts and lists of any kind, NumPy arrays too.

    Raises ArgumentError that names each array that is missing, unknown, or of another shape or
    dtype than that of `like`.
    """
    leaves = _flatten(tree)
    groups = [("", like.outer), *((f"layers.{i}.", g) for i, g in enumerate(like.layers))]
    expected = {p + name: a for p, group in groups for name, a in named_arrays(group).items()}
    unfit = []
    for name in leaves.keys() & expected.keys():
        data, array = expected[name], leaves[name]
        if kind_of(array) not in ("jax", "numpy"):
            unfit.append(f"{name} is {a_type(array)}, no array")
        elif (array.shape, array.dtype) != (data.shape, data.dtype):
            unfit.append(
                f"{name} is {array.dtype}{list(array.shape)}, expected "
                f"{data.dtype}{list(data.shape)}"
            )
    problems = [
        f"{what} {len(names)}: {', '.join(sorted(names)[:8])}" + (" ..." if len(names) > 8 else "")
        for what, names in (
            ("missing", expected.keys() - leaves.keys()),
            ("unknown", leaves.keys() - expected.keys()),
            ("not fitting", unfit),
        )
        if names
    ]
    if problems:
        raise ArgumentError(
            f"params are not those of this engine: {'; '.join(problems)}. Expected is the "
            "structure, the shapes and the dtype of engine.params."
        )

    def read(name: str, leaf: Leaf) -> Leaf:
        parts = {part: jnp.asarray(leaves[part_name(name, part)]) for part in parts_of(leaf)}
        return with_parts(leaf, parts)

    outer, *layers = (
        {name: read(prefix + name, leaf) for name, leaf in group.items()}
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
    """A named group of parameters, such as one projection: `weight`, perhaps `bias`.

    What a quantized weight's codes need are parameters beside them: `weight_scale`, `weight_zero`.
    Pieces that are quantized in different ways are `weight_q` and so on.
    """

    def put(self, path: list[str], param: nnx.Param) -> None:
        """Hang `param` at `path` below this part, making the parts on the way."""
        if len(path) == 1:
            setattr(self, path[0], param)
            return
        if not hasattr(self, path[0]):
            setattr(self, path[0], Part())
        getattr(self, path[0]).put(path[1:], param)


def _weight_of(part: Any, name: str) -> Weight:
    """The Weight of the arrays that `Model.show` has hung into a part."""
    param = getattr(part, name)
    arrays = {kind: getattr(part, part_name(name, kind))[...] for kind in param.kinds}
    beside = {kind: array for kind, array in arrays.items() if kind != "data"}
    own = param.axes, param.scheme, beside, param.stands_for, param.blocks
    return to_device(Weight(arrays["data"], *own))


class Layer(Part):
    """One decoder layer. `qkv` is fused; `q`, `k` and `v` are slices of it made on access.

    Of several devices, each one's blocks follow those of the one before: H and K are then what all
    of them hold together, padding and copies included.
    """

    qkv: Any

    def __init__(self, sizes: tuple[int, int, int], devices: int):
        self.sizes, self.devices = sizes, devices

    def _rows(self, index: int) -> jax.Array:
        if not hasattr(self.qkv, "weight"):  # its pieces are quantized in different ways
            return SCHEMES.dequantize(_weight_of(self.qkv, f"weight_{'qkv'[index]}"))
        start = sum(self.sizes[:index])
        weight = SCHEMES.dequantize(_weight_of(self.qkv, "weight"))
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


def _qkv_sizes(layer: LayerSpec) -> tuple[int, int, int]:
    """Rows of a layer's queries, keys and values, but for those of a projection of their own."""
    if layer.attention is None:
        return 0, 0, 0
    q, k, v = layer.attention.qkv_sizes
    apart = 0 if layer.block is None else layer.attention.heads * layer.block.apart
    return q - apart, k - apart, v - apart


class Model(Part):
    """A whole model to inspect, as `model.layers[0].qkv.weight`; shares the engine's buffers."""

    def __init__(self, spec: ModelSpec, devices: int):
        self.layers = nnx.List([Layer(_qkv_sizes(layer), devices) for layer in spec.all_layers])

    def show(self, row: Row, leaf: Leaf) -> None:
        """Hang a leaf in its place, in the place of what is there."""
        part = self if row.layer is None else self.layers[row.layer]
        for kind, array in parts_of(leaf).items():
            held = {}
            if isinstance(leaf, Weight) and kind == "data":
                held = {name: getattr(leaf, name) for name in ("scheme", "stands_for", "blocks")}
                held["kinds"] = tuple(parts_of(leaf))
            param = nnx.Param(array, axes=row.parts[kind], **held)
            part.put(part_name(row.local_name, kind).split("."), param)

    def __repr__(self) -> str:
        """Names, axes and dtypes, those of equal layers once; no values."""
        outer: list[str] = []
        layers: list[list[str]] = [[] for _ in self.layers]
        for keys, param in nnx.to_flat_state(nnx.state(self)):
            inner = keys[0] == "layers"
            name = ".".join(map(str, keys[2:] if inner else keys))
            (layers[int(str(keys[1]))] if inner else outer).append(f"{name}: {_describe(param)}")
        lines, first = list(outer), 0
        while first < len(layers):
            end = first
            while end < len(layers) and layers[end] == layers[first]:
                end += 1
            lines.append(f"layers[{first}]:" if end == first + 1 else f"layers[{first}:{end}]:")
            lines += [f"  {line}" for line in layers[first]]
            first = end
        return "\n  ".join([f"{type(self).__name__}(", *lines]) + "\n)"


def _describe(param: Any) -> str:
    (array,) = jax.tree.leaves(param)  # also where a transformation of nnx has left no array
    sizes = zip(param.axes, array.shape, strict=True)
    scheme = getattr(param, "scheme", None)
    held = f" ({scheme.name})" if scheme else ""
    return f"{array.dtype}[{', '.join(f'{axis}={size}' for axis, size in sizes)}]{held}"


def load_params(
    place: Place,
    tp_plan: ShardingPlan,
    plan: LoadPlan,
    source: TensorSource,
    dtype: Any,
    streaming: Streaming | None = None,
) -> tuple[Params, Model, tuple[str, ...]]:
    """The plan's rows in `dtype`: each device's share read, fused and transposed on the device.

    A weight is one array over all devices, with their blocks one after another. Beside them the
    model that shows them, and notes for people: how much was read, and how fast.
    """
    spec = tp_plan.shards[0].spec
    params, model = Params({}, tuple({} for _ in spec.all_layers)), Model(spec, tp_plan.size)
    where = params, model, place, tp_plan
    return params, model, read_into(*where, plan, source, dtype, streaming)


def read_into(
    params: Params,
    model: Model,
    place: Place,
    tp_plan: ShardingPlan,
    plan: LoadPlan,
    source: TensorSource,
    dtype: Any,
    streaming: Streaming | None = None,
    shown: bool = True,
) -> tuple[str, ...]:
    """Put the plan's rows into `params` and `model`, in the place of those there; gives notes.

    One old array goes for each new one, if nothing else holds it. What `streaming` moves goes on to
    the host's memory. `shown`: with a progress bar.
    """
    own, first = [tp_plan.shards[rank] for rank in place.ranks], tp_plan.shards[0]
    plan = fit_blocks(plan, tp_plan.shards)
    name, is_shown = jnp.dtype(dtype).name, shown and jax.process_index() == 0
    with RowReader(own, plan, source, name, is_shown) as reader:
        for row, shares in reader:
            by_rank = dict(zip(place.ranks, shares, strict=True))
            parts = {}
            for part in row.parts:

                def make(
                    rank: int,
                    device: jax.Device,
                    row: Row = row,
                    part: str = part,
                    of: Any = by_rank,
                ) -> jax.Array:
                    read = of.get(rank) or next(iter(of.values()))  # of what all hold, any's
                    return _assemble(tp_plan.shards[rank], row, part, read, dtype, device)

                array = place.join(make, first.split_axis(row, part))
                # Only then may the host's parts go, and torch write to what it has lent.
                array.block_until_ready()
                parts[part] = to_host(array) if streaming and streaming.moves(row) else array
            leaf = make_leaf(row, parts, dtype, first.width(row))
            put_leaf(params.group(row), row, leaf)
            model.show(row, leaf)
    return reader.notes()


def _assemble(
    shard: Shard, row: Row, part: str, found: Sequence[Found], dtype: Any, device: jax.Device
) -> jax.Array:
    if not row.sources:
        kind = jnp.float32 if row.wide else dtype
        if callable(row.constant):
            return jnp.asarray(shard.made(row), kind, device=device)
        return jnp.full(shard.shape(row), row.constant, kind, device=device)

    def put(array: Any, order: tuple[int, ...]) -> jax.Array:
        turned = to_jax(array, device).transpose(order)
        if row.scheme is not None:
            return turned
        return turned.astype(jnp.float32 if row.wide else dtype)

    own = [one for one in found if one.read.source.part == part]
    array = shard.assemble(row, own, put, padding(row.scheme, part, _padded), jnp.concatenate)
    return array[..., np.array(row.picks)] if row.picks else array


def _padded(block: jax.Array, shape: tuple[int, ...], value: int) -> jax.Array:
    """`block` with `value` behind its elements, up to `shape`."""
    if block.shape == shape:
        return block
    missing = [(0, n - m) for n, m in zip(shape, block.shape, strict=True)]
    return jnp.pad(block, missing, constant_values=value)


def split_notes(
    place: Place, tp_plan: ShardingPlan, leaves: Sequence[jax.Array]
) -> tuple[str, ...]:
    """Notes for people on what each of several devices holds; `leaves` are the weights."""
    if place.size == 1:
        return ()
    listed = tp_plan.shards[0].describe()
    copied = sum(x.nbytes for x in leaves if x.sharding.is_fully_replicated)
    return (
        f"tensor parallel over {place.size} devices; each holds, padding included, {listed}, and "
        f"{copied:,} bytes of weights that all have",
    )
