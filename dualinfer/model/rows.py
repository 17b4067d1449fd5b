"""Rows that the weight tables of several families share.

In a layer's template `{i}` stands for its number in HF's names; where a projection is joined of
several, `{p}` stands for the name of a part.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .spec import XIELU, Attention, Layer, ModelSpec, Norm, RelativeBias
from .weights import Row, WeightTable, row

QKV = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
GATE_UP = {"gate": "gate_proj", "up": "up_proj"}


def linear(ours: str, theirs: str, axes: str, bias: bool = True, stored: str = "") -> list[Row]:
    """An `nn.Linear` whose weight has `axes`, out and in, and is stored by HF as `stored`.

    Its bias has the first of them.
    """
    stored, out = stored or axes, axes.split()[0]
    rows = [row(f"{ours}.weight", axes, (f"{theirs}.weight", stored))]
    if bias:
        rows.append(row(f"{ours}.bias", out, (f"{theirs}.bias", out)))
    return rows


def joined(
    ours: str,
    theirs: str,
    parts: Mapping[str, str],
    bias: bool,
    biased: Container[str] | None = None,
    width: str = "embed",
) -> list[Row]:
    """One projection of the embedding in the place of several: axis to HF's name of each.

    `biased` are the axes that have a bias, None for all; `width` is the axis that it reads.
    """
    fused = "+".join(parts)
    rows = []
    for part, rest in (("weight", f" {width}"), ("bias", ""))[: 1 + bias]:
        names = {axis: theirs.replace("{p}", name) for axis, name in parts.items()}
        sources = [
            (f"{name}.{part}", axis + rest)
            for axis, name in names.items()
            if part == "weight" or biased is None or axis in biased
        ]
        rows.append(row(f"{ours}.{part}", fused + rest, *sources))
    return rows


def tables(named: Iterable[tuple[str, str, str]]) -> list[Row]:
    """Tables, each by our name, its axes and the name of HF's module."""
    return [row(f"{ours}.weight", axes, (f"{hf}.weight", axes)) for ours, axes, hf in named]


def packed(ours: str, theirs: str, layout: str, bias: bool) -> list[Row]:
    """The projection to q, k and v that HF stores as one linear layer, with its `layout`."""
    rows = [row(f"{ours}.weight", "q+k+v embed", (f"{theirs}.weight", f"{layout} embed"))]
    if bias:
        rows.append(row(f"{ours}.bias", "q+k+v", (f"{theirs}.bias", layout)))
    return rows


def cross(
    theirs: str,
    parts: Mapping[str, str],
    out: str,
    bias: bool,
    biased: Container[str] | None = None,
    width: str = "embed",
) -> list[Row]:
    """Attention across to an encoder's output, whose axis is `width`.

    HF's names are of the parts, and of what is behind.
    """
    keys = {axis: parts[axis] for axis in ("k", "v")}
    return [
        *joined("cross_q", theirs, {"q": parts["q"]}, bias, biased),
        *joined("cross_kv", theirs, keys, bias, biased, width),
        *linear("cross_out", theirs.replace("{p}", out), "embed q", bias),
    ]


def by_head(ours: str, theirs: str, bias: bool) -> list[Row]:
    """As `packed`, head by head."""
    return packed(ours, theirs, "q+k+v/heads", bias)


def recurrence(
    theirs: str,
    reads: str,
    gives: str,
    bias: bool,
    *,
    kernel: str = "conv",
    convolved: str = "",
    kernel_bias: bool | None = None,
    out_bias: bool | None = None,
) -> list[Row]:
    """The products before and behind a recurrence, and its kernel of one weight for each tap.

    `reads` is the axis that the first product makes, `gives` the one that the second reads, and
    `convolved` what the kernel is over, `gives` if that is not said. All have a bias or none,
    unless `kernel_bias` and `out_bias` say of the kernel and of the second product.
    """
    axis = convolved or gives
    source = (f"{theirs}.{kernel}.weight", f"{axis} one recurrence_taps")
    rows = linear("recurrence_in", f"{theirs}.in_proj", f"{reads} embed", bias)
    last = bias if out_bias is None else out_bias
    rows += linear("recurrence_out", f"{theirs}.out_proj", f"embed {gives}", last)
    rows.append(row("recurrence_kernel", f"{axis} recurrence_taps", source))
    if bias if kernel_bias is None else kernel_bias:
        rows.append(row("recurrence_kernel_bias", axis, (f"{theirs}.{kernel}.bias", axis)))
    return rows


