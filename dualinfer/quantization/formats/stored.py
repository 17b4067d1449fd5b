"""The common parts of quantized checkpoints' formats: reading tensors, and their configs."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np

from ...errors import CheckpointError, UnsupportedError, counted, shown
from ...system.patterns import Patterns
from ..scheme import BlockScheme, QuantizedMatrix

FLOATS = ("float32", "float16", "bfloat16")
ALL = slice(None)


class Tensors(Protocol):
    """The place that tensors are read from; a checkpoint's source."""

    description: str

    def names(self) -> Iterable[str]:
        """Names as stored."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        ...

    def dtype(self, name: str) -> str:
        """NumPy's name of the stored dtype."""
        ...

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, or the part of it at `index`."""
        ...


@dataclass(frozen=True)
class Opener:
    """From HF's name of a weight to its matrix; None where it is stored as it is.

    `notes` say, for people, where what runs is not all that the checkpoint's own library does.
    """

    open: Callable[[str], QuantizedMatrix | None]
    notes: tuple[str, ...] = ()

    def __call__(self, name: str) -> QuantizedMatrix | None:
        """See the class."""
        return self.open(name)


class Checkpoint:
    """The tensors of a quantized checkpoint; what is missing or does not fit is a CheckpointError.

    `method` is how messages call the format.
    """

    def __init__(self, source: Tensors, method: str):
        self.source, self.method = source, method
        self.names = frozenset(source.names())

    def error(self, problem: str) -> CheckpointError:
        """An error of this checkpoint."""
        return CheckpointError(
            f"{self.source.description} ({self.method}): {problem} Fetch or quantize it again."
        )

    def check(
        self, name: str, dtypes: Collection[str], shape: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """The shape of a tensor that must be there, of one of `dtypes`, and of `shape` if given."""
        if name not in self.names:
            raise self.error(f"{name} is missing.")
        found = self.source.shape(name)
        dtype = self.source.dtype(name)
        if dtype not in dtypes:
            raise self.error(f"{name} is {dtype}, expected {' or '.join(dtypes)}.")
        if shape is not None and found != tuple(shape):
            raise self.error(f"{name} has the shape {found}, expected {tuple(shape)}.")
        return found

    def read(self, name: str, *index: slice) -> np.ndarray:
        """A part of a tensor, or all of it."""
        return np.asarray(self.source.read(name, index or None))

    def scale(
        self, name: str, dtypes: Collection[str] = FLOATS, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """A tensor of scales; each must be a number."""
        self.check(name, dtypes, shape)
        return self.finite(name, self.read(name))

    def finite(self, name: str, values: np.ndarray) -> np.ndarray:
        """The values, of `name`; each must be a number."""
        wrong = np.argwhere(~np.isfinite(values.astype(np.float32)))
        if len(wrong):
            where = tuple(int(i) for i in wrong[0])
            raise self.error(f"{name} holds {values[where]} at {where}, which is no scale.")
        return values


class StoredMatrix:
    """A QuantizedMatrix of a checkpoint, without the parts that few formats have."""

    scheme: BlockScheme
    shape: tuple[int, int]
    stored: tuple[str, ...]
    inputs_first = False

    def zero(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return None

    def group(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return None

    def outer(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return None

    def input_scale(self) -> np.ndarray | None:
        """See QuantizedMatrix."""
        return None


def blocks(size: int, block: int) -> int:
    """The number of blocks of an axis; a block of 0 is all of it."""
    return ceil(size / block) if block else 1


# Fields that say what a key-value cache in fewer bits is quantized by.
CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")
KEPT_CACHE = (
    "the checkpoint has scales for a key-value cache in fewer bits; they are not used: the cache "
    "keeps its dtype, or with kv_cache_dtype each token has scales of its own"
)


# As compressed-tensors, ModelOpt, AutoFP8, Quark and TensorRT-LLM call the scales.
_OF_CACHE = re.compile(
    r"\.((q|k|v|kv)_(scale|zero_point)|(q|k|v|qkv)_proj\.output_(scale|zero_point)"
    r"|prob(_output)?_scale|kv_cache_scaling_factor|[qkv]_bmm_quantizer\._(amax|scale))$"
)


def is_of_cache(name: str) -> bool:
    """True for a tensor by which a cache in fewer bits is scaled, or attention in 8 bits."""
    return _OF_CACHE.search(name) is not None


def quantizes_cache(config: Mapping[str, Any]) -> bool:
    """True if a quantization_config says how a key-value cache is quantized."""
    return any(config.get(field) for field in CACHE)


def check_fields(config: Mapping[str, Any], method: str, known: Iterable[str]) -> None:
    """Raise UnsupportedError for fields of a quantization_config that are not known."""
    unknown = sorted(config.keys() - {"quant_method", *CACHE, *known})
    if unknown:
        raise UnsupportedError(
            f"The model's quantization_config ({method}) has fields that are not known "
            f"({counted(unknown)}); ignoring them could give wrong results. Remove those that do "
            "not change what the weights mean, or pass the model that they were made from."
        )


def refuse(method: str, field: str, value: Any, instead: str) -> UnsupportedError:
    """The error of a field's value that is not served, with the way on."""
    return UnsupportedError(
        f"The model's quantization_config ({method}) has {field}={shown(value)}, which is not read "
        f"here. {instead}"
    )


class LeftOut:
    """The modules that HF does not convert: `in` is true where a pattern names one, or one around.

    As transformers' should_convert_module, a pattern is a start of the name up to a dot, or a
    regular expression for one, or its end.
    """

    def __init__(self, patterns: Sequence[str], method: str):
        self.patterns = tuple(patterns)
        starts = [rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" for pattern in self.patterns]
        where = f"The model's quantization_config ({method})"
        self._starts = Patterns(starts, where, or_none=True)

    def __contains__(self, module: str) -> bool:
        """See the class."""
        return module.endswith(self.patterns) or bool(self._starts.find(module))


def name_list(config: Mapping[str, Any], method: str, field: str) -> tuple[str, ...]:
    """A field that is a list of names or patterns, or absent."""
    value = config.get(field)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise refuse(method, field, value, "Expected a list of names.")
    return tuple(value)
