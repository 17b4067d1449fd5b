"""Layers' matrices in pinned host memory, copied to the devices ahead of their use."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ...errors import OutOfMemoryError
from ...model.weights import Leaf, Weight

HOST = "pinned_host"

Weights = Mapping[str, Leaf]


def to_host(array: jax.Array) -> jax.Array:
    """The array in pinned host memory, split as it is; waits until it is there."""
    try:
        return _moved(array, HOST).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(
            f"{array.nbytes:,} bytes of weights find no room in pinned host memory. XLA takes at "
            "most 64 GB of it on a GPU, unless the environment has another number of GB in "
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB when JAX starts. Raise it, keep more layers on the "
            "device (resident_layers), or use a quantized model."
        ) from error


def to_device(tree: Any) -> Any:
    """A tree's arrays in the devices' own memory; the copies of those in the host's are begun."""

    def put(array: jax.Array) -> jax.Array:
        if array.sharding.memory_kind != HOST:
            return array
        (device, *_) = array.sharding.addressable_devices
        return _moved(array, device.default_memory().kind)

    return jax.tree.map(put, tree)


def _moved(array: jax.Array, kind: str) -> jax.Array:
    """The array in memory of another kind: device by device, so that processes may share it."""
    parts = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in array.addressable_shards
    ]
    sharding = array.sharding.with_memory_kind(kind)
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def is_on_host(layer: Weights) -> bool:
    """True for a layer whose matrices lie in host memory."""
    arrays = jax.tree.leaves([leaf for leaf in layer.values() if isinstance(leaf, Weight)])
    return any(array.sharding.memory_kind == HOST for array in arrays)


class LayerStream:
    """The layers' weights, as a pass takes them one after another, on the devices.

    While the devices compute with one layer that lies in host memory, the next one is copied, by
    the runtime and outside of compiled code, so that the copy runs beside it; after the last one
    the first one of the next pass. Two layers are on the devices: a copy is begun once the step
    before is done, and before the next one is dispatched, since a runtime may let a copy into
    memory that was just freed wait for all that was dispatched before.
    """

    def __init__(self, layers: Sequence[Weights]) -> None:
        self._layers = layers
        self._order = [i for i, layer in enumerate(layers) if is_on_host(layer)]
        self._number = {layer: number for number, layer in enumerate(self._order)}
        self.forget()

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def take(self, index: int) -> Weights:
        """The layer's weights, on their way at least, and the next ones begun."""
        number = self._number.get(index)
        if number is None:
            return self._layers[index]
        jax.block_until_ready(self._last)
        wanted = number, (number + 1) % len(self._order)
        self._held = {n: w for n, w in self._held.items() if n in wanted}  # frees the others
        for n in wanted:
            if n not in self._held:
                self._held[n] = to_device(self._layers[self._order[n]])
        return self._held[number]

    def sent(self, index: int, result: Any) -> None:
        """`result` is what the devices compute with the layer."""
        self._last = None if index + 1 == len(self._layers) else result

    def forget(self) -> None:
        """Copy every layer anew when it is next needed: the host's weights have changed."""
        self._held: dict[int, Weights] = {}  # by number among those of host memory
        self._last: Any = None  # what the layer before has given
