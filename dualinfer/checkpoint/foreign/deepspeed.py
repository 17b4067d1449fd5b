"""Weights as DeepSpeed takes and leaves them: its checkpoint JSON, and the folders of its training.

Only files inside the folder that the JSON speaks of are opened.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, CheckpointNotFoundError, listing, shortened, shown
from ..files.safetensors import StoredFile, TensorFile, is_path, read_json
from ..files.torch_files import open_torch_file
from .fitting import Wanted
from .megatron import MegatronShards, is_megatron
from .meta_llama import is_meta_folder, open_meta_folder
from .shards import Shards, check_no_pairs

SAVED = "ds_inference_config.json"  # of DeepSpeed's save_mp_checkpoint_path
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_TYPES = ("bloom", "ds_model")
_KEYS = ("type", "checkpoints", "version", "parallelization", "tp_size", "mp_size", "base_dir")
_HARMLESS = ("dtype",)  # which the files say as well
_RANK = re.compile(r"^mp_rank_(\d{1,6})_model_states\.pt$")
_EXPERT = re.compile(r"^(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt$")
_OF_EXPERT = re.compile(r"(.*)\.deepspeed_experts\.(\d+)\.")
_MOST_FILES = 1 << 16


def open_json(path: Path, base_dir: str = "") -> Shards:
    """The weights that a checkpoint JSON of DeepSpeed's names."""
    return _open(read_json(path), str(path), path.parent, base_dir)


def open_dict(said: Mapping[str, Any], base_dir: str = "") -> Shards:
    """The weights that a dict of the form of DeepSpeed's checkpoint JSON names.

    Without a base_dir names are as in any call of the caller's: absolute, or of the present folder.
    """
    return _open(said, "checkpoint={...}", None, base_dir)


def _open(said: Mapping[str, Any], label: str, beside: Path | None, base_dir: str) -> Shards:
    unknown = sorted(str(key) for key in said if key not in (*_KEYS, *_HARMLESS))
    if unknown:
        raise CheckpointError(
            f"{label} has {listing(unknown)}, which is no key of DeepSpeed's checkpoint JSON; "
            f"expected {', '.join((*_KEYS, *_HARMLESS))}. Remove it."
        )
    kind = said.get("type")
    is_megatron_type = kind == "Megatron"
    if not is_megatron_type and (not isinstance(kind, str) or kind.lower() not in _TYPES):
        raise CheckpointError(
            f"{label} has type={shown(kind)}; expected 'ds_model', 'bloom' or 'Megatron'."
        )
    if said.get("dtype") in ("int8", "torch.int8"):
        raise CheckpointError(
            f"{label} has dtype='int8': DeepSpeed's int8 shards are not read. Save them with dtype "
            'fp16 or bf16, and quantize here with quant="int8".'
        )
    lists, is_split = _lists(said, label, is_megatron_type)
    base, notes = _base(said, label, beside, base_dir)
    files = {name: _open_file(_inside(base, name, label)) for own in lists for name in own}
    rounds = [[files[name] for name in own] for own in lists]
    check_no_pairs(files.values(), label)
    if not any(any(True for _ in file.names()) for file in files.values()):
        raise CheckpointError(f"{label} lists files without tensors. Save the checkpoint again.")
    where = label if beside is not None else f"checkpoint={{'type': {kind!r}, ...}}"
    if is_megatron_type:
        return MegatronShards(rounds, where, notes, version=_version(said.get("version"), label))
    _check_world(rounds[:1] if is_split else [], where)
    return ListedFiles(rounds, where, notes)


class ListedFiles(Shards):
    """Files that a JSON of type ds_model or bloom lists."""

    def fit(self, wanted: Wanted) -> Any:
        """As of Shards; CheckpointError for Megatron's names, which another type asks for."""
        if is_megatron(self.shards, wanted):
            raise CheckpointError(
                f"{self.description} lists files with Megatron's names. Set type to 'Megatron', "
                "and checkpoints to the list of its ranks' files."
            )
        return super().fit(wanted)


