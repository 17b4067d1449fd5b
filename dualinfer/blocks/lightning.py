"""Lightning attention in attention's place (arXiv:2401.04658, HF's `MiniMaxLightningAttention`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from ..model import rows as make
from ..model.spec import Activation
from ..model.weights import Row, row
from ..ops.caches import Buffer
from ..ops.contract import Array, BlockOps, Seen, Weights
from ..ops.maths import cut, flat, heads
from ..ops.norms import rms_norm
from ..ops.recurrence_kernels import StateStep
from ..ops.recurrences import begins_anew, counted, scan_decaying, step_token
from ..parallel.sharding import Devices, Share

_CHUNK = 64  # tokens whose pairs are scored at a time


@dataclass(frozen=True)
class Slopes:
    """Log-decays of heads' states, float32 [H]: 2^(-8 h / H) of head h times a `factor`."""

    factor: float

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The table of a `weights.Row` of this shape."""
        (count,) = shape
        return (2.0 ** (-8 * (np.arange(count) + 1) / count) * self.factor).astype(np.float32)


@dataclass(frozen=True)
class Lightning:
    """See `spec.Recurrence`.

    A token's projection holds queries, keys, values, of which the `activation` is taken, and gates,
    of `heads` of `head_dim` elements. A head's state, of head_dim times head_dim elements, is times
    exp(-slope) at each token, by a number of the head, and v k^T is added; the state times q is
    what it gives. That is RMS-normed as one of `normed` elements, and times the logistic function
    of the gates.
    """

    heads: int
    head_dim: int
    activation: Activation
    eps: float
    normed: int
    held: ClassVar[Mapping[str, str]] = {"state heads": "lightnings"}

    @property
    def width(self) -> int:
        """Elements of all queries, and of what it gives."""
        return self.heads * self.head_dim

    @property
    def extents(self) -> dict[str, int]:
        """See `spec.Recurrence`."""
        wide = dict.fromkeys(("lightning", *(f"lightning_{x}" for x in "qkvg")), self.width)
        return {**wide, "lightnings": self.heads}

    def rows(self, hf: str, forgets: float) -> list[Row]:
        """The rows of what HF calls `hf`, whose queries, keys and values lie head by head.

        Slopes are those of ALiBi times `forgets`.
        """
        qkv = "lightning_q+lightning_k+lightning_v"
        sources = (
            (f"{hf}.qkv_proj.weight", f"{qkv}/lightnings embed"),
            (f"{hf}.output_gate.weight", "lightning_g embed"),
        )
        return [
            row("recurrence_in.weight", f"{qkv}+lightning_g embed", *sources),
            *make.linear("recurrence_out", f"{hf}.out_proj", "embed lightning", bias=False),
            row("lightning_norm.weight", "lightning", (f"{hf}.norm.weight", "lightning")),
            Row("lightning_slopes", ("lightnings",), (), constant=Slopes(forgets), wide=True),
        ]

    @property
    def passing(self) -> int:
        """See `spec.Recurrence`."""
        return 5 * self.width

    @property
    def multiplied(self) -> int:
        """See `spec.Recurrence`."""
        return 3 * self.width * self.head_dim

    def share(self, devices: Devices) -> list[tuple[Self, dict[str, Share]]]:
        """See `spec.Recurrence`: devices share the heads."""
        axes = "lightning", *(f"lightning_{x}" for x in "qkvg")
        return [
            (
                replace(self, heads=own.extent),
                {**dict.fromkeys(axes, own.times(self.head_dim)), "lightnings": own},
            )
            for own in devices.heads(self.heads, self.heads)[0]
        ]

    def layout(self, slots: int) -> tuple[Buffer, ...]:
        """See `spec.Recurrence`: states, float32 [N, heads, head_dim, head_dim], values first."""
        return (Buffer((slots, self.heads, self.head_dim, self.head_dim), dtype="float32"),)

    def sequence(
        self,
        ops: BlockOps,
        w: Weights,
        x: Array,
        states: tuple[Array, ...] | None,
        seen: Seen,
        lengths: Array | None,
    ) -> tuple[Array, tuple[Array, ...]]:
        """See `spec.Recurrence`."""
        m, (mask, segments) = ops.maths, seen
        q, k, v, gate = self._parted(ops, x)
        mask = counted(m, x, mask, lengths)
        decays = m.zeros((*x.shape[:2], 1), m.float32, x) - w["lightning_slopes"]
        if mask is not None:  # other tokens leave a state as it is
            k = m.where(mask[..., None, None], k, 0.0)
            decays = m.where(mask[..., None], decays, 0.0)
        if segments is not None:
            anew = begins_anew(m, segments)[..., None]
            decays = m.where(anew, -float("inf"), decays)
        state = None if states is None else states[0]
        y, state = scan_decaying(m, v, k, q, decays, state, _CHUNK)
        return self._out(ops, w, y, gate), () if lengths is None else (state,)

    def token(
        self, ops: BlockOps, w: Weights, x: Array, states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """See `spec.Recurrence`."""
        return step_token(ops, self, w, x, states)

    def stepped(
        self, ops: BlockOps, w: Weights, x: Array, rest: tuple[Array, ...]
    ) -> tuple[StateStep, Callable[[Array], Array], tuple[Array, ...]]:
        """See `recurrence_kernels.SteppedRecurrence`."""
        q, k, v, gate = self._parted(ops, x)
        decays = ops.maths.broadcast(-w["lightning_slopes"], (len(x), self.heads))
        step = StateStep(q[:, 0], k[:, 0], v[:, 0, :, None], None, decays[..., None, None])
        return step, lambda y: self._out(ops, w, y[:, None], gate), rest

    def _parted(self, ops: BlockOps, x: Array) -> list[Array]:
        """Queries, keys and values, float32 [..., heads, head_dim], and gates [..., width]."""
        m, gate = ops.maths, x[..., 3 * self.width :]
        qkv = m.wide(m.cast(m.activation(x[..., : 3 * self.width], self.activation), x.dtype))
        return [*(heads(part, self.heads) for part in cut(qkv, *[self.width] * 3)), gate]

    def _out(self, ops: BlockOps, w: Weights, y: Array, gate: Array) -> Array:
        """Results of heads, float32 [B, T, heads, head_dim], normed and gated: [B, T, width]."""
        m, y = ops.maths, flat(y)
        squares = None
        if self.width < self.normed:  # devices share what is normed
            squares = ops.sum((y * y).sum(-1)) / self.normed
        y = rms_norm(m, y, w["lightning_norm.weight"], self.eps, squares=squares)
        return m.cast(y * m.sigmoid(m.wide(gate)), gate.dtype)