def relative_bias(bias: RelativeBias, theirs: str) -> Row:
    """The row of a layer's score terms by distance, of a bucket table stored as `theirs` by HF."""
    table = row("relative_bias", "heads buckets", (theirs, "buckets heads"))
    return replace(table, picks=bias.by_distance)


def norm(kind: Norm, ours: str, theirs: str, axis: str = "embed") -> list[Row]:
    """A norm's weight, and its bias where it has one."""
    parts = ("weight",) if kind.kind == "rms" else ("weight", "bias")
    return [row(f"{ours}.{part}", axis, (f"{theirs}.{part}", axis)) for part in parts]


def head_norms(
    a: Attention, theirs: str, names: tuple[str, str] = ("q_norm", "k_norm")
) -> list[Row]:
    """The weights of the norm of queries and keys, where a model has one.

    `names` are HF's; `{x}` in one stands for a head's number.
    """
    rows = []
    for ours, name in zip(("q", "k"), names, strict=True):
        if a.qk_norm is None:
            break
        hf, heads = f"{theirs}.{name}", "heads" if ours == "q" else "kv_heads"
        if a.qk_norm_over == "own":
            stored = "head_dim" if "{x}" in name else f"{heads} head_dim"
            rows.append(row(f"{ours}_norm.weight", f"{heads} head_dim", (f"{hf}.weight", stored)))
        else:
            axis = ours if a.qk_norm_over == "all" else "head_dim"
            rows += norm(a.qk_norm, f"{ours}_norm", hf, axis)
    return rows


def norm_without_bias(kind: Norm, ours: str, theirs: str) -> list[Row]:
    """A LayerNorm for which HF has a weight alone."""
    return [*norm(kind, ours, theirs)[:1], *plain_norm(kind, ours)[1:]]


def plain_norm(kind: Norm, ours: str, axis: str = "embed") -> list[Row]:
    """A norm for which HF has no weights."""
    parts = {"weight": 1, "bias": 0} if kind.kind == "layer" else {"weight": 1}
    return [Row(f"{ours}.{part}", (axis,), (), constant=value) for part, value in parts.items()]


def xielu(theirs: str) -> list[Row]:
    """The numbers of a layer's xIELU: two that are learned, and two buffers."""
    rows = [row(f"xielu.{x}", "one", (f"{theirs}.{x}", "one")) for x in XIELU[:2]]
    numbers = [row(f"xielu.{x}", "", (f"{theirs}.{x}", "")) for x in XIELU[2:]]
    return rows + [replace(number, fixed=True) for number in numbers]


def by_layer(table: WeightTable, rows_of: Callable[[Layer], Iterable[Row]]) -> WeightTable:
    """The table where each layer has rows of its own; layers that are one object share them."""
    layers = table.spec.layers
    made = {id(layer): tuple(rows_of(layer)) for layer in layers}
    return replace(table, layers=tuple(made[id(layer)] for layer in layers))


def causal_table(
    spec: ModelSpec,
    layer: Iterable[Row],
    outer: Iterable[Row],
    *,
    embedding: str,
    tied: bool,
    width: str = "embed",
    unused: Iterable[str] = (),
    **other: Any,
) -> WeightTable:
    """The table of a language model whose layers are alike.

    `embedding` is HF's name of the module that embeds tokens, whose weight a `tied` head repeats;
    both have the `width`. A model without a head leaves that of a checkpoint unread. `other` are
    fields of WeightTable.
    """
    axes, weight = f"vocab {width}", f"{embedding}.weight"
    rows = [row("embed.weight", axes, (weight, axes)), *outer]
    head = row("head.weight", axes, ("lm_head.weight", axes))
    if spec.head is None:
        unused = (*unused, r"^lm_head\.")
    elif not tied:
        rows.append(head)
    return WeightTable(
        spec,
        tuple(rows),
        (tuple(layer),) * len(spec.layers),
        unused=tuple(unused),
        tied=((head, weight),) if spec.head and tied else (),
        **other,
    )
