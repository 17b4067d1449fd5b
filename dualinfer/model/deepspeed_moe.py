"""DeepSpeed's MoE layers: how they are told, and what fused mode makes of those in a HF module.

They are told by the names of their classes and parts, so that DeepSpeed is not imported. What a
caller's own classes around them and their experts compute is found out by a trial of copies with
random values, so that a live module on the meta device serves as well.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from types import BuiltinFunctionType, FunctionType
from typing import Any, get_args

import numpy as np

from ..errors import ModelError, UnsupportedError, a_type
from .spec import Activation, Experts, Mlp, ModelSpec, Router
from .weights import Row, Source, WeightTable, row

_LOOSE = ("fc1", "activation_fn", "fc2")  # an MLP that is three parts of OPT's layer
_SAME = 1e-5  # relative RMS in float32


@dataclass(frozen=True)
class Form:
    """The formula of an expert: down(activation(up(x))), or with two `ups` activation(gate) * up.

    `ups` and `down` are the names of its matrices, each with that of its bias if it has one;
    `turned` ones are stored with inputs before outputs.
    """

    ups: tuple[tuple[str, str | None], ...]
    down: tuple[str, str | None]
    turned: bool
    activation: Activation
    ffn: int


@dataclass(frozen=True)
class MoeLayer:
    """A MoE layer of DeepSpeed's in a HF module, by the paths of its parts.

    `place` is the part of HF's that it stands for, and `beside` are those that do nothing any more.
    `dispatch` holds the gate for `count` experts, of which a token has `k`, and experts, `held`
    here; `owner` holds that, and the dense MLP where the layer is `residual`. With `drawn`
    DeepSpeed draws a token's second expert.
    """

    place: str
    beside: tuple[str, ...]
    owner: str
    dispatch: str
    count: int
    held: int
    k: int
    residual: bool
    drawn: bool
    form: Form

    def covers(self, name: str) -> bool:
        """True for the path of a part that the layer stands for."""
        return f"{name}.".startswith(f"{self.place}.") or name in self.beside


def is_dispatch(part: Any) -> bool:
    """True for a MOELayer of DeepSpeed's whose gate and experts are its own, too."""
    import torch

    if not isinstance(part, torch.nn.Module) or not _defined_by(part, "MOELayer"):
        return False
    gate, experts = (part._modules.get(name) for name in ("gate", "experts"))
    return (
        _defined_by(gate, "TopKGate")
        and _defined_by(experts, "Experts")
        and isinstance(getattr(gate, "wg", None), torch.nn.Module)
        and isinstance(getattr(experts, "deepspeed_experts", None), torch.nn.ModuleList)
        and hasattr(gate, "k")
    )


def _defined_by(part: Any, name: str) -> bool:
    """True if the class of that name, and none that inherits it, has the part's forward."""
    kind = next((c for c in type(part).__mro__ if "forward" in vars(c)), None)
    return kind is not None and kind.__name__ == name and "forward" not in vars(part)


def check_dispatch(path: str, part: Any) -> None:
    """Raise for a layer whose parts do not fit, or that has what would not be called."""
    count, here = int(part.gate.wg.weight.shape[0]), len(part.experts.deepspeed_experts)
    if not here or count % here:
        raise ModelError(
            f"{path} has a gate for {count} experts and holds {here}. Expected all, or an even "
            "part of them; load the layer again."
        )
    k = part.gate.k
    if not isinstance(k, int) or not 1 <= k <= count:
        raise ModelError(f"{path}.gate has k={k!r}; expected 1 to its {count} experts.")
    for name, own in (("gate", part.gate), ("gate.wg", part.gate.wg), ("experts", part.experts)):
        if own._forward_hooks or own._forward_pre_hooks or "forward" in vars(own):
            raise UnsupportedError(
                f"{path}.{name} has hooks or a forward set on it, and dualinfer, which runs "
                "DeepSpeed's MoE layers without its dispatch, does not call it. Remove them, or "
                f"set them on {path} or on the experts."
            )


def draws_second(gate: Any) -> bool:
    """True for a gate that DeepSpeed draws a token's second expert by."""
    return gate.k == 2 and bool(getattr(gate, "top2_2nd_expert_sampling", True))


