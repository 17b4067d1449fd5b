"""Adapters of peft, merged into the weights as these are read: LoRA, rsLoRA and DoRA.

With several adapters a weight is W + the sum of w x change: an adapter's change is s B A (LoRA),
m / |W + s B A| (W + s B A) - W (DoRA, arXiv:2402.09353) or what it puts in the place of W, less W;
w is the factor that the caller gives it. All is computed in float32 and rounded once, when the
weight becomes of the model's dtype.
"""

import math
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays import to_numpy
from ..errors import CheckpointError, counted, shortened, shown
from ..model.hf_module import active_adapters, adapted_layers
from ..model.load_plan import TensorSource
from ..model.weights import FLOATS, WeightTable
from ..quantization import Matrices, QuantizedMatrix
from ..quantization.codes import dequantize
from .files import TensorFile, read_json
from .sources import ADAPTER, ADAPTER_PREFIX, FilesSource, TorchSource
from .torch_files import open_torch_file

FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PART = re.compile(
    r"(?P<path>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<last>weight|bias))?"
)
# Fields of adapter_config.json that say how it was trained, or what the names of its tensors say.
_OF_TRAINING = {
    "alpha_pattern", "auto_mapping", "base_model_class", "base_model_name_or_path", "bias",
    "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "parent_library", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora",
    "use_rslora",
}  # fmt: skip
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the model, too
_MERGE = "Merge it with peft (merge_and_unload()) and pass what save_pretrained() writes."


class Stored(NamedTuple):
    """A tensor of an adapter, read when it is asked for."""

    source: TensorSource
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        return tuple(self.source.shape(self.name))

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or what of it is at `index`, in float32."""
        return np.asarray(to_numpy(self.source.read(self.name, index)), np.float32)


@dataclass(frozen=True)
class LowRank:
    """A change of a matrix: `scale` x up [out, r] x down [r, in]; DoRA's with a `magnitude` [out].

    `turned`: the matrix is stored [in, out]; None leaves it to its shape, and to `wide` where it is
    square.
    """

    up: Stored
    down: Stored
    scale: float
    magnitude: Stored | None = None
    turned: bool | None = None
    wide: bool = False


@dataclass(frozen=True)
class Adapter:
    """One adapter: what it changes, by HF's names of the model's weights.

    `low_rank` are its changes, `replaced` what it puts in the place of a tensor, `added` what is
    added to a bias, with its scale.
    """

    label: str
    weight: float = 1.0
    low_rank: Mapping[str, LowRank] = field(default_factory=dict)
    replaced: Mapping[str, Stored] = field(default_factory=dict)
    added: Mapping[str, tuple[Stored, float]] = field(default_factory=dict)

    def names(self) -> Iterable[str]:
        """HF's names of all that it changes."""
        return dict.fromkeys((*self.low_rank, *self.replaced, *self.added))


def open_adapter(folder: Path, weight: float = 1.0) -> Adapter:
    """The adapter that peft wrote to a folder, times `weight`.

    Raises CheckpointError for kinds other than LoRA, and for what no merge can take in.
    """
    config = read_json(folder / ADAPTER)
    _check_kind(folder, config)
    source = _open_files(folder)
    factors: dict[str, dict[str, str]] = {}
    replaced, added = {}, {}
    for stored in source.names():
        name = stored.removeprefix(ADAPTER_PREFIX)
        found = _PART.fullmatch(name)
        if found is None:
            name = re.sub(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.[^.]+$)", "", name)
            _put(folder, replaced, name, Stored(source, stored))
            continue
        part = found["part"] + (".bias" if found["last"] == "bias" else "")
        _put(folder, factors.setdefault(found["path"], {}), part, stored)
    low_rank = {}
    for path, parts in factors.items():
        held, scale = _low_rank(folder, config, source, path, parts)
        low_rank[f"{path}.weight"] = held
        if "B.bias" in parts:
            added[f"{path}.bias"] = Stored(source, parts["B.bias"]), scale
    return Adapter(str(folder), weight, low_rank, replaced, added)


def _put(folder: Path, held: dict[str, Any], name: str, value: Any) -> None:
    if name in held:
        raise CheckpointError(
            f"{folder} holds {shortened(name)} of one module twice, as of several adapters in one "
            "file. Save each in a folder of its own."
        )
    held[name] = value


