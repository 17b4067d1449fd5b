"""Rows that the weight tables of several families share: linear layers, norms, the head."""

from typing import NamedTuple

from ..weights import Row, row


def linear(ours: str, theirs: str, axes: str, bias: bool = True) -> list[Row]:
    """An `nn.Linear` whose weight has `axes` in and out of HF; its bias has the first of them."""
    rows = [row(f"{ours}.weight", axes, (f"{theirs}.weight", axes))]
    if bias:
        out = axes.split()[0]
        rows.append(row(f"{ours}.bias", out, (f"{theirs}.bias", out)))
    return rows


def split_qkv(ours: str, theirs: str, bias: bool) -> list[Row]:
    """The fused projection of HF's q_proj, k_proj and v_proj, whose names `theirs` begins."""
    rows = []
    for part, axes in (("weight", "{} embed"), ("bias", "{}"))[: 1 + bias]:
        sources = [(f"{theirs}{p}_proj.{part}", axes.format(p)) for p in "qkv"]
        rows.append(row(f"{ours}.{part}", axes.format("q+k+v"), *sources))
    return rows


def fused_qkv(ours: str, theirs: str, bias: bool) -> list[Row]:
    """The fused projection of one HF linear layer that holds q, k and v head by head."""
    rows = [row(f"{ours}.weight", "q+k+v embed", (f"{theirs}.weight", "q+k+v/heads embed"))]
    if bias:
        rows.append(row(f"{ours}.bias", "q+k+v", (f"{theirs}.bias", "q+k+v/heads")))
    return rows


def layer_norm(ours: str, theirs: str) -> list[Row]:
    """An `nn.LayerNorm` over the embedding."""
    return [row(f"{ours}.{p}", "embed", (f"{theirs}.{p}", "embed")) for p in ("weight", "bias")]


def plain_layer_norm(ours: str) -> list[Row]:
    """A LayerNorm for which HF has no weights."""
    return [Row(f"{ours}.{p}", ("embed",), (), constant=c) for p, c in (("weight", 1), ("bias", 0))]


class HeadRows(NamedTuple):
    """The `lm_head` of a causal model: its rows, those tied to the embedding, what is not read."""

    rows: list[Row]
    tied: tuple[tuple[Row, str], ...]
    unused: tuple[str, ...]

    @classmethod
    def of(cls, present: bool, tied: bool, embedding: str, axes: str = "vocab embed") -> "HeadRows":
        """`present`: the model has one. `embedding` is HF's tensor that a tied one repeats."""
        if not present:
            return cls([], (), (r"^lm_head\.",))
        own = row("head.weight", axes, ("lm_head.weight", axes))
        return cls([], ((own, embedding),), ()) if tied else cls([own], (), ())
