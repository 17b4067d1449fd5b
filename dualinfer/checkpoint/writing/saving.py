"""save_mp_checkpoint_path: a model's weights as a folder that loads at any degree.

The weights are read again from where they came from, part by part, so that neither the host nor
the device holds more than it did; the folder appears when it is whole.
"""

import copy
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...arrays import numpy_dtype, to_numpy
from ...config.nested import TensorParallelConfig
from ...errors import (
    CheckpointError,
    ConfigError,
    DualinferError,
    UnsupportedError,
    listing,
    warn_caller,
)
from ...model.kept_config import made
from ...model.load_plan import LoadPlan, MadeSource, TensorSource
from ...model.spec import ModelSpec
from ...model.weights import FLOATS
from ...parallel.agreement import Peers
from ...parallel.sharding import make_plan
from ...quantization import QuantizedMatrix, quantization_of
from ...quantization.meaning import dequantize
from ...system.new_folder import NewFolder, TakenError, write_synced
from ...system.progress import track_bytes
from ..described.tokenizer_files import tokenizer_files
from ..files.pieces import INDEX, Cut, cut_pieces, make_index
from ..files.safetensors import write_tensors
from ..views.quantized import QuantizedSource
from ..views.stacked import Splits
from .compressed import Spec, Stored, arrays_of, describe, store

_LONGEST_NAME = 240  # bytes; a folder beside it has some more


@dataclass(frozen=True)
class Saved:
    """The parts that a checkpoint is made of.

    `config` and `generation_config` are HF's objects; `dtype` is the engine's, by NumPy's name.
    Tokenizer files are taken from `folder` if it is one.
    """

    spec: ModelSpec
    plan: LoadPlan
    source: TensorSource
    dtype: str
    config: Any
    generation_config: Any
    folder: Any


_OPTION = "save_mp_checkpoint_path"  # how messages call the path


def _quantizes(saved: Saved) -> bool:
    """True if the weights are quantized here, and no checkpoint holds them so."""
    if not isinstance(saved.source, QuantizedSource):
        return False
    return quantization_of(saved.config.to_dict()) is None


def check_content(saved: Saved) -> None:
    """Raise UnsupportedError for what is quantized here and cannot be written so."""
    if _quantizes(saved) or saved.plan.table.added:
        _entries(saved)


def check_saving(path: str, folder: Any, option: str = _OPTION) -> None:
    """Raise what saving to `path` would: it is not free, or tokenizer files cannot be copied.

    `folder` is where they are taken from, if it is one. Raises ConfigError or CheckpointError.
    """
    target = _resolved(path, option)
    if target.is_dir():
        names = sorted(entry.name for entry in target.iterdir())
        if names:
            raise ConfigError(
                f"{option}={path!r} holds {', '.join(names[:4])}"
                f"{' and more' if len(names) > 4 else ''}; nothing is written over. Pass a folder "
                "that is empty or not there, or empty this one."
            )
    elif target.exists():
        raise ConfigError(f"{option}={path!r} is no folder. Pass another path.")
    for _ in tokenizer_files(folder):
        pass


def save_checkpoint(path: str, saved: Saved, tp: TensorParallelConfig, peers: Peers) -> str:
    """Write a folder with a file of weights for each device; what was done, for people.

    Each process of `peers`, which must share the file system, writes its part of the files. That of
    one device is a checkpoint that transformers reads; those of several dualinfer reads, at any
    degree. What is quantized here is written as `save_folder` does, by the first process. Raises
    CheckpointError or DistributedError, and then leaves nothing at `path`.
    """
    target = _resolved(path)
    if _quantizes(saved):
        with peers.together("Saving"):
            if peers.rank == 0:
                save_folder(path, saved, option=_OPTION)
        return f"saved quantized, in 1 file of weights, to {target}"
    degree = _degree(tp, peers)
    found = (name for _, names in saved.plan.rows for name in names)
    whole = _whole_of(saved.source)
    if degree == 1 and any("#" in n or whole(n) != n for n in found):
        # HF has no names for the parts of a tensor.
        save_folder(path, saved, option=_OPTION)
        return f"saved in 1 file of weights to {_resolved(path)}"
    tp_plan = make_plan(saved.plan.table, degree, tp.tp_grain_size)
    cuts = cut_pieces(tp_plan.shards, saved.plan, saved.source, saved.dtype, _kept(saved))
    with ExitStack() as stack:
        with peers.together("The start of saving") as work, _told(path):
            new = stack.enter_context(closing(NewFolder(target))) if peers.rank == 0 else None
            content = None if new is None else str(new.content)
            folder = Path(work.meet(folder=content)["folder"][0])
        with peers.together("The folder of saving"):
            if not folder.is_dir():
                raise CheckpointError(
                    f"save_mp_checkpoint_path={path!r}: rank {peers.rank} does not see what rank 0 "
                    "wrote there. Pass a folder of a file system that all processes share."
                )
        with peers.together("Saving"), _told(path):
            for own in cuts[peers.rank :: peers.size]:
                _write_shard(folder, own, saved)
        with peers.together("The end of saving"), _told(path):
            if new is not None:
                _check_complete(folder, cuts)
                _write_descriptions(folder, saved)
                if tp_plan.size > 1:
                    _write_json(folder / INDEX, make_index(cuts))
                new.publish()
    count = sum(map(bool, cuts))
    return f"saved in {count} file{'s' if count > 1 else ''} of weights to {target}"


