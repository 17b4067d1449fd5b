"""A checkpoint folder's config.json and generation_config.json as HF's objects."""

import dataclasses
import inspect
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, CheckpointError, ModelError, UnsupportedError, reads, shown
from ...model.families import check_model_type
from ...model.families.fields import INERT, check_layers
from ...model.families.gpt_neo import check_types
from ...model.generation import GENERATION
from ...model.generation import check_types as check_generation_types
from ...quantization import find_method, quantization_of, read_quantization, without_caches
from ...quantization.formats import BESIDE, read_beside
from ..files.safetensors import read_json
from ..foreign.meta_llama import is_meta_folder, read_meta_config
from ..gguf.config import read_gguf_config, read_gguf_generation
from ..gguf.model import is_gguf
from . import nomic
from .auto_class import as_auto, changed
from .kept_configs import keep

# Which code attends is chosen here, and HF would fetch a name that it does not know.
_CODE = {
    *("_attn_implementation", "attn_implementation", "_attn_implementation_internal"),
    *("_experts_implementation", "experts_implementation", "_experts_implementation_internal"),
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_MOST_PARTS = 1024
_COUNTED = ("layer", "expert", "block", "depth", "group", "stage", "codebook")
_MOST_LABELS = 1 << 16  # HF makes a name for each; no family here has a head with labels
_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "half", "float", "double"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Models that think and speak, of which HF's class of what thinks reads a part of the config.
_THINKERS = {
    "qwen2_5_omni": ("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration"),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration"),
}
_WHOLE = "quantization_config", "transformers_version"
_SAME = {"kimi_k2": "deepseek_v3"}  # names of makers for a family that transformers has
_LONGEST = 600  # letters of an error of transformers', which may repeat the whole file


@reads("config.json", ModelError)
def read_written(folder: Path) -> dict[str, Any]:
    """config.json, of the type and class that transformers' Auto classes take it for.

    A file beside it may say of quantization what it does not. Of a GGUF file it is what its fields
    say, and of Meta's files what params.json does. Raises ModelError for a class that is code of
    the checkpoint's own.
    """
    return as_auto(_read_as_it_is(folder))


def _read_as_it_is(folder: Path) -> dict[str, Any]:
    if is_gguf(folder):
        return read_gguf_config(folder)
    if not os.path.isfile(folder / "config.json") and is_meta_folder(folder):
        return read_meta_config(folder)
    written = read_json(folder / "config.json")
    model_type = written.get("model_type")
    if isinstance(model_type, str) and model_type in _SAME:
        written["model_type"] = _SAME[model_type]
    thinker = written.get("thinker_config")
    if isinstance(model_type, str) and model_type in _THINKERS and isinstance(thinker, dict):
        own, name = _THINKERS[model_type]
        kept = {k: written[k] for k in ("dtype", "torch_dtype", *_WHOLE) if k in written}
        written = {**kept, **thinker, "model_type": own, "architectures": [name]}
    if nomic.is_makers(written):
        written = nomic.to_transformers(written)
    beside = _quantization_file(folder, written)
    if beside is not None:
        written["quantization_config"] = read_beside(beside.name, read_json(beside))
    return without_caches(written)


def _quantization_file(folder: Path, written: Mapping[str, Any]) -> Path | None:
    """The file that says how weights are quantized where config.json, as `written`, does not."""
    if quantization_of(written) is not None:
        return None
    return next((folder / name for name in BESIDE if os.path.isfile(folder / name)), None)


@reads("config.json", ModelError)
def notes_on(folder: Path) -> list[str]:
    """Notes on where a folder's config was read, and what it was taken for."""
    written = _read_as_it_is(folder)
    notes = changed(written, as_auto(written))
    path = folder / "config.json"
    beside = _quantization_file(folder, read_json(path)) if os.path.isfile(path) else None
    if beside is None:
        return notes
    said = f"config.json says nothing of quantization, and {beside.name} was read for it"
    return [*notes, said]


def config_place(folder: Path) -> str:
    """Name the place of a checkpoint's config, in words for errors."""
    if is_gguf(folder):
        return f"the config of {folder.name}"
    is_meta = not os.path.isfile(folder / "config.json") and is_meta_folder(folder)
    return "params.json" if is_meta else "config.json"


@reads("config.json", ModelError)
def read_config(folder: Path) -> Any:
    """config.json in transformers' present form: defaults filled in, old names moved.

    It may be a `KeptConfig` of HF's object. No code of the folder runs, and no field of it makes HF
    look for a file or fill the memory. Raises ModelError that names a bad field, and
    UnsupportedError for a quantized model of a kind that is not served.
    """
    path = folder if is_gguf(folder) else folder / "config.json"
    written = read_written(folder)
    model_type = check_model_type(written.get("model_type"))
    read_quantization(written)  # which refuses what is not known
    return keep("config", written, partial(_make_config, path, model_type, written))


def _make_config(path: Path, model_type: str, written: Mapping[str, Any]) -> Any:
    fields = usable_fields(model_type, written)
    if written.get("quantization_config"):
        fields["quantization_config"] = written["quantization_config"]
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # transformers' validation raises many kinds
        raise ModelError(f"{path} is not a valid config: {str(error)[:_LONGEST]}") from error


@reads("config.json", ModelError)
def read_other_config(folder: Path) -> Any:
    """config.json of a family that fused mode does not know.

    As `read_config`, it runs nothing of the folder and looks for no other file. Raises ModelError,
    and UnsupportedError for a quantized model.
    """
    path = folder / "config.json"
    written = _without_code(read_written(folder))
    quantization = quantization_of(written)
    if quantization is not None:
        raise UnsupportedError(
            f"{path} has a quantization_config ({find_method(quantization)}), which is served in "
            "fused mode only, and its family is not. Pass the model that it was made from, with "
            "backend='torch'."
        )
    from transformers import CONFIG_MAPPING

    model_type = written.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own = (
            " Its config is Python code of the checkpoint's own, which dualinfer does not run: if "
            "you trust it, load the model yourself with trust_remote_code=True and pass it to "
            "init_inference with backend='torch'."
        )
        raise ModelError(
            f"transformers has no model_type {shown(model_type)}."
            + (own if written.get("auto_map") else "")
        )
    check_counts(written)
    try:
        return CONFIG_MAPPING[model_type](**usable_fields(model_type, written))
    except ModelError:
        raise
    except Exception as error:  # transformers' validation raises many kinds
        raise ModelError(f"{path} is not a valid config: {str(error)[:_LONGEST]}") from error


def _without_code(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those that choose code, in the configs inside as well."""
    return {
        name: _without_code(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in _CODE
    }


def check_counts(fields: Mapping[str, Any]) -> None:
    """Raise ModelError for more parts than any model has, since each would become a module.

    So does a backbone by its name, which HF's class would look for on the hub.
    """
    for name, value in fields.items():
        if name == "backbone" and value:
            raise ModelError(
                f"config.json has backbone={shown(value)}, another model that transformers would "
                "look for on the hub; dualinfer makes models that are whole."
            )
        counts = "size" not in name and any(part in name for part in _COUNTED)
        inner = value if isinstance(value, list | tuple) else [value]
        for one in inner:
            if isinstance(one, dict):
                check_counts(one)
            if counts and isinstance(one, int) and one > _MOST_PARTS:
                raise ModelError(
                    f"config.json has {name[:80]}={shown(value)}; dualinfer makes models of at "
                    f"most {_MOST_PARTS} parts of a kind."
                )


# What HF's class folds into a list of layers, and shows as a property (Nemotron-H).
_FOLDED = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")


def usable_fields(model_type: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that HF's class of `model_type` may be made from.

    Raises ModelError that names a field which would overwrite a part of that class, or make it
    build lists beyond all measure, and for a family that is newer than transformers here.
    """
    check_sizes(model_type, written)
    from transformers import CONFIG_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers {__version__} has no model_type {shown(model_type)}, whose config.json "
            "dualinfer reads by transformers' class. Install a newer transformers."
        )
    config_class = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(config_class)}
    fields = {}
    for name, value in written.items():
        if name in _CODE or name in ("model_type", "quantization_config"):
            continue
        own = inspect.getattr_static(config_class, name, None)
        settable = own is None or (isinstance(own, property) and own.fset is not None)
        settable |= name in _FOLDED and isinstance(own, property) and isinstance(value, str)
        if name in declared or settable or (name == "tie_word_embeddings" and own is True):
            fields[name] = value
        elif name not in INERT:
            raise ModelError(
                f"config.json has a field {name}, which is a part of transformers' "
                f"{config_class.__name__} and no setting. Remove it."
            )
    return fields