def _lists(
    said: Mapping[str, Any], label: str, is_megatron_type: bool
) -> tuple[list[list[str]], bool]:
    """The file names of each round, and whether ranks have split their tensors."""
    given, way = said.get("checkpoints"), said.get("parallelization", "pp")
    if way not in ("pp", "tp"):
        raise CheckpointError(
            f"{label} has parallelization={shown(way)}; expected 'pp', files of whole tensors, or "
            "'tp', files of ranks' shards."
        )
    whole: list[str] = []
    if isinstance(given, dict):
        odd = sorted(str(key) for key in given if key not in ("tp", "non_tp"))
        if odd or "tp" not in given:
            raise CheckpointError(
                f"{label} has checkpoints with {listing(odd) or 'no tp'}; expected lists 'tp' and "
                "'non_tp'."
            )
        split = _names(given["tp"], label, "checkpoints.tp")
        whole = _names(given.get("non_tp", []), label, "checkpoints.non_tp")
    else:
        split = _names(given, label, "checkpoints")
    if not split and not whole:
        raise CheckpointError(f"{label} has no file in checkpoints. List the files of weights.")
    twice = sorted(name for name, count in Counter([*split, *whole]).items() if count > 1)
    if twice:
        raise CheckpointError(f"{label} lists {listing(twice)} twice. List each file once.")
    sizes = {key: _size(said, key, label) for key in ("mp_size", "tp_size") if key in said}
    size = sizes.get("mp_size", sizes.get("tp_size"))
    if is_megatron_type:
        if isinstance(given, dict) or (size or len(split)) != len(split):
            raise CheckpointError(
                f"{label} is of type Megatron with {len(split)} files for {size or 'its'} ranks; "
                "expected a list with one file for each rank."
            )
        return [split], True
    if way == "pp" and not isinstance(given, dict):
        if size is not None and size > 1:
            raise CheckpointError(
                f"{label} has {'mp_size' if 'mp_size' in sizes else 'tp_size'}={size}, and "
                "parallelization is 'pp', that of files with whole tensors. Set parallelization to "
                "'tp' if the files hold ranks' shards; else leave the size out."
            )
        return [[name] for name in split], False
    size = size or len(split) or 1
    if len(split) % size:
        raise CheckpointError(
            f"{label} lists {len(split)} files of ranks' shards for {size} ranks; expected as many "
            "for each. Is tp_size the number of ranks that wrote them?"
        )
    rounds = [split[i : i + size] for i in range(0, len(split), size)]
    return [*rounds, *([name] for name in whole)], size > 1


def _names(given: Any, label: str, key: str) -> list[str]:
    if not isinstance(given, list | tuple) or len(given) > _MOST_FILES:
        raise CheckpointError(f"{label} has {key}={shown(given)}; expected a list of file names.")
    names = [os.fspath(name) if isinstance(name, os.PathLike) else name for name in given]
    odd = [name for name in names if not isinstance(name, str) or not name or not is_path(name)]
    if odd:
        raise CheckpointError(f"{label} has {shown(odd[0])} in {key}; expected a file's name.")
    return names


def _size(said: Mapping[str, Any], key: str, label: str) -> int | None:
    value = said[key]
    if value in (None, 0) and value is not False:  # DeepSpeed's own default for none
        return None
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{label} has {key}={shown(value)}; expected a number of ranks.")
    return value


def _version(value: Any, label: str) -> float | None:
    """The version of Megatron's QKV layout; None leaves it to the files."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in (0, 1, 2):
        raise CheckpointError(
            f"{label} has version={shown(value)}; expected 0, 1.0 or 2.0, those of Megatron's "
            "layouts of query, key and value that are known."
        )
    return float(value)


def _base(
    said: Mapping[str, Any], label: str, beside: Path | None, base_dir: str
) -> tuple[Path | None, list[str]]:
    """The folder of the files, and notes; None where the caller's names are paths themselves."""
    own = said.get("base_dir") or ""
    own = os.fspath(own) if isinstance(own, os.PathLike) else own
    if not isinstance(own, str) or not is_path(own):
        raise CheckpointError(f"{label} has base_dir={shown(own)}; expected a folder's path.")
    for given, key in ((base_dir, "the config's base_dir"), (own, "base_dir")):
        if not given:
            continue
        folder = Path(os.path.expanduser(given))
        if folder.is_dir():
            return folder, []
        if beside is None or key != "base_dir":
            raise CheckpointNotFoundError(
                f"{label}: {key}={shortened(repr(given))} is no folder here. Name the one that "
                "holds the files."
            )
        return beside, [f"its base_dir is not here: the files beside {label} were read"]
    return beside, []