class Written(NamedTuple):
    """A weight in a folder that was written: its matrix where it is quantized, and its bytes."""

    name: str
    matrix: QuantizedMatrix | None
    shape: tuple[int, ...]
    nbytes: int


def save_folder(
    path: str,
    saved: Saved,
    max_shard_size: int | None = None,
    seen: Callable[[Written], None] | None = None,
    option: str = "folder",
) -> list[Written]:
    """Write a folder that transformers and any engine load, and say what is in it.

    Plain weights are in the engine's dtype; quantized ones are in compressed-tensors' format,
    matrix by matrix. An embedding that is quantized because it is the head as well becomes two: a
    plain one with the same values, and the quantized head. Files hold at most `max_shard_size`
    bytes, unless one weight is larger. `seen` is called with each weight once it is written, and
    `option` is how messages call the path. Raises ConfigError, CheckpointError, or UnsupportedError
    for what the format cannot say, and then leaves nothing at `path`.
    """
    check_saving(path, saved.folder, option)
    entries, described, untied = _entries(saved)
    written = [entry.written for entry in entries]
    files: list[list[_Entry]] = [[]]
    for entry in entries:
        size = sum(own.written.nbytes for own in files[-1])
        if max_shard_size and files[-1] and size + entry.written.nbytes > max_shard_size:
            files.append([])
        files[-1].append(entry)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    total = sum(own.nbytes for own in written)
    with _told(path, option), closing(NewFolder(_resolved(path, option))) as new:
        with track_bytes("Saving", total) as advance:
            for name, own in zip(names, files, strict=True):
                specs = {k: v for entry in own for k, v in entry.spec.items()}
                write_tensors(new.content / name, specs, _arrays(own, advance, seen))
        _write_descriptions(new.content, saved, described, untied)
        if len(files) > 1:
            where = {k: n for n, own in zip(names, files, strict=True) for e in own for k in e.spec}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            _write_json(new.content / "model.safetensors.index.json", index)
        new.publish()
    return written


class _Entry(NamedTuple):
    """The part of one weight that is written in one file."""

    written: Written
    spec: Spec
    arrays: Callable[[], Iterable[np.ndarray]]


def _arrays(
    entries: list[_Entry], advance: Callable[[int], Any], seen: Callable[[Written], None] | None
) -> Iterator[np.ndarray]:
    for entry in entries:
        yield from entry.arrays()
        advance(entry.written.nbytes)
        if seen:
            seen(entry.written)