def describe_layers(counts: Sequence[int], dropping: int, drawn: bool) -> str:
    """A report's line on layers with so many experts each, of which some drop tokens."""
    known = " or ".join(map(str, sorted(set(counts))))
    how = f"tokens over capacity are dropped in {dropping}" if dropping else "no token is dropped"
    more = ", second experts are not drawn" if drawn else ""
    return (
        f"DeepSpeed's MoE layers: {len(counts)} of {known} experts, run without its dispatch; "
        f"{how}{more}"
    )


def find_layers(
    parts: Mapping[str, Any], expected: Mapping[str, Any], kind: str, other_way: str
) -> list[MoeLayer]:
    """DeepSpeed's MoE layers among the parts of a HF module, by their paths.

    `expected` are the parts that its config makes. Raises ModelError for layers that fused mode
    does not run.
    """
    found, forms = [], {}
    for path, part in parts.items():
        own = vars(part).get("original", part)  # below the one that module mode has put there
        if type(own).__name__ != "MOELayer" or not hasattr(own, "experts"):
            continue
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
    forms: dict[Any, Form | None],
) -> MoeLayer:
    """The layer whose dispatch is `own`, which stands at `path` or below `part` there."""
    gate, experts = own.gate, list(own.experts.deepspeed_experts)
    width = int(gate.wg.weight.shape[1])
    owner_path = path.rpartition(".")[0]
    owner = parts[owner_path]
    residual = hasattr(owner, "coefficient") and hasattr(owner, "mlp")
    alike = [*experts, owner.mlp] if residual else experts
    key = _likeness(alike[0])
    if any(_likeness(other) != key for other in alike):
        raise ModelError("its experts, or the dense MLP beside them, differ in more than values")
    if key not in forms:
        forms[key] = _form_of(alike[0], width)
    form = forms[key]
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
    import torch

    parent, _, name = place.rpartition(".")
    if name not in _LOOSE:
        return ()
    others = [f"{parent}.{other}" for other in _LOOSE if other != name]
    others = [other for other in others if other in expected]
    for other in others:
        if type(parts.get(other)) is not torch.nn.Identity:
            raise ModelError(
                f"it stands for {place}, and {other} would follow or precede it: with a MoE layer "
                "in the place of an MLP that is torch.nn.Identity()"
            )
    return tuple(others)


def _likeness(expert: Any) -> Any:
    """A key that experts share which compute alike: classes, settings, names and shapes."""
    simple = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)
    settings = tuple(
        (name, type(part), *sorted(_plain(part, simple), key=lambda own: own[0]))
        for name, part in expert.named_modules()
    )
    return settings, tuple((n, tuple(p.shape)) for n, p in expert.named_parameters())


