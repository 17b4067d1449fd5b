"""Layers of several streams of a token (Gemma 3n): AltUp, arXiv:2301.13310."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..decoder.attention import Projected, changes_of_qkv
from ..decoder.run import Run, activation_of
from ..model import rows as make
from ..model.spec import Block, Layer, ModelSpec, Norm
from ..model.weights import Row, row
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Weights
from ..ops.maths import Maths, halves, heads
from ..ops.projection import project
from .own_embeddings import own_part


@dataclass(frozen=True)
class Streams(Block):
    """`count` streams of a token, of which layers compute on the first one alone.

    Each stream is first predicted of all, by coefficients of the first, and what the layer makes of
    that corrects all. Beside attention its input passes through `rank` elements (LAuReL,
    arXiv:2411.07501), and is added. What the layer's own embedding of a token, of `reads` elements,
    gives is added to all
    streams but the first; it is computed of the first, times a learned vector if `scaled`. With
    `sparse` (s, n) what a gate of the MLP is above the mean of a token's n gates by more than s
    standard deviations of them stands in its place, and 0 where it is not.
    """

    count: int
    rank: int
    scaled: bool
    sparse: tuple[float, int] | None = None
    reads: int = 0

    def outer_axes(self, spec: ModelSpec) -> dict[str, int]:
        """See `Block`."""
        streams = dict.fromkeys(("streams", "streams_in"), self.count)
        return {**streams, "laurel": self.rank, "coefficients": self.count**2}

    def rows(self, hf: str, norm: Norm) -> list[Row]:
        """A layer's rows beside those of attention and its MLP, of what HF calls `hf`."""
        own, laurel = f"{hf}altup.", f"{hf}laurel."
        coefficients = "coefficients streams"
        rows = [
            *make.linear("told", f"{own}modality_router", "streams embed", bias=False),
            *make.linear("predict", f"{own}prediction_coefs", coefficients, bias=False),
            *make.linear("correct", f"{own}correction_coefs", "streams streams_in", bias=False),
        ]
        return [
            *(replace(one, dense=True) for one in rows),
            *make.norm(norm, "told_norm", f"{own}router_norm"),
            *make.linear("laurel_in", f"{laurel}linear_left", "laurel embed", bias=False),
            *make.linear("laurel_out", f"{laurel}linear_right", "embed laurel", bias=False),
            *make.norm(norm, "laurel_norm", f"{laurel}post_laurel_norm"),
            row("corrected_scale", "embed", (f"{own}correct_output_scale", "embed")),
        ]

    def outer_rows(self, hf: str) -> list[Row]:
        """The rows of the projections before and behind all layers, which HF calls `hf`."""
        rows, square = [], "embed embed_in"
        for i in range(self.count - 1):
            rows += make.linear(f"spread.{i}", f"{hf}altup_projections.{i}", square, bias=False)
            theirs = f"{hf}altup_unembed_projections.{i}"
            rows += make.linear(f"gather.{i}", theirs, square, bias=False)
        return rows

    def enter(self, ops: BlockOps, spec: ModelSpec, w: Weights, x: Array, where: Any) -> Array:
        """See `Block`: streams [A, B, T, E], itself and projections as large."""
        others = [project(ops, w, f"spread.{i}", x) for i in range(self.count - 1)]
        return ops.maths.stack([x, *(_as_large(y, x) for y in others)], 0)

    def leave(self, ops: BlockOps, w: Weights, states: Sequence[Array], keep: bool) -> list[Array]:
        """See `Block`: states [B, T, A, E], and the mean [B, T, E] of the last one's streams.

        Others than the first are projected, and as large as that.
        """
        x = states[-1]
        total = first = x[0]
        for i in range(self.count - 1):
            total = total + _as_large(project(ops, w, f"gather.{i}", x[i + 1]), first)
        # Sequences first, as callers have them.
        shown = [y.swapaxes(0, 1).swapaxes(1, 2) for y in states] if keep else []
        return [*shown, total * (1 / self.count)]

    def hidden(self, states: Sequence[Array], last: Array) -> tuple[Array, ...]:
        """See `Block`."""
        return tuple(states[:-1])

    def shown(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `Block`: [A, B, T, E]."""
        return tuple(x.swapaxes(1, 2).swapaxes(0, 1) for x in states)

    def runs(self, layer: Layer, lends: bool) -> Callable[[Run, Array], Array]:
        """See `Block`."""
        changes = changes_of_qkv(layer.attending, lends)

        def run_layer(run: Run, x: Array) -> Array:
            ops, m, w = run.ops, run.ops.maths, run.w
            # The learned scale, over the width as HF has it.
            scale = w["told_norm.weight"] * x.shape[-1] ** -1
            scaled = NormOf(run.layer.norm, scale, None, made=True)

            def told(y: Array, name: str) -> Array:
                """Coefficients [B, T, C] of a stream."""
                own = run.project("told", y, Epilogue(norm=scaled, activation="tanh"))
                return run.project(name, own)

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
            h = self._hidden(run, y)
            y = ops.add(y, run.project_back("down", h), run.norm("mlp_post_norm"))
            x = correct_streams(m, x, told(y, "correct") + 1, y - first)
            y = x[0] * w["corrected_scale"] if self.scaled else x[0]
            return add_to_rest(m, x, ops.norm(own_part(run, y), run.norm("read_norm")))

        return run_layer

    def _hidden(self, run: Run, y: Array) -> Array:
        activation, norm = activation_of(run.layer), run.norm("mlp_norm")
        if self.sparse is None:
            return run.project("up", y, Epilogue(None, norm, activation, gated=True))
        h, m, (deviations, width) = (
            run.project("up", y, Epilogue(norm=norm)),
            run.ops.maths,
            self.sparse,
        )
        gates, ups = halves(m.wide(h))
        sums = run.ops.sum(m.stack((gates.sum(-1), (gates * gates).sum(-1)), 0)) / width
        mean, square = sums[0], sums[1]
        least = mean + deviations * m.sqrt((square - mean * mean).clip(0))
        gates = m.cast(m.activation(gates - least[..., None], "relu"), h.dtype)
        return m.activation(gates, activation) * m.cast(ups, h.dtype)


def _as_large(x: Array, other: Array) -> Array:
    """x with the root of the mean square of `other`, over the last axis."""
    size = (other * other).mean(-1)[..., None] ** 0.5
    return x * size / (x * x).mean(-1)[..., None].clip(1e-5) ** 0.5


def mix_streams(m: Maths, coefficients: Array, x: Array) -> Array:
    """Streams x [A, B, T, E], and to stream j added all i times coefficients [B, T, A j + i].

    HF's `Gemma3nTextAltUp.predict`.
    """
    return x + m.einsum("btji,ibte->jbte", heads(coefficients, len(x)), x)


def correct_streams(m: Maths, x: Array, coefficients: Array, change: Array) -> Array:
    """Streams x [A, B, T, E], to each added `change` [B, T, E] times its coefficient [B, T, A].

    HF's `Gemma3nTextAltUp.correct`.
    """
    return x + m.moveaxis(coefficients, -1, 0)[..., None] * change


def add_to_rest(m: Maths, x: Array, y: Array) -> Array:
    """Streams x [A, B, T, E], to all but the first y [B, T, E] added."""
    return m.join((x[:1], x[1:] + y), 0)
