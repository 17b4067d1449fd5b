"""The files by which sentence-transformers says how a model's folder embeds texts."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..arrays import to_numpy
from ..errors import CheckpointError, UnsupportedError, shown
from ..model.embedding import DENSE_ACTIVATIONS, POOLINGS, Dense, TextEmbedding
from .files import read_json, read_list
from .sources import open_checkpoint

_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu"}


def read_text_embedding(folder: Path) -> TextEmbedding:
    """How the model in `folder` embeds texts, by modules.json and what it names.

    Without that file, mean pooling and nothing more. Raises CheckpointError for files that are none
    of sentence-transformers', and UnsupportedError for a module that dualinfer does not know.
    """
    if not (folder / "modules.json").is_file():
        return TextEmbedding()
    pooling, include, layers = "", True, []
    transformer = folder
    for module in read_list(folder / "modules.json"):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(f"{folder / 'modules.json'} holds {shown(module)}, no module.")
        kind, place = module["type"].rpartition(".")[2], folder / _path(folder, module)
        if kind == "Transformer":
            transformer = place
        elif kind == "Pooling":
            pooling, include = _read_pooling(place)
        elif kind == "Normalize":
            layers.append(None)
        elif kind == "Dense":
            layers.append(_read_dense(place))
        else:
            raise UnsupportedError(
                f"{folder / 'modules.json'} has a module of type {shown(module['type'])}; "
                "dualinfer knows Transformer, Pooling, Dense and Normalize."
            )
    settings = _optional(transformer / "sentence_bert_config.json")
    own = _optional(folder / "config_sentence_transformers.json")
    length, prompts = settings.get("max_seq_length"), own.get("prompts") or {}
    name = own.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(f"{folder} has prompts={shown(prompts)}; expected texts by name.")
    if length is not None and (type(length) is not int or length < 1):
        raise CheckpointError(f"{folder} has max_seq_length={shown(length)}; expected an int.")
    if name is not None and name not in prompts:
        raise CheckpointError(f"{folder} has default_prompt_name={shown(name)}, not among prompts.")
    lower = bool(settings.get("do_lower_case", False))
    return TextEmbedding(pooling or "mean", include, tuple(layers), length, lower, prompts, name)


def _path(folder: Path, module: dict[str, Any]) -> str:
    path = module.get("path", "")
    if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
        raise CheckpointError(
            f"{folder / 'modules.json'} names the path {shown(path)}, not one within the folder."
        )
    return path


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_pooling(place: Path) -> tuple[str, bool]:
    config = read_json(place / "config.json")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_MODES.items() if config.get(name)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not all(mode in POOLINGS for mode in modes):
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
    short = name.rpartition(".")[2] if isinstance(name, str) else name
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
