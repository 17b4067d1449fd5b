"""init_inference: model and config to spec, weights, runner and engine."""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import backends
from .checkpoint import check_folder, open_checkpoint, open_module, read_json
from .config import InferenceConfig, make_config
from .engine import InferenceEngine
from .errors import ModelError, UnsupportedError
from .families import check_model_type, describe_model
from .weights import TensorSource, make_load_plan


def init_inference(
    model: Any,
    config: InferenceConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> InferenceEngine:
    """An engine that runs `model` on `backend` ("torch", the default, or "jax").

    `model` is the folder of a HF checkpoint or a live HF module, which stays as it is; its weights
    are shared where layout, dtype and device agree. `config` is a dict, an InferenceConfig or the
    path of a JSON file; keyword arguments are its fields. Raises ConfigError, ModelError,
    CheckpointError or BackendNotAvailableError; nothing half done stays behind.
    """
    overrides = kwargs if backend is None else {"backend": backend, **kwargs}
    settings = make_config(config, overrides)
    backends.check_backend(settings.backend)
    if isinstance(model, str | os.PathLike):
        folder = check_folder(model)
        model_config = _read_config(folder)
        class_names = model_config.get("architectures")
        generation = _read_generation_config(folder, model_config)
        notes: list[str] = []
        open_source: Callable[[], TensorSource] = partial(open_checkpoint, folder)
    else:
        _check_module(model, settings)
        model_config = model.config.to_dict()
        class_names = _hf_class_names(model)
        own = getattr(model, "generation_config", None)
        generation = own.to_dict() if own is not None else {}
        notes = _notes_on(model)
        open_source = partial(open_module, model)
    spec, table = describe_model(model_config, class_names)
    source = open_source()
    plan = make_load_plan(table, source)
    if not class_names:
        notes.append(f"config.json names no architecture; taken as {spec.architecture}")
    if plan.unused:
        notes.append(f"weights without use here: {', '.join(plan.unused)}")
    dtype = settings.dtype
    if dtype is None:
        dtype = backends.default_dtype(settings.backend)
        notes.append(f"dtype was unset: {dtype}")
        stored = {source.dtype(names[0]) for _, names in plan.rows}
        if dtype == "float16" and "bfloat16" in stored:
            warnings.warn(
                "The checkpoint is bfloat16 and dtype is unset, so that it is float16 on a GPU, "
                'whose range is smaller. Pass dtype="bf16" to keep its own.',
                stacklevel=2,
            )
    settings = settings.model_copy(update={"dtype": dtype})
    runner = backends.create_runner(settings, spec, plan, source)
    return InferenceEngine(runner, settings, model_config, generation, source.description, notes)


def _check_module(model: Any, settings: InferenceConfig) -> None:
    if not hasattr(model, "state_dict") or not hasattr(getattr(model, "config", None), "to_dict"):
        raise ModelError(
            f"model is a {type(model).__name__}; expected a live HF module or the folder of a HF "
            "checkpoint."
        )
    if settings.backend == "torch" and not settings.replace_with_kernel_inject:
        raise UnsupportedError(
            "A live module on torch runs as it is unless replace_with_kernel_inject=True, and that "
            "module mode is not in this version. Set replace_with_kernel_inject=True, or pass the "
            "checkpoint's folder."
        )


def _hf_class_names(model: Any) -> list[str]:
    """Names of the module's classes from transformers, the most derived first.

    Raises ModelError for a class whose forward is not HF's, since ours would differ from it.
    """
    classes = type(model).__mro__
    for i, cls in enumerate(classes):
        if cls.__module__.startswith("transformers."):
            return [c.__name__ for c in classes[i:]]
        if "forward" in vars(cls):
            raise ModelError(
                f"{cls.__name__} has a forward of its own, which fused mode would not run. Pass "
                "the HF module itself."
            )
    raise ModelError(f"{type(model).__name__} is no HF model.")


def _notes_on(model: Any) -> list[str]:
    """What the report should say of a live module that our decoder replaces."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return ["the module has forward hooks, which do not run here"] if hooked else []


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json in transformers' present form: defaults filled in, old names moved."""
    from transformers import AutoConfig

    written = read_json(folder / "config.json")
    model_type = check_model_type(written.get("model_type"))
    fields = {name: value for name, value in written.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # transformers' validation raises many kinds
        raise ModelError(f"{folder / 'config.json'} is not a valid config: {error}") from error
    return config.to_dict()


def _read_generation_config(folder: Path, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json; without one, what config.json says of generation, as in HF."""
    path = folder / "generation_config.json"
    if path.is_file():
        return read_json(path)
    from transformers import GenerationConfig

    written = read_json(folder / "config.json")
    known = GenerationConfig().to_dict().keys() - {"output_hidden_states", "output_attentions"}
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **{name: model_config.get(name) for name in special},
        **{name: value for name, value in written.items() if name in known},
    }