def _entries(saved: Saved) -> tuple[list[_Entry], dict[str, Any] | None, bool]:
    """List what to write, the quantization_config, and whether the head is its own weight now."""
    source, table = saved.source, saved.plan.table
    if table.added:
        raise UnsupportedError(
            f"The adapter adds {listing(table.added)}, for which HF's {saved.spec.architecture} "
            "has no place. Keep the model and the adapter (lora_bias=True) apart."
        )
    turned = {
        part.name
        for row in replace(table, matrices=None).rows
        for part in row.sources
        if row.is_weight and row.permutation(part) != tuple(range(len(part.axes)))
    }
    tied = {name: row.sources[0].name for row, name in table.tied}
    whole_of = _whole_of(source)
    entries: dict[str, _Entry] = {}
    stored: dict[str, Stored] = {}
    plain: list[str] = []
    found_as: dict[str, str] = {}
    for row, names in saved.plan.rows:
        for part, found in zip(row.sources, names, strict=True):
            name, own = found.partition(":")[0], part.name.partition(":")[0]
            matrix = source.matrix(name) if isinstance(source, QuantizedSource) else None
            name = whole_of(name) if matrix is None else name  # a plain tensor stays whole
            found_as[own] = name
            if name in entries:
                continue
            if matrix is None and "#" in name:  # files for several devices hold experts apart
                whole = name.partition("#")[0]
                if whole not in entries:
                    parts = [n for n in names if n.startswith(f"{whole}#")]
                    entries[whole] = _joined_entry(whole, parts, source, saved.dtype)
                continue
            if matrix is None:
                entries[name] = _plain_entry(name, source, saved.dtype)
                plain += [name] if row.is_weight else []
                continue
            if own in turned:
                what = "one expert of a tensor" if "#" in name else "a Conv1D of transformers"
                raise UnsupportedError(
                    f"{name} is {what}, which compressed-tensors does not hold. "
                    "Keep the plain model, and quantize it while it is loaded, by `quant`."
                )
            if row.layer is None and row.name != "head.weight":
                entries[name] = _dense_entry(name, matrix, saved.dtype)
                plain.append(name)
                name = tied.get(own, "")
            if name:
                stored[name] = store(name, matrix)
                entries[name] = _quantized_entry(name, matrix, stored[name])
    kept = _kept_plain(saved)
    kept = [name for name in kept if whole_of(name) not in entries]  # of one that is written
    entries |= {name: _plain_entry(name, source, saved.dtype) for name in kept}
    plain += [name for name in kept if name.endswith(".weight")]
    untied = any(name in stored for name in tied.values())
    for name, twin in tied.items() if untied else ():
        if twin not in entries and twin.endswith(".bias"):  # of such a head, which reads its own
            entry = entries[found_as[name]]
            ((_, spec),) = entry.spec.items()
            written = entry.written._replace(name=twin)
            entries[twin] = entry._replace(written=written, spec={twin: spec})
    return [*entries.values()], describe(stored, plain) if stored else None, untied


def _whole_of(source: TensorSource) -> Callable[[str], str]:
    """A function: the tensor in which HF has a plain matrix that is shown by itself."""
    shown = source.plain() if isinstance(source, QuantizedSource) else source
    return shown.whole if isinstance(shown, Splits) else lambda name: name


def _kept(saved: Saved) -> list[str]:
    """Tensors that the engine leaves unread, and HF's class reads.

    Of a quantized checkpoint all that it stores of them, of a plain one those of floats.
    """
    patterns, source = saved.plan.table.kept, saved.source
    names = [n for n in saved.plan.unused if any(re.search(p, n) for p in patterns)]
    is_made = isinstance(source, MadeSource)
    return [name for name in names if is_made or source.dtype(name) in FLOATS]


def _kept_plain(saved: Saved) -> list[str]:
    """Names of kept tensors that `save_folder` writes, which holds no codes of other formats."""
    names = _kept(saved)
    if names and quantization_of(saved.config.to_dict()) is not None:
        warn_caller(
            f"What is saved lacks {listing(names)}, which this engine does not read and "
            "transformers does: of a quantized checkpoint they are not copied."
        )
        return []
    return [name for name in names if saved.source.dtype(name) in FLOATS]


def _plain_entry(name: str, source: TensorSource, dtype: str) -> _Entry:
    shape = tuple(source.shape(name))
    size = prod(shape) * numpy_dtype(dtype).itemsize

    def arrays() -> Iterator[np.ndarray]:
        with np.errstate(over="ignore"):  # infinite in the engine as well
            yield to_numpy(source.read(name)).astype(numpy_dtype(dtype), copy=False)

    return _Entry(Written(name, None, shape, size), {name: (dtype, shape)}, arrays)


def _joined_entry(whole: str, names: list[str], source: TensorSource, dtype: str) -> _Entry:
    """A tensor whose rows are those of others, in their order."""
    names = sorted(names, key=lambda name: int(name.partition("#")[2]))
    parts = [_plain_entry(name, source, dtype) for name in names]
    high = sum(part.written.shape[0] for part in parts)
    shape = (high, *parts[0].written.shape[1:])

    def arrays() -> Iterator[np.ndarray]:
        yield np.concatenate([array for part in parts for array in part.arrays()])

    size = sum(part.written.nbytes for part in parts)
    return _Entry(Written(whole, None, shape, size), {whole: (dtype, shape)}, arrays)