def check_sizes(model_type: str, written: Mapping[str, Any]) -> None:
    """Raise ModelError for what HF's class would loop over beyond all measure, or not check."""
    inner = (own for name, own in written.items() if name.endswith("_config"))
    for own in (written, *(own for own in inner if isinstance(own, Mapping))):
        for name in _LAYERS:
            check_layers(name, own.get(name))
    if model_type == "gpt_neo" and written.get("attention_types") is not None:
        check_types(written["attention_types"])
    apart = written.get("per_layer_config") or {}
    if apart and not model_type.startswith("gemma4"):
        raise ModelError(
            f"config.json has per_layer_config={shown(apart)}, and the {model_type} family has no "
            "layers that differ from one another in their sizes. Remove it."
        )
    if not isinstance(apart, Mapping):
        raise ModelError(f"config.json has per_layer_config={shown(apart)}; expected an object.")
    check_layers("len(per_layer_config)", len(apart))
    labels = written.get("num_labels")
    if labels is not None and not (isinstance(labels, int) and 0 <= labels <= _MOST_LABELS):
        raise ModelError(
            f"config.json has num_labels={shown(labels)}; expected an int of at most "
            f"{_MOST_LABELS}. No family here reads it: remove it."
        )
    for name in ("dtype", "torch_dtype"):
        dtype = written.get(name)
        if dtype is not None and dtype not in _DTYPES:
            raise ModelError(
                f"config.json has {name}={shown(dtype)}; expected one of {', '.join(_DTYPES)}."
            )


