"""Models with random weights: a HF module made on the device, or a checkpoint's folder on disk."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import numpy_dtype
from ..checkpoint.files import write_tensors
from ..errors import ModelError
from .shapes import Model

_DEVIATION = 0.02  # as HF initialises most families
_BLOCK = 4194301  # values drawn; a prime, so that a matrix's rows are not alike


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

    Needs no framework, and memory for one tensor only.
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
    """A safetensors file of ones for norms and normal values for the rest."""
    _, table = model.describe()
    kind = numpy_dtype(dtype)
    tensors = {
        source.name: (dtype, table.shape(row, source.axes))
        for row in table.rows
        for source in row.sources
    }
    random = np.random.default_rng(0)
    block = (_DEVIATION * random.standard_normal(_BLOCK, np.float32)).astype(kind)

    def arrays() -> Iterator[np.ndarray]:
        for name, (_, shape) in tensors.items():
            if len(shape) == 1 and name.endswith(".weight"):  # a norm's
                yield np.ones(shape, kind)
            else:
                yield np.resize(np.roll(block, -int(random.integers(_BLOCK))), shape)

    write_tensors(path, tensors, arrays(), to_disk=False)
