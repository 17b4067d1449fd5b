"""Layers and wrappers that peft puts into a live HF module, and which adapters are in use."""

import re
from collections.abc import Iterator
from typing import Any

from ..errors import ModelError

# peft's kinds of which a layer needs nothing of the model but the weight that it changes, each with
# the beginning of its parameters' names.
MERGING = {
    **{"ADALORA": "lora_", "BOFT": "boft_", "C3A": "c3a_", "DEFT": "deft_", "DELORA": "delora_"},
    **{"FOURIERFT": "fourierft_", "GLORA": "glora_", "GRALORA": "gralora_", "HIRA": "hira_"},
    **{"HRA": "hra_", "IA3": "ia3_", "LN_TUNING": "ln_tuning_", "LOHA": "hada_", "LOKR": "lokr_"},
    **{"MISS": "miss_", "OFT": "oft_", "PEANUT": "peanut_", "PVERA": "pvera_", "ROAD": "road_"},
    **{"RANDLORA": "randlora_", "SHIRA": "shira_", "SUPERTUNING": "supertuning_"},
    **{"UNILORA": "unilora_", "VBLORA": "vblora_", "VERA": "vera_", "WAVEFT": "waveft_"},
}
# Those that no merge takes in, and what they do.
UNMERGED = {
    **dict.fromkeys(
        ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT"),
        "adds to the text that the model reads",
    ),
    **{"ADAPTION_PROMPT": "adds to attention", "CARTRIDGE": "adds keys and values"},
    **{"BEFT": "adds biases where there may be none"},
    **dict.fromkeys(("LILY", "POLY", "XLORA", "SHADOW"), "changes weights by what they read"),
}


def class_path(cls: type) -> str:
    """The module that a class is from, and its name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def see_through(module: Any) -> Any:
    """The HF module that peft's wrapper is about; any other module itself."""
    is_wrapper = type(module).__module__.startswith("peft.") and hasattr(module, "get_base_model")
    return module.get_base_model() if is_wrapper else module


def plain_parts(module: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a HF module by the names that they have without peft's layers.

    Of an adapted layer that is the layer below, of a module that peft trains the one in use.
    """
    seen: set[int] = set()

    def walk(path: str, part: Any) -> Iterator[tuple[str, Any]]:
        while _is_peft(part):
            part = _below(part)
        if id(part) in seen:
            return
        seen.add(id(part))
        yield path, part
        for name, child in part._modules.items():
            if child is not None:
                yield from walk(f"{path}.{name}" if path else name, child)

    return walk("", see_through(module))


def plain_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and persistent buffers of `plain_parts`, by name."""
    for path, part in plain_parts(module):
        passing = part._non_persistent_buffers_set
        buffers = {name: own for name, own in part._buffers.items() if name not in passing}
        for name, tensor in {**part._parameters, **buffers}.items():
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor


_INSIDE = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)\b")


def adapted_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """peft's layers in a HF module, by the names of those below them; those in use alone."""
    spare = [
        f"{name}.{other}."
        for name, part in see_through(module).named_modules()
        if _is_peft(part) and class_path(type(part)) == _TRAINED
        for other in _unused(part)
    ]
    for name, part in see_through(module).named_modules():
        if _is_layer(part) and not f"{name}.".startswith(tuple(spare)):
            yield _INSIDE.sub("", name), part


def adapted_parameters(module: Any) -> Iterator[Any]:
    """The parameters that layers of peft's adapt by themselves (`target_parameters`).

    peft's forward parametrizes them, which counts as writing, and leaves their values.
    """
    for part in module.modules():
        if kind_of_layer(part) == "parameter":
            yield part.get_param()


def active_adapters(layer: Any) -> list[str]:
    """The adapters that change what a layer gives beside its own weights; merged ones do not."""
    if layer.disable_adapters:
        return []
    kind = kind_of_layer(layer)
    if kind in ("matrix", "parameter"):
        held = {*layer.lora_A, *layer.lora_embedding_A}
    else:
        held = {*layer.token_indices} if kind == "tokens" else layer._get_available_adapters()
    return [n for n in layer.active_adapters if n in held and n not in layer.merged_adapters]


def kind_of_layer(layer: Any) -> str | None:
    """The kind of a layer of peft's: `matrix`, `parameter` or `tokens`; None for others.

    Of those that merge by themselves it is peft's own word, such as `IA3`.
    """
    package = _package(layer)
    return _LAYERS.get(class_path(type(layer)), package if package in MERGING else None)


def _package(layer: Any) -> str:
    """The kind of adapters that a layer is for, as peft's config calls it."""
    parts = class_path(type(layer)).split(".")
    return parts[2].upper() if parts[:2] == ["peft", "tuners"] else ""


def adapters_in_use(module: Any) -> list[Any]:
    """The adapters that each of peft's layers runs, and how much of each; empty without any."""
    return [
        (part.disable_adapters, list(part.active_adapters), dict(getattr(part, "scaling", {})))
        for part in module.modules()
        if _is_peft(part) and hasattr(part, "active_adapters")
    ]


