"""The tensors of a GGUF model, under HF's names and in its layouts.

llama.cpp's converter renames tensors, joins and permutes rows of some, and adds 1 to Gemma's norms:
that is undone while parts are read. Source: llama.cpp's convert_hf_to_gguf.py.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError, UnsupportedError
from ...quantization.formats import Opener
from ...quantization.formats.ggml import BlockMatrix, GgmlType, check_reader, values
from .config import ROPE_FACTORS, WAY, architecture_of, make_config
from .file import GgufFile
from .model import GgufModel

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)$")
_FAR = 64  # rows; what lies between nearer ones is read as well
_log = logging.getLogger(__name__)


class _Tensor(NamedTuple):
    """A stored tensor under HF's name; `order` gives the file's row of each row."""

    file: GgufFile
    name: str
    kind: GgmlType
    order: np.ndarray | None
    turned: bool
    raised: bool

    def blocks(self, rows: slice, rest: tuple[slice, ...]) -> np.ndarray:
        """Read some rows from the file, floats or blocks."""
        if self.order is None:
            return self.file.read(self.name, (rows, *rest))
        places = self.order[rows]
        if not len(places):
            return self.file.read(self.name, (slice(0, 0), *rest))
        by_place = np.argsort(places)
        sorted_places = places[by_place]
        runs = np.split(sorted_places, np.flatnonzero(np.diff(sorted_places) > _FAR) + 1)
        parts = [
            self.file.read(self.name, (slice(int(run[0]), int(run[-1]) + 1), *rest))[run - run[0]]
            for run in runs
        ]
        found = np.empty((len(places), *parts[0].shape[1:]), parts[0].dtype)
        found[by_place] = np.concatenate(parts)
        return found


class GgufSource:
    """The tensors of a GGUF model under HF's names; blocks are floats where they are read.

    Those of Q8_0 and Q4_0 are matrices in `matrices()`, too.
    """

    def __init__(self, path: Path):
        model = GgufModel(path)
        config = make_config(model)
        self.description = str(path)
        self._tensors: dict[str, _Tensor] = {}
        self._kept: list[str] = []
        for name, file in model.place.items():
            if name == ROPE_FACTORS:
                continue  # which the config holds
            theirs, tensor = _describe(model, config, name, file)
            check_reader(tensor.kind)
            self._tensors[theirs] = tensor
            is_matrix = len(file.shape(name)) == 2 and name.endswith(".weight")
            in_place = name.startswith(("blk.", "token_embd.", "output."))
            if tensor.kind.scheme is not None and is_matrix and in_place:
                self._kept.append(theirs)
        self._in_layers = any(self._tensors[name].name.startswith("blk.") for name in self._kept)
        self.notes = _notes(t.kind for t in self._tensors.values())
        for note in self.notes:
            _log.info("%s: %s", path, note)

    def names(self) -> Iterable[str]:
        """HF's names; the file's own of what HF has not."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as in HF's model."""
        tensor = self._tensors[name]
        shape = tensor.file.shape(tensor.name)
        return shape[::-1] if tensor.turned else shape

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype that is read."""
        return self._tensors[name].kind.dtype

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the part at `index`."""
        tensor, shape = self._tensors[name], self.shape(name)
        whole = (slice(None),) * len(shape)
        index = tuple(slice(*i.indices(n)) for i, n in zip(index or whole, shape, strict=True))
        if tensor.turned:
            index = index[::-1]
        if tensor.kind.is_plain:
            array = tensor.blocks(index[0], index[1:])
        elif len(index) == 1:
            raise UnsupportedError(
                f"{self.description}: {name} is a vector in {tensor.kind.name}, which no converter "
                f"writes. {WAY}"
            )
        else:
            first, size = index[-1].start, tensor.kind.elements
            span = slice(first // size, -(-index[-1].stop // size))
            raw = tensor.blocks(index[0], (*index[1:-1], span, slice(None)))
            start = first - span.start * size
            array = values(tensor.kind, raw)[..., start : start + index[-1].stop - first]
        if tensor.raised:
            array = array.astype(np.float32) - np.float32(1)
        return np.ascontiguousarray(array.T if tensor.turned else array)

    def matrices(self) -> Opener | None:
        """The matrices whose blocks a scheme says; None where no layer has one."""
        return Opener(self._matrix) if self._in_layers else None

    def _matrix(self, name: str) -> BlockMatrix | None:
        if name not in self._kept:
            return None
        tensor = self._tensors[name]
        n, k = tensor.file.shape(tensor.name)
        read = partial(_read_blocks, tensor)
        return BlockMatrix(name, (n, k), tensor.kind, read, self.description)


def _read_blocks(tensor: _Tensor, rows: slice, blocks: slice) -> np.ndarray:
    return tensor.blocks(rows, (blocks, slice(None)))


def _describe(
    model: GgufModel, config: Mapping[str, Any], name: str, file: GgufFile
) -> tuple[str, _Tensor]:
    """HF's name of a tensor, and how it lies in the file."""
    own, shape = architecture_of(model), file.shape(name)
    block = _BLOCK.match(name)
    module, _, part = name.rpartition(".")
    theirs = own.outer.get(module, "lm_head" if module == "output" else None)
    if block:
        module, part = block[2], block[3]
        inner = own.layer.get(module)
        theirs = None if inner is None else f"{own.prefix}.{int(block[1])}.{inner}"
    heads = config.get("n_head") or config["num_attention_heads"]
    order = None
    if module in own.by_pairs:
        heads = config["num_key_value_heads"] if module == "attn_k" else heads
        order = _order(model, name, shape[0], (heads, -1, 2))
    elif module in own.by_head:
        order = _order(model, name, shape[0], (3, heads, -1))
    turned = module in own.turned and len(shape) == 2
    raised = own.raised and name.endswith("norm.weight")
    tensor = _Tensor(file, name, file.types[name], order, turned, raised)
    return f"{theirs}.{part}" if theirs else name, tensor


def _order(model: GgufModel, name: str, rows: int, axes: tuple[int, int, int]) -> np.ndarray:
    """The file's row of each of HF's: two axes of the rows, as the file has them, change places."""
    if type(axes[0]) is not int or type(axes[1]) is not int or rows % -math.prod(axes):
        raise CheckpointError(
            f"{model.path}: {name} has {rows} rows, which do not fit the model's heads. Fetch or "
            "convert it again."
        )
    swapped = (1, 2) if axes[2] == 2 else (0, 1)
    return np.arange(rows).reshape(axes).swapaxes(*swapped).reshape(-1)


def _notes(kinds: Iterable[GgmlType]) -> tuple[str, ...]:
    """Tell people what becomes of a file's blocks."""
    counts = Counter(kind for kind in kinds if not kind.is_plain)
    kept = [f"{n} tensors of {kind.name}" for kind, n in counts.items() if kind.scheme]
    made = [f"{n} tensors of {kind.name}" for kind, n in counts.items() if not kind.scheme]
    notes = []
    if kept:
        way = "stay quantized in fused mode, and are dequantized in module mode"
        notes.append(f"GGUF: {', '.join(kept)} {way}")
    if made:
        notes.append(f"GGUF: {', '.join(made)} are dequantized while they are loaded")
    return tuple(notes)
