"""Look at a live HF module: its classes, and whether its parts are what its config makes."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import CheckpointError, ModelError, a_type, counted, listing, warn_caller
from .deepspeed_moe import MoeLayer, is_candidate
from .peft_modules import check_adapters, class_path, plain_parts

# Finds DeepSpeed's layers among parts and those by the config, of a kind, with another way.
FindMixtures = Callable[[Mapping[str, Any], Mapping[str, Any], str, str], list[MoeLayer]]
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
    check_adapters(module, other_way)


def check_parts(module: Any, other_way: str, find_mixtures: FindMixtures) -> list[MoeLayer]:
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
    mixtures: list[MoeLayer] = []
    if any(is_candidate(part) for _, part in parts):
        mixtures = find_mixtures(dict(parts), expected, kind, other_way)
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
            found, wanted = class_path(type(part)), class_path(type(other))
        raise ModelError(
            f"{name} of this {kind} is {found}, and {wanted} by its config, which fused mode goes "
            f"by. {other_way}"
        )
    return mixtures


def _check_forward(part: Any, what: str, other_way: str) -> None:
    """Raise ModelError for a forward set on a part, unless it is accelerate's that only places."""
    hook = vars(part).get("_hf_hook")
    hooks = _chained(hook)
    kinds = [class_path(type(own)) for own in hooks]
    foreign = next((kind for kind in kinds if kind != f"{_ACCELERATE}.AlignDevicesHook"), None)
    if foreign is not None:
        raise ModelError(
            f"{what} has a hook of accelerate's kind, {foreign}, which fused mode would not run. "
            "Remove it with accelerate.hooks.remove_hook_from_module(module). "
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
    if class_path(type(hook)) == f"{_ACCELERATE}.SequentialHook":
        return [inner for part in hook.hooks for inner in _chained(part)]
    return [hook]


def check_made(module: Any) -> None:
    """Raise ModelError where a torch module has parameters that its first pass will make."""
    named = (getattr(module, name, tuple)() for name in ("named_parameters", "named_buffers"))
    lazy = [name for own in named for name, t in own if hasattr(t, "materialize")]
    if lazy:
        raise ModelError(
            f"The {type(module).__name__} has lazy parameters without a shape, {counted(lazy)}. "
            "Run a dummy batch through it first, so that it makes them."
        )


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
    """True if a HF module's frequencies follow the length of what it has last read."""
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
