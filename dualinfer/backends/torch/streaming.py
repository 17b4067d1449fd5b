"""Layers' matrices in pinned host memory, copied to the device ahead of their use."""

import mmap
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch

from ...errors import OutOfMemoryError
from ...model.weights import Leaf, Weight, parts_of, with_parts
from ..streaming import DEPTH

_ALIGNMENT = 256  # bytes: kernels read 16 at a time, and torch's own allocator aligns like this

Weights = dict[str, Leaf]


def pack(group: Weights, device: torch.device) -> torch.Tensor:
    """Bring a layer's matrices, in host memory, into one block that a copy to `device` can read.

    The leaves in `group` become views of it. Pinned where the device is a GPU.
    """
    arrays = [(n, p, a) for n, w in _matrices(group) for p, a in parts_of(w).items()]
    starts, size = [], 0
    for _, _, array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    if device.type == "cuda":
        block = _pinned(size, device)
    else:
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
    views: dict[str, dict[str, torch.Tensor]] = {}
    for (name, part, array), start in zip(arrays, starts, strict=True):
        views.setdefault(name, {})[part] = _view(block, start, array).copy_(array)
    for name, parts in views.items():
        group[name] = with_parts(group[name], parts)
    return block


def _matrices(group: Weights) -> list[tuple[str, Weight]]:
    return [(name, leaf) for name, leaf in group.items() if isinstance(leaf, Weight)]


def _view(block: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes of `block` from `start` as a tensor of the shape and dtype of `like`."""
    return block[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of pinned memory, no more: torch's own allocator rounds up to a power of two."""
    memory = mmap.mmap(-1, max(size, 1))
    array = np.frombuffer(memory, np.uint8, size)
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = int(runtime.cudaHostRegister(array.ctypes.data, size, 0))
    if status:
        with suppress(RuntimeError):  # the next launch would report the error as its own
            torch.ones(1, device=device)
        raise OutOfMemoryError(
            f"{size:,} bytes of host memory for a layer's weights cannot be pinned: "
            f"{torch.cuda.CudaError(status)}. The limit of "
            "locked memory (`ulimit -l`) or that of the container may be too low. Raise it, or "
            "keep more layers on the device with resident_layers."
        )

    def unpin(memory: mmap.mmap, address: int) -> None:
        torch.cuda.synchronize(device)  # a copy may still read it
        runtime.cudaHostUnregister(address)

    # The memory itself goes after that, with the arguments.
    weakref.finalize(array, unpin, memory, array.ctypes.data).atexit = False
    return torch.from_numpy(array)


class LayerStream(Sequence[Weights]):
    """The layers' weights, as a pass takes them one after another, on the device.

    Those in `blocks`, which `pack` has made, lie in host memory: while the device computes with one
    of them, the next one is copied beside it, after the last one the first one of the next pass.
    A layer's weights are valid until the next layer is asked for. Copies are not captured into
    CUDA graphs: each takes as long as hundreds of launches. On a CPU the order is the same, and
    each copy is done at once.
    """

    def __init__(
        self, layers: Sequence[Weights], blocks: Mapping[int, torch.Tensor], device: torch.device
    ) -> None:
        self._layers, self._blocks = layers, blocks
        self._order = sorted(blocks)
        self._number = {layer: number for number, layer in enumerate(self._order)}
        size = max(block.nbytes for block in blocks.values())
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(DEPTH)]
        self._views: dict[tuple[int, int], Weights] = {}
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = [torch.cuda.Event() for _ in range(DEPTH)] if self._side else []
        self._current: int | None = None
        self._shown: Weights = {}
        self.forget()

    def forget(self) -> None:
        """Copy every layer anew when it is next needed: the host's weights have changed."""
        self._held: list[int | None] = [None] * DEPTH  # numbers of layers, by buffer
        self._current = None

    def close(self) -> None:
        """Wait for copies under way, and let go of the buffers."""
        if self._side is not None:
            self._side.synchronize()
        self._buffers.clear()
        self._views.clear()
        self._shown = {}
        self.forget()

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def __getitem__(self, index):  # pyright: ignore  # layers are asked for one by one
        """The layer's weights, on the device."""
        if index != self._current:
            self._leave()
            self._current, self._shown = index, self._enter(index)
        return self._shown

    def _enter(self, index: int) -> Weights:
        number = self._number.get(index)
        if number is None:
            return self._layers[index]
        if number not in self._held:  # the first pass, or one after a pass that failed
            for buffer in range(DEPTH):
                self._copy((number + buffer) % len(self._order), buffer)
        buffer = self._held.index(number)
        if self._side is not None:
            torch.cuda.current_stream().wait_event(self._arrived[buffer])
        if (index, buffer) not in self._views:
            self._views[index, buffer] = self._on_device(index, buffer)
        return self._views[index, buffer]

    def _leave(self) -> None:
        """Fill the buffer of the layer that is done with."""
        number = self._number.get(self._current) if self._current is not None else None
        if number in self._held and number is not None:
            following = (number + DEPTH) % len(self._order)
            if following not in self._held:
                self._copy(following, self._held.index(number))

    def _copy(self, number: int, buffer: int) -> None:
        """Copy a layer into a buffer, once the work queued so far is done with it."""
        block = self._blocks[self._order[number]]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side) if self._side else nullcontext():
            self._buffers[buffer][: block.nbytes].copy_(block, non_blocking=True)
            if self._side is not None:
                self._arrived[buffer].record(self._side)
        self._held[buffer] = number

    def _on_device(self, index: int, buffer: int) -> Weights:
        """The layer's weights with matrices that are views of the buffer."""
        group = dict(self._layers[index])
        for name, leaf in _matrices(group):
            parts = parts_of(leaf).items()
            group[name] = with_parts(
                leaf,
                {
                    part: _view(
                        self._buffers[buffer], host.storage_offset() * host.element_size(), host
                    )
                    for part, host in parts
                },
            )
        return group
