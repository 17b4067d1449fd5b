"""The place of a model: one device, or the devices of a mesh that share it."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from ...config.nested import TensorParallelConfig
from ...errors import ConfigError, UnsupportedError
from .executables import TRACED

WHOLE = PartitionSpec()  # on every device
Make = Callable[[int, jax.Device], jax.Array]


@dataclass(frozen=True)
class OneDevice:
    """A model on one device: nothing is split, and functions run as they are."""

    device: jax.Device
    size = 1
    ranks = (0,)
    over_devices = WHOLE

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device."""
        return (self.device,)

    @property
    def name(self) -> str:
        """The device for people, as gpu:0."""
        return f"{self.device.platform}:{self.device.id}"

    def split(self, dim: int | None) -> PartitionSpec:
        """The split of arrays that devices share along axis number `dim`: none here."""
        return WHOLE

    def sharding(self, spec: PartitionSpec = WHOLE) -> Sharding:
        """The sharding of an array: on this device."""
        return SingleDeviceSharding(self.device)

    def spec_of(self, array: jax.Array) -> PartitionSpec:
        """The split of an array: none."""
        return WHOLE

    def put(self, tree: Any) -> Any:
        """A pytree's arrays on the device."""
        return jax.device_put(tree, self.device)

    def operands(self, tree: Any) -> Any:
        """NumPy arrays of a step as they are: it takes them there itself, and in less time."""
        return tree

    def share(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """An array on the device."""
        return jax.device_put(array, self.device)

    def join(self, make: Make, dim: int | None) -> jax.Array:
        """`make(rank, device)` of the only device."""
        return make(0, self.device)

    def spread(self, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
        """`function`, since this device has all."""
        return function

    def local(self, tree: Any) -> Any:
        """`tree`: it is here."""
        return tree

    def parts(self, tree: Any) -> Any:
        """`tree`: the device has all of it."""
        return tree

    def context(self) -> AbstractContextManager[Any]:
        """Within it no mesh is JAX's, whatever the caller has set. Not while tracing."""
        return without_mesh()


@dataclass(frozen=True)
class ManyDevices:
    """A model that the devices of `mesh` share along `axis`; along other axes it is replicated.

    Of several processes each sees the devices of its own, and makes the same calls.
    """

    mesh: Mesh
    axis: str

    @property
    def size(self) -> int:
        """Number of devices that one copy of the model is split over."""
        return self.mesh.shape[self.axis]

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """This process's devices."""
        return tuple(self.mesh.local_devices)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The shares of the model that this process's devices hold, by number."""
        return tuple(sorted({self._rank(device) for device in self.devices}))

    def _rank(self, device: jax.Device) -> int:
        place = np.argwhere(self.mesh.devices == device)[0]
        return int(place[self.mesh.axis_names.index(self.axis)])

    @property
    def device(self) -> jax.Device:
        """The first of this process's devices, where results are handed out."""
        return self.devices[0]

    @property
    def name(self) -> str:
        """All devices for people, those of other processes too."""
        ids = ", ".join(str(device.id) for device in self.mesh.devices.flat)
        return f"{self.device.platform}:{ids}"

    @property
    def over_devices(self) -> PartitionSpec:
        """The split of arrays [devices, ...]: a row each."""
        return self.split(0)

    def split(self, dim: int | None) -> PartitionSpec:
        """The split of arrays that devices share along axis number `dim`."""
        if dim is None or self.size == 1:
            return WHOLE
        return PartitionSpec(*(None,) * dim, self.axis)

    def sharding(self, spec: PartitionSpec = WHOLE) -> NamedSharding:
        """The sharding of an array that is split by `spec`; without one, whole on every device."""
        return NamedSharding(self.mesh, spec)

    def spec_of(self, array: jax.Array) -> PartitionSpec:
        """The split of an array of this mesh."""
        assert isinstance(array.sharding, NamedSharding)
        return array.sharding.spec

    def put(self, tree: Any) -> Any:
        """A pytree's arrays, whole, on every device; every process has the same ones."""
        if not self.mesh.is_multi_process:
            return jax.device_put(tree, self.sharding())

        def there(x: Any) -> Any:
            if isinstance(x, jax.Array) and x.sharding == self.sharding():
                return x
            return self.join(lambda _, d: jax.device_put(x, d), None)

        return jax.tree.map(there, tree)

    def operands(self, tree: Any) -> Any:
        """NumPy arrays of a step, whole, on every device."""
        return self.put(tree)

    def share(self, array: Any, spec: PartitionSpec) -> jax.Array:
        """An array of one device or of host memory, split by `spec`."""
        if not self.mesh.is_multi_process:
            return jax.device_put(array, self.sharding(spec))
        if spec == WHOLE:
            return self.put(array)
        host = np.asarray(array)
        return jax.make_array_from_callback(
            host.shape, self.sharding(spec), lambda index: host[index]
        )

    def join(self, make: Make, dim: int | None) -> jax.Array:
        """One array of the parts `make(rank, device)`, side by side along axis number `dim`.

        With None all are the same. Each part is made once, on a device of its own.
        """
        by_rank: dict[int, jax.Array] = {}
        parts = []
        for device in self.devices:
            rank = 0 if dim is None else self._rank(device)
            part = by_rank.get(rank)
            part = make(rank, device) if part is None else jax.device_put(part, device)
            by_rank.setdefault(rank, part)
            parts.append(part)
        shape = list(parts[0].shape)
        if dim is not None:
            shape[dim] *= self.size
        sharding = self.sharding(self.split(dim))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)

    def spread(self, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
        """`function` of one device's parts as one of whole arrays, by specs as in jax.shard_map."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False
        )

    def local(self, tree: Any) -> Any:
        """A pytree's arrays, however they lie, as whole ones on this process's first device."""

        def fetch(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            if not x.is_fully_replicated:
                x = jax.device_put(x, self.sharding())
            return x.addressable_data(0)

        return jax.tree.map(fetch, tree)

    def parts(self, tree: Any) -> Any:
        """A pytree's arrays as what this process's first device has of each."""
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def automatic(self) -> "ManyDevices":
        """The same devices, with the compiler to see how arrays that meet are split."""
        return ManyDevices(Mesh(self.mesh.devices, self.mesh.axis_names), self.axis)

    def context(self) -> AbstractContextManager[Any]:
        """Within it no other mesh is JAX's, whatever the caller has set. Not while tracing.

        Without need none is set: Flax's own annotations of axes come to life where one is.
        """
        return _within(self.mesh)


def _within(mesh: Mesh) -> AbstractContextManager[Any]:
    """Within it JAX's mesh is `mesh`, where the caller has set one; a Mesh without axes is none."""
    if jax.sharding.get_abstract_mesh().empty:
        return nullcontext()
    try:
        return jax.set_mesh(mesh)
    except ValueError as error:
        raise UnsupportedError(TRACED) from error


def without_mesh() -> AbstractContextManager[Any]:
    """Within it no mesh is JAX's: what is made for one device after another wants none."""
    return _within(Mesh(np.empty((), object), ()))


Place = OneDevice | ManyDevices


def in_place(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an object with a `_place`, run within its context.

    What host and device exchange there is ours: no `jax.transfer_guard` of the caller's bars it.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._place.context(), jax.transfer_guard("allow"):
            return method(self, *args, **kwargs)

    return call


def find_place(settings: TensorParallelConfig, device: jax.Device) -> Place:
    """The devices that the config asks for, of the platform of `device`, the only one for one.

    Those of this process where they suffice, else those of all processes. Raises ConfigError.
    """
    if not settings.enabled:
        return OneDevice(device)
    if settings.mesh is not None:
        return _of_mesh(settings)
    degree, platform = settings.tp_size, device.platform
    if degree == 1:
        return OneDevice(device)
    devices = jax.local_devices(backend=platform)
    if degree > len(devices):
        devices = _of_all_processes(settings, platform, len(devices))
    return ManyDevices(Mesh(np.array(devices[:degree]), (settings.axis,)), settings.axis)


def _of_mesh(settings: TensorParallelConfig) -> Place:
    mesh, axis = settings.mesh, settings.axis
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"tensor_parallel.mesh={mesh!r}: expected a jax.sharding.Mesh, such as jax.make_mesh "
            "gives."
        )
    if axis not in mesh.axis_names:
        raise ConfigError(
            f"tensor_parallel.axis={axis!r}, but the mesh has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}. Name one of them."
        )
    if AxisType.Manual in mesh.axis_types:
        raise ConfigError(
            f"tensor_parallel.mesh has manual axes ({mesh}), as inside jax.shard_map; the engine "
            "maps its own steps. Pass a mesh of Auto or Explicit axes."
        )
    size = mesh.shape[axis]
    if settings.tp_size not in (1, size):
        raise ConfigError(
            f"tensor_parallel.tp_size={settings.tp_size}, but the mesh has {size} devices along "
            f"{axis!r}. Leave tp_size out."
        )
    if len(set(mesh.devices.flat)) < mesh.size:
        raise ConfigError("tensor_parallel.mesh has a device more than once. Make it of others.")
    if not mesh.local_devices:
        raise ConfigError(
            f"tensor_parallel.mesh has no device of this process (number {jax.process_index()}). "
            "Only processes that have one make the engine."
        )
    return OneDevice(mesh.devices.item()) if mesh.size == 1 else ManyDevices(mesh, axis)


def _of_all_processes(settings: TensorParallelConfig, platform: str, here: int) -> list[jax.Device]:
    """The devices of all processes, where the model is to be shared by all of them."""
    degree, devices = settings.tp_size, jax.devices(platform)
    processes = jax.process_count()
    if processes > 1 and degree == len(devices):
        return devices
    there = f"{here} {platform} device{'s' if here > 1 else ''} in this process"
    if processes > 1:
        there += f" and {len(devices)} in all {processes}"
        way = f"Use {len(devices)}, or at most {here}, or pass a mesh."
    elif platform == "cpu":
        way = (
            f"For {degree} virtual ones set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{degree} before JAX starts."
        )
    else:
        way = f"Use {here} or fewer." if here > 1 else "Leave it unset."
    raise ConfigError(f"{settings.asked_by}={degree}, but JAX has {there}. {way}")
