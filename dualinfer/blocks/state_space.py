"""Mamba-2 in attention's place, or beside it (arXiv:2405.21060, HF's `Mamba2Mixer`)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..errors import ConfigError
from ..model import rows as make
from ..model.spec import Activation, Norm
from ..model.weights import Row, row
from ..ops.caches import Buffer, StateView
from ..ops.contract import Array, BlockOps, NormOf, Seen, StateRows, Unnormed, Weights
from ..ops.maths import Maths, cut, flat, heads
from ..ops.recurrence_kernels import Launch, LaunchingOps, StateStep
from ..ops.recurrences import (
    begins_anew,
    convolve_past,
    counted,
    last_tokens,
    scan_decaying,
    step_token,
    visible,
)
from ..parallel.sharding import Devices, Share

_CHUNK = 64  # tokens whose pairs are scored at a time


@dataclass(frozen=True)
class StateSpace:
    """See `spec.Recurrence`.

    A token's projection holds a gate, an input x of `heads` of `head_dim` elements, B and C of
    `groups` of `state` elements, and a number of each head. x, B and C are convolved over the token
    and the `taps` - 1 before it, and the `activation` taken. A head's step d is the softplus of its
    number and a bias, within `limits`. Its state, of head_dim times state elements, is times
    exp(d A), and d x B^T is added; the state times C, and D x, is what it gives. A group's B and C
    are those of as many heads in a row. That is times silu of the gate, and then normed, or the
    gate comes behind the norm if it is `gated_last`. A norm is over `normed` elements; there may be
    none. Numbers of `scales` are what gate, x, B, C and the heads' numbers are times, before all
    that, and `out_scale` what comes out is times (Falcon-H1).
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    activation: Activation
    norm: Norm | None
    normed: int
    gated_last: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, float, float, float, float] | None = None
    out_scale: float = 1.0
    held: ClassVar[Mapping[str, str]] = {"state heads": "states"}

    @property
    def width(self) -> int:
        """Elements of x, and of what it gives."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Elements of B, and of C."""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """Elements of a token that are convolved."""
        return self.width + 2 * self.shared

    @property
    def extents(self) -> dict[str, int]:
        """See `spec.Recurrence`."""
        wide = dict.fromkeys(("state_z", "state_x"), self.width)
        shared = dict.fromkeys(("state_b", "state_c"), self.shared)
        return {**wide, **shared, "states": self.heads, "recurrence_taps": self.taps}

    def rows(
        self, hf: str, bias: bool, kernel_bias: bool, out_bias: bool | None = None
    ) -> list[Row]:
        """The rows of what HF calls `hf`; `bias` is that of both products.

        `out_bias` is that of the second where it has its own.
        """
        found = make.recurrence(
            *(hf, "state_z+state_x+state_b+state_c+states", "state_x", bias),
            kernel="conv1d",
            convolved="state_x+state_b+state_c",
            kernel_bias=kernel_bias,
            out_bias=out_bias,
        )
        for name, source in {
            "state_step_bias": "dt_bias",
            "state_decay": "A_log",
            "state_skip": "D",
        }.items():
            found.append(replace(row(name, "states", (f"{hf}.{source}", "states")), wide=True))
        if self.norm is not None:
            found += make.norm(self.norm, "state_norm", f"{hf}.norm", "state_x")
        return found

    @property
    def passing(self) -> int:
        """See `spec.Recurrence`."""
        return self.channels + self.width

    @property
    def multiplied(self) -> int:
        """See `spec.Recurrence`."""
        return self.taps * self.channels + 3 * self.width * self.state

    def share(self, devices: Devices) -> list[tuple[Self, dict[str, Share]]]:
        """See `spec.Recurrence`: devices share whole groups of heads.

        Where all heads are of one group, each device has that.
        """
        if devices.size > self.groups > 1:
            raise ConfigError(
                f"{devices.asked_by}={devices.size}: the states of this model have {self.groups} "
                f"groups of heads, and devices share whole ones. Use at most {self.groups}."
            )
        parts = []
        for own, groups in zip(*devices.heads(self.heads, self.groups), strict=True):
            shares = dict.fromkeys(("state_z", "state_x"), own.times(self.head_dim))
            shares |= dict.fromkeys(("state_b", "state_c"), groups.times(self.state))
            part = replace(self, heads=own.extent, groups=groups.extent)
            parts.append((part, {**shares, "states": own}))
        return parts

    def layout(self, slots: int) -> tuple[Buffer, ...]:
        """See `spec.Recurrence`.

        The last tokens convolved, [N, taps - 1, C], and states, float32 [N, heads, head_dim,
        state].
        """
        past = Buffer((slots, self.taps - 1, self.channels), heads=2)
        return past, Buffer((slots, self.heads, self.head_dim, self.state), dtype="float32")

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
        past, state = (None, None) if states is None else states
        gate, given, steps = self._parted(m, x)
        y, wide = convolve_past(m, w, visible(given, mask), past, segments)
        steps, decays = self._steps(m, w, steps)
        mask = counted(m, x, mask, lengths)
        if mask is not None:  # other tokens leave a state as it is
            steps, decays = (m.where(mask[..., None], a, 0.0) for a in (steps, decays))
        if segments is not None:
            anew = begins_anew(m, segments)[..., None]
            decays = m.where(anew, -float("inf"), decays)
        parts = self._heads(m.activation(y, self.activation))
        y, state = self.scan(m, *parts, steps, decays, state)
        y = self._out(ops, w, y, parts[0], gate)
        return y, () if lengths is None else (last_tokens(m, w, wide, lengths), state)

    def token(
        self, ops: BlockOps, w: Weights, x: Array, states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """See `spec.Recurrence`."""
        return step_token(ops, self, w, x, states)

    def stepped(
        self, ops: BlockOps, w: Weights, x: Array, rest: tuple[Array, ...]
    ) -> tuple[StateStep, Callable[[Array], Array], tuple[Array, ...]]:
        """See `recurrence_kernels.SteppedRecurrence`."""
        m = ops.maths
        gate, given, steps = self._parted(m, x)
        y, wide = convolve_past(m, w, given, rest[0])
        steps, decays = self._steps(m, w, steps[:, 0])
        value, b, c = self._heads(m.activation(y[:, 0], self.activation))
        by_group = len(x), self.groups, self.heads // self.groups, -1
        added = (value * steps[..., None]).reshape(by_group)
        step = StateStep(c, b, added, None, decays.reshape(by_group))

        def finish(y: Array) -> Array:
            return self._out(ops, w, y, value, gate[:, 0])[:, None]

        return step, finish, (wide[:, 1:],)

    @property
    def is_fused(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`; not where devices share what is normed."""
        from ..kernels.triton import state_token

        normed = self.normed if self.norm is not None else 1
        known = state_token.serves(self.head_dim, self.state, normed, self.taps)
        return self.activation == "silu" and normed <= self.width and known

    @property
    def fuses_sequences(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        return True

    def fused_token(
        self, ops: LaunchingOps, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array | Unnormed, StateView] | None:
        """See `recurrence_kernels.FusedRecurrence`; the norm over all heads of one slot is left."""
        from ..kernels.triton import linear, state_token

        if not state_token.counts(len(x), self.groups):
            return None
        layer, behind = self._known(w), None
        is_whole = self.norm is not None and self.normed == self.width and not self.gated_last
        if is_whole and self.out_scale == 1 and len(x) == 1 and ops.split is None:
            assert self.norm is not None
            behind = NormOf.named(self.norm, w, "state_norm")
            if w["recurrence_out.weight"].scheme is not None or not linear.fuses_norm(behind):
                behind = None
        own = x, layer, *cache.arrays, moves
        how = {"pdl": ops.starts_early(len(x)), "leaves_norm": behind is not None}
        launch = Launch(state_token.state_token, own, how)
        y, held = ops.launch(launch, cache.arrays, counts=True)
        return y if behind is None else Unnormed(y, None, behind), cache.of(*held)

    def fused_sequence(
        self, ops: LaunchingOps, w: Weights, x: Array, mask: Array | None, rows: StateRows
    ) -> tuple[Array, StateView | None] | None:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import state_prompt

        early = ops.starts_early(x.shape[0] * x.shape[1])
        how = {"mask": mask, "pdl": early, **rows.numbers}
        own = x, self._known(w), *rows.held
        y, held = ops.launch(Launch(state_prompt.state_prompt, own, how), rows.held)
        return y, rows.after(held)

    def _known(self, w: Weights) -> Any:
        """Put the layer's facts and weights together, for both kernels."""
        from ..kernels.triton.state_token import StateLayer

        norm = None if self.norm is None else w["state_norm.weight"]
        return StateLayer(
            *(self.heads, self.head_dim, self.state, self.groups),
            *(w["recurrence_kernel"], w.get("recurrence_kernel_bias")),
            *(w["state_step_bias"], w["state_decay"], w["state_skip"], norm, self.normed),
            eps=0.0 if self.norm is None else self.norm.eps,
            gated_last=self.gated_last,
            limits=self.limits,
            scales=self.scales,
            out_scale=self.out_scale,
        )

    def _parted(self, m: Maths, x: Array) -> list[Array]:
        """Gates [..., width], what is convolved [..., C], and the heads' numbers [..., heads]."""
        if self.scales is not None:
            sizes = self.width, self.width, self.shared, self.shared, self.heads
            parts = zip(cut(x, *sizes), self.scales, strict=True)
            x = m.join([part * scale for part, scale in parts], -1)
        return cut(x, self.width, self.channels, self.heads)

    def _steps(self, m: Maths, w: Weights, numbers: Array) -> tuple[Array, Array]:
        """A head's step, and the logarithm of what its state is times: float32 [..., heads]."""
        steps = m.softplus(m.wide(numbers) + w["state_step_bias"])
        if self.limits != (0.0, float("inf")):
            steps = m.clip(steps, *self.limits)
        return steps, -steps * m.exp(w["state_decay"])

    def _heads(self, x: Array) -> tuple[Array, Array, Array]:
        """Inputs [..., heads, head_dim], B and C [..., groups, state], of what was convolved."""
        value, b, c = cut(x, self.width, self.shared, self.shared)
        return heads(value, self.heads), heads(b, self.groups), heads(c, self.groups)

    def scan(
        self,
        m: Maths,
        x: Array,
        b: Array,
        c: Array,
        steps: Array,
        decays: Array,
        state: Array | None,
    ) -> tuple[Array, Array]:
        """Results of states over sequences, [B, T, heads, head_dim], and the last ones; float32.

        `x`, `b` and `c` as `_heads` gives them, `steps` and `decays` as `_steps`; `state` [B,
        heads, head_dim, state] is the one before, None for zeros.
        """
        return scan_decaying(m, x * steps[..., None], b, c, decays, state, _CHUNK)

    def _out(self, ops: BlockOps, w: Weights, y: Array, x: Array, gate: Array) -> Array:
        """Results of heads, y and x float32 [..., heads, head_dim], gated, normed: [..., width]."""
        m = ops.maths
        y = flat(y + x * w["state_skip"][:, None])
        gates = m.activation(m.wide(gate), "silu")
        if not self.gated_last:
            y = y * gates
        if self.norm is not None:
            if self.width < self.normed:  # devices share what is normed
                mean = ops.sum((y * y).sum(-1, keepdims=True)) / self.normed
                y = y * m.rsqrt(mean + self.norm.eps)
            else:
                parts = heads(y, width=self.normed)
                mean = (parts * parts).mean(-1, keepdims=True)
                y = flat(parts * m.rsqrt(mean + self.norm.eps))
            y = y * m.wide(w["state_norm.weight"])
        if self.gated_last:
            y = y * gates
        return m.cast(y if self.out_scale == 1 else y * self.out_scale, gate.dtype)