def base_of(folder: Path) -> tuple[str | None, str | None]:
    """The folder or hub id of the model that an adapter was made for, and its revision."""
    config = read_json(folder / ADAPTER)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    is_named = isinstance(base, str) and bool(base)
    return (base if is_named else None), (revision if isinstance(revision, str) else None)


def _open_files(folder: Path) -> TensorSource:
    for name in FILES:
        if os.path.isfile(folder / name):
            opener = TensorFile if name.endswith(".safetensors") else open_torch_file
            return FilesSource({name: opener(folder / name)}, str(folder))
    raise CheckpointError(
        f"{folder} holds {ADAPTER}, and neither {' nor '.join(FILES)}. Was it copied in full?"
    )


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{folder} holds an adapter of kind {shown(kind)}; LORA is expected (LoRA, rsLoRA and "
            f"DoRA). {_MERGE}"
        )
    if config.get("init_lora_weights") not in _INITS:
        raise CheckpointError(
            f"{folder}: init_lora_weights={shown(config['init_lora_weights'])} changes the model's "
            "own weights, too, which the adapter does not hold. Save it with peft's "
            f"path_initial_model_for_weight_conversion, or merge it. {_MERGE}"
        )
    unknown = sorted(str(n) for n, value in config.items() if value and n not in _OF_TRAINING)
    if unknown:
        given = ", ".join(f"{shortened(n, 60)}={shown(config[n])}" for n in unknown[:4])
        raise CheckpointError(
            f"{folder / ADAPTER} has {given}, which dualinfer does not merge. {_MERGE}"
        )


_FACTORS = {"A", "B"}
_EMBEDDING = {"embedding_A", "embedding_B"}


def _low_rank(
    folder: Path,
    config: Mapping[str, Any],
    source: TensorSource,
    path: str,
    parts: Mapping[str, str],
) -> tuple[LowRank, float]:
    """The change of a module's matrix, and its scale."""
    where = f"{folder}: {shortened(path)}"
    factors = {*parts} - {"magnitude_vector", "B.bias"}
    if factors not in (_FACTORS, _EMBEDDING):
        raise CheckpointError(
            f"{where} has lora_{' and lora_'.join(sorted(factors)) or 'magnitude_vector'}; "
            f"lora_A and lora_B are expected. Was the adapter saved in full? {_MERGE}"
        )
    prefix = "embedding_" if factors == _EMBEDDING else ""
    up, down = (Stored(source, parts[prefix + part]) for part in "BA")
    magnitude = Stored(source, parts["magnitude_vector"]) if "magnitude_vector" in parts else None
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise CheckpointError(
            f"{where} has {'a' if magnitude else 'no'} lora_magnitude_vector, and "
            f"use_dora={shown(config.get('use_dora'))}. Fetch or save the adapter again."
        )
    shapes = up.shape, down.shape, *((magnitude.shape,) if magnitude else ())
    rank = down.shape[0] if down.shape else 0
    expected = _of_module(where, config, "rank_pattern", "r", path)
    is_matrices = len(up.shape) == len(down.shape) == 2 and up.shape[1] == rank > 0
    if not is_matrices or (magnitude is not None and magnitude.shape != up.shape[:1]):
        raise CheckpointError(
            f"{where} has factors of shapes {', '.join(map(str, shapes))}; [out, r], [r, in] and, "
            f"of DoRA, [out] are expected, as those of nn.Linear and embeddings. {_MERGE}"
        )
    if rank != expected:
        raise CheckpointError(
            f"{where} has factors of rank {rank}, and by {ADAPTER} it is {shown(expected)}, "
            "on which its scale depends. Fetch or save the adapter again."
        )
    alpha = _of_module(where, config, "alpha_pattern", "lora_alpha", path)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    turned = True if prefix else None
    wide = bool(config.get("fan_in_fan_out"))
    return LowRank(up, down, scale, magnitude, turned, wide), scale


