"""Parameters on a JAX device: an nnx model for people, split once into a pytree for the step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ...arrays import to_numpy
from ...progress import track
from ...spec import ModelSpec
from ...weights import LoadPlan, Row, TensorSource, Weight

Weights = dict[str, Weight]

jax.tree_util.register_dataclass(
    Weight, data_fields=["data", "scale", "zero"], meta_fields=["axes", "scheme"]
)


class Params(NamedTuple):
    """The weights outside the layers, and those of each layer: what the compiled steps see."""

    outer: Weights
    layers: tuple[Weights, ...]

    def weights(self) -> list[Weight]:
        """Every leaf."""
        return [w for group in (self.outer, *self.layers) for w in group.values()]


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
    """One decoder layer. `qkv` is fused; `q`, `k` and `v` are slices of it made on access."""

    qkv: Any

    def __init__(self, sizes: tuple[int, int, int]):
        self.sizes = sizes

    def _rows(self, index: int) -> jax.Array:
        start = sum(self.sizes[:index])
        return self.qkv.weight[start : start + self.sizes[index]]

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

    def __init__(self, spec: ModelSpec):
        self.layers = nnx.List([Layer(layer.attention.qkv_sizes) for layer in spec.layers])


def load_model(
    spec: ModelSpec, plan: LoadPlan, source: TensorSource, dtype: Any, device: jax.Device
) -> Model:
    """The plan's rows on `device` in `dtype`, fused and transposed there."""
    model = Model(spec)
    for row, names in track(plan.rows, f"Loading {source.description}"):
        param = nnx.Param(_assemble(plan, row, names, source, dtype, device), axes=row.axes)
        path = row.name.split(".")
        if path[0] == "layers":
            model.layers[int(path[1])].put(path[2:], param)
        else:
            model.put(path, param)
    return model


def split_model(model: Model) -> Params:
    """The model's parameters as a plain pytree of Weight leaves over the same buffers."""
    _, state = nnx.split(model)
    params = Params({}, tuple({} for _ in model.layers))
    for keys, param in nnx.to_flat_state(state):
        weight = Weight(param[...], param.axes)
        path = [str(key) for key in keys]
        if path[0] == "layers":
            params.layers[int(path[1])][".".join(path[2:])] = weight
        else:
            params.outer[".".join(path)] = weight
    return params


def _assemble(
    plan: LoadPlan,
    row: Row,
    names: tuple[str, ...],
    source: TensorSource,
    dtype: Any,
    device: jax.Device,
) -> jax.Array:
    if not row.sources:
        return jnp.full(plan.shape(row), row.constant, dtype, device=device)
    blocks = []
    for part, name in zip(row.sources, names, strict=True):
        array = jax.device_put(to_numpy(source.read(name)), device)
        array = array.transpose(row.permutation(part)).astype(dtype)
        blocks += plan.blocks(row, part, array)
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=row.join_axis)
