"""init_inference: model and config to the engine of the right mode."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from . import backends
from .checkpoint.described.auto_class import class_named
from .checkpoint.described.hf_config import (
    notes_on,
    read_config,
    read_generation_config,
    read_other_config,
    read_written,
)
from .checkpoint.described.tokenizer import load_tokenizer, tokenizer_folder
from .checkpoint.foreign.fitting import fit, wanted_by_module
from .checkpoint.gguf.model import is_gguf
from .checkpoint.hub import find_adapters, find_embedding, find_model, find_weights
from .checkpoint.sources import open_checkpoint, open_weights
from .checkpoint.views.adapted import AdaptedSource
from .checkpoint.writing.saving import (
    Saved,
    Written,
    check_content,
    check_saving,
    save_checkpoint,
    save_folder,
)
from .config import InferenceConfig, dtype_name, make_config
from .config.keywords import ConfigFields
from .config.refusals import check_config
from .engine.arguments import with_names
from .engine.base import About
from .engine.fused import FusedEngine
from .engine.likeness import in_place_of, in_place_of_module
from .engine.module import ModuleEngine
from .engine.origin import Origin
from .errors import (
    BackendNotAvailableError,
    ConfigError,
    DualinferError,
    ModelError,
    OutOfMemoryError,
    UnservedError,
    a_type,
    shortened,
    shown,
    warn_caller,
)
from .model.embedding import TextEmbedding
from .model.families import knows_family
from .model.hf_module import check_made, warn_of_hooks
from .model.live import Watch
from .model.load_plan import LoadPlan, TensorSource, marks_of
from .model.spec import ModelSpec
from .opening import (
    Described,
    Opened,
    count_elements,
    describe,
    describe_fused,
    open_adapters,
    overlay,
    own_dtype,
    refuse_checkpoint,
    stored_dtypes,
    unserved,
    with_dtype,
)
from .parallel.agreement import Peers, in_turn
from .quantization.recipe import make_recipe

if TYPE_CHECKING:
    from .engines import JaxEngine, TorchEngine

_Config = InferenceConfig | Mapping[str, Any] | str | os.PathLike[str] | None


@overload
def init_inference(
    model: Any,
    config: _Config = ...,
    *,
    backend: Literal["torch"],
    params: Any = ...,
    revision: str | None = ...,
    **kwargs: Unpack[ConfigFields],
) -> "TorchEngine": ...


@overload
def init_inference(
    model: Any,
    config: _Config,
    backend: Literal["torch"],
    *,
    params: Any = ...,
    revision: str | None = ...,
    **kwargs: Unpack[ConfigFields],
) -> "TorchEngine": ...


@overload
def init_inference(
    model: Any,
    config: _Config = ...,
    *,
    backend: Literal["jax"],
    params: Any = ...,
    revision: str | None = ...,
    **kwargs: Unpack[ConfigFields],
) -> "JaxEngine": ...


@overload
def init_inference(
    model: Any,
    config: _Config,
    backend: Literal["jax"],
    *,
    params: Any = ...,
    revision: str | None = ...,
    **kwargs: Unpack[ConfigFields],
) -> "JaxEngine": ...


@overload
def init_inference(
    model: Any,
    config: _Config = ...,
    backend: str | None = ...,
    *,
    params: Any = ...,
    revision: str | None = ...,
    **kwargs: Unpack[ConfigFields],
) -> "TorchEngine | JaxEngine": ...


@with_names(ConfigFields)
def init_inference(
    model: Any,
    config: _Config = None,
    backend: str | None = None,
    *,
    params: Any = None,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """An engine that runs `model` on `backend`, "torch" or "jax"; unset: what is installed.

    Examples:
        >>> engine = dualinfer.init_inference("Qwen/Qwen3-0.6B", backend="jax")  # or a folder
        >>> engine.generate_text("def add(a, b):", max_new_tokens=32)
        >>> engine = dualinfer.init_inference("gpt2", backend="torch", quant="int8")
        >>> engine.chat([{"role": "user", "content": "Hello"}])  # needs a chat template

    `model` is the folder of a HF checkpoint, a GGUF file, the name of a model of the hub, which is
    fetched where the local cache does not hold it (`revision` is its branch, tag or commit), a live
    HF module, any other nn.Module (torch), or a Flax module (JAX): nnx, Linen bound to its
    variables, or Linen with them as `params`.

    A checkpoint runs in fused mode, by dualinfer's own decoder. So do HF modules on JAX, and on
    torch with `replace_with_kernel_inject=True`; they stay as they are, their weights shared where
    layout, dtype and device agree. Everything else runs in module mode: on torch the module itself,
    cast and moved in place, or one that is made of a checkpoint whose family fused mode does not
    know. The engine is a TorchEngine or a JaxEngine; in module mode it has the calls that the
    module can serve.

    `config` is a dict, an InferenceConfig or the path of a JSON file; keyword arguments are its
    fields. docs/config.md says what each means. Raises ConfigError, ModelError, CheckpointError,
    BackendNotAvailableError or OutOfMemoryError; nothing half done stays behind.
    """
    overrides = kwargs if backend is None else {"backend": backend, **kwargs}
    settings = make_config(config, overrides).with_int8_as_quant().with_experts_shared()
    backends.check_backend(settings.backend)
    kind = _kind_of_model(model, settings.backend)
    if params is not None:
        if kind != "flax" or not hasattr(model, "apply"):
            raise ModelError(
                f"params are the variables of a Linen module; a {_class_name(model)} has its own. "
                "Leave params out."
            )
        model = (model, params)
    if not isinstance(revision, str | None):
        raise ModelError(
            f"revision={shown(revision)}: expected the name of a branch, a tag or a commit."
        )
    if revision is not None and kind != "folder" and settings.checkpoint is None:
        raise ModelError(
            f"revision={revision!r} is that of a model of the hub; a {_class_name(model)} has "
            "none. Leave revision out."
        )
    peers = backends.join(settings, is_module=kind == "flax")
    try:
        find = partial(_find, model, kind, settings, revision)
        model, settings = in_turn(peers, "Finding the model", find)
        with peers.together("The models and configs"):
            make, model, settings, notes = _choose_mode(model, kind, settings)
        return make(model, settings, peers, notes)
    except BaseException:
        peers.close()
        raise


def _find(
    model: Any, kind: str, settings: InferenceConfig, revision: str | None
) -> tuple[Any, InferenceConfig]:
    """The model and the config with folders in the place of names of the hub, adapters too."""
    if kind == "folder":
        found, adapters = find_model(model, revision, settings.adapter)
        return found, settings.model_copy(update={"adapter": adapters or None})
    update: dict[str, Any] = {"adapter": find_adapters(settings.adapter)}
    if isinstance(settings.checkpoint, str):
        weights, own = find_weights(settings.checkpoint, revision)
        update = {"checkpoint": str(weights), "adapter": {**own, **update["adapter"]}}
    return model, settings.model_copy(update={**update, "adapter": update["adapter"] or None})


_Make = Callable[[Any, InferenceConfig, Peers, list[str]], FusedEngine | ModuleEngine]


def _choose_mode(
    model: Any, kind: str, settings: InferenceConfig
) -> tuple[_Make, Any, InferenceConfig, list[str]]:
    """The function that makes the engine, and its model, config without open choices, and notes.

    A folder whose model fused mode does not serve becomes a module, on the meta device, and what
    fills it. What cannot be honoured is refused.
    """
    asked, on_jax = settings.replace_with_kernel_inject, settings.backend == "jax"
    unknown = unserved(model, settings.config) if kind == "folder" else None
    if unknown is not None and (on_jax or asked):
        raise UnservedError(f"{unknown} {_way_to_module_mode(model, settings)}") from unknown
    fused = (kind == "folder" and unknown is None) or kind == "opened"
    fused = fused or (kind == "torch" and bool(on_jax or asked))
    kernels = fused if asked is None else asked
    settings = settings.model_copy(update={"replace_with_kernel_inject": kernels})
    check_config(settings, "fused" if fused else "module", backends.device_kind(settings.backend))
    make_recipe(settings.quant)
    if settings.dtype is not None:
        backends.check_dtype(settings.backend, settings.dtype)
    if settings.replace_with_kernel_inject and not fused:
        raise ModelError(
            f"replace_with_kernel_inject=True replaces HF models; a {_class_name(model)} runs as "
            "it is. Leave it unset."
        )
    if unknown is not None:
        if knows_family(read_written(model)):
            warn_caller(f"The model runs in module mode, without kernels: {unknown}")
        make = partial(_make_module_engine, is_checkpoint=True)
        return make, *_module_of_folder(model, settings, unknown)
    return _make_fused_engine if fused else _make_module_engine, model, settings, []


def _way_to_module_mode(folder: Path, settings: InferenceConfig) -> str:
    """A sentence: how a folder's model runs in module mode, tried without weights; or why not."""
    on_jax = settings.backend == "jax"
    way = "With backend='torch'" if on_jax else "Without replace_with_kernel_inject"
    there = {"backend": "torch", "replace_with_kernel_inject": False, "config": settings.config}
    try:
        check_config(settings.model_copy(update=there), "module", "cpu")
        module = _empty_module(folder, settings)
    except BackendNotAvailableError as error:
        return f"{way} transformers' own model may run, in module mode: {error}"
    except DualinferError as error:
        return f"Nor does module mode serve it, on torch: {error}"
    return f"{way} transformers' own {type(module).__name__} runs, in module mode."


