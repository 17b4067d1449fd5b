"""Models with random weights: a HF module made on the device, or a checkpoint's folder on disk."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import numpy_dtype
from ..errors import ModelError
from .shapes import Model

_DEVIATION = 0.02  # as HF initialises most families
_BLOCK = 4194301  # values drawn; a prime, so that a matrix's rows are not alike
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def make_module(model: Model, dtype: str, device: str) -> Any:
    """The HF module of a model, made or read in `dtype` on a torch device."""
    import torch
    import transformers

    kind: Any = getattr(transformers, model.class_name, None)
    if not (isinstance(kind, type) and transformers.PreTrainedModel in kind.__mro__):
        raise ModelError(
            f"transformers {transformers.__version__} has no model {model.class_name}."
        )
    if model.folder is not None:
        module = kind.from_pretrained(
            model.folder,
            config=model.config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
        )
        return module.to(device).eval()
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            return kind(model.config).eval()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def checkpoint(model: Model, dtype: str) -> Iterator[Path]:
    """A folder that holds the model: its own, or one with random weights while the context lasts.

    Needs no framework, and memory for one block of values only.
    """
    if model.folder is not None:
        yield model.folder
        return
    with tempfile.TemporaryDirectory(prefix="dualinfer-bench-") as temporary:
        folder = Path(temporary)
        model.config.save_pretrained(folder)
        _write_weights(model, dtype, folder / "model.safetensors")
        yield folder


def _write_weights(model: Model, dtype: str, path: Path) -> None:
    """A safetensors file: length of the header, the header in JSON, then the tensors' bytes."""
    _, table = model.describe()
    kind = numpy_dtype(dtype)
    shapes = {
        source.name: table.shape(row, source.axes) for row in table.rows for source in row.sources
    }
    header, at = {}, 0
    for name, shape in shapes.items():
        size = prod(shape) * kind.itemsize
        offsets = [at, at + size]
        header[name] = {"dtype": _SAFETENSORS[dtype], "shape": shape, "data_offsets": offsets}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    block = (_DEVIATION * random.standard_normal(_BLOCK, np.float32)).astype(kind)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            if len(shape) == 1 and name.endswith(".weight"):  # a norm's
                file.write(np.ones(shape, kind).tobytes())
            else:
                _write_values(file, block, prod(shape), int(random.integers(_BLOCK)))


def _write_values(file: Any, block: np.ndarray, count: int, start: int) -> None:
    """`count` values of the block, from `start` on and round again."""
    while count:
        piece = block[start : start + count]
        file.write(piece.view(np.uint8).data)
        count, start = count - len(piece), 0
