"""Adapters of peft as changes of a model's weights, read from folders and from live models.

An adapter makes f(W) of a weight W: W + s B A (LoRA), m / |W + s B A| (W + s B A) (DoRA,
arXiv:2402.09353), W with other rows (trained tokens), or what it puts in the place of W. Where a
tensor has a matrix for each expert, each has factors of its own (peft's `target_parameters`).
`adapted` merges these changes while weights are read.
"""

import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...arrays import to_numpy
from ...errors import CheckpointError, reads, shortened, shown
from ...model.load_plan import TensorSource
from ...model.peft_modules import (
    MERGING,
    UNMERGED,
    active_adapters,
    adapted_layers,
    kind_of_layer,
)
from ...system.patterns import Patterns
from ..files.safetensors import TensorFile, read_json
from ..files.torch_files import open_torch_file
from ..sources import ADAPTER, ADAPTER_PREFIX, FilesSource, TorchSource
from . import peft_layers

FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PART = re.compile(
    r"(?P<path>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.(?P<last>weight|bias))?"
)
_TOKENS = re.compile(r"(?P<path>.+?)(?:\.token_adapter)?\.trainable_tokens_delta(?:\.[^.]+)?")
_WHOLE = re.compile(
    r"(?P<path>.+?)\.(?:(?P<below>(?:token_adapter\.)?base_layer|original_module)"
    r"|modules_to_save(?:\.[^.]+?)??)\.(?P<last>[^.]+)"
)
_KINDS = ("LORA", "TRAINABLE_TOKENS", *MERGING)
# Fields of adapter_config.json that say how it was trained, or what the names of its tensors say.
_OF_TRAINING = {
    "alpha_pattern", "auto_mapping", "base_model_class", "base_model_name_or_path", "bias",
    "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "init_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "parent_library", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters",
    "task_type", "token_indices", "trainable_token_indices", "use_dora", "use_rslora",
}  # fmt: skip
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the model, too
MERGE = "Merge it with peft (merge_and_unload()) and pass what save_pretrained() writes."


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


class Held:
    """Whole tensors of adapters, in float32: those that were read last."""

    def __init__(self, most: int = 4) -> None:
        self._lock, self._most = threading.Lock(), most
        self._tensors: dict[tuple[int, str], np.ndarray] = {}

    def read(self, stored: Stored) -> np.ndarray:
        """The tensor, which is not to be written to."""
        key = id(stored.source), stored.name
        with self._lock:
            array = self._tensors.pop(key, None)
            array = stored.read() if array is None else array
            self._tensors[key] = array
            for old in [*self._tensors][: -self._most]:
                del self._tensors[old]
            return array