@reads("generation_config.json")
def read_generation_config(folder: Path, config: Any) -> Any:
    """generation_config.json; without one, what config.json says of generation, as in HF.

    Fields that HF does not know stay, as in HF, which ignores them. As of `read_config` it may be a
    `KeptConfig`. Raises CheckpointError that
    names the file, and a field of a wrong type.
    """
    if is_gguf(folder):
        return _make_generation_config(folder, read_gguf_generation(folder))
    path = folder / "generation_config.json"
    if path.is_file():
        return _make_generation_config(path, read_json(path))
    path = folder / "config.json"
    own = config.to_dict()
    fields = {name: own.get(name) for name in _SPECIAL}
    written = {name: value for name, value in read_written(folder).items() if name in GENERATION}
    return _make_generation_config(path, fields | written)


def _make_generation_config(path: Path, written: Mapping[str, Any]) -> Any:
    return keep("generation", written, partial(_generation_config, path, written))


def _generation_config(path: Path, written: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig

    fields = {n: v for n, v in written.items() if n != "self" and not hasattr(GenerationConfig, n)}
    try:
        check_generation_types(fields)
        return GenerationConfig(**fields)
    except ArgumentError as error:
        raise CheckpointError(f"{path} has {error}") from error
    except Exception as error:  # transformers' validation raises many kinds
        known = {name: value for name, value in fields.items() if name in GENERATION}
        bad = [f"{n}={shown(v)}" for n, v in known.items() if not _is_valid(n, v)]
        where = f" ({', '.join(bad)})" if bad else ""
        raise CheckpointError(
            f"{path} is no valid generation config{where}: {str(error)[:_LONGEST]}"
        ) from error


def _is_valid(name: str, value: Any) -> bool:
    """True if transformers takes this field alone."""
    from transformers import GenerationConfig

    try:
        GenerationConfig(**{name: value})
    except Exception:
        return False
    return True
