"""Weights that stay in the host's memory: which layers, and what the device needs for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import InferenceConfig
from ..errors import OutOfMemoryError
from ..model.weights import Row
from ..parallel.shard import Shard
from .held import held_bytes

DEPTH = 2  # layers that the device has buffers for: one is computed with, the next one arrives
_FOR_WEIGHTS = 0.75  # of what is free; the rest is left to the cache and to activations


@dataclass(frozen=True)
class Streaming:
    """The layers whose matrices lie in host memory, and how large these are on one device.

    `layers` are numbered, in order; `sizes` has the bytes of the matrices of every layer. Biases
    and norms' weights are small and lie on the device.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def streamed(self) -> int:
        """Bytes that a pass over the layers copies to the device."""
        return sum(self.sizes[i] for i in self.layers)

    @property
    def buffers(self) -> int:
        """Bytes of the device's buffers."""
        return DEPTH * max((self.sizes[i] for i in self.layers), default=0)

    def moves(self, row: Row) -> bool:
        """True for a row that lies in host memory."""
        return row.is_weight and row.layer in self.layers

    def describe(self) -> str:
        """Tell people which weights lie where."""
        if not self.layers:
            return f"all {len(self.sizes)} layers fit on the device, so that none is streamed"
        return (
            f"the matrices of {len(self.layers)} of {len(self.sizes)} layers, "
            f"{self.streamed / 2**20:,.1f} MiB, stay in host memory and are streamed through "
            f"{DEPTH} buffers of {self.buffers // DEPTH / 2**20:,.1f} MiB in each pass"
        )


def spread(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` layers at even distances, so that those between hide some of the copies.

    No more layers than there are buffers are none: they would stay in these.
    """
    if count <= DEPTH:
        return ()
    return tuple(i for i in range(total) if (i + 1) * count // total > i * count // total)


def choose_layers(
    config: InferenceConfig,
    shard: Shard,
    rows: Sequence[Row],
    itemsize: int,
    free: int | None,
    on_cpu: bool = False,
) -> Streaming | None:
    """Choose what a device streams of its share of `rows`; None where the config asks for none.

    `free` are the device's bytes. Where it is the host, weights lie there already, and only a
    config that sets `resident_layers` streams, in the way that it would on a GPU. Raises
    OutOfMemoryError where not even streaming makes the weights fit.
    """
    if not config.streams or (on_cpu and config.resident_layers is None):
        return None
    count = len(shard.spec.all_layers)
    sizes, others = [0] * count, 0
    for row in rows:
        size = held_bytes(shard, row, itemsize)
        if row.layer is None or not row.is_weight:
            others += size
        else:
            sizes[row.layer] += size

    def kept(resident: int) -> tuple[Streaming, int]:
        streaming = Streaming(spread(count - resident, count), tuple(sizes))
        return streaming, others + sum(sizes) - streaming.streamed + streaming.buffers

    if config.resident_layers is not None:
        streaming, needed = kept(min(config.resident_layers, count))
        way = "Lower resident_layers, or leave it unset"
    else:
        room = 0 if free is None else int(free * _FOR_WEIGHTS)
        fitting = (n for n in range(count, 0, -1) if kept(n)[1] <= room)
        streaming, needed = kept(next(fitting, 0))
        way = "Use a quantized model, a smaller dtype or more devices"
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"With the matrices of {len(streaming.layers)} of {count} layers in host memory the "
            f"device still needs {needed:,} bytes for the embedding, the head, resident layers and "
            f"{DEPTH} buffers, and {free:,} are free. {way}."
        )
    return streaming


def check_host(streaming: Streaming | None, free: int | None, devices: int) -> None:
    """Raise OutOfMemoryError if the host's memory cannot hold what stays there for its devices."""
    needed = 0 if streaming is None else streaming.streamed * devices
    if streaming is not None and free is not None and needed > free:
        raise OutOfMemoryError(
            f"keep_module_on_host=True: {len(streaming.layers)} layers need "
            f"{needed:,} bytes of host memory, which cannot be swapped out, and "
            f"{free:,} are free. Keep more layers on the device (resident_layers), use a quantized "
            "model, or free memory."
        )
