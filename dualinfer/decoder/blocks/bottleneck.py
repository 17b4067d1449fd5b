"""Layers within fewer elements than the stream has (MobileBERT, `spec.Bottleneck`)."""

from ...ops.contract import Array, Epilogue
from ..run import Run, activation_of


def narrow_block(run: Run, x: Array) -> Array:
    """The layer: norms are over the sums of sub-layers and what they read."""
    ops, own = run.ops, run.layer.bottleneck
    assert own is not None
    h = ops.norm(run.project("narrow", x), run.norm("narrow_norm"))
    read = ops.norm(run.project("narrow_qk", x), run.norm("narrow_qk_norm"))
    qkv = ops.maths.join((run.project("query_key", read), run.project("value", x)), -1)
    y = run.project_back("out", run.attend(qkv))
    h = ops.norm(y, run.norm("attn_norm"), residual=h)
    for i in range(own.feeds):
        y = run.project(f"up.{i}", h, Epilogue(activation=activation_of(run.layer)))
        y = run.project_back(f"down.{i}", y)
        h = ops.norm(y, run.norm(f"mlp.{i}_norm"), residual=h)
    return ops.norm(run.project("wide", h), run.norm("wide_norm"), residual=x)