def _dense_entry(name: str, matrix: QuantizedMatrix, dtype: str) -> _Entry:
    size = prod(matrix.shape) * numpy_dtype(dtype).itemsize
    written = Written(name, None, matrix.shape, size)
    spec = {name: (dtype, matrix.shape)}
    return _Entry(written, spec, lambda: [dequantize(matrix).astype(numpy_dtype(dtype))])


def _quantized_entry(name: str, matrix: QuantizedMatrix, stored: Stored) -> _Entry:
    size = sum(prod(shape) * numpy_dtype(kind).itemsize for kind, shape in stored.spec.values())
    written = Written(name, matrix, matrix.shape, size)
    return _Entry(written, stored.spec, lambda: arrays_of(stored))


def _degree(tp: TensorParallelConfig, peers: Peers) -> int:
    """Number of devices: on torch one a process, on JAX those of all processes."""
    if tp.enabled and tp.mesh is not None:
        return int(tp.mesh.shape[tp.axis])
    return max(tp.degree, peers.size)


def _resolved(path: str, option: str = _OPTION) -> Path:
    """The path without links; ConfigError where no folder can have it."""
    try:
        target = Path(os.path.realpath(Path(path).expanduser()))
        if len(os.fsencode(target.name)) > _LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        target.exists()
    except (OSError, ValueError, RuntimeError) as error:
        shown = path if len(path) < 80 else f"{path[:80]}..."
        raise ConfigError(
            f"{option}={shown!r} cannot be a folder: {error}. Pass another path."
        ) from error
    return target


@contextmanager
def _told(path: str, option: str = _OPTION) -> Iterator[None]:
    """Report what the system refuses as an error that names the option."""
    try:
        yield
    except DualinferError:  # of the weights that are read; one of these is an OSError, too
        raise
    except TakenError as error:
        raise CheckpointError(
            f"{option}={path!r}: {error}. Nothing of this checkpoint is left."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{option}={path!r}: the checkpoint was not written, and nothing of it "
            f"is left ({error}). Is there room, and may you write there?"
        ) from error


def _write_shard(folder: Path, cuts: Sequence[Cut], saved: Saved) -> None:
    if not cuts:
        return
    tensors = {cut.piece.key: (cut.dtype, cut.piece.box.shape) for cut in cuts}
    source, metadata = saved.source, {}
    if isinstance(source, MadeSource):  # of a quantized checkpoint, whose header may describe it
        source = source.plain()
        metadata = getattr(source, "metadata", {})

    def arrays() -> Iterator[np.ndarray]:
        for cut in cuts:
            array = to_numpy(source.read(cut.stored, cut.part))
            with np.errstate(over="ignore"):  # infinite in the engine as well
                array = array.astype(numpy_dtype(cut.dtype), copy=False)
            yield array

    write_tensors(folder / cuts[0].piece.file, tensors, arrays(), metadata)


def _check_complete(folder: Path, cuts: Sequence[Sequence[Cut]]) -> None:
    for own in cuts:
        if own and not (folder / own[0].piece.file).is_file():
            raise FileNotFoundError(f"{own[0].piece.file} of another process is not there")


def _write_descriptions(
    folder: Path, saved: Saved, quantized: dict[str, Any] | None = None, untied: bool = False
) -> None:
    """config.json, generation_config.json and the tokenizer: what makes weights a model.

    `quantized` takes the place of what the config says of quantization.
    """
    config = copy.deepcopy(made(saved.config))
    config.architectures, config.dtype = [saved.spec.architecture], saved.dtype
    content = json.loads(config.to_json_string())
    if quantized is not None:
        content["quantization_config"] = quantized
    if untied:
        content["tie_word_embeddings"] = False
    _write_json(folder / "config.json", content)
    if saved.spec.can_generate and saved.generation_config is not None:
        text = made(saved.generation_config).to_json_string()
        _write_json(folder / "generation_config.json", json.loads(text))
    for file in tokenizer_files(saved.folder):
        write_synced(folder / file.name, file.content, file.mode)


def _write_json(path: Path, content: Any) -> None:
    write_synced(path, json.dumps(content, indent=1).encode())
