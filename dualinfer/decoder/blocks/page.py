"""Layers of two streams, of tokens and of where they lie on a page (LiLT, `spec.Page`)."""

from ...ops.contract import Array, Epilogue
from ...ops.streams import parted, unweave, weave
from ..run import Run, activation_of


def paged_block(run: Run, x: Array) -> Array:
    """The layer: heads attend by the sum of both streams' scores."""
    m, own, count = run.ops.maths, run.layer.page, run.layer.attention.heads
    assert own is not None

    def written(y: Array, name: str, norm: str, residual: Array) -> Array:
        return run.ops.norm(run.project_back(name, y), run.norm(norm), residual=residual)

    epilogue = Epilogue(activation=activation_of(run.layer))
    text, place = parted(m, x, x.shape[-1] - own.width)
    qkv = weave(m, count, run.project("qkv", text), run.project("page_qkv", place))
    y, z = unweave(m, count, run.attend(qkv), own.head_dim)
    text = written(y, "out", "attn_norm", text)
    place = written(z, "page_out", "page_attn_norm", place)
    text = written(run.project("up", text, epilogue), "down", "mlp_norm", text)
    # Narrow enough to be whole on every device.
    z = run.project("page_down", run.project("page_up", place, epilogue))
    place = run.ops.norm(z, run.norm("page_mlp_norm"), residual=place)
    return m.join((text, place), -1)