def _module_of_folder(
    folder: Path, settings: InferenceConfig, unknown: ModelError
) -> tuple[Any, InferenceConfig, list[str]]:
    """The HF model that config.json describes, without values yet, to be filled from the folder."""
    refuse_checkpoint(settings)
    try:
        module = _empty_module(folder, settings)
    except ModelError as error:
        raise ModelError(f"{unknown} Nor does module mode serve it: {error}") from error
    update = {"checkpoint": str(folder), "config": None}
    name = type(module).__name__
    notes = [f"module mode, with transformers' {name}: {unknown}", *notes_on(folder)]
    return module, settings.model_copy(update=update), notes


def _empty_module(folder: Path, settings: InferenceConfig) -> Any:
    """The HF model that transformers' Auto classes make of a config.json, without values."""
    config = overlay(read_other_config(folder), settings.config)
    name = class_named(config.to_dict())
    if name is None:
        raise ModelError(
            "config.json names no class (architectures), and transformers' Auto classes know none "
            f"of model_type {config.model_type!r}."
        )
    try:
        module = backends.make_empty_module(name, config)
        if module.can_generate():
            module.generation_config = read_generation_config(folder, module.config)
    except DualinferError:
        raise
    except Exception as error:  # transformers' classes raise many kinds
        raise ModelError(f"transformers could make no {name} of it: {shortened(error)}") from error
    return module


