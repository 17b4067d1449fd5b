"""Trials of DeepSpeed's MoE layers in a HF module: the formulas that fused mode then runs.

What a caller's own classes around them and their experts compute is found out with copies of
random values, so that a live module on the meta device serves as well.
"""

import copy
import inspect
from collections.abc import Mapping
from itertools import permutations
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from ....errors import ModelError, a_type
from ....model.deepspeed_moe import (
    Form,
    MoeLayer,
    check_dispatch,
    draws_second,
    is_candidate,
    is_dispatch,
)
from ....model.spec import Activation
from .autotp.miniature import are_alike

_LOOSE = ("fc1", "activation_fn", "fc2")  # an MLP that is three parts of OPT's layer
_SAME = 1e-5  # relative RMS in float32


def find_layers(
    parts: Mapping[str, Any], expected: Mapping[str, Any], kind: str, other_way: str
) -> list[MoeLayer]:
    """DeepSpeed's MoE layers among the parts of a HF module, by their paths.

    `expected` are the parts that its config makes. Raises ModelError for layers that fused mode
    does not run.
    """
    found: list[MoeLayer] = []
    forms: list[tuple[Any, Form | None]] = []
    for path, part in parts.items():
        if not is_candidate(part):
            continue
        own: Any = vars(part).get("original", part)
        is_known = is_dispatch(own)
        if is_known:
            check_dispatch(path, own)
        try:
            if not is_known:
                raise ModelError("its forward, or that of its gate or experts, is not DeepSpeed's")
            layer = _read(path, own, part, parts, expected, forms)
            if any(layer.place == other.place for other in found):
                raise ModelError(f"{layer.place} holds another one")
        except ModelError as error:
            raise ModelError(
                f"{path} of this {kind} is a MoE layer of DeepSpeed's that fused mode does not "
                f"run: {str(error).rstrip('.')}. Module mode does, on torch. {other_way}"
            ) from error
        found.append(layer)
    return found


def _read(
    path: str,
    own: Any,
    part: Any,
    parts: Mapping[str, Any],
    expected: Mapping[str, Any],
    forms: list[tuple[Any, Form | None]],
) -> MoeLayer:
    """The layer whose dispatch is `own`, which stands at `path` or below `part` there."""
    gate, experts = own.gate, list(own.experts.deepspeed_experts)
    width = int(gate.wg.weight.shape[1])
    owner_path = path.rpartition(".")[0]
    owner = parts[owner_path]
    residual = hasattr(owner, "coefficient") and hasattr(owner, "mlp")
    alike = [*experts, owner.mlp] if residual else experts
    if not all(are_alike(other, alike[0]) for other in alike):
        raise ModelError("its experts, or the dense MLP beside them, differ in more than values")
    known = [form for expert, form in forms if are_alike(expert, alike[0])]
    form = known[0] if known else _form_of(alike[0], width)
    forms.append((alike[0], form))
    if form is None:
        raise ModelError(
            f"an expert is {a_type(alike[0])}, and no feed-forward that is known: two "
            f"matrices, or three with a gate, with biases or none, and one of "
            f"{', '.join(get_args(Activation))}"
        )
    place = _place(path, parts, expected)
    beside = _beside(place, parts, expected)
    _try_place(parts[place], expected[place], part, owner if residual else None, width, place)
    return MoeLayer(
        *(place, beside, owner_path, path, int(gate.wg.weight.shape[0]), len(experts), gate.k),
        *(residual, draws_second(gate), form),
    )


