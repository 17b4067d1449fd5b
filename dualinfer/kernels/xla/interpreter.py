"""Launches on the CPU, by Triton's interpreter, which wants torch tensors: for tests."""

import threading
from typing import Any

import numpy as np

from ..triton.operands import Buffer, Launch, Pointer

_one_at_a_time = threading.Lock()  # the interpreter's state is the process's; devices have threads


def run(
    launches: tuple[Launch, ...],
    out: tuple[Buffer, ...],
    aliases: tuple[tuple[int, int], ...],
    *arrays: Any,
) -> list[np.ndarray]:
    """The outputs of launches over `arrays`."""
    inputs = [np.asarray(x) for x in arrays]
    origins = {place: inputs[number] for number, place in aliases}
    outputs = [
        np.array(origins[i]) if i in origins else np.zeros(b.shape, _numpy(b.dtype))
        for i, b in enumerate(out)
    ]
    buffers = [_tensor(x) for x in (*inputs, *outputs)]
    with _one_at_a_time:
        for launch in launches:
            values = {
                name: _at(buffers[x.buffer], x) if isinstance(x, Pointer) else x
                for name, x in launch.arguments
            }
            launch.kernel[launch.grid](**values)
    return outputs


def _numpy(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _tensor(x: np.ndarray) -> Any:
    """The bytes of an array, in the same memory."""
    import torch

    x = x if x.flags.writeable else x.copy()
    return torch.from_numpy(x.reshape(-1).view(np.uint8))


def _at(buffer: Any, pointer: Pointer) -> Any:
    import torch

    return buffer[pointer.offset :].view(getattr(torch, pointer.dtype))