def _is_peft(part: Any) -> bool:
    return type(part).__module__.startswith("peft.") and (
        hasattr(part, "base_layer") or hasattr(part, "original_module")
    )


def _is_layer(part: Any) -> bool:
    """True for a layer of peft's; its wrappers have what is below them as their own attributes."""
    return _is_peft(part) and "base_layer" in part._modules


def _below(part: Any) -> Any:
    """The module that runs in the place of one of peft's, but for its adapters."""
    if _is_layer(part):
        return part.base_layer
    if "modules_to_save" not in part._modules:
        return part.token_adapter
    return part.get_submodule(_used(part))


def _used(wrapper: Any) -> str:
    """The name of the module that a wrapper of trained modules runs."""
    own = [n for n in wrapper.active_adapters if n in wrapper.modules_to_save]
    use = own and not wrapper.disable_adapters
    return f"modules_to_save.{own[0]}" if use else "original_module"


def _unused(wrapper: Any) -> list[str]:
    """The names of the modules that a wrapper of trained modules does not run."""
    names = ["original_module", *(f"modules_to_save.{n}" for n in wrapper.modules_to_save)]
    return [name for name in names if name != _used(wrapper)]


_LAYERS = {
    "peft.tuners.lora.layer.Linear": "matrix",
    "peft.tuners.lora.layer.Embedding": "matrix",
    "peft.tuners.lora.layer.ParamWrapper": "parameter",
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer": "tokens",
}
_DORA = {f"peft.tuners.lora.variants.Dora{kind}Variant" for kind in ("Linear", "Embedding")}
_EMBEDDING = "torch.nn.modules.sparse.Embedding"
_ADAPTED = {"torch.nn.modules.linear.Linear", _EMBEDDING, "transformers.pytorch_utils.Conv1D"}
_TRAINED = "peft.utils.other.ModulesToSaveWrapper"
_WRAPPERS = (_TRAINED, "peft.utils.other.TrainableTokensWrapper")


def _merging(layer: Any) -> str:
    """The way on with a layer of peft's that can merge; empty for one that cannot."""
    if _package(layer) in UNMERGED or not hasattr(layer, "merge"):
        return ""
    return "Merge it and pass what comes back: model = peft_model.merge_and_unload(). "


def _is_plain(layer: Any) -> bool:
    """True where what peft adds to a layer's result is what a change of its matrix would add.

    So it is for the kinds of torch and transformers, and for embeddings that scale what they give,
    as Gemma's do: peft scales what it adds, too.
    """
    kinds = [class_path(c) for c in type(layer).__mro__]
    own = "forward" in vars(type(layer)) and kinds[0] != _EMBEDDING
    is_odd = _EMBEDDING in kinds and own and not hasattr(layer, "embed_scale")
    return kinds[0].startswith(("torch.", "transformers.")) and not (
        is_odd or _ADAPTED.isdisjoint(kinds)
    )


def check_adapters(module: Any, other_way: str) -> None:
    """Raise ModelError for what peft has put into a module, unless it can be merged."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        if not _is_peft(part):
            continue
        what, own = f"{name} of this {kind} is a", class_path(type(part))
        if _is_layer(part):
            layer = kind_of_layer(part)
            whole = layer in ("parameter", "LN_TUNING")
            if layer is None or not (whole or _is_plain(part.base_layer)):
                base = class_path(type(part.base_layer))
                raise ModelError(
                    f"{what} {own} over {base}, which fused mode does not merge. {_merging(part)}"
                    f"{other_way}"
                )
            variants = getattr(part, "lora_variant", {})
            for adapter in active_adapters(part):
                variant = variants.get(adapter)
                if variant is not None and class_path(type(variant)) not in _DORA:
                    raise ModelError(
                        f"{what} LoRA by {type(variant).__name__}, which fused mode does not "
                        f"merge; LoRA, rsLoRA and DoRA are. {other_way}"
                    )
        elif own not in _WRAPPERS:
            raise ModelError(f"{what} {own}, which fused mode does not merge. {other_way}")
        if part.disable_adapters and getattr(part, "merged_adapters", None):
            raise ModelError(
                f"{what} layer whose adapters are merged and switched off at once. Call "
                "peft_model.unmerge_adapter() or enable them."
            )
        if own == _TRAINED and sum(n in part.modules_to_save for n in part.active_adapters) > 1:
            raise ModelError(
                f"{what} module of which several active adapters have one each. Activate one of "
                "them: peft_model.set_adapter(name)."
            )
    if getattr(module, "prompt_encoder", None) is not None or (
        type(module).__module__.startswith("peft.") and see_through(module) is module
    ):
        raise ModelError(
            f"This {kind} adds to its inputs what peft has learned, which fused mode does not run "
            f"and no merge takes in. {other_way}"
        )
