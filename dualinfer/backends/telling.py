"""Log-probabilities at places of logits, on the device that holds them."""

import importlib
from typing import Any

import numpy as np

from ..arrays import from_numpy, to_numpy
from ..ops.sampling import tell


def tell_at(backend: str, logits: Any, places: np.ndarray) -> np.ndarray:
    """What `sampling.tell` says, float32 [N, 1 + 2 K], by logits [B, T, V] of a backend.

    `places` int [3, N] are a row, a column and the token there.
    """
    maths = importlib.import_module(f".{backend}.maths", __package__).MATHS
    held = from_numpy(places, "torch" if backend == "torch" else "jax")
    held = held.to(logits.device) if backend == "torch" else held
    return to_numpy(tell(maths, logits[held[0], held[1]], held[2]))