@dataclass(frozen=True)
class Sliced:
    """The part of a stored tensor at `ranges`; `turned`: with the last two axes exchanged.

    `alone`: without the first axis, of which it has one element. Where a step is not 1 the whole is
    read, and `held` for those that follow.
    """

    stored: Stored
    ranges: tuple[range, ...]
    held: Held
    turned: bool = False
    alone: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self._order([len(r) for r in self.ranges[self.alone :]])

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The part, or what of it is at `index`, in float32."""
        own = self.cut(*index).ranges if index else self.ranges
        slices = tuple(slice(r.start, r.stop, r.step) for r in own)
        whole = any(r.step != 1 for r in own)
        part = self.held.read(self.stored)[slices] if whole else self.stored.read(slices)
        part = part[0] if self.alone else part
        return part.swapaxes(-1, -2) if self.turned else part

    def cut(self, *index: slice) -> "Sliced":
        """The part of it at `index`."""
        inner = zip(self.ranges[self.alone :], self._order(index), strict=True)
        own = (*self.ranges[: self.alone], *(r[i] for r, i in inner))
        return replace(self, ranges=own)

    def transposed(self) -> "Sliced":
        """The same, with the last two axes exchanged."""
        return replace(self, turned=not self.turned)

    def _order(self, axes: Sequence[Any]) -> tuple[Any, ...]:
        """Of something for each axis, what it is for those of the stored tensor, or back."""
        return (*axes[:-2], axes[-1], axes[-2]) if self.turned else tuple(axes)


def sliced(factor: "Stored | Sliced", held: Held) -> Sliced:
    """All of a stored tensor, which can be cut."""
    if isinstance(factor, Sliced):
        return factor
    return Sliced(factor, tuple(map(range, factor.shape)), held)


Factor: TypeAlias = Stored | Sliced


@dataclass(frozen=True)
class LowRank:
    """A change of a matrix: `scale` x up [out, r] x down [r, in]; DoRA's with a `magnitude` [out].

    `turned`: the matrix is stored [in, out]; None leaves it to its shape, and to `wide` where it is
    square.
    """

    up: Factor
    down: Factor
    scale: float
    magnitude: Factor | None = None
    turned: bool | None = None
    wide: bool = False


@dataclass(frozen=True)
class Stack:
    """A change of a tensor of several matrices [X, a, b], each of them by `scale` x up x down.

    peft keeps the factors of all as two matrices: up [a, r X], where the columns of the matrices
    take turns, and down [r X, b], one after another. `turned`: they are of the transposes [b, a];
    None leaves it to the shapes, and where a is b to `old`, which peft's versions before 0.19 are.
    """

    up: Factor
    down: Factor
    scale: float
    rank: int
    turned: bool | None = None
    old: bool = False

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self.down.shape[0] // self.rank

    def matrix(self, place: int, held: Held) -> LowRank:
        """The change of one of the matrices."""
        every, own = slice(None), slice(place * self.rank, (place + 1) * self.rank)
        up = sliced(self.up, held).cut(every, slice(place, None, self.count))
        down = sliced(self.down, held).cut(own, every)
        return LowRank(up, down, self.scale, turned=bool(self.turned))


@dataclass(frozen=True)
class Rows:
    """Other rows of a matrix, in the place of those with these numbers."""

    ids: tuple[int, ...]
    values: Factor


@dataclass(frozen=True)
class Added:
    """`scale` x values, added to a bias."""

    values: Factor
    scale: float


@dataclass(frozen=True)
class Made:
    """A tensor that `make` makes of the whole one, in float32."""

    make: Callable[[np.ndarray], np.ndarray]


# A tensor in the place of the model's, or a change of what there is.
Change: TypeAlias = Stored | Sliced | LowRank | Stack | Rows | Added | Made


@dataclass(frozen=True)
class Nested:
    """Factors of several parameters of one module, in layers of peft's that lie one in another.

    The names of tensors leave out which parameters these are: `targets` are the last parts of the
    names that the config has, of which a module may have none. `factors` are the innermost layer's
    first. `as_parameter` makes a change, given the parameter's name, its number of axes and the
    factors; `as_module` those of a module whose matrix, and no parameter, is meant.
    """

    module: str
    targets: tuple[str, ...]
    factors: tuple[Mapping[str, str], ...]
    as_parameter: Callable[[str, int, Mapping[str, str]], "Change"]
    as_module: Callable[[str, Mapping[str, str]], Mapping[str, "Change"]]


@dataclass(frozen=True)
class Adapter:
    """One adapter: what it changes, by HF's names of the model's weights.

    The `changes` of a weight apply in order. `bases` are weights of the model itself that an
    adapter brings along, as those of a vocabulary that was resized are; its `nested` changes get
    names where the model is known. `task` is peft's task_type.
    """

    label: str
    weight: float = 1.0
    changes: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    bases: Mapping[str, Stored] = field(default_factory=dict)
    nested: Sequence[Nested] = ()
    task: str | None = None
    held: Held = field(default_factory=Held)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a weight that it puts in the place of the model's, or brings along."""
        whole = [c for c in self.changes.get(name, ()) if isinstance(c, Factor)]
        found = whole[-1] if whole else self.bases.get(name)
        return None if found is None else found.shape