def _of_module(where: str, config: Mapping[str, Any], pattern: str, name: str, path: str) -> float:
    """A number of the config for one module: that of the first pattern that its path matches."""
    patterns = config.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: {pattern} is {shown(patterns)}, expected an object.")
    for own in patterns:
        _check_pattern(where, pattern, own)
    found = next((v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", path)), None)
    value = config.get(name, 8) if found is None else found  # peft's default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{where}: {name} is {shown(value)}, expected a number.")
    return value


def _check_pattern(where: str, kind: str, pattern: str) -> None:
    """Raise CheckpointError for what is no regular expression, or one that may take for ever."""
    repeats = len(re.findall(r"[*+{]", pattern))
    if len(pattern) > 1000 or repeats > 3 or re.search(r"\)\s*[*+?{]|\(\?|\\[1-9]", pattern):
        reason = "it repeats groups or has more than 3 repetitions, which may take for ever to try"
    else:
        try:
            re.compile(pattern)
            return
        except re.error as error:
            reason = str(error)
    raise CheckpointError(
        f"{where}: {kind} has {shown(pattern)}, which is not tried: {reason}. Name the modules in "
        f"{ADAPTER}."
    )


class AdaptedSource:
    """A source over another one that shows what adapters make of its tensors, in float32.

    `bases` are by name the stored tensor that a shown one is made of; `matrices` gives those that
    are stored as codes.
    """

    def __init__(
        self,
        source: TensorSource,
        adapters: Sequence[Adapter],
        table: WeightTable | None = None,
        matrices: Matrices | None = None,
    ):
        self.description = source.description
        self._source, self._matrices, self._lock = source, matrices, threading.Lock()
        names = _Names(source, table, matrices)
        self._changes: dict[str, list[tuple[float, Any]]] = {}
        self._bases: dict[str, str] = {}
        self._factors: dict[tuple[str, int], np.ndarray] = {}
        self._last: tuple[str, np.ndarray] | None = None
        for adapter in adapters:
            lost = []
            for name in adapter.names():
                found = names.find(name)
                if found is None:
                    lost.append(name)
                    continue
                shown_as, self._bases[found[0]] = found
                own = self._changes.setdefault(shown_as, [])
                own += [(adapter.weight, c) for c in _changes_of(adapter, name)]
            if lost:
                raise CheckpointError(
                    f"The adapter {adapter.label} changes what {source.description} does not hold: "
                    f"{counted(lost)}. Pass the model that it was trained for."
                )
        self._untie(names)
        self._taken = {
            part
            for base in self._bases.values()
            if (matrix := self._matrix(base)) is not None
            for part in matrix.stored
        }
        for name in self._changes:
            self._check(name, names.is_turned(name))
        labels = [a.label + (f" times {a.weight:g}" if a.weight != 1 else "") for a in adapters]
        opened = sum(1 for base in self._bases.values() if self._matrix(base) is not None)
        notes = [f"merged: {', '.join(labels)}, into {len(self._changes)} tensors"]
        if opened:
            notes.append(f"{opened} quantized matrices are plain here, since adapters change them")
        self.own_notes = tuple(notes)
        self.notes = (*source.notes, *notes)

    def _untie(self, names: "_Names") -> None:
        """Show a tensor's tied one on its own, where an adapter changes the first alone."""
        for base in list(self._bases.values()):
            for other in names.tied_to(base):
                if other not in self._changes and other not in names.stored:
                    self._bases[other] = base
                    self._changes[other] = []

    def _matrix(self, name: str) -> QuantizedMatrix | None:
        return None if self._matrices is None else self._matrices(name)

    @property
    def merged(self) -> frozenset[str]:
        """Names of the tensors that are made here."""
        return frozenset(self._changes)

    def names(self) -> Iterable[str]:
        """Names as stored, and those that adapters untie or dequantize."""
        kept = [n for n in self._source.names() if n not in self._taken]
        return dict.fromkeys((*kept, *self._changes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored; of a replaced tensor the new one's."""
        for _, change in reversed(self._changes.get(name, [])):
            if isinstance(change, Stored):
                return change.shape
        return self._base_shape(self._bases.get(name, name))

    def _base_shape(self, base: str) -> tuple[int, ...]:
        matrix = self._matrix(base)
        return tuple(matrix.shape if matrix is not None else self._source.shape(base))

    def dtype(self, name: str) -> str:
        """NumPy's name of the dtype: float32 of what adapters make."""
        return "float32" if name in self._changes else self._source.dtype(name)

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Any:
        """The tensor, or what of it is at `index`."""
        if name not in self._changes:
            return self._source.read(name, index)
        shape = self.shape(name)
        whole = (slice(None),) * len(shape)
        part = tuple(slice(*i.indices(n)) for i, n in zip(index or whole, shape, strict=True))
        changes = self._changes[name]
        if len(changes) == 1 and changes[0][0] == 1 and isinstance(changes[0][1], Stored):
            return changes[0][1].read(part)
        base = self._read_base(self._bases[name], part)
        result = base.copy()
        for i, (weight, change) in enumerate(changes):
            if isinstance(change, Stored):
                result += np.float32(weight) * (change.read(part) - base)
            elif isinstance(change, LowRank):
                result += np.float32(weight) * self._change(name, i, change, base, part)
            else:
                stored, scale = change
                result += np.float32(weight * scale) * stored.read(part)
        return result

    def _read_base(self, base: str, part: tuple[slice, ...]) -> np.ndarray:
        matrix = self._matrix(base)
        if matrix is None:
            return np.asarray(to_numpy(self._source.read(base, part)), np.float32)
        with self._lock:
            if self._last is None or self._last[0] != base:
                self._last = base, dequantize(matrix)
            return self._last[1][part]

    def _change(
        self, name: str, number: int, change: LowRank, base: np.ndarray, part: tuple[slice, ...]
    ) -> np.ndarray:
        """An adapter's change of the part of a matrix, where that is `base`."""
        delta = _product(change, part)
        if change.magnitude is None:
            return delta
        factor = self._factor(name, number, change)
        factor = factor[part[1]] if change.turned else factor[part[0]][:, None]
        return factor * (base + delta) - base

    def _factor(self, name: str, number: int, change: LowRank) -> np.ndarray:
        """DoRA's factor of each output [out]: few rows of the matrix are read at a time."""
        with self._lock:
            held = self._factors.get((name, number))
        if held is not None:
            return held
        assert change.magnitude is not None
        rows, columns = self.shape(name)
        squares = np.zeros(columns if change.turned else rows, np.float64)
        few = max(1, _AT_ONCE // max(1, columns))
        for start in range(0, rows, few):
            part = slice(start, min(start + few, rows)), slice(0, columns)
            merged = self._read_base(self._bases[name], part) + _product(change, part)
            if change.turned:
                squares += (merged.astype(np.float64) ** 2).sum(0)
            else:
                squares[part[0]] = (merged.astype(np.float64) ** 2).sum(1)
        with np.errstate(divide="ignore"):  # the reader refuses a weight that is not finite
            factor = (change.magnitude.read() / np.sqrt(squares)).astype(np.float32)
        with self._lock:
            self._factors[name, number] = factor
        return factor

    def _check(self, name: str, is_turned: bool | None) -> None:
        """Settle how changes lie; CheckpointError for one of another shape than its tensor."""
        base, changes = self._bases[name], self._changes[name]
        shape = self._base_shape(base)
        if self._matrix(base) is None and self._source.dtype(base) not in FLOATS:
            raise CheckpointError(
                f"{base} of {self.description} is stored in {self._source.dtype(base)}, to which "
                "an adapter cannot be added here. Pass the model in 16 or 32 bits."
            )
        for i, (weight, change) in enumerate(changes):
            if isinstance(change, LowRank):
                matrix = (change.up.shape[0], change.down.shape[1])
                turned = is_turned if change.turned is None else change.turned
                if turned is None:
                    turned = change.wide if matrix == matrix[::-1] else matrix != shape
                changes[i] = weight, _with_turned(change, turned)
                found = matrix[::-1] if turned else matrix
            else:
                found = change.shape if isinstance(change, Stored) else change[0].shape
            alone = isinstance(change, Stored) and weight == 1 and len(changes) == 1
            if found != shape and not alone:
                raise CheckpointError(
                    f"An adapter changes {name} by {found}, and that of {self.description} is "
                    f"{shape}. Pass the model that it was trained for."
                )


_AT_ONCE = 1 << 22  # elements


def _with_turned(change: LowRank, turned: bool) -> LowRank:
    own = change.up, change.down, change.scale, change.magnitude
    return LowRank(*own, turned, change.wide)


def _product(change: LowRank, part: tuple[slice, ...]) -> np.ndarray:
    """scale x up x down, at the part of the matrix as it is stored."""
    every = slice(0, change.down.shape[0])
    out, inner = (part[1], part[0]) if change.turned else (part[0], part[1])
    up, down = change.up.read((out, every)), change.down.read((every, inner))
    delta = (up @ down) * np.float32(change.scale)
    return delta.T if change.turned else delta


def _changes_of(adapter: Adapter, name: str) -> list[Any]:
    own = (adapter.replaced, adapter.low_rank, adapter.added)
    return [changes[name] for changes in own if name in changes]


class _Names:
    """Which stored tensor HF's name of a weight means.

    With a table it is found under each of the names that a checkpoint may have for it, and where
    tensors are tied under the other one's; without, by the name itself, or its end.
    """

    def __init__(self, source: TensorSource, table: WeightTable | None, matrices: Matrices | None):
        self.stored = set(source.names())
        self._matrices, self._table = matrices, table
        self._pairs: list[tuple[str, str]] = []
        if table is not None:
            self._pairs = [(s.name, other) for row, other in table.tied for s in row.sources]

    @cached_property
    def _known(self) -> dict[str, str]:
        """By every name that a checkpoint may have for a tensor, HF's own."""
        assert self._table is not None
        rows = (*self._table.rows, *(row for row, _ in self._table.tied))
        own = dict.fromkeys(source.name for row in rows for source in row.sources)
        found = {c: name for name in own for c in self._table.candidates(name)}
        return {**found, **{name: name for name in own}}

    def _holds(self, name: str) -> bool:
        return name in self.stored or (
            self._matrices is not None and self._matrices(name) is not None
        )

    def _held(self, name: str) -> str | None:
        candidates = [name] if self._table is None else self._table.candidates(name)
        return next((c for c in candidates if self._holds(c)), None)

    def find(self, name: str) -> tuple[str, str] | None:
        """The name under which the tensor is shown, and that of the stored one."""
        if self._table is None:
            if self._holds(name):
                return name, name
            alike = [s for s in self.stored if s.endswith(f".{name}") or name.endswith(f".{s}")]
            return (alike[0], alike[0]) if len(alike) == 1 else None
        own = self._known.get(name)
        if own is None:
            return None
        held = self._held(own)
        if held is not None:
            return held, held
        for pair in self._pairs:
            if own in pair:
                other = self._held(pair[1 - pair.index(own)])
                if other is not None:
                    return own, other
        return None

    @cached_property
    def _turned(self) -> dict[str, bool]:
        assert self._table is not None
        return {
            source.name: row.permutation(source) == (1, 0)
            for row in self._table.rows
            if row.is_weight
            for source in row.sources
        }

    def is_turned(self, name: str) -> bool | None:
        """Whether a matrix is stored [in, out]; None where no table says it."""
        return None if self._table is None else self._turned.get(self._known.get(name, name))

    def tied_to(self, name: str) -> list[str]:
        """HF's names of what is tied to a tensor, by the name that it is shown under."""
        if not self._pairs:
            return []
        own = self._known.get(name, name)
        return [pair[1 - pair.index(own)] for pair in self._pairs if own in pair]


def open_adapters_of(module: Any) -> list[Adapter]:
    """The adapters of peft's that are in use in a live module; an empty list without any."""
    changes: dict[str, dict[str, LowRank]] = {}
    added: dict[str, dict[str, tuple[Stored, float]]] = {}
    factors: dict[str, Any] = {}
    source = TorchSource(factors, f"the adapters of the live {type(module).__name__}")
    for path, layer in adapted_layers(module):
        for name in active_adapters(layer):
            prefix = "lora_embedding_" if name in layer.lora_embedding_A else "lora_"
            up, down = (getattr(layer, prefix + part)[name] for part in "BA")
            held = {"up": getattr(up, "weight", up), "down": getattr(down, "weight", down)}
            magnitudes = getattr(layer, "lora_magnitude_vector", {})
            if name in magnitudes:
                held["magnitude"] = magnitudes[name].weight
            if getattr(up, "bias", None) is not None:
                held["bias"] = up.bias
            stored = {part: Stored(source, f"{path}.{name}.{part}") for part in held}
            factors.update((stored[part].name, tensor) for part, tensor in held.items())
            scale = float(layer.scaling[name])
            turned = prefix != "lora_" or bool(getattr(layer, "fan_in_fan_out", False))
            own = LowRank(stored["up"], stored["down"], scale, stored.get("magnitude"), turned)
            changes.setdefault(name, {})[f"{path}.weight"] = own
            if "bias" in stored:
                added.setdefault(name, {})[f"{path}.bias"] = stored["bias"], scale
    return [Adapter(n, low_rank=own, added=added.get(n, {})) for n, own in changes.items()]
