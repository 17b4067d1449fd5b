"""DeepSpeed's MoE layers: how they are told, and what fused mode makes of those in a HF module.

They are told by the names of their classes and parts, so that DeepSpeed is not imported. Module
mode finds out by a trial what the caller's own classes around them compute
(`backends.find_mixtures`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelError, UnsupportedError
from .spec import Activation, Experts, Mlp, ModelSpec, Router
from .weights import Row, Source, WeightTable, row


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


def is_candidate(part: Any) -> bool:
    """True for a part whose class has the name of DeepSpeed's, also below module mode's own."""
    own = vars(part).get("original", part)
    return type(own).__name__ == "MOELayer" and hasattr(own, "experts")


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
    form, router = moe.form, Router(moe.k, over_sum=0.0 if moe.k > 1 else None)
    each = Mlp(form.ffn, form.activation, gated=len(form.ups) == 2)
    return Experts(moe.count + moe.residual, each, router, blended=moe.residual)


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
