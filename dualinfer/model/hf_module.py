"""What a live HF module is: its classes, and whether its parts are what its config makes."""

import copy
import re
from collections.abc import Iterator
from typing import Any

from ..errors import CheckpointError, ModelError, a_type, listing, warn_caller
from .deepspeed_moe import MoeLayer, find_layers

_ACCELERATE = "accelerate.hooks"
_ROUNDED = 1e-2  # what half precision may make of a number, relatively


def class_names(model: Any) -> list[str]:
    """Names of the module's classes from transformers, from the most derived to whose forward runs.

    Raises ModelError for a class whose forward is not HF's, since ours would differ from it.
    """
    classes = type(model).__mro__
    for i, cls in enumerate(classes):
        if cls.__module__.startswith("transformers."):
            own = next((j for j, c in enumerate(classes) if "forward" in vars(c)), i)
            return [c.__name__ for c in classes[i : own + 1]]
        if "forward" in vars(cls):
            raise ModelError(
                f"{cls.__name__} has a forward of its own, which fused mode would not run. Pass "
                "the HF module itself."
            )
    raise ModelError(f"{type(model).__name__} is no HF model.")


def check_wrapper(module: Any, other_way: str) -> None:
    """Raise ModelError for what compiles, spreads or adapts a HF module, with the way to that."""
    kind = type(module)
    if kind.__module__.startswith("torch._dynamo.") and hasattr(module, "_orig_mod"):
        raise ModelError(
            f"This {kind.__name__} is what torch.compile() made of a "
            f"{type(module._orig_mod).__name__}; fused mode runs dualinfer's own decoder in its "
            "place. Pass the module itself: model._orig_mod."
        )
    wraps = kind.__module__.startswith(("torch.nn.parallel.", "torch.distributed."))
    if wraps and hasattr(module, "module"):
        raise ModelError(
            f"This {kind.__name__} wraps {a_type(module.module)}. Pass the module itself: "
            "model.module."
        )
    _check_adapters(module, other_way)


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
        if _is_peft(part) and _path(type(part)) == _TRAINED
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
    held = {*layer.token_indices} if kind == "tokens" else {*layer.lora_A, *layer.lora_embedding_A}
    return [n for n in layer.active_adapters if n in held and n not in layer.merged_adapters]


def kind_of_layer(layer: Any) -> str | None:
    """Of which kind a layer of peft's is: `matrix`, `parameter` or `tokens`; None of others."""
    return _LAYERS.get(_path(type(layer)))


def adapters_in_use(module: Any) -> list[Any]:
    """Which adapters each of peft's layers runs, and how much of each; empty without any."""
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
    """What runs in the place of a layer or wrapper of peft's, but for its adapters."""
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


def _is_plain(layer: Any) -> bool:
    """True where what peft adds to a layer's result is what a change of its matrix would add.

    So it is for the kinds of torch and transformers, and for embeddings that scale what they give,
    as Gemma's do: peft scales what it adds, too.
    """
    kinds = [_path(c) for c in type(layer).__mro__]
    own = "forward" in vars(type(layer)) and kinds[0] != _EMBEDDING
    is_odd = _EMBEDDING in kinds and own and not hasattr(layer, "embed_scale")
    return kinds[0].startswith(("torch.", "transformers.")) and not (
        is_odd or _ADAPTED.isdisjoint(kinds)
    )


def _check_adapters(module: Any, other_way: str) -> None:
    """Raise ModelError for what peft has put into a module, unless it can be merged."""
    kind = type(module).__name__
    for name, part in module.named_modules():
        if not _is_peft(part):
            continue
        what, own = f"{name} of this {kind} is a", _path(type(part))
        if _is_layer(part):
            layer = kind_of_layer(part)
            if layer is None or not (layer == "parameter" or _is_plain(part.base_layer)):
                raise ModelError(
                    f"{what} {own} over {_path(type(part.base_layer))}: fused mode merges LoRA, "
                    "rsLoRA, DoRA and trained tokens over plain layers. Merge it yourself and pass "
                    f"what comes back: model = peft_model.merge_and_unload(). {other_way}"
                )
            variants = getattr(part, "lora_variant", {})
            for adapter in active_adapters(part):
                variant = variants.get(adapter)
                if variant is not None and _path(type(variant)) not in _DORA:
                    raise ModelError(
                        f"{what} LoRA by {type(variant).__name__}, which fused mode does not "
                        f"merge; LoRA, rsLoRA and DoRA are. {other_way}"
                    )
        elif own not in _WRAPPERS:
            raise ModelError(
                f"{what} {own}, which fused mode does not merge. Merge it yourself and pass what "
                f"comes back: model = peft_model.merge_and_unload(). {other_way}"
            )
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


