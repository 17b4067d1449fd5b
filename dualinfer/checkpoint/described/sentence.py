"""The files by which sentence-transformers says how a model's folder embeds texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ...arrays import to_numpy
from ...errors import CheckpointError, UnsupportedError, reads, shown
from ...model.embedding import DENSE_ACTIVATIONS, POOLINGS, Dense, TextEmbedding
from ..files.safetensors import is_path, read_json, read_list
from ..sources import open_checkpoint

MODULES = "modules.json"
SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu"}


@reads()
def read_text_embedding(folder: Path) -> TextEmbedding:
    """Read how the model in `folder` embeds texts, by modules.json and what it names.

    Without that file, mean pooling and nothing more, and if others say that the folder is a part of
    one of sentence-transformers', `unknown` says so. Raises CheckpointError for files that are none
    of sentence-transformers', and UnsupportedError for a module that dualinfer does not know.
    """
    if not (folder / MODULES).is_file():
        return TextEmbedding(unknown=_unknown(folder))
    pooling, include, layers = "", True, []
    transformer = folder
    for kind, path in _modules(folder):
        place = folder / path
        if kind == "Transformer":
            transformer = place
        elif kind == "Pooling":
            pooling, include = _read_pooling(place)
        elif kind == "Normalize":
            layers.append(None)
        else:
            layers.append(_read_dense(place))
    settings, own = _optional(transformer / SETTINGS[0]), _optional(folder / SETTINGS[1])
    length, prompts = settings.get("max_seq_length"), own.get("prompts") or {}
    name = own.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(f"{folder} has prompts={shown(prompts)}; expected texts by name.")
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointError(f"{folder} has max_seq_length={shown(length)}; expected an int.")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise CheckpointError(f"{folder} has default_prompt_name={shown(name)}, not among prompts.")
    most = own.get("truncate_dim")
    if most is not None and (type(most) is not int or most < 1):
        raise CheckpointError(f"{folder} has truncate_dim={shown(most)}; expected an int above 0.")
    lower = bool(settings.get("do_lower_case", False))
    # sentence-transformers knows these two of every model.
    prompts = {"query": "", "document": "", **prompts}
    how = pooling or "mean", include, tuple(layers), length, lower, prompts, name, most
    return TextEmbedding(*how)


def files_of_modules(folder: Path) -> Iterator[tuple[str, ...]]:
    """The files beside modules.json that `read_text_embedding` reads, each with what may stand in.

    Of those that stand in for each other the first one that there is serves; some may be absent.
    """
    yield (SETTINGS[1],)
    for kind, path in _modules(folder):
        at = f"{path}/" if path else ""
        if kind == "Transformer":
            yield (f"{at}{SETTINGS[0]}",)
        elif kind in ("Pooling", "Dense"):
            yield (f"{at}config.json",)
        if kind == "Dense":
            yield tuple(f"{at}{name}" for name in ("model.safetensors", "pytorch_model.bin"))


def _unknown(folder: Path) -> str | None:
    """Why a folder without modules.json does not say how it embeds texts, if it should."""
    pooling = sorted(place.parent.name for place in folder.glob("*_Pooling/config.json"))
    held = [*pooling, *(name for name in SETTINGS if (folder / name).is_file())]
    if not held:
        return None
    return (
        f"{folder} holds {held[0]}, but no {MODULES}, so that it is a part of a folder of "
        "sentence-transformers and does not say how it embeds texts. Copy that file to it, or pass "
        "pooling=, and normalize=True if vectors shall have length 1."
    )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Kind and path of each module, in order."""
    found = []
    for module in read_list(folder / MODULES):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{folder / MODULES} holds {shown(module)}, no module.")
        kind, path = module["type"].rpartition(".")[2], _path(folder, module)
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise UnsupportedError(
                f"{folder / MODULES} has a module of type {shown(module['type'])}; dualinfer knows "
                "Transformer, Pooling, Dense and Normalize. Pass its model's folder without "
                f"{MODULES}, or embed with sentence-transformers."
            )
        found.append((kind, path))
    return found


def _path(folder: Path, module: dict[str, Any]) -> str:
    path = module.get("path", "")
    written = path if isinstance(path, str) and is_path(path) else ".."
    if Path(written).is_absolute() or ".." in Path(written).parts:
        raise CheckpointError(
            f"{folder / MODULES} names the path {shown(path)}, not one within the folder."
        )
    return written


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_pooling(place: Path) -> tuple[str, bool]:
    config = read_json(place / "config.json")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_MODES.items() if config.get(name)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    known = isinstance(modes, list) and all(isinstance(m, str) and m in POOLINGS for m in modes)
    if not known:
        raise CheckpointError(f"{place} has pooling_mode={shown(modes)}; known: {POOLINGS}.")
    if len(modes) > 1:
        raise UnsupportedError(
            f"{place} joins the vectors of {', '.join(modes)} pooling; dualinfer pools one way. "
            "Pass pooling= to choose one."
        )
    return modes[0], bool(config.get("include_prompt", True))


def _read_dense(place: Path) -> Dense:
    config = read_json(place / "config.json")
    name = config.get("activation_function") or "Identity"
    short = name.rpartition(".")[2] if isinstance(name, str) else "?"
    ways = {"module_input_name", "module_output_name"} & config.keys()
    elsewhere = any(config[way] not in (None, "sentence_embedding") for way in ways)
    if short not in _ACTIVATIONS or config.get("use_residual") or elsewhere:
        raise UnsupportedError(
            f"{place} is a Dense module with activation_function={shown(name)}, "
            f"use_residual={config.get('use_residual', False)}; dualinfer knows those behind the "
            f"pooling with {', '.join(_ACTIVATIONS)} and no residual."
        )
    source = open_checkpoint(place)
    arrays = {}
    for key in source.names():
        array = to_numpy(source.read(key))
        if array.dtype != ml_dtypes.bfloat16 and array.dtype.kind != "f":
            raise CheckpointError(f"{key} in {place} is {array.dtype}; expected floats.")
        arrays[key] = array.astype(np.float32)
    weight, bias = arrays.pop("linear.weight", None), arrays.pop("linear.bias", None)
    if (
        weight is None
        or arrays
        or weight.ndim != 2
        or (bias is not None) != bool(config.get("bias", True))
    ):
        raise CheckpointError(
            f"{place} holds other tensors than a Dense module's linear.weight and linear.bias."
        )
    activation: Any = _ACTIVATIONS[short]
    assert activation is None or activation in DENSE_ACTIVATIONS
    return Dense(weight, bias, activation)
