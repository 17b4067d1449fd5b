"""The engine's own precision around a step: no autocast, and float32 that is float32."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_backends: Any = torch.backends  # some parts have no types of their own


def _parts() -> list[Any]:
    """The objects that hold torch's precision of float32 products, by library and operation."""
    cudnn, mkldnn = _backends.cudnn, _backends.mkldnn
    return [
        *(_backends.cuda.matmul, cudnn.conv, cudnn.rnn),
        *(mkldnn.matmul, mkldnn.conv, mkldnn.rnn),
    ]


def _told(read: Callable[[], Any]) -> Any:
    """A setting by its old name; None where the new names were set to what it cannot say."""
    try:
        return read()
    except RuntimeError:
        return None


def _set_ieee() -> Callable[[], None]:
    """Turn TF32 and bfloat16 off for float32 products; what is returned puts all back.

    The old names are set as well: torch raises where they are read and disagree with the new ones.
    """
    parts = _parts()
    before = [part.fp32_precision for part in parts]
    matmul = _told(torch.get_float32_matmul_precision)
    cudnn = _told(lambda: _backends.cudnn.allow_tf32)

    def restore() -> None:
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            _backends.cudnn.allow_tf32 = cudnn
        for part, value in zip(parts, before, strict=True):
            part.fp32_precision = value

    if matmul is not None:
        torch.set_float32_matmul_precision("highest")
    if cudnn is not None:
        _backends.cudnn.allow_tf32 = False
    for part in parts:
        part.fp32_precision = "ieee"
    return restore


class _Ieee:
    """Counts who needs float32 as it is: the first one sets it, the last one puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._restore = _set_ieee()
            self._users += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._restore is not None:
                self._restore()
                self._restore = None


# What it guards belongs to the process, not to an engine: two engines in two threads would each
# restore what the other had set.
_ieee = _Ieee()


@contextmanager
def own_precision(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """The engine's dtype inside, and no TF32 or bfloat16 where it is float32.

    The caller's autocast and float32 settings stand again after it. Other threads' float32
    products are exact meanwhile: torch has one setting for the process.
    """
    with torch.autocast(device.type, enabled=False):
        if dtype != torch.float32:
            yield
            return
        with _ieee:
            yield
