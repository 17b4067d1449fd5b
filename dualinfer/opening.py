"""A model as an engine needs it, before its weights are read: spec, plan, source and dtype."""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from . import backends
from .checkpoint.described.auto_class import as_auto
from .checkpoint.described.hf_config import (
    check_sizes,
    config_place,
    notes_on,
    read_config,
    read_generation_config,
)
from .checkpoint.foreign.fitting import fit, wanted_by_table
from .checkpoint.sources import check_folder, open_checkpoint, open_module, open_weights
from .checkpoint.views.adapted_model import check_head, describe_adapted
from .checkpoint.views.adapters import Adapter, open_adapter, open_adapters_of
from .checkpoint.views.peft_layers import empty_model
from .checkpoint.views.quantized import open_as_held, quantize_by
from .config import InferenceConfig, serving_dtype
from .errors import (
    ConfigError,
    DualinferError,
    ModelError,
    UnservedError,
    blamed_on,
    counted,
    shown,
    warn_caller,
)
from .model.deepspeed_moe import MoeLayer, describe_layers, with_layers
from .model.families import describe_model
from .model.hf_module import check_parts, check_values, check_wrapper, class_names
from .model.load_plan import (
    LoadPlan,
    TensorSource,
    make_load_plan,
    with_stored_order,
    with_stored_turns,
)
from .model.peft_modules import see_through
from .model.spec import ModelSpec
from .model.weights import WeightTable
from .quantization import KEPT_CACHE, is_of_cache
from .quantization.formats import Opener
from .quantization.recipe import Recipe, make_recipe

_Quantize = Callable[[Recipe, WeightTable, TensorSource], Opener]


@dataclass(frozen=True)
class Opened:
    """A HF model whose tensors lie in no folder and no module: its config, and their source.

    `quantize` makes the matrices that `quant` asks for. dualinfer's own benchmarks run these.
    """

    config: Any
    class_names: list[str]
    source: TensorSource
    quantize: _Quantize = quantize_by


class HFModel(NamedTuple):
    """A HF model as fused mode needs it: its config, class names and generation defaults."""

    config: Any
    class_names: list[str] | None
    generation_config: Any
    open_source: Callable[[], TensorSource]
    other_way: str
    is_checkpoint: bool = False
    place: str = "config.json"  # where its config stands, in errors
    quantize: _Quantize = quantize_by
    own_adapters: Callable[[], list[Adapter]] = list  # of a live module's
    mixtures: Sequence[MoeLayer] = ()  # DeepSpeed's, in a live module


Described = tuple[InferenceConfig, HFModel, ModelSpec, LoadPlan, TensorSource]


def describe_fused(model: Any, settings: InferenceConfig, notes: list[str]) -> Described:
    """Describe a model before its weights are read; `notes` gets what users should know."""
    other_way = _other_way(model, settings)
    if isinstance(model, Path):
        hf_model = _from_folder(model, other_way)
        notes.extend(notes_on(model))
    elif isinstance(model, Opened):
        given = model.config, model.class_names, None, lambda: model.source, other_way
        hf_model = HFModel(*given, is_checkpoint=True, quantize=model.quantize)
    else:
        hf_model = _from_module(model, other_way)
    if settings.checkpoint is not None:
        if isinstance(model, Path):
            refuse_checkpoint(settings)
        source = partial(open_weights, settings.checkpoint, settings.base_dir)
        hf_model = hf_model._replace(open_source=source)
    config = overlay(hf_model.config, settings.config)
    if "architectures" in (settings.config or ()):
        if not isinstance(model, Path):
            raise ConfigError(
                f"config.architectures={shown(config.architectures)}: the model is a live "
                f"{type(model).__name__}, and stays one. Leave it out."
            )
        hf_model = hf_model._replace(class_names=config.architectures)
    return describe(hf_model._replace(config=config), settings, notes)