def _kind_of_model(model: Any, backend: str) -> str:
    """`folder`, `opened`, `torch` or `flax`; told without importing a framework."""
    if isinstance(model, str | os.PathLike):
        return "folder"
    if isinstance(model, Opened):
        return "opened"
    parts = model if isinstance(model, tuple) and len(model) == 2 else (model,)
    classes = {(c.__module__.split(".")[0], c.__name__) for c in type(parts[0]).__mro__}
    if ("torch", "Module") in classes and len(parts) == 1:
        return "torch"
    if ("flax", "Module") in classes:
        if backend != "jax":
            raise ModelError(f"A Flax module ({_class_name(model)}) needs backend='jax'.")
        return "flax"
    raise ModelError(
        f"model is {a_type(model)}; expected the folder of a HF checkpoint, a hub id, an "
        "nn.Module or, with backend='jax', a Flax module."
    )


def _tokenizer_of(model: Any, settings: InferenceConfig) -> Callable[[], Any] | None:
    """A function that loads the model's tokenizer; None where it is in no folder on this machine.

    It is looked for where the model is, was loaded from, or is filled from.
    """
    if isinstance(model, Path):
        return partial(load_tokenizer, tokenizer_folder(model, settings.adapter))
    for place in (getattr(model, "name_or_path", None), settings.checkpoint):
        if isinstance(place, str | os.PathLike):
            path = os.path.expanduser(place)
            if is_gguf(path) or os.path.isdir(path):
                return partial(load_tokenizer, path)
    return None


