"""The model's projections by their names, and what a product with one carries.

A projection is the weight and the bias that stand under one name among a layer's weights. How the
weight is held, in which scheme, in pieces or as a share, is known to the ops alone.
"""

from typing import Any

from .contract import ALONE, Array, BlockOps, Epilogue, Projection, Unnormed, Weights
from .maths import Maths


def project(ops: BlockOps, w: Weights, name: str, x: Array, epilogue: Epilogue = ALONE) -> Array:
    """x [..., in] by the projection `name` of `w`: [..., out], with the epilogue; see `linear`.

    The bias is the projection's own.
    """
    return project_by(ops, Projection.named(w, name), x, epilogue)


def project_by(ops: BlockOps, own: Projection, x: Array, epilogue: Epilogue = ALONE) -> Array:
    """As `project`, by a projection that is found already."""
    return ops.linear(x, own.weight, epilogue._replace(bias=own.bias))


def project_unnormed(
    ops: BlockOps, w: Weights, name: str, x: Unnormed, epilogue: Epilogue = ALONE
) -> tuple[Array, Array]:
    """As `project`, of a stream whose norm is still to be made, and that stream; see `read`."""
    own = Projection.named(w, name)
    return ops.read(x, own.weight, epilogue._replace(bias=own.bias))


def project_back(
    ops: BlockOps, w: Weights, name: str, x: Array, epilogue: Epilogue = ALONE
) -> Array:
    """As `project`, where each device has a share of `in`; see `row_product`."""
    own = Projection.named(w, name)
    return ops.row_product(x, own.weight, epilogue._replace(bias=own.bias))


def project_in_part(ops: BlockOps, w: Weights, name: str, x: Array) -> Array:
    """As `project_back` before the sum over devices, without a bias; see `partial_product`."""
    return ops.partial_product(x, w[f"{name}.weight"])


def added(m: Maths, y: Array, dtype: Any, epilogue: Epilogue) -> Array:
    """A product with what stands behind a sum over devices: a bias and a residual."""
    if epilogue.bias is not None:
        y = y + m.cast(epilogue.bias, y.dtype)
    y = m.cast(y, dtype)
    return y if epilogue.residual is None else epilogue.residual + y