def check_parts(module: Any, other_way: str) -> list[MoeLayer]:
    """Raise ModelError where a part of a HF module is not what its config makes.

    DeepSpeed's MoE layers in the place of MLPs may be there, and are what comes back.
    """
    kind = type(module).__name__
    parts = list(plain_parts(module))
    for name, part in parts:
        what = f"{name} of this" if name else "This"
        if "forward" in vars(part) and not _is_own_method(part, vars(part)["forward"]):
            _check_forward(part, f"{what} {kind}", other_way)
    _check_attention(module, other_way)
    expected = _made_by_config(module)
    mixtures = find_layers(dict(parts), expected, kind, other_way)
    for name, part in parts:
        other = expected.get(name)
        if not name or other is None or any(own.covers(name) for own in mixtures):
            continue
        found, wanted = type(part).__name__, type(other).__name__
        if type(part) is type(other):
            ours, theirs = _settings(part), _settings(other)
            changed = [k for k in ours if k in theirs and ours[k] != theirs[k]]
            if changed:
                name, found, wanted = f"{name}.{changed[0]}", ours[changed[0]], theirs[changed[0]]
            elif buffer := _changed_buffer(part, other):
                name, found, wanted = f"{name}.{buffer}", "of other values", "computed"
            else:
                continue
        elif found == wanted:  # a class of another package by the same name
            found, wanted = _path(type(part)), _path(type(other))
        raise ModelError(
            f"{name} of this {kind} is {found}, and {wanted} by its config, which fused mode goes "
            f"by. {other_way}"
        )
    return mixtures


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _check_forward(part: Any, what: str, other_way: str) -> None:
    """Raise ModelError for a forward set on a part, unless it is accelerate's that only places."""
    hook = vars(part).get("_hf_hook")
    hooks = _chained(hook)
    foreign = next((h for h in hooks if _path(type(h)) != f"{_ACCELERATE}.AlignDevicesHook"), None)
    if foreign is not None:
        raise ModelError(
            f"{what} has a hook of accelerate's kind, {_path(type(foreign))}, which fused mode "
            "would not run. Remove it with accelerate.hooks.remove_hook_from_module(module). "
            f"{other_way}"
        )
    set_on = getattr(vars(part)["forward"], "func", None)  # accelerate's is a partial
    is_hook = hooks and getattr(set_on, "__module__", None) == _ACCELERATE
    if not (is_hook and _is_own_method(part, vars(part).get("_old_forward"))):
        raise ModelError(
            f"{what} has a forward of its own set on it, which fused mode would not run. Remove "
            f"it. {other_way}"
        )


def _is_own_method(part: Any, forward: Any) -> bool:
    """True for the forward of the part's class: accelerate leaves it there with its last hook."""
    own = getattr(forward, "__self__", None) is part
    return own and getattr(forward, "__func__", None) is type(part).forward


def _chained(hook: Any) -> list[Any]:
    """The hooks that accelerate runs one after another."""
    if hook is None:
        return []
    if _path(type(hook)) == f"{_ACCELERATE}.SequentialHook":
        return [inner for part in hook.hooks for inner in _chained(part)]
    return [hook]


def check_values(module: Any) -> None:
    """Raise CheckpointError where accelerate keeps weights elsewhere while they are not in use."""
    for name, part in module.named_modules():
        hooks = _chained(vars(part).get("_hf_hook"))
        tensors = (*part._parameters.values(), *part._buffers.values())
        if any(getattr(h, "offload", False) for h in hooks) and any(
            t is not None and t.device.type == "meta" for t in tensors
        ):
            raise CheckpointError(
                f"accelerate keeps weights of this {type(module).__name__} on the host or on disk "
                f"(cpu_offload, disk_offload or a device_map), and {name or 'it'} holds none of "
                "its own. Load the model without offloading, pass the checkpoint's folder, or "
                "after cpu_offload bring them back: "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
            )