def _embedding_of(model: Any) -> Callable[[], TextEmbedding] | None:
    """A function that reads how the model embeds texts; None for one of no folder and no hub."""
    place: Any = model if isinstance(model, Path) else getattr(model, "name_or_path", None)
    if not place or not isinstance(place, str | os.PathLike):
        return None
    # transformers notes the commit that it has loaded.
    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    return partial(find_embedding, place, commit)


def _class_name(model: Any) -> str:
    return type(model[0] if isinstance(model, tuple) else model).__name__


def _make_fused_engine(
    model: Any, settings: InferenceConfig, peers: Peers, notes: list[str]
) -> FusedEngine:
    watch = None
    saving = settings.save_mp_checkpoint_path if peers.copy == 0 else None
    folder = model if isinstance(model, Path) else settings.checkpoint

    with peers.together("The models and configs") as work:
        if saving:
            check_saving(saving, folder)
        described = describe_fused(model, settings, notes)
        settings, hf_model, spec, plan, source = described
        config, own = hf_model.config, hf_model.generation_config
        saved = Saved(spec, plan, source, settings.dtype or "", config, own, folder)
        if saving:
            check_content(saved)
        if not isinstance(model, Path | Opened):
            notes.extend(warn_of_hooks(model, hf_model.other_way))
            watch = Watch(model) if settings.checkpoint is None else None
        work.meet(lambda: (_shared(settings), spec, plan.rows, marks_of(source, plan)))
    origin = _origin(model, described, watch)
    with ExitStack() as stack:
        with peers.together("Loading"):
            runner = backends.create_runner(settings, spec, plan, source, peers)
            stack.callback(runner.close)
            if spec.can_generate:
                _check_memory(runner, settings, notes)
            engine_type = backends.engine_type(settings.backend, FusedEngine)
            engine_type = in_place_of(engine_type, spec.architecture)
            load = _tokenizer_of(model, settings)
            about = About(settings, peers, config, own, source.description, notes, load)
            of_torch = settings.backend == "jax" and not isinstance(model, Path | Opened)
            about = replace(about, load_embedding=_embedding_of(model), of_torch=of_torch)
            about = replace(about, answer_rows=_answer_rows)
            engine = stack.enter_context(engine_type(runner, about, origin))
        if saving:
            notes.append(save_checkpoint(saving, saved, settings.tensor_parallel, peers))
        stack.pop_all()
    return engine


def _answer_rows(engine: Any, rows: Any, name: str | None) -> Iterator[dict[str, Any]]:
    from .serving.http.rows import answer_rows

    return answer_rows(engine, rows, name)


def quantize_checkpoint(
    folder: Path,
    out: str,
    quant: Any,
    max_shard_size: int | None,
    seen: Callable[[Written], None],
    adapters: Mapping[str, float] | None = None,
) -> list[Written]:
    """Write the checkpoint of `folder` to `out`, quantized as a config's `quant` says.

    No device is used, and a few matrices at a time are in memory; other weights keep the
    checkpoint's dtype. `adapters` are merged first. See `save_folder`. Raises as `init_inference`
    does.
    """
    source = open_checkpoint(folder)
    config = read_config(folder)
    dtype = own_dtype(config, count_elements(source, source.names()))
    settings = make_config({"quant": quant, "dtype": dtype, "adapter": adapters}, {})
    _, hf_model, spec, plan, weights = describe_fused(folder, settings, [])
    own = hf_model.config, hf_model.generation_config, folder
    saved = Saved(spec, plan, weights, dtype_name(dtype), *own)
    return save_folder(out, saved, max_shard_size, seen, option="OUT")