def _plain(part: Any, kinds: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        if isinstance(value, kinds) and not name.startswith("_") and name != "training":
            yield name, value


def _copy(part: Any, stands_for: Mapping[Any, Any]) -> Any:
    """A copy for a trial: random float32 on the CPU, in evaluation, without hooks.

    `stands_for` are modules in the place of some.
    """
    import torch

    random = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {id(module): other for module, other in stands_for.items()}
    left_out = {id(p) for module in stands_for for p in module.parameters()}
    for own in part.parameters():
        if id(own) not in left_out:
            scale = max(own.shape[-1:], default=1) ** -0.5 if own.ndim > 1 else 1.0
            values = torch.randn(own.shape, generator=random, device="cpu", dtype=torch.float32)
            values = values * scale
            memo[id(own)] = torch.nn.Parameter(values, requires_grad=False)
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
    import torch

    try:
        with torch.no_grad(), torch.device("cpu"):
            found = module(*inputs)
    except Exception as error:  # a caller's own code
        raise ModelError(f"a trial of {type(module).__name__} failed: {error}") from error
    return found[0] if isinstance(found, tuple) else found


def _inputs(shape: tuple[int, ...], seed: int) -> Any:
    """Random inputs [..., 4, E], in rows of other sizes: some functions differ far from 0 alone."""
    import torch

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
    import torch
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
        return torch.nn.functional.linear(x, weight, bias)

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
    import torch

    class Known(torch.nn.Module):
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


def with_layers(
    spec: ModelSpec, table: WeightTable, found: Sequence[MoeLayer]
) -> tuple[ModelSpec, WeightTable]:
    """A model of which DeepSpeed's MoE layers stand in the place of MLPs.

    Raises ModelError where they stand for something else.
    """
    layers, rows, own = list(spec.all_layers), list(table.layers), len(spec.layers)
    left = list(found)
    for i, layer in enumerate(layers):
        number = i if i < own else i - own
        for moe in found:
            path = _mlp_path(table, rows[i], number, moe)
            if path is None or not isinstance(layer.mlp, Mlp):
                continue
            left.remove(moe)
            layers[i] = replace(layer, mlp=_experts(moe))
            kept = [own for own in rows[i] if own.name.split(".")[0] not in ("up", "down", "xielu")]
            rows[i] = (*kept, *_rows(moe, lambda name, p=path, m=moe: p + name[len(m.place) :]))
    if left:
        raise ModelError(
            f"{left[0].place} is a MoE layer of DeepSpeed's, and no MLP of a layer by the config."
        )
    spec = spec.with_layers(layers)
    return spec, replace(table, spec=spec, layers=tuple(rows))


def _mlp_path(table: WeightTable, rows: Iterable[Row], number: int, moe: MoeLayer) -> str | None:
    """The table's name of `moe.place` if that is the MLP of the layer with these rows."""

    def modules(*names: str) -> list[str]:
        return [
            source.name.replace("{i}", str(number)).rpartition(".")[0]
            for own in rows
            if own.name in names
            for source in own.sources
        ]

    ups, downs = modules("up.weight"), modules("down.weight")
    if not ups or not downs:
        return None
    if moe.beside:
        paths = [*ups, *downs]
    else:
        paths = [ups[0].rpartition(".")[0]]
        inner = f"{paths[0]}."
        others = [n for n in modules(*(r.name for r in rows)) if n not in (*ups, *downs)]
        if not all(n.startswith(inner) for n in (*ups, *downs)) or any(
            n.startswith(inner) for n in others
        ):
            return None
    return next((path for path in paths if moe.place in table.candidates(path)), None)


def _experts(moe: MoeLayer) -> Experts:
    form, router = moe.form, Router(moe.k, renormalized=moe.k > 1)
    how = form.ffn, form.activation, len(form.ups) == 2, router
    return Experts(moe.count + moe.residual, *how, blended=moe.residual)


def _rows(moe: MoeLayer, named: Any) -> list[Row]:
    """The rows of a layer; `named` makes the table's names of those of the module."""
    form, dispatch, owner = moe.form, named(moe.dispatch), named(moe.owner)
    places = [f"{dispatch}.experts.deepspeed_experts.{x}" for x in range(moe.count)]
    places += [f"{owner}.mlp"] * moe.residual
    parts = ("ffn",) if len(form.ups) == 1 else ("gate", "up")
    fused = "+".join(parts)

    def stacked(ours: str, axes: str, inner: Iterable[tuple[str | None, str]]) -> Row:
        """A row of all experts, of tensors of each by their names and axes."""
        sources = tuple(
            Source(f"{place}.{name}", tuple(own.split()), index=x)
            for x, place in enumerate(places)
            for name, own in inner
        )
        return Row(ours, tuple(axes.split()), sources)

    def stored(axes: str) -> str:
        return " ".join(reversed(axes.split())) if form.turned else axes

    up = [(name, stored(f"{axis} embed")) for (name, _), axis in zip(form.ups, parts, strict=True)]
    rows = [
        row("router.weight", "choices embed", (f"{dispatch}.gate.wg.weight", "choices embed")),
        stacked("experts.up.weight", f"experts {fused} embed", up),
        stacked("experts.down.weight", "experts embed ffn", [(form.down[0], stored("embed ffn"))]),
    ]
    if form.ups[0][1]:
        biases = [(name, axis) for (_, name), axis in zip(form.ups, parts, strict=True)]
        rows.append(stacked("experts.up.bias", f"experts {fused}", biases))
    if form.down[1]:
        rows.append(stacked("experts.down.bias", "mixed embed", [(form.down[1], "embed")]))
    if moe.residual:
        sides = f"{owner}.coefficient"
        rows.append(row("sides.weight", "sides embed", (f"{sides}.weight", "sides embed")))
        rows.append(row("sides.bias", "sides", (f"{sides}.bias", "sides")))
    return rows
