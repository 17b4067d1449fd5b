"""Parts of some layers in the place of `layer.feed_forward`."""

from ..model.spec import XIELU, Experts, Layer, Mlp
from ..ops.contract import Array, Epilogue, NormOf
from . import layer as common
from .mixture import mixture_of
from .run import Run, SubLayer


def feed_forward_of(layer: Layer, mlp: Mlp | Experts) -> SubLayer:
    """The feed-forward of a layer: an MLP, or a mixture, as its edits have it."""
    own = common.feed_forward
    if isinstance(mlp, Experts):
        own = mixture_of(mlp)
    elif mlp.activation == "xielu":
        own = _xielu
    for edit in layer.edits:
        own = edit.feeding(own)
    return own


def _xielu(run: Run, x: Array, norm: NormOf | None, residual: Array | None, spend: bool) -> Array:
    h = run.project("up", x, Epilogue(norm=norm))
    h = run.ops.xielu(h, [run.w[f"xielu.{name}"] for name in XIELU])
    return run.project_back("down", h, Epilogue(residual=residual, spend=spend))
