"""The steps between the products of a feed-forward: activations, gates and what bounds them."""

from typing import Literal

from ..model.spec import Activation
from .contract import Array, BlockOps, Epilogue, NormOf, Weights
from .maths import Maths, halves, named
from .projection import project


@named("activation")
def activation(m: Maths, x: Array, kind: Activation) -> Array:
    """An activation by our name of it."""
    return m.activation(x, kind)


@named("activation")
def xielu(m: Maths, x: Array, alpha_p: Array, alpha_n: Array, beta: Array, eps: Array) -> Array:
    """alpha_p' x^2 + beta x above 0, else alpha_n' (expm1(min(x, eps)) - x) + beta x, in float32.

    Huang and Schlag, 2024 (arXiv:2411.13010), as HF computes it: alpha_p' is the softplus of one
    learned number, alpha_n' beta and the softplus of another.
    """
    y, beta = m.wide(x), m.wide(beta)
    above = y * (m.softplus(m.wide(alpha_p)) * y + beta)
    below = m.expm1(m.minimum(y, m.wide(eps))) - y
    below = below * (beta + m.softplus(m.wide(alpha_n))) + beta * y
    return m.cast(m.where(y > 0, above, below), x.dtype)


@named("gated_activation")
def gated_activation(m: Maths, x: Array, kind: Activation) -> Array:
    """activation(gate) * up for x [..., 2F] that holds gate, then up."""
    gate, up = halves(x)
    return activation(m, gate, kind) * up


def gate_within(m: Maths, h: Array, kind: Activation, limit: float) -> Array:
    """Gates and ups h [..., 2 F] as hidden values [..., F], as within a limit."""
    gate, up = halves(h)
    return activation(m, gate, kind).clip(max=limit) * up.clip(-limit, limit)


def gate(
    ops: BlockOps,
    w: Weights,
    name: str,
    y: Array,
    x: Array,
    norm: NormOf | None = None,
    kind: Literal["sigmoid", "softplus"] = "sigmoid",
) -> Array:
    """y [..., out] times a function, the logistic or another, of norm(x) [..., E] by `name`.

    That projection gives [..., n], each element for out / n elements of y in a row.
    """
    m = ops.maths
    gate = project(ops, w, name, x, Epilogue(norm=norm, wide=True))
    gate = m.sigmoid(gate) if kind == "sigmoid" else m.softplus(gate)
    if 1 < gate.shape[-1] < y.shape[-1]:
        gate = m.repeat(gate, y.shape[-1] // gate.shape[-1], -1)
    return m.cast(y * gate, y.dtype)


def times_logistic(m: Maths, y: Array, gates: Array) -> Array:
    """y times the logistic function of gates, both [..., N]."""
    return m.cast(y * m.sigmoid(m.wide(gates)), y.dtype)


def softcap(m: Maths, logits: Array, cap: float) -> Array:
    """cap * tanh(logits / cap), computed in float32."""
    return m.cast(m.tanh(m.wide(logits) / cap) * cap, logits.dtype)