def _origin(model: Any, described: Described, watch: Watch | None = None) -> Origin:
    """The origin to read weights from again; a live module is held no longer than by its owner."""
    settings, hf_model, spec, plan, _ = described
    lasting = model if isinstance(model, Path | Opened) else None
    filled = hf_model if settings.checkpoint is not None else None

    def read() -> tuple[ModelSpec, LoadPlan, TensorSource]:
        if filled is not None:
            return describe(filled, settings, [])[2:]
        now = lasting if watch is None else watch.module
        if now is None:
            raise ModelError(
                "The model that this engine was made of is gone, so that nothing can be read "
                "again. Keep it as long as refresh() or save_pretrained() is to be called, or make "
                "a new engine."
            )
        return describe_fused(now, settings, [])[2:]

    weights = model if isinstance(model, Path) else settings.checkpoint
    own = hf_model.config, hf_model.generation_config, weights  # and not the model

    def save(path: str, max_shard_size: int | None) -> None:
        save_folder(path, Saved(*read(), settings.dtype or "", *own), max_shard_size)

    return Origin(spec, plan, read, save, watch)


def _make_module_engine(
    model: Any,
    settings: InferenceConfig,
    peers: Peers,
    notes: list[str],
    is_checkpoint: bool = False,
) -> ModuleEngine:
    """`is_checkpoint`: the user passed the checkpoint, and `model` was made for it."""
    with peers.together("The models and configs") as work:
        check_made(model)
        source, given = None, settings.checkpoint
        if given is not None:
            source = fit(open_weights(given, settings.base_dir), wanted_by_module(model))
        if settings.adapter:
            if source is None:
                way = "Merge the adapter with peft first, or set replace_with_kernel_inject=True."
                if settings.backend == "jax":
                    way = "Adapters are of HF models: pass one of those, or leave it unset."
                raise ConfigError(
                    f"adapter={shown([*settings.adapter])}: in module mode the module is the "
                    f"caller's, and its weights are not changed. {way}"
                )
            source = AdaptedSource(source, open_adapters(settings))
        notes.extend(source.notes if source else ())
        stored = stored_dtypes(model, source)
        dtype = own_dtype(model.config, stored) if is_checkpoint else None
        settings = with_dtype(settings, notes, stored, dtype)
        work.meet(lambda: (_class_name(model), _shared(settings)))
    with ExitStack() as stack, peers.together("Loading") as work:
        runner = backends.create_module_runner(settings, model, source, peers)
        stack.callback(runner.close)
        module = runner.module
        config = settings.config if settings.config is not None else getattr(module, "config", None)
        own = getattr(module, "generation_config", None)
        description = source.description if source else f"the caller's {_class_name(model)}"
        engine_type = backends.engine_type(settings.backend, ModuleEngine)
        engine_type = in_place_of_module(engine_type, module)
        load = _tokenizer_of(model, settings)
        about = About(settings, peers, config, own, description, notes, load, is_checkpoint)
        engine = engine_type(runner, about)
        work.meet()
        stack.pop_all()
    return engine


def _shared(settings: InferenceConfig) -> list[tuple[str, str]]:
    """Config fields that must be the same in every process; groups and units are objects of each.

    Sets have an order of their own in each.
    """
    tp = settings.tensor_parallel.model_copy(update={"mpu": None, "tp_group": None, "mesh": None})
    policy = {
        layer: sorted(names, key=repr) if isinstance(names, set | frozenset) else names
        for layer, names in (settings.injection_policy or {}).items()
    }
    moe = settings.moe.model_copy(update={"ep_group": None, "ep_mp_group": None})
    fields = dict(settings) | {"tensor_parallel": tp, "moe": moe, "injection_policy": policy}
    return [(name, repr(value)) for name, value in fields.items()]


def _check_memory(runner: Any, settings: InferenceConfig, notes: list[str]) -> None:
    """The contract's promise: a cache of `min_out_tokens` fits, or nothing is made."""
    free = runner.free_bytes()
    if free is None:
        return
    least = settings.min_out_tokens
    needed = runner.cache_bytes_for(1, least)
    if needed > free:
        raise OutOfMemoryError(
            f"A cache of min_out_tokens={least} tokens for one sequence needs {needed:,} bytes, "
            f"and {free:,} are free on {runner.device}. Use a smaller dtype or min_out_tokens, or "
            "free memory first."
        )
    most = settings.max_out_tokens
    if most is not None and runner.cache_bytes_for(1, most) > free:
        notes.append(
            f"max_out_tokens={most} needs a cache of {runner.cache_bytes_for(1, most):,} bytes for "
            f"one sequence, and {free:,} are free: long requests will be refused"
        )