def warn_of_hooks(module: Any, other_way: str) -> list[str]:
    """A note of the parts that have forward hooks, where there are any, after a warning.

    Those that transformers sets are left out: they record what is asked for, and change nothing.
    """
    from torch.nn.modules import module as common

    def own(hooks: Any) -> bool:
        functions = (getattr(hook, "func", hook) for hook in hooks.values())
        return any(
            not str(getattr(f, "__module__", "")).startswith("transformers.") for f in functions
        )

    names = [
        name or type(module).__name__
        for name, part in module.named_modules()
        if own(part._forward_hooks) or own(part._forward_pre_hooks)
    ]
    if common._global_forward_hooks or common._global_forward_pre_hooks:
        names.append("every module of this process")
    if not names:
        return []
    listed = listing(names, 4)
    warn_caller(
        f"The model has forward hooks, which fused mode does not run: those of {listed}. What they "
        f"change or record is left out. {other_way}"
    )
    return [f"the module has forward hooks, which do not run here: those of {listed}"]


def _check_attention(module: Any, other_way: str) -> None:
    """Raise ModelError where attention is a function of the caller's own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = getattr(module.config, "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name, None) if isinstance(name, str) else None
    function = getattr(function, "func", function)  # a kernel of the hub is a partial of HF's
    if not getattr(function, "__module__", "transformers.").startswith("transformers."):
        raise ModelError(
            f"This {type(module).__name__} attends by {name!r}, a function that is not HF's, which "
            f"fused mode would not run. {other_way}"
        )


def _settings(part: Any) -> dict[str, Any]:
    """Numbers, switches and names among a module's attributes; nothing that only trains.

    Of torch's own modules their floats, such as eps: their sizes are those of the weights. A table
    that was resized and layers that were taken out leave names and numbers behind.
    """
    left_out = {"training", "gradient_checkpointing", "padding_idx", "vocab_size", "layer_idx"}
    if getattr(part, "scale_attn_by_inverse_layer_idx", False):  # GPT-2 computes with it
        left_out.remove("layer_idx")
    if hasattr(part, "moe_eval_capacity_token_fraction"):  # NLLB-MoE's, which notes its last batch
        left_out.add("expert_capacity")
    kinds: Any = float
    if type(part).__module__.startswith("transformers."):
        kinds = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, kinds)
        and not name.startswith("_")
        and name not in left_out
        and "drop" not in name
        and "cached" not in name  # how far a table reaches that grows in use
    }


def turns_by_length(part: Any) -> bool:
    """Whether a HF module's frequencies follow the length of what it has last read."""
    return any(word in str(getattr(part, "rope_type", "")) for word in ("dynamic", "longrope"))


_LEARNED = ("e_score_correction_bias", "expert_bias", "layer_scalar")


def _changed_buffer(part: Any, other: Any) -> str | None:
    """Name of a buffer whose values are not those of the same module made anew; None if none is.

    Half precision may have rounded them, more than once. Frequencies that follow the length of what
    was last read are left out, and what training moves: biases of routers, factors of layers.
    """
    import torch

    if turns_by_length(part):
        return None
    theirs = dict(other.named_buffers(recurse=False))
    for name, buffer in part.named_buffers(recurse=False):
        wanted = theirs.get(name)
        if wanted is None or buffer.is_meta or wanted.is_meta or name in _LEARNED:
            continue
        values = buffer.detach().cpu()
        if values.shape != wanted.shape:
            return name
        if not (values.is_floating_point() and wanted.is_floating_point()):
            if not torch.equal(values, wanted.to(values.dtype)):
                return name
            continue
        least = 1e-3 * float(wanted.abs().max()) if wanted.numel() else 0.0
        if not torch.allclose(values.double(), wanted.double(), _ROUNDED, least):
            return name
    return None


def _made_by_config(module: Any) -> dict[str, Any]:
    """The parts that a HF module's config makes, their buffers real; none if it makes none.

    Matrices, which HF makes by torch.empty, are on the meta device.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutMatrices(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.empty:
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    class_ = next(
        (c for c in type(module).__mro__ if c.__module__.startswith("transformers.")), None
    )
    if class_ is None:
        return {}
    try:
        with torch.device("cpu"), WithoutMatrices(), torch.random.fork_rng(devices=[]):
            model = class_(copy.deepcopy(module.config))
    except Exception:  # a class that needs more than its config
        return {}
    return {n: m for n, m in model.named_modules() if not isinstance(m, torch.nn.Dropout)}
