"""save_mp_checkpoint_path: a model's weights as a folder that loads at any degree.

The weights are read again from where they came from, part by part, so that neither the host nor
the device holds more than it did; the folder appears when it is whole.
"""

import copy
import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import numpy_dtype, to_numpy
from ..config.nested import TensorParallelConfig
from ..errors import CheckpointError, ConfigError, DualinferError
from ..model.spec import ModelSpec
from ..model.weights import LoadPlan, TensorSource
from ..parallel.agreement import Peers
from ..parallel.sharding import make_plan
from ..system.new_folder import NewFolder, write_synced
from .files import write_tensors
from .pieces import INDEX, Cut, cut_pieces, make_index
from .quantized import QuantizedSource
from .tokenizer_files import tokenizer_files

_LONGEST_NAME = 240  # bytes; a folder beside it has some more


@dataclass(frozen=True)
class Saved:
    """What a checkpoint is made of.

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


def check_saving(path: str, folder: Any) -> None:
    """Raise what saving to `path` would: it is not free, or tokenizer files cannot be copied.

    `folder` is where they are taken from, if it is one. Raises ConfigError or CheckpointError.
    """
    target = _resolved(path)
    if target.is_dir():
        names = sorted(entry.name for entry in target.iterdir())
        if names:
            raise ConfigError(
                f"save_mp_checkpoint_path={path!r} holds {', '.join(names[:4])}"
                f"{' and more' if len(names) > 4 else ''}; nothing is written over. Pass a folder "
                "that is empty or not there, or empty this one."
            )
    elif target.exists():
        raise ConfigError(f"save_mp_checkpoint_path={path!r} is no folder. Pass another path.")
    for _ in tokenizer_files(folder):
        pass


def save_checkpoint(path: str, saved: Saved, tp: TensorParallelConfig, peers: Peers) -> str:
    """Write a folder with a file of weights for each device; what was done, for people.

    Each process of `peers`, which must share the file system, writes its part of the files. That of
    one device is a checkpoint that transformers reads; those of several dualinfer reads, at any
    degree. Raises CheckpointError or DistributedError, and then leaves nothing at `path`.
    """
    target = _resolved(path)
    tp_plan = make_plan(saved.plan.table, _degree(tp, peers), tp.tp_grain_size)
    cuts = cut_pieces(tp_plan.shards, saved.plan, saved.source, saved.dtype)
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


def _degree(tp: TensorParallelConfig, peers: Peers) -> int:
    """Number of devices: on torch one a process, on JAX those of all processes."""
    if tp.enabled and tp.mesh is not None:
        return int(tp.mesh.shape[tp.axis])
    return max(tp.degree, peers.size)


def _resolved(path: str) -> Path:
    """The path without links; ConfigError where no folder can have it."""
    try:
        target = Path(os.path.realpath(Path(path).expanduser()))
        if len(os.fsencode(target.name)) > _LONGEST_NAME:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        target.exists()
    except (OSError, ValueError, RuntimeError) as error:
        shown = path if len(path) < 80 else f"{path[:80]}..."
        raise ConfigError(
            f"save_mp_checkpoint_path={shown!r} cannot be a folder: {error}. Pass another path."
        ) from error
    return target


@contextmanager
def _told(path: str) -> Iterator[None]:
    """What the system refuses, as an error that names the option."""
    try:
        yield
    except DualinferError:  # of the weights that are read; one of these is an OSError, too
        raise
    except OSError as error:
        raise CheckpointError(
            f"save_mp_checkpoint_path={path!r}: the checkpoint was not written, and nothing of it "
            f"is left ({error}). Is there room, and may you write there?"
        ) from error


def _write_shard(folder: Path, cuts: Sequence[Cut], saved: Saved) -> None:
    if not cuts:
        return
    tensors = {cut.piece.key: (cut.dtype, cut.piece.box.shape) for cut in cuts}
    source = saved.source.plain() if isinstance(saved.source, QuantizedSource) else saved.source

    def arrays() -> Iterator[np.ndarray]:
        for cut in cuts:
            array = to_numpy(source.read(cut.stored, cut.part))
            with np.errstate(over="ignore"):  # infinite in the engine as well
                array = array.astype(numpy_dtype(cut.dtype), copy=False)
            yield array

    write_tensors(folder / cuts[0].piece.file, tensors, arrays())


def _check_complete(folder: Path, cuts: Sequence[Sequence[Cut]]) -> None:
    for own in cuts:
        if own and not (folder / own[0].piece.file).is_file():
            raise FileNotFoundError(f"{own[0].piece.file} of another process is not there")


def _write_descriptions(folder: Path, saved: Saved) -> None:
    """config.json, generation_config.json and the tokenizer: what makes weights a model."""
    config = copy.deepcopy(saved.config)
    config.architectures, config.dtype = [saved.spec.architecture], saved.dtype
    _write_json(folder / "config.json", json.loads(config.to_json_string()))
    if saved.spec.can_generate and saved.generation_config is not None:
        text = saved.generation_config.to_json_string()
        _write_json(folder / "generation_config.json", json.loads(text))
    for file in tokenizer_files(saved.folder):
        write_synced(folder / file.name, file.content, file.mode)


def _write_json(path: Path, content: Any) -> None:
    write_synced(path, json.dumps(content, indent=1).encode())
