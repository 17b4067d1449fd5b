"""Activation functions, as the epilogues of other kernels call them."""

import jax
import jax.numpy as jnp

KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "tanh")

# Chebyshev fits, highest power first: erf(x) / x in x^2 up to 1, and exp(x^2) erfc(x) in
# 1 / (1 + x / 2) from 1 on. Together within 1.7e-7 of erf, relative, in float32.
_NEAR = (
    *(7.882497116623881e-05, -0.0008018854994239941, 0.0051893119427883746),
    *(-0.026854328796083987, 0.11283597463487416, -0.37612626903580265, 1.128379165881503),
)
_FAR = (
    *(0.11925904593979451, -0.47088178144429704, 0.5627731053988874, -0.10317262862678338),
    *(0.34756502444592324, 0.2597658123179778, 0.2848982123305186, -0.0001530647922236006),
)


def activate(x: jax.Array, kind: str | None) -> jax.Array:
    """f(x) of float32 x, by the kinds of `reference.activation`; x itself where `kind` is None."""
    if kind is None:
        return x
    if kind == "silu":
        return x * jax.nn.sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * (1 + _erf(x * 0.7071067811865476))
    if kind == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2 u
        return x * jax.nn.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if kind == "quick_gelu":
        return x * jax.nn.sigmoid(1.702 * x)
    if kind == "relu":
        return jnp.where(x < 0, 0.0, x)  # a maximum would hide NaN on a GPU
    assert kind == "tanh", kind
    return jnp.tanh(x)


def _erf(x: jax.Array) -> jax.Array:
    """The error function of float32 x; Triton's lowering has none."""
    size = jnp.abs(x)
    near = x * _polynomial(_NEAR, jnp.minimum(x * x, 1.0))
    last = jnp.minimum(size, 4.2)  # where it is 1 in float32
    far = 1.0 - _polynomial(_FAR, 1.0 / (1.0 + 0.5 * last)) * jnp.exp(-last * last)
    far = jnp.where(x < 0, -far, far)
    return jnp.where(size >= 1.0, far, near)  # NaN, which minima may hide, takes the near one


def _polynomial(coefficients: tuple[float, ...], x: jax.Array) -> jax.Array:
    y = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = y * x + c
    return y