@reads(ADAPTER)
def open_adapter(
    folder: Path, weight: float = 1.0, make_model: Callable[[str | None], Any] | None = None
) -> Adapter:
    """The adapter that peft wrote to a folder, times `weight`.

    `make_model` makes the HF model of a task_type without values, in which peft's own layers can be
    put. Raises CheckpointError for kinds that are not merged here, and for what no merge can take
    in, and BackendNotAvailableError for a kind that needs peft where that is not installed.
    """
    config = read_json(folder / ADAPTER)
    kind = _check_kind(folder, config)
    source = _open_files(folder)
    factors: dict[str, dict[str, str]] = {}
    held: dict[str, dict[str, Any]] = {"trained": {}, "bases": {}, "kept": {}, "tokens": {}}
    by_layers = kind in MERGING
    for stored in source.names():
        name = stored.removeprefix(ADAPTER_PREFIX)
        if by_layers and peft_layers.is_own(kind, name):
            continue
        if found := _PART.fullmatch(name):
            part = found["part"] + (".bias" if found["last"] == "bias" else "")
            _put(folder, factors.setdefault(found["path"], {}), part, stored)
        elif found := _TOKENS.fullmatch(name):
            _put(folder, held["tokens"], found["path"], stored)
        elif found := _WHOLE.fullmatch(name):
            name = f"{found['path']}.{found['last']}"
            _put(folder, held["bases" if found["below"] else "kept"], name, Stored(source, stored))
        else:
            _put(folder, held["trained"], name, Stored(source, stored))
    # peft writes what it trains by its plain name, and once more beside the model's own.
    trained, wrapped = {**held["kept"], **held["trained"]}, {**held["kept"], **held["bases"]}
    brought = {n: v for n, v in trained.items() if n not in wrapped and _is_brought(config, n)}
    changes: dict[str, list[Change]] = {n: [v] for n, v in trained.items() if n not in brought}
    for path, stored in held["tokens"].items():
        ids = _trained_ids(folder, config, path)
        rows = Rows(ids, Stored(source, stored))
        if len(rows.values.shape) != 2 or rows.values.shape[0] != len(ids):
            raise CheckpointError(
                f"{folder}: {shortened(path)} has rows of shape {rows.values.shape} for "
                f"{len(ids)} trained tokens. Fetch or save the adapter again."
            )
        changes.setdefault(f"{path}.weight", []).append(rows)
    reader = _Reader(folder, config, source)
    nested: dict[str, dict[int, dict[str, str]]] = {}
    for path, parts in factors.items():
        module = re.sub(r"(\.base_layer)+$", "", path)
        if module != path or reader.targets_of(module):
            depth = (len(path) - len(module)) // len(".base_layer")
            nested.setdefault(module, {})[depth] = parts
            continue
        for name, change in reader.of_module(path, parts).items():
            changes.setdefault(name, []).append(change)
    if by_layers:
        for name, make in peft_layers.read_layers(folder, kind, source, make_model).items():
            changes.setdefault(name, []).append(Made(make))
    task = config.get("task_type")
    return Adapter(
        str(folder),
        weight,
        changes,
        {**brought, **held["bases"]},
        [reader.nested(module, levels) for module, levels in nested.items()],
        task if isinstance(task, str) else None,
    )


_LABELS = ("score", "classifier", "qa_outputs")  # heads that peft trains without being asked


def _is_brought(config: Mapping[str, Any], name: str) -> bool:
    """True if a weight by its plain name is the model's own, as embeddings are that peft saves."""
    module, _, last = name.rpartition(".")
    own = config.get("modules_to_save")
    if config.get("ensure_weight_tying"):  # what is tied to one of them is trained, too
        return False
    named = [*own, *_LABELS] if isinstance(own, list) else _LABELS
    return last == "weight" and not any(
        isinstance(part, str) and f".{part}." in f".{module}." for part in named
    )


def _put(folder: Path, held: dict[str, Any], name: str, value: Any) -> None:
    if name in held:
        raise CheckpointError(
            f"{folder} holds {shortened(name)} of one module twice, as of several adapters in one "
            "file. Save each in a folder of its own."
        )
    held[name] = value


