"""Parts of some layers in the place of `layer.feed_forward`."""

from collections.abc import Callable
from typing import TypeAlias

from ..model.spec import XIELU, Experts, Layer, Mlp
from ..ops.contract import Array, Epilogue, NormOf
from ..ops.feed_forward import gate_scaled
from ..ops.norms import norm_shared
from . import layer as common
from .mixture import hidden, mixture_of
from .run import Run, SubLayer, activation_of

Hidden: TypeAlias = Callable[[Run, Array, NormOf | None], Array]  # norm(x) to hidden values


def feed_forward_of(layer: Layer) -> SubLayer:
    """The feed-forward of a layer: an MLP, or a mixture."""
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        return mixture_of(mlp)
    if mlp.scales is not None:
        return _scaled
    own = _xielu if mlp.activation == "xielu" else _hidden
    if layer.sub_norms:
        return _feed_forward(_normed(own))
    return common.feed_forward if own is _hidden and mlp.limit is None else _feed_forward(own)


def _scaled(run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool) -> Array:
    """An MLP whose gates and results are times numbers (Falcon-H1)."""
    mlp = run.layer.mlp
    assert isinstance(mlp, Mlp) and mlp.scales is not None
    of_gate, of_all = mlp.scales
    h = run.project("up", x, Epilogue(norm=norm))
    h = gate_scaled(run.ops.maths, h, activation_of(run.layer), of_gate)
    y = run.project_back("down", h) * of_all
    return y if residual is None else run.ops.add(residual, y)


def _feed_forward(own: Hidden) -> SubLayer:
    def feed_forward(
        run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool
    ) -> Array:
        h = own(run, x, norm)
        return run.project_back("down", h, Epilogue(residual=residual, spend=spend))

    return feed_forward


def _hidden(run: Run, x: Array, norm: NormOf | None) -> Array:
    mlp = run.layer.mlp
    assert isinstance(mlp, Mlp)
    return hidden(mlp, run.w, run.ops, "up", x, norm, mlp.limit)


def _xielu(run: Run, x: Array, norm: NormOf | None) -> Array:
    h = run.project("up", x, Epilogue(norm=norm))
    return run.ops.xielu(h, [run.w[f"xielu.{name}"] for name in XIELU])


def _normed(own: Hidden) -> Hidden:
    """Hidden values that are normed as one, whatever share of them a device has (BitNet)."""

    def normed(run: Run, x: Array, norm: NormOf | None) -> Array:
        assert run.layer.sub_norms is not None
        h = own(run, x, norm)
        return norm_shared(run.ops, h, run.norm("down_norm"), run.layer.sub_norms[1])

    return normed
