"""A small copy of a module, with random weights, and calls to try it with."""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .....system.memory import host_free_bytes
from ..fill import is_hf, slots
from ..mixtures import mixture_layers
from .changes import join_path

_TOKENS = 7
_OTHER_SIZES = (2, 1), (1, 40), (9, 3)  # rows and tokens
_MOST_WHOLE = 2**30  # bytes
_MOST_OF_MEMORY = 0.5  # of what the host has left; the copy of the copy needs as much again


class Call(NamedTuple):
    """A call of one part of the module; its path is "" for all of it.

    `whole` is true of HF models, of which those that ran already need no call. `doubt` says why the
    module may call the part in other ways. A `guess` need not work: it shows what else a part may
    do.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    doubt: str = ""
    guess: bool = False
    whole: bool = False


def pattern(path: str) -> str:
    """The path with * for each number: the same for all layers of a stack."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def stacks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The stacks of layers, with their paths: lists of modules with parts, in no other list."""
    outer = [join_path(path, "experts") for path, _ in mixture_layers(module)]
    for path, part in module.named_modules():
        if any(path.startswith(f"{o}.") for o in outer):
            continue
        is_list = isinstance(part, nn.ModuleList | nn.Sequential) and len(part._modules) > 0
        if is_list and all(len([*m.modules()]) > 2 for m in part.children()):
            outer.append(path)
            yield path, part


def make_miniature(module: nn.Module, whole: bool = False) -> Any:
    """A copy in float32 on the CPU in eval mode, each stack as long as it has new kinds of layers.

    With `whole`, stacks in full, where that is small. The parameters are random, the same each
    time; the buffers are the module's own. Forward hooks are left out. Raises ValueError where the
    host lacks memory or buffers lack values.
    """
    if whole:
        small = sharing_copy(module)
    else:
        with _shortened(module):
            small = sharing_copy(module)
    places = [(slot, slot.tensor) for slot in slots(small)]
    tensors = {id(tensor): tensor for _, tensor in places}
    needed, free = sum(4 * t.numel() for t in tensors.values()), host_free_bytes()
    if whole and needed > _MOST_WHOLE:
        raise ValueError("it is too large to be copied whole")
    if free is not None and needed > _MOST_OF_MEMORY * free:
        raise ValueError(f"a copy needs {needed:,} bytes of host memory, and {free:,} are free")
    generator = torch.Generator().manual_seed(0)
    stand_ins = {key: _stand_in(tensor, generator) for key, tensor in tensors.items()}
    for slot, tensor in places:
        slot.place[slot.key] = stand_ins[id(tensor)]
    for part in small.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return small.eval()


def sharing_copy(module: nn.Module) -> Any:
    """A copy with the same tensors."""
    tensors = [slot.tensor for slot in slots(module)]
    return copy.deepcopy(module, {id(t): t for t in tensors})


def make_calls(module: nn.Module, rows: int) -> list[Call]:
    """Calls with random inputs: of HF models as wholes, and of each kind of layer in other stacks.

    The latter also with one token, with many, with more rows; a module of one's own also as a
    whole, as far as that works. HF models within others come behind these. Raises ValueError where
    it is not known what any takes.
    """
    generator = torch.Generator().manual_seed(1)
    models = [path for path, part in module.named_modules() if is_hf(part)]
    calls: list[Call] = []
    problem = None
    for path in models:
        try:
            inputs = _hf_inputs(module.get_submodule(path), rows, generator)
            calls.append(Call(path, (), inputs, whole=True))
        except Exception as error:
            problem = problem or error
    if is_hf(module):
        if problem is not None and not calls:
            raise problem
        return calls
    for path, stack in stacks(module):
        if f"{path}.".startswith(tuple(f"{model}." for model in models)):
            continue
        kinds: list[nn.Module] = []
        for name, layer in stack.named_children():
            width = _width(layer)
            if width and not any(are_alike(layer, kind) for kind in kinds):
                kinds.append(layer)
                x = _uniform((rows, _TOKENS, width), generator)
                calls.append(Call(f"{path}.{name}".lstrip("."), (x,), {}, _doubt(layer)))
                for size in _OTHER_SIZES:
                    x = _uniform((*size, width), generator)
                    calls.append(calls[-1]._replace(args=(x,), guess=True))
    vocabs = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    for tokens in (_TOKENS, 1):
        if vocabs:
            shape = (rows, tokens)
            x = torch.randint(0, min(vocabs), shape, generator=generator, device="cpu")
        else:
            x = _uniform((rows, tokens, _width(module)), generator)
        calls.append(Call("", (x, *_more_inputs(module, rows, tokens)), {}, guess=True))
    return calls


def _width(module: nn.Module) -> int:
    """The inputs of the first linear layer in a module; 0 if it has none."""
    return next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), 0)


def _more_inputs(module: nn.Module, rows: int, tokens: int) -> Iterator[Any]:
    """Common inputs that a module asks for beside the first: masks, and where a sequence starts."""
    for name, own in [*inspect.signature(module.forward).parameters.items()][1:]:
        if own.default is not own.empty or own.kind is not own.POSITIONAL_OR_KEYWORD:
            return
        yield torch.ones((rows, tokens), dtype=torch.long) if "mask" in name else 0


def _doubt(layer: nn.Module) -> str:
    """Name the arguments that a layer takes beside the hidden states, if any."""
    more = [*inspect.signature(layer.forward).parameters][1:]
    return f"{type(layer).__name__} takes {', '.join(more)}, too" if more else ""


def _share_parts(stack: nn.Module) -> bool:
    """True if different layers have parts in common that hold parameters."""
    seen: set[int] = set()
    for layer in {id(layer): layer for layer in stack.children()}.values():
        own = {id(part) for part in layer.modules() if any(True for _ in part.parameters())}
        if seen & own:
            return True
        seen |= own
    return False