def _place(path: str, parts: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first part on the way to `path` that is not of the class that the config makes."""
    names = path.split(".")
    for i in range(1, len(names) + 1):
        place = ".".join(names[:i])
        other = expected.get(place)
        if type(parts[place]) is not type(other):
            if other is None:
                break
            return place
    raise ModelError("it stands where the model's config has no part")


def _beside(place: str, parts: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[str, ...]:
    """The other parts, which must do nothing, where an MLP is parts of a larger one."""
    parent, _, name = place.rpartition(".")
    if name not in _LOOSE:
        return ()
    others = [f"{parent}.{other}" for other in _LOOSE if other != name]
    others = [other for other in others if other in expected]
    for other in others:
        if type(parts.get(other)) is not nn.Identity:
            raise ModelError(
                f"it stands for {place}, and {other} would follow or precede it: with a MoE layer "
                "in the place of an MLP that is nn.Identity()"
            )
    return tuple(others)


def _copy(part: Any, stands_for: Mapping[Any, Any]) -> Any:
    """A copy for a trial: random float32 on the CPU, in evaluation, without hooks.

    `stands_for` are modules in the place of some.
    """
    random = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {id(module): other for module, other in stands_for.items()}
    left_out = {id(p) for module in stands_for for p in module.parameters()}
    for own in part.parameters():
        if id(own) not in left_out:
            scale = max(own.shape[-1:], default=1) ** -0.5 if own.ndim > 1 else 1.0
            values = torch.randn(own.shape, generator=random, device="cpu", dtype=torch.float32)
            values = values * scale
            memo[id(own)] = nn.Parameter(values, requires_grad=False)
    for own in part.buffers():
        is_empty = own.is_meta
        memo[id(own)] = (
            torch.zeros_like(own, device="cpu") if is_empty else own.detach().cpu().clone()
        )
    made = copy.deepcopy(part, memo)
    for module in made.modules():
        vars(module).pop("forward", None)  # accelerate's, which only places
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return made.eval()


def _run(module: Any, *inputs: Any) -> Any:
    """Run a copy and return its result, of several the first."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = module(*inputs)
    except Exception as error:  # a caller's own code
        raise ModelError(f"a trial of {type(module).__name__} failed: {error}") from error
    return found[0] if isinstance(found, tuple) else found


def _inputs(shape: tuple[int, ...], seed: int) -> Any:
    """Random inputs [..., 4, E], in rows of other sizes: some functions differ far from 0 alone."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return x * torch.tensor([[0.25], [1.0], [4.0], [16.0]], device="cpu")


def _is_same(found: Any, wanted: Any) -> bool:
    """True if every row is the same but for roundings."""
    found, wanted = (np.asarray(own, np.float64) for own in (found, wanted))
    if found.shape != wanted.shape:
        return False
    error, size = np.square(found - wanted).mean(-1), np.square(wanted).mean(-1)
    return bool((error <= _SAME**2 * size).all())


def _form_of(expert: Any, width: int) -> Form | None:
    """Find the formula of an expert of this input and output width; None where it is not known."""
    from transformers.activations import ACT2FN

    made = _copy(expert, {})
    named = dict(made.named_parameters())
    matrices = [name for name, p in named.items() if p.ndim == 2]
    biases = {name: name.removesuffix("weight") + "bias" for name in matrices}
    biases = {name: bias for name, bias in biases.items() if bias in named}
    if set(made.state_dict()) != {*matrices, *biases.values()} or len(matrices) not in (2, 3):
        return None
    x = _inputs((4, width), 1)
    wanted = _run(made, x[None, None])
    if not isinstance(wanted, torch.Tensor) or wanted.numel() != x.numel():
        return None
    wanted = wanted.reshape(x.shape)

    def product(x: Any, name: str, turned: bool) -> Any:
        weight = named[name].T if turned else named[name]
        bias = named[biases[name]] if name in biases else None
        return nn.functional.linear(x, weight, bias)

    for *ups, down in permutations(matrices):
        for turned in (False, True):
            ffn = int(named[down].shape[0 if turned else 1])
            shapes = [tuple(named[name].shape)[:: -1 if turned else 1] for name in (*ups, down)]
            sizes = [named[bias].numel() for bias in map(biases.get, (*ups, down)) if bias]
            wanted_sizes = [ffn for name in ups if name in biases] + [width] * (down in biases)
            if shapes != [*[(ffn, width)] * len(ups), (width, ffn)] or sizes != wanted_sizes:
                continue
            gate, *up = (product(x, name, turned) for name in ups)
            for activation in get_args(Activation):
                function = ACT2FN["gelu_pytorch_tanh" if activation == "gelu_tanh" else activation]
                y = product(function(gate) * (up[0] if up else 1), down, turned)
                if _is_same(y, wanted):
                    own = [(name, biases.get(name)) for name in (*ups, down)]
                    return Form(tuple(own[:-1]), own[-1], turned, activation, ffn)
    return None


def _try_place(place: Any, other: Any, dispatch: Any, residual: Any, width: int, path: str) -> None:
    """Raise ModelError unless a part gives what the MoE layer in it does, of what it is given.

    `other` is what the config has there, `residual` the owner of a dense MLP and its coefficient.
    """

    class Known(nn.Module):
        """In the place of the experts, or of the dense MLP."""

        def __init__(self, seed: int) -> None:
            super().__init__()
            random = torch.Generator().manual_seed(seed)
            matrix = torch.randn((width, width), generator=random, device="cpu")
            self.register_buffer("matrix", matrix)
            self.l_aux, self.exp_counts = torch.zeros(()), torch.zeros(1)

        def forward(self, x: Any, *_: Any, **__: Any) -> Any:
            return x @ self.matrix

    taken = [*inspect.signature(type(other).forward).parameters][1:]
    if taken[1:] not in ([], ["residual"]):
        raise ModelError(f"{path} is {a_type(other)} by the config, which takes {taken}")
    inputs = [_inputs((2, 4, width), 4 + i) for i in range(len(taken))]
    if path.rpartition(".")[2] in _LOOSE:  # in OPT tokens of all sequences lie in one row
        inputs = [own.flatten(0, 1) for own in inputs]
    x, stand_in, dense = inputs[0], Known(2), Known(3)
    stands_for = {dispatch: stand_in}
    wanted = stand_in(x)
    if residual is not None:
        stands_for[residual.mlp] = dense
        stands_for[residual.coefficient] = sides = _copy(residual.coefficient, {})
        weights = _run(sides, x).softmax(-1)
        if weights.shape[-1] != 2 or {n for n, _ in sides.named_parameters()} != {"weight", "bias"}:
            raise ModelError("its coefficient is no linear layer of two outputs")
        wanted = wanted * weights[..., :1] + dense(x) * weights[..., 1:]
    found = _run(_copy(place, stands_for), *inputs)
    wanted = wanted + sum(inputs[1:])
    if not isinstance(found, torch.Tensor) or not _is_same(found, wanted):
        more = ", and the residual that it is given," if inputs[1:] else ""
        raise ModelError(
            f"{path}, {a_type(place)}, gives something else than the output of the MoE "
            f"layer{more} for its input"
        )