def _trained_ids(folder: Path, config: Mapping[str, Any], path: str) -> tuple[int, ...]:
    """The ids of the tokens whose rows of a module are trained."""
    given = config.get("trainable_token_indices") or config.get("token_indices")
    if isinstance(given, dict):  # by modules, of which a tied one may be left out
        own = [v for name, v in given.items() if f".{path}".endswith(f".{name}")]
        given = own[0] if own else next(iter(given.values()), None)
    ids = given if isinstance(given, list) else []
    if not ids or any(type(i) is not int or i < 0 for i in ids) or len({*ids}) < len(ids):
        raise CheckpointError(
            f"{folder}: {shortened(path)} has trained tokens, and {ADAPTER} names {shown(given)}; "
            "expected a list of their ids. Fetch or save the adapter again."
        )
    return tuple(ids)


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


def _check_kind(folder: Path, config: Mapping[str, Any]) -> str:
    """The kind of an adapter; CheckpointError for one that is not merged."""
    kind = config.get("peft_type")
    if kind in UNMERGED:
        raise CheckpointError(
            f"{folder} holds an adapter of kind {kind}, which {UNMERGED[kind]}, so that "
            "no merge takes it in. On torch a PeftModel runs as it is: model = "
            f"PeftModel.from_pretrained(base, {str(folder)!r}), and pass that."
        )
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(
            f"{folder} holds an adapter of kind {shown(kind)}, which is not merged here; LORA is "
            f"the usual one. {MERGE}"
        )
    if config.get("init_lora_weights") not in _INITS and kind == "LORA":
        raise CheckpointError(
            f"{folder}: init_lora_weights={shown(config['init_lora_weights'])} changes the model's "
            "own weights, too, which the adapter does not hold. Save it with peft's "
            f"path_initial_model_for_weight_conversion, or merge it. {MERGE}"
        )
    for name, value in config.items():
        for pattern in value if isinstance(value, dict | list) else [value]:
            is_pattern = name.endswith(("_modules", "_pattern")) and isinstance(pattern, str)
            if kind in MERGING and is_pattern:  # which peft will try
                _check_pattern(str(folder), name, pattern)
    known = peft_layers.fields_of(kind) if kind in MERGING else _OF_TRAINING
    unknown = sorted(str(n) for n, value in config.items() if value and n not in known)
    if unknown:
        given = ", ".join(f"{shortened(n, 60)}={shown(config[n])}" for n in unknown[:4])
        raise CheckpointError(
            f"{folder / ADAPTER} has {given}, which dualinfer does not merge. {MERGE}"
        )
    return kind


_FACTORS = {"A", "B"}
_EMBEDDING = {"embedding_A", "embedding_B"}


class _Reader(NamedTuple):
    """Makes changes of the factors that a folder has."""

    folder: Path
    config: Mapping[str, Any]
    source: TensorSource

    def _factors(self, path: str, parts: Mapping[str, str]) -> tuple[Stored, Stored, bool]:
        """The factors up and down, and whether they are an embedding's."""
        where = self._where(path)
        factors = {*parts} - {"magnitude_vector", "B.bias"}
        if factors not in (_FACTORS, _EMBEDDING):
            raise CheckpointError(
                f"{where} has lora_{' and lora_'.join(sorted(factors)) or 'magnitude_vector'}; "
                f"lora_A and lora_B are expected. Was the adapter saved in full? {MERGE}"
            )
        prefix = "embedding_" if factors == _EMBEDDING else ""
        up, down = (Stored(self.source, parts[prefix + part]) for part in "BA")
        return up, down, bool(prefix)

    def _where(self, path: str) -> str:
        return f"{self.folder}: {shortened(path)}"

    def _scale(self, path: str, rank: int) -> float:
        alpha = self._number("alpha_pattern", "lora_alpha", path)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def low_rank(
        self, name: str, key: str, parts: Mapping[str, str], turned: bool | None = None
    ) -> LowRank:
        """The change of a matrix; `key` is what patterns of the config are compared with."""
        path = name.removesuffix(".weight")
        up, down, is_embedding = self._factors(path, parts)
        where, name = self._where(path), "magnitude_vector"
        magnitude = Stored(self.source, parts[name]) if name in parts else None
        if bool(self.config.get("use_dora")) != (magnitude is not None):
            raise CheckpointError(
                f"{where} has {'a' if magnitude else 'no'} lora_magnitude_vector, and "
                f"use_dora={shown(self.config.get('use_dora'))}. Fetch or save the adapter again."
            )
        shapes = up.shape, down.shape, *((magnitude.shape,) if magnitude else ())
        rank = down.shape[0] if down.shape else 0
        expected = self._number("rank_pattern", "r", key)
        is_matrices = len(up.shape) == len(down.shape) == 2 and up.shape[1] == rank > 0
        if not is_matrices or (magnitude is not None and magnitude.shape != up.shape[:1]):
            raise CheckpointError(
                f"{where} has factors of shapes {', '.join(map(str, shapes))}; [out, r], [r, in] "
                f"and, of DoRA, [out] are expected, as those of nn.Linear and embeddings. {MERGE}"
            )
        if rank != expected:
            raise CheckpointError(
                f"{where} has factors of rank {rank}, and by {ADAPTER} it is {shown(expected)}, "
                "on which its scale depends. Fetch or save the adapter again."
            )
        turned = True if is_embedding else turned
        wide = bool(self.config.get("fan_in_fan_out"))
        return LowRank(up, down, self._scale(key, rank), magnitude, turned, wide)

    def of_module(self, path: str, parts: Mapping[str, str]) -> dict[str, Change]:
        """The changes of a module's matrix and bias, by their names."""
        own = self.low_rank(f"{path}.weight", path, parts)
        changes: dict[str, Change] = {f"{path}.weight": own}
        if "B.bias" in parts:
            changes[f"{path}.bias"] = Added(Stored(self.source, parts["B.bias"]), own.scale)
        return changes

    def targets_of(self, module: str) -> tuple[str, ...]:
        """The last parts of the names of a module's parameters that the config may mean."""
        given = self.config.get("target_parameters") or []
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise CheckpointError(
                f"{self.folder}: target_parameters is {shown(given)}, expected a list of names. "
                "Fetch or save the adapter again."
            )
        names = (name.rpartition(".") for name in given)
        own = (last for parent, dot, last in names if f".{module}".endswith(dot + parent))
        return tuple(dict.fromkeys(own))

    def nested(self, module: str, levels: Mapping[int, Mapping[str, str]]) -> Nested:
        """The changes of a module's parameters, whose layers lie one in another."""
        targets = self.targets_of(module)
        if not targets or sorted(levels) != list(range(len(levels))):
            raise CheckpointError(
                f"{self._where(module)} has factors in {len(levels)} layers, one in another, "
                f"which target_parameters={shown(self.config.get('target_parameters'))} do not "
                "fit. Fetch or save the adapter again."
            )
        factors = tuple(levels[depth] for depth in sorted(levels, reverse=True))
        return Nested(module, targets, factors, self._change, self.of_module)

    def _change(self, name: str, axes: int, parts: Mapping[str, str]) -> Change:
        """The change of a parameter, of which peft keeps factors."""
        if axes == 2:
            return self.low_rank(name, name, parts, turned=False)
        up, down, _ = self._factors(name, parts)
        where = self._where(name)
        rank = self._number("rank_pattern", "r", name)
        both = up.shape[1:2] + down.shape[:1]
        if (
            {*parts} != _FACTORS
            or (len(up.shape), len(down.shape)) != (2, 2)
            or type(rank) is not int
            or rank < 1
            or both[0] != both[1]
            or both[0] % rank
        ):
            raise CheckpointError(
                f"{where} has factors of shapes {up.shape} and {down.shape}; [out, r x experts] "
                f"and [r x experts, in] are expected, and by {ADAPTER} r is {shown(rank)}. Fetch "
                "or save the adapter again."
            )
        version = re.match(r"(\d{1,4})\.(\d{1,4})", str(self.config.get("peft_version") or ""))
        old = version is None or (int(version[1]), int(version[2])) < (0, 19)
        return Stack(up, down, self._scale(name, rank), rank, old=old)

    def _number(self, pattern: str, name: str, path: str) -> float:
        """A number of the config for one module: that of the first pattern that fits its path."""
        where = self._where(path)
        patterns = self.config.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{where}: {pattern} is {shown(patterns)}, expected an object.")
        texts = tuple(rf"(.*\.)?({text})$" for text in patterns)
        tried = _patterns(texts, f"{self.folder / ADAPTER}: {pattern}")
        found = next((list(patterns.values())[i] for i in tried.find(path)), None)
        value = self.config.get(name, 8) if found is None else found  # peft's default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise CheckpointError(f"{where}: {name} is {shown(value)}, expected a number.")
        return value