@contextmanager
def _shortened(module: nn.Module) -> Iterator[None]:
    """Each stack without its end, as far as layers of every kind are left."""
    whole = [(stack, dict(stack._modules)) for _, stack in stacks(module)]
    try:
        for stack, layers in whole:
            if _share_parts(stack):
                continue
            kinds: list[Any] = []
            count = 0
            for i, layer in enumerate(stack):
                if not any(are_alike(layer, kind) for kind in kinds):
                    kinds.append(layer)
                    count = i + 1
            for name in list(layers)[count:]:
                del stack._modules[name]
        yield
    finally:
        for stack, layers in whole:
            stack._modules.clear()
            stack._modules.update(layers)


_PLACE = re.compile(r"_*(((layer|block)_?)?(idx|index|id|number)|(layer|block)_?(num|name))")
_IRRELEVANT = re.compile(r"drop|_is_hf_initialized")  # in eval mode
_BASE = frozenset(vars(nn.Module()))


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """True for layers of the same parts, settings and buffers, but for what tells their place.

    What cannot be compared is taken for different.
    """
    parts = [*one.named_modules()], [*other.named_modules()]
    return len(parts[0]) == len(parts[1]) and all(
        name == other_name
        and type(part) is type(like)
        and _is_same(_settings(part), _settings(like))
        for (name, part), (other_name, like) in zip(*parts, strict=True)
    )


def _settings(part: nn.Module) -> dict[str, Any]:
    """All that a part's forward may go by but its weights' values and its place."""
    own = {name: value for name, value in vars(part).items() if name not in _BASE}
    own = {n: v for n, v in own.items() if not _PLACE.fullmatch(n) and not _IRRELEVANT.search(n)}
    shapes = {n: None if p is None else p.shape for n, p in part._parameters.items()}
    return {**own, " shapes": shapes, " buffers": part._buffers}


def _is_same(one: Any, other: Any, depth: int = 6) -> bool:
    """True for settings that are alike, objects in objects down to `depth` among them."""
    if one is other:
        return True
    if type(one) is not type(other) or depth == 0:
        return False
    if isinstance(one, nn.Module):  # another layer, which knows this one
        return True
    if isinstance(one, nn.Parameter) or (isinstance(one, torch.Tensor) and one.is_meta):
        return one.shape == other.shape
    if isinstance(one, torch.Tensor):
        alike = one.shape == other.shape and one.device == other.device
        return alike and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        same = (_is_same(value, other[key], depth - 1) for key, value in one.items())
        return one.keys() == other.keys() and all(same)
    if isinstance(one, list | tuple):
        same = (_is_same(x, y, depth - 1) for x, y in zip(one, other, strict=False))
        return len(one) == len(other) and all(same)
    if isinstance(one, MethodType):
        same = one.__func__ is other.__func__
        return same and _is_same(_owner(one), _owner(other), depth - 1)
    if isinstance(one, FunctionType):  # as one that is made anew in each layer
        held, like = ((own.__defaults__, own.__kwdefaults__) for own in (one, other))
        same = one.__code__ is other.__code__ and not one.__closure__
        return same and _is_same(held, like, depth - 1)
    if isinstance(one, partial):
        held, like = ((own.func, own.args, own.keywords) for own in (one, other))
        return _is_same(held, like, depth - 1)
    if type(one).__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return _is_same(vars(one), vars(other), depth - 1)
    try:
        return bool(one == other or one != one)  # NaN is not equal to itself
    except Exception:  # of what cannot be compared
        return False


def _owner(method: MethodType) -> Any:
    """A method's object; of a layer its settings, without those that are methods."""
    own = method.__self__
    if not isinstance(own, nn.Module):
        return own
    return {n: v for n, v in _settings(own).items() if not isinstance(v, MethodType)}


def _uniform(shape: Any, generator: torch.Generator) -> torch.Tensor:
    new = torch.empty(shape, dtype=torch.float32, device="cpu")
    return new.uniform_(-1, 1, generator=generator)


def _stand_in(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random values for a parameter, a buffer's own."""
    if not isinstance(tensor, nn.Parameter):
        if tensor.is_meta:
            raise ValueError("its buffers hold no values yet")
        kind = torch.float32 if tensor.is_floating_point() else None
        return tensor.to("cpu", kind, copy=True)
    if not tensor.is_floating_point():
        raise ValueError(f"it has parameters of {tensor.dtype}")
    new = _uniform(tensor.shape, generator)
    new = new * (3 / max(new.shape[-1], 1)) ** 0.5 if new.ndim > 1 else 1 + 0.3 * new
    return nn.Parameter(new, requires_grad=False)


def _hf_inputs(module: Any, rows: int, generator: torch.Generator) -> dict[str, Any]:
    parameters = inspect.signature(module.forward).parameters
    inputs: dict[str, Any] = {}
    config = module.config
    if module.main_input_name == "pixel_values":
        size, channels = getattr(config, "image_size", 64), getattr(config, "num_channels", 3)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        inputs["pixel_values"] = _uniform((rows, channels, height, width), generator)
    elif module.main_input_name in ("input_ids", "input_features"):
        vocab = module.get_input_embeddings().num_embeddings
        ids = torch.randint(
            min(8, vocab - 1), vocab, (rows, _TOKENS), generator=generator, device="cpu"
        )
        inputs["input_ids"] = ids
        if module.main_input_name == "input_features":  # Whisper's
            shape = rows, config.num_mel_bins, 2 * config.max_source_positions
            inputs = {"input_features": _uniform(shape, generator)}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            inputs["decoder_input_ids"] = ids.flip(1)
    else:
        raise ValueError(f"its input is {module.main_input_name}")
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs
