"""Models with random weights: a HF module made on the device, a checkpoint's folder, or codes.

Codes need no weights that they stand for: they are drawn where an engine reads them.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ..arrays import numpy_dtype
from ..checkpoint.files.safetensors import write_tensors
from ..checkpoint.gguf.model import is_gguf
from ..checkpoint.sources import open_checkpoint
from ..checkpoint.views.quantized import open_as_held, quantize_by
from ..config import make_config
from ..errors import ModelError
from ..model.load_plan import LoadPlan, TableSource, TensorSource, make_load_plan
from ..model.weights import WeightTable
from ..opening import Opened
from ..quantization import BlockScheme, QuantizedMatrix
from ..quantization.formats import Opener
from ..quantization.recipe import Recipe, make_recipe
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
        packed = is_gguf(model.folder)
        module = kind.from_pretrained(
            model.folder.parent if packed else model.folder,
            gguf_file=model.folder.name if packed else None,
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
    source = _random_source(model, dtype)
    tensors = {name: (source.dtype(name), source.shape(name)) for name in source.names()}
    write_tensors(path, tensors, map(source.read, tensors), to_disk=False)


class RandomSource(TableSource):
    """Tensors made when they are read: ones for norms, and normal values for the rest.

    They are the same in every process.
    """

    def __init__(self, model: Model, dtype: str) -> None:
        super().__init__(model.describe()[1], dtype, f"random weights of {model.name}")

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A tensor, or the part of it at `index`."""
        shape, dtype = self.shape(name), self.dtype(name)
        if len(shape) == 1 and name.endswith(".weight"):  # a norm's
            return np.ones(shape, numpy_dtype(dtype))[index or ()]
        return _part(_normal_block(dtype), name, shape, index or (slice(None),) * len(shape))


class MXFP4Source(RandomSource):
    """As gpt-oss is published: the experts of a layer are blocks of 32 codes and their scales."""

    _EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.weight")
    _PARTS = ("_blocks", "_scales")

    def __init__(self, model: Model, dtype: str) -> None:
        super().__init__(model, dtype)
        parts: dict[str, tuple[int, ...]] = {}
        for name, shape in list(self._shapes.items()):
            if found := self._EXPERT.fullmatch(name):
                del self._shapes[name]
                outer = int(found[2]) + 1, shape[0], shape[1] // 32
                parts[f"{found[1]}.{found[3]}_blocks"] = *outer, 16
                parts[f"{found[1]}.{found[3]}_scales"] = outer
        self._shapes |= parts

    def dtype(self, name: str) -> str:
        """The one of all but codes."""
        return "uint8" if name.endswith(self._PARTS) else super().dtype(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """As RandomSource; scales are powers of two by which values have the size of its own."""
        if not name.endswith(self._PARTS):
            return super().read(name, index)
        shape = self.shape(name)
        index = index or (slice(None),) * len(shape)
        if name.endswith("_scales"):
            return np.broadcast_to(np.uint8(127 - 7), shape)[index].copy()
        return _part(_byte_block(), name, shape, index)


def _random_source(model: Model, dtype: str) -> RandomSource:
    return (MXFP4Source if model.is_quantized else RandomSource)(model, dtype)


class RandomMatrix:
    """Codes in the place of a matrix that is to be quantized, each value as likely as any other.

    What they mean has the size of RandomSource's values.
    """

    inputs_first = False

    def __init__(self, like: QuantizedMatrix) -> None:
        self.scheme, self.shape, self.stored = like.scheme, like.shape, like.stored
        assert self.scheme.rows == 1 and not (self.scheme.zeros or self.scheme.groups)

    def codes(self, rows: slice, columns: slice) -> np.ndarray:
        """See QuantizedMatrix."""
        return _part(_code_block(self.scheme), self.stored[0], self.shape, (rows, columns))

    def scale(self) -> np.ndarray:
        """See QuantizedMatrix; those of nvfp4 are around 64, and the second ones make up for it."""
        rows, width = self.shape
        count = -(-width // self.scheme.columns) if self.scheme.columns else 1
        size = OUTER if self.scheme.outer else code_size(self.scheme)
        values = np.random.default_rng(crc32(self.stored[0].encode())).random((rows, count))
        return (size * (0.5 + values)).astype(numpy_dtype(self.scheme.scale_dtype))

    def zero(self) -> None:
        """None: code 0 means zero."""

    def group(self) -> None:
        """None: columns stay where they are."""

    def outer(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        if not self.scheme.outer:
            return None
        return np.full(self.shape[0], code_size(self.scheme) / OUTER, np.float32)

    def input_scale(self) -> None:
        """None: inputs have no scale of their own."""


OUTER = 64.0
"""The scale of a block where a row has a second one."""


def random_codes(recipe: Recipe, table: WeightTable, source: TensorSource) -> Opener:
    """As `quantize_by`, with random codes and nothing that is read."""
    found = quantize_by(recipe, table, source)

    def matrix(name: str) -> QuantizedMatrix | None:
        own = found(name)
        return None if own is None else RandomMatrix(own)

    return Opener(matrix)


def random_model(model: Model, dtype: str) -> Opened:
    """The model for `init_inference`, which quantizes it to random codes."""
    return Opened(model.config, [model.class_name], _random_source(model, dtype), random_codes)


def plan_weights(model: Model, dtype: str, quant: str | None) -> LoadPlan:
    """The plan of an engine in `dtype` to load a model, quantized as the config's `quant` says."""
    _, table = model.describe()
    source: TensorSource
    if model.folder is not None:
        source = open_checkpoint(model.folder)
    elif model.is_quantized:
        source = _random_source(model, dtype)
    else:
        source = TableSource(table, dtype, model.name)
    recipe = make_recipe(make_config({"quant": quant}, {}).quant)
    source, table, _ = open_as_held(source, table, model.config.to_dict(), recipe)
    return make_load_plan(table, source)


@cache
def _normal_block(dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(_BLOCK, np.float32)
    return (_DEVIATION * values).astype(numpy_dtype(dtype))


@cache
def _byte_block() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, _BLOCK, np.uint8)


@cache
def _values(scheme: BlockScheme) -> np.ndarray:
    """All codes that are numbers, as `QuantizedMatrix.codes` has them."""
    code = scheme.code
    codes = (np.arange(1 << code.bits) - (1 << code.bits - 1) * code.signed).astype(code.dtype)
    return codes[np.isfinite(code.decode(codes))]


@cache
def _code_block(scheme: BlockScheme) -> np.ndarray:
    return np.random.default_rng(0).choice(_values(scheme), _BLOCK)


def code_size(scheme: BlockScheme) -> float:
    """The scale by which codes mean values of the common deviation."""
    return float(_DEVIATION / np.sqrt(np.mean(scheme.code.decode(_values(scheme)) ** 2)))


def _part(
    block: np.ndarray, name: str, shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    """The part at `index` of a tensor that is `block` over and over, from where its name says."""
    rows, *rest = (slice(*i.indices(n)) for i, n in zip(index, shape, strict=True))
    width, count = prod(shape[1:]), max(0, rows.stop - rows.start)
    start = (crc32(name.encode()) + rows.start * width) % len(block)
    flat = block[start : start + count * width]
    if len(flat) < count * width:
        flat = np.resize(np.roll(block, -start), count * width)
    return flat.reshape(count, *shape[1:])[(slice(None), *rest)]