@lru_cache(maxsize=16)
def _patterns(texts: tuple[str, ...], where: str) -> Patterns:
    """The patterns of a config, which each module asks for."""
    return Patterns(texts, where)


def _check_pattern(where: str, kind: str, pattern: str) -> None:
    """Raise CheckpointError for what is no regular expression, or may take peft for ever to try."""
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


def open_adapters_of(module: Any) -> list[Adapter]:
    """The adapters of peft's that are in use in a live module; an empty list without any."""
    changes: dict[str, dict[str, list[Change]]] = {}
    factors: dict[str, Any] = {}
    source = TorchSource(factors, f"the adapters of the live {type(module).__name__}")
    for path, layer in adapted_layers(module):
        for name in active_adapters(layer):
            own = changes.setdefault(name, {})

            def stored(part: str, tensor: Any, place: str = f"{path}.{name}.{id(layer)}") -> Stored:
                factors[f"{place}.{part}"] = getattr(tensor, "weight", tensor)
                return Stored(source, f"{place}.{part}")

            for weight, change in _changes_of_layer(path, layer, name, stored).items():
                own.setdefault(weight, []).append(change)
    return [Adapter(name, changes=own) for name, own in changes.items()]


def _changes_of_layer(
    path: str, layer: Any, name: str, stored: Callable[[str, Any], Stored]
) -> dict[str, Change]:
    """The changes that an adapter makes of a live layer's weights, by their names."""
    kind = kind_of_layer(layer)
    if kind not in ("tokens", "matrix", "parameter"):
        made = peft_layers.changes_of(str(kind), path, layer, name)
        return {weight: Made(make) for weight, make in made.items()}
    if kind == "tokens":
        ids = tuple(int(i) for i in layer.token_indices[name])
        rows = Rows(ids, stored("rows", layer.trainable_tokens_delta[name]))
        return {f"{path}.weight": rows}
    prefix = "lora_embedding_" if name in layer.lora_embedding_A else "lora_"
    up, down = (stored(part, getattr(layer, prefix + part)[name]) for part in "BA")
    scale = float(layer.scaling[name])
    if kind == "parameter":
        at = f"{path}.{layer.parameter_name}"
        if len(layer.get_param().shape) == 2:
            return {at: LowRank(up, down, scale, turned=False)}
        turned = not layer._did_swap_in_out_features
        return {at: Stack(up, down, scale, int(layer.r[name]), turned)}
    magnitudes = getattr(layer, "lora_magnitude_vector", {})
    magnitude = stored("magnitude", magnitudes[name]) if name in magnitudes else None
    turned = prefix != "lora_" or bool(getattr(layer, "fan_in_fan_out", False))
    own: dict[str, Change] = {f"{path}.weight": LowRank(up, down, scale, magnitude, turned)}
    bias = getattr(getattr(layer, prefix + "B")[name], "bias", None)
    if bias is not None:
        own[f"{path}.bias"] = Added(stored("bias", bias), scale)
    return own