def describe(found: HFModel, settings: InferenceConfig, notes: list[str]) -> Described:
    """Describe a HF model that is found already; see `describe_fused`."""
    make_model = partial(empty_model, found.config, found.class_names)
    adapters = [*found.own_adapters(), *open_adapters(settings, make_model)]
    try:
        with (
            said_of(found.place, settings.config),
            blamed_on(found.place, ModelError) if found.is_checkpoint else nullcontext(),
        ):
            own = describe_adapted(found.config, found.class_names, adapters)
        found = found._replace(config=own.config, class_names=own.class_names)
        spec, table = with_layers(own.spec, own.table, found.mixtures)
    except ModelError as error:
        if not found.other_way:
            raise
        raise ModelError(f"{error} {found.other_way}") from error
    notes.extend(own.notes)
    _check_least_tokens(spec, settings)
    if settings.kv_cache_dtype is not None and not spec.can_generate:
        raise ConfigError(
            f"kv_cache_dtype={settings.kv_cache_dtype!r}: {spec.architecture} does not generate "
            "and has no cache. Leave it unset."
        )
    if settings.state_dtype is not None and not spec.has_float32_states:
        raise ConfigError(
            f"state_dtype={settings.state_dtype!r}: no layer of {spec.architecture} keeps float32 "
            "states, as Mamba's and the delta rule's do. Leave it unset."
        )
    if settings.streams and spec.encoder:
        raise ConfigError(
            f"keep_module_on_host=True: the layers of {spec.architecture}, which has two stacks of "
            "them, are not streamed. Leave it unset, or use a quantized model."
        )
    notes.extend(_check_mixtures(found, settings))
    most, asked = spec.most_tokens(settings.max_out_tokens), settings.max_out_tokens
    if asked is not None and asked > most:
        notes.append(f"max_out_tokens={asked}: the model's positions end at {most} tokens before")
    config, recipe = found.config.to_dict(), make_recipe(settings.quant)
    stored_as = source = fit(found.open_source(), wanted_by_table(table, config))
    notes.extend(source.notes)
    spec, table = with_stored_turns(spec, table, source)
    table = with_stored_order(table, source)
    check_head(own, adapters, source)
    source, table, more = open_as_held(source, table, config, recipe, found.quantize, adapters)
    notes.extend(more)
    plan = make_load_plan(table, source)
    if not found.class_names:
        notes.append(f"config.json names no architecture; taken as {spec.architecture}")
    if plan.unused:
        notes.append(f"weights without use here, {counted(plan.unused)}")
        if KEPT_CACHE not in notes and any(map(is_of_cache, plan.unused)):
            notes.append(KEPT_CACHE)
    plain = [name for row, names in plan.rows if row.scheme is None for name in names]
    held = set(stored_as.names())  # adapters give others, and in float32
    stored = count_elements(stored_as, [name for name in plain if name in held])
    own = own_dtype(found.config, stored) if found.is_checkpoint else None
    return with_dtype(settings, notes, stored, own), found, spec, plan, source


def _from_folder(folder: Path, other_way: str) -> HFModel:
    folder = check_folder(folder)
    config = read_config(folder)
    names = config.architectures
    source = partial(open_checkpoint, folder)
    own = read_generation_config(folder, config)
    given = config, names, own, source, other_way
    return HFModel(*given, is_checkpoint=True, place=config_place(folder))


def _from_module(live: Any, other_way: str) -> HFModel:
    check_wrapper(live, other_way)
    module = see_through(live)
    if not hasattr(getattr(module, "config", None), "to_dict"):
        raise ModelError(
            f"{type(module).__name__} is no HF model, so that fused mode, which runs dualinfer's "
            f"own decoder, does not know it. {other_way}"
        )
    mixtures = check_parts(live, other_way, backends.find_mixtures)
    generation = getattr(module, "generation_config", None)

    def open_source() -> TensorSource:
        check_values(live)
        return open_module(live)

    own = module.config, class_names(module), generation, open_source, other_way
    adapters = partial(open_adapters_of, live)
    return HFModel(*own, place="model.config", own_adapters=adapters, mixtures=mixtures)


def _other_way(model: Any, settings: InferenceConfig) -> str:
    """A hint at how to run a live model that fused mode does not serve; empty for another one."""
    if isinstance(model, Path | Opened):
        return ""
    if settings.backend == "jax":
        return "With backend='torch' any module runs as it is."
    return "Leave replace_with_kernel_inject unset to run the module as it is."