def _inside(base: Path | None, name: str, label: str) -> Path:
    """The path of a file that the JSON names; CheckpointError if it leads out of the folder.

    A link may lead elsewhere in the folder, or as in HF's cache from snapshots/X to blobs.
    """
    if base is None:
        return Path(os.path.expanduser(name))
    folder = Path(os.path.realpath(base))
    path = folder / name
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    written = Path(os.path.normpath(path))
    is_written = ".." not in Path(name).parts and _is_below(
        written, [folder, Path(base).absolute()]
    )
    if not is_written or not _is_below(Path(os.path.realpath(path)), allowed):
        raise CheckpointError(
            f"{label} names {shortened(repr(name))}, which is outside of {folder}, the folder of "
            "its files. Set base_dir to the folder that holds them all."
        )
    return path


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path != folder and path.is_relative_to(folder) for folder in folders)


def _open_file(path: Path) -> StoredFile:
    if path.suffix not in SUFFIXES:
        raise CheckpointError(
            f"{shortened(path)} is no file of weights by its name; expected {', '.join(SUFFIXES)}."
        )
    if path.suffix == ".safetensors":
        return TensorFile(path)
    return open_torch_file(path, may_be_empty=True)  # as DeepSpeed leaves some


def _check_world(rounds: Sequence[Sequence[Any]], label: str) -> None:
    """Raise CheckpointError if a file says that another number of ranks wrote its kind."""
    for files in rounds:
        for file in files:
            size = getattr(file, "facts", {}).get("mp_world_size")
            if size is not None and size != len(files):
                raise CheckpointError(
                    f"{label}: {file.path.name} says mp_world_size={shown(size)}, and there are "
                    f"{len(files)} files of ranks. Fetch or list all of them."
                )


def open_folder(folder: Path) -> Any:
    """The weights of a folder that DeepSpeed or Meta wrote; None if it is none of these.

    That is what DeepSpeed's save_mp_checkpoint_path leaves, a folder of a training with its file
    `latest`, or one of its tags.
    """
    if is_meta_folder(folder):
        return open_meta_folder(folder)
    if os.path.isfile(folder / SAVED):
        return open_json(folder / SAVED)
    tagged = _tagged(folder)
    found = sorted(name for name in os.listdir(tagged) if _RANK.match(name))
    opened = _open_ranks(tagged, found) if found else None
    if opened is None or all(0 in opened.shape(name) for name in opened.names()):
        _refuse_parts(folder, tagged)
    return opened


def _tagged(folder: Path) -> Path:
    """The folder of the tag that `latest` names; the folder itself without that file."""
    latest = folder / "latest"
    if not os.path.isfile(latest):
        return folder
    try:
        with open(latest, "rb") as file:
            tag = file.read(4096).decode().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{latest} cannot be read: {shortened(error)}.") from error
    if not tag or tag in (".", "..") or "/" in tag or "\\" in tag or not is_path(tag):
        raise CheckpointError(
            f"{latest} names {shortened(repr(tag))}; expected the name of a folder beside it."
        )
    tagged = folder / tag
    if not _is_below(Path(os.path.realpath(tagged)), [Path(os.path.realpath(folder))]):
        raise CheckpointError(f"{latest} names {shortened(tag)}, a link out of {folder}.")
    if not os.path.isdir(tagged):
        raise CheckpointNotFoundError(
            f"{latest} names the folder {shortened(tag)}, which is not there. Fetch it, or pass "
            "the folder of another tag."
        )
    return tagged


def _open_ranks(folder: Path, names: Sequence[str]) -> Shards:
    """The weights of mp_rank_NN_model_states.pt, a file for each rank."""
    ranks = [int(name.split("_")[2]) for name in names]
    order = sorted(zip(ranks, names, strict=True))
    if [rank for rank, _ in order] != list(range(len(order))):
        raise CheckpointError(
            f"{folder} holds {listing(list(names))}; expected the files of ranks 0, 1 and so on, "
            "each once. Fetch all of them."
        )
    label = str(folder)
    files = [open_torch_file(_inside(folder, name, label)) for _, name in order]
    _check_world([files], label)
    experts = [
        [open_torch_file(_inside(folder, name, label)) for name in own]
        for own in _expert_files(folder, len(files))
    ]
    check_no_pairs([file for own in (files, *experts) for file in own], label)
    return RankFiles([files, *experts], label)


