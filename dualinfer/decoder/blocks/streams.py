"""Layers of several streams of a token (Gemma 3n, `spec.Streams`)."""

from ...model.spec import Layer, Mlp
from ...ops.contract import Array, Epilogue, NormOf
from ...ops.feed_forward import gate_sparsely
from ...ops.streams import add_to_rest, correct_streams, mix_streams
from ..attention import Projected, changes_of_qkv
from ..run import Block, Run, activation_of


def streamed_block(layer: Layer, lends: bool) -> Block:
    """The layer, of streams [A, B, T, E]; if it `lends`, others have its keys and values."""
    changes = changes_of_qkv(layer, lends)

    def block(run: Run, x: Array) -> Array:
        ops, m, w, streams = run.ops, run.ops.maths, run.w, run.layer.streams
        assert streams is not None
        # The learned scale, over the width as HF has it.
        scale = w["told_norm.weight"] * x.shape[-1] ** -1
        scaled = NormOf(run.layer.norm, scale, None, made=True)

        def told(y: Array, name: str) -> Array:
            """Coefficients [B, T, C] of a stream."""
            return run.project(
                name, run.project("told", y, Epilogue(norm=scaled, activation="tanh"))
            )

        x = mix_streams(m, told(x[0], "predict"), x)
        first = x[0]
        read = ops.norm(first, run.norm("attn_norm"))
        learned = run.project("laurel_out", run.project("laurel_in", read))
        learned = ops.add(read, learned, run.norm("laurel_norm"))
        own = Projected(run.project("qkv", read), read, None)
        qkv = own.qkv
        for change in changes:
            qkv = change(run, qkv, own)
        y = run.project_back("out", run.attend(qkv))
        y = (ops.add(first, y, run.norm("attn_post_norm")) + learned) * 2**-0.5
        h = _hidden(run, y)
        y = ops.add(y, run.project_back("down", h), run.norm("mlp_post_norm"))
        x = correct_streams(m, x, told(y, "correct") + 1, y - first)
        y = x[0] * w["corrected_scale"] if streams.scaled else x[0]
        h = run.project("read", y, Epilogue(activation=activation_of(run.layer)))
        y = run.project("read_out", h * run.own)
        return add_to_rest(m, x, ops.norm(y, run.norm("read_norm")))

    return block


def _hidden(run: Run, y: Array) -> Array:
    mlp, activation, norm = run.layer.mlp, activation_of(run.layer), run.norm("mlp_norm")
    assert isinstance(mlp, Mlp)
    if mlp.sparse is None:
        return run.project("up", y, Epilogue(None, norm, activation, gated=True))
    h = run.project("up", y, Epilogue(norm=norm))
    return gate_sparsely(run.ops, h, activation, *mlp.sparse)