@contextmanager
def said_of(place: str, fields: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Within it, an error of a config names the `place` where it stands, as no other code knows.

    Where it is of one of the caller's `fields`, that is `args`.
    """
    try:
        yield
    except ModelError as error:
        text = str(error)
        own = "args" if any(f" {name}=" in text for name in fields or ()) else place
        if own == "config.json" or "config.json" not in text:
            raise
        raise type(error)(text.replace("config.json", own)) from error


def overlay(config: Any, fields: Mapping[str, Any] | None) -> Any:
    """The HF config with the caller's fields laid over it; the given one stays as it is."""
    if not fields:
        return config
    from transformers import AutoConfig

    values = config.to_dict()
    for name, value in fields.items():
        if name not in values:
            near = difflib.get_close_matches(str(name), values, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"config.{name}: the model's config has no such field{hint}")
        if name == "model_type" and value != values[name]:
            raise ConfigError(f"config.model_type={value!r}, but the model is a {values[name]!r}.")
    values |= fields
    model_type = values.pop("model_type")
    with said_of("args"):
        check_sizes(model_type, values)
    if "architectures" in fields:
        named = as_auto({"model_type": model_type, "architectures": values["architectures"]})
        values["architectures"] = named["architectures"]
    try:
        return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers' validation raises many kinds
        raise ConfigError(f"config={dict(fields)!r} is not valid: {error}") from error


def refuse_checkpoint(settings: InferenceConfig) -> None:
    """Raise ConfigError where a checkpoint is named beside a model that is one."""
    if settings.checkpoint is not None:
        raise ConfigError(
            f"checkpoint={settings.checkpoint!r}: the model is a checkpoint's folder already. Pass "
            "one of them."
        )


def _check_least_tokens(spec: ModelSpec, settings: InferenceConfig) -> None:
    """Raise ConfigError if `min_out_tokens` promises what generate would refuse."""
    least, most = settings.min_out_tokens, spec.most_tokens(settings.max_out_tokens)
    if least > 1 and not spec.can_generate:
        raise ConfigError(
            f"min_out_tokens={least}: {spec.architecture} does not generate and has no cache. "
            "Leave it unset."
        )
    if least > most:
        raise ConfigError(
            f"min_out_tokens={least}, but {spec.architecture} takes at most {most} tokens here. "
            "Use a smaller one."
        )


def _check_mixtures(found: HFModel, settings: InferenceConfig) -> list[str]:
    """Notes of DeepSpeed's MoE layers; ModelError where experts of them are in other processes."""
    layers = found.mixtures
    for own in layers:
        if own.held < own.count and settings.checkpoint is None:
            raise ModelError(
                f"{own.dispatch} was made with ep_size={own.count // own.held} and holds "
                f"{own.held} of its {own.count} experts. Pass checkpoint= with all of them, or "
                f"make the layer with ep_size=1. {found.other_way}"
            )
    drawn = any(own.drawn for own in layers)
    return [describe_layers([own.count for own in layers], 0, drawn)] if layers else []


def open_adapters(
    settings: InferenceConfig, make_model: Callable[[str | None], Any] | None = None
) -> list[Adapter]:
    """The config's adapters, once `_find` has found them; see `open_adapter`."""
    given = (settings.adapter or {}).items()
    return [open_adapter(Path(path), factor, make_model) for path, factor in given]


def unserved(folder: Path, fields: Mapping[str, Any] | None = None) -> UnservedError | None:
    """Why fused mode does not serve a folder's model; None where it does, or nothing would.

    The caller's `fields` are laid over those of config.json.
    """
    try:
        config = overlay(read_config(folder), fields)
        place = config_place(folder)
        with said_of(place, fields), blamed_on(place, ModelError):
            describe_model(config.to_dict(), config.architectures)
    except UnservedError as error:
        return error
    except DualinferError:  # raised where the model is described
        return None
    return None


def with_dtype(
    settings: InferenceConfig, notes: list[str], stored: Counter[str], own: str | None
) -> InferenceConfig:
    """The config with its dtype resolved; `own` is that of a checkpoint passed as the model.

    `stored` counts the elements of each dtype.
    """
    if settings.dtype is not None:
        return settings
    dtype = backends.default_dtype(settings.backend)  # the contract's
    if own is None:
        notes.append(f"dtype was unset: {dtype}")
        if dtype == "float16" and "bfloat16" in stored:
            warn_caller(
                "The model is bfloat16 and dtype is unset, so that it is float16 on a GPU, whose "
                'range is smaller. Pass dtype="bf16" to keep its own.'
            )
        return settings.model_copy(update={"dtype": dtype})
    name, why = serving_dtype(own, dtype)
    try:
        backends.check_dtype(settings.backend, name)
        dtype = name
    except ConfigError:  # a GPU without bfloat16
        why = f"the checkpoint is {own}, in which the device does not compute"
    notes.append(f"dtype was unset: {dtype}, {why}")
    return settings.model_copy(update={"dtype": dtype})


def own_dtype(config: Any, stored: Counter[str]) -> str:
    """A checkpoint's dtype, as in transformers: its config's, else that of most of its elements."""
    own = config.to_dict().get("dtype")
    return own or next((dtype for dtype, _ in stored.most_common()), "float32")


def count_elements(source: TensorSource, names: Iterable[str]) -> Counter[str]:
    """The number of elements of each dtype that a source holds under these names."""
    elements: Counter[str] = Counter()
    for name in names:
        elements[source.dtype(name)] += prod(source.shape(name))
    return elements


def stored_dtypes(model: Any, source: TensorSource | None) -> Counter[str]:
    """The dtypes of what a torch module will hold, before it is cast, by their elements."""
    if source is not None:
        return count_elements(source, source.names())
    elements: Counter[str] = Counter()
    for parameter in getattr(model, "parameters", tuple)():
        dtype = str(getattr(parameter, "dtype", "")).removeprefix("torch.")
        elements[dtype] += prod(getattr(parameter, "shape", ()))
    return elements