def _expert_files(folder: Path, ranks: int) -> list[list[str]]:
    """The files of each expert of each MoE layer, one for each rank in order.

    Older ones hold an expert of all layers. Raises CheckpointError where some are missing or there
    twice.
    """
    found: dict[tuple[int, int], dict[int, str]] = {}
    twice = []
    for name in sorted(os.listdir(folder)):
        match = _EXPERT.match(name)
        if match:
            layer, expert, rank = (int(part) if part else 0 for part in match.groups())
            own = found.setdefault((layer, expert), {})
            twice += [f"{own[rank]} and {name}"] if rank in own else []
            own[rank] = name
    if twice:
        raise CheckpointError(
            f"{folder} holds experts twice, {listing(twice)}. Keep one file for each expert."
        )
    layers: dict[int, set[int]] = {}
    for layer, expert in found:
        layers.setdefault(layer, set()).add(expert)
    lacking = [f"layer {n}" for n in range(max(layers, default=0)) if n not in layers]
    for layer, experts in sorted(layers.items()):
        absent = [e for e in range(max(experts)) if e not in experts]
        lacking += [f"expert {e} of layer {layer}" for e in absent]
    for (layer, expert), own in sorted(found.items()):
        where = f"expert {expert} of layer {layer}"
        lacking += [f"rank {rank} of {where}" for rank in range(ranks) if rank not in own]
        lacking += [f"mp_rank_{rank:02d} of the rest" for rank in sorted(own) if rank >= ranks]
    if lacking:
        raise CheckpointError(
            f"{folder} lacks files of experts, {listing(lacking)}: there are experts or ranks of "
            "higher numbers. Fetch all of them."
        )
    return [[own[rank] for rank in range(ranks)] for _, own in sorted(found.items())]


class RankFiles(Shards):
    """Files of ranks of a training: of HF's names, or of Megatron's."""

    def fit(self, wanted: Wanted) -> Any:
        """As of Shards, or of Megatron's where the names are its.

        CheckpointError where experts that the model has are in no file, or the other way round.
        """
        if is_megatron(self.shards, wanted):
            return MegatronShards([self.files], self.description, self.notes, None).fit(wanted)
        fitted = super().fit(wanted)
        self._check_experts([*fitted.names()], wanted)
        return fitted

    def _check_experts(self, names: Sequence[str], wanted: Wanted) -> None:
        stored, asked = (_experts_of(own) for own in (names, wanted.shapes))
        problems = []
        for layer, experts in sorted(asked.items()):
            # A HF model's prefix may lack on either side.
            alike = (n for n in stored if n == layer or n.endswith(f".{layer}"))
            own = next((stored[n] for n in alike), set[int]())
            longer = any(other.endswith(f".{layer}") for other in asked)
            if not experts <= own and not (longer and not own):
                problems.append(
                    f"{layer} has {len(experts)} experts in the model and {len(own)} in the files"
                )
        if problems:
            raise CheckpointError(
                f"{self.description} does not hold all experts: {listing(problems)}. DeepSpeed "
                "writes each to layer_L_expert_E_mp_rank_00_model_states.pt; fetch all of them, or "
                "make the model with as many experts."
            )


def _experts_of(names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of the experts that tensors belong to, by what holds them."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _OF_EXPERT.match(name)
        if match:
            found.setdefault(match[1], set()).add(int(match[2]))
    return found


def _refuse_parts(folder: Path, tagged: Path) -> None:
    """Raise CheckpointError for what only DeepSpeed itself puts together."""
    names = sorted(os.listdir(tagged))
    zero = [n for n in names if re.match(r"^(bf16_)?zero_pp_rank_\d+_mp_rank_\d+.*\.pt$", n)]
    if zero:
        way = f"python {folder / 'zero_to_fp32.py'} {folder} OUT"
        raise CheckpointError(
            f"{tagged} holds ZeRO's parts of the weights ({listing(zero, 2)}), a part of each "
            "tensor for each rank. Put them together with the script that DeepSpeed has left "
            f"there: `{way}`, and pass OUT."
        )
    layers = [n for n in names if re.match(r"^layer_\d+-model_.*\.pt$", n)]
    if layers:
        raise CheckpointError(
            f"{tagged} is of DeepSpeed's pipeline parallelism ({listing(layers, 2)}), whose layers "
            "have numbers in the place of names. Save the model's state dict and pass that."
        )
