"""Mamba-1 in attention's place (arXiv:2312.00752, HF's `MambaMixer`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from ..model import rows as make
from ..model.spec import Activation, Norm
from ..model.weights import Row, row
from ..ops.caches import Buffer, StateView
from ..ops.contract import Array, BlockOps, Epilogue, NormOf, Seen, StateRows, Weights
from ..ops.maths import Maths, cut
from ..ops.recurrence_kernels import Launch, LaunchingOps
from ..ops.recurrences import begins_anew, convolve_past, counted, last_tokens, visible
from ..parallel.sharding import Devices, Share

_CHUNK = 64  # tokens whose states are held at a time
_SIDE = 8  # tokens in a row within a chunk; those of all its rows go on side by side


@dataclass(frozen=True)
class SelectiveScan:
    """See `spec.Recurrence`.

    A token's projection holds an input x and a gate, of `width` channels each. x is convolved over
    the token and the `taps` - 1 before it, and the `activation` taken. A product of all its
    channels gives `rank` numbers, and B and C of `state` elements, which are normed each by itself
    where there is an `eps`, with weights or without as `normed` says. A channel's step d is the
    softplus of a product of the rank's numbers, and a bias. Each channel has a state of `state`
    elements: it is times exp(d A), by a matrix A of channels and elements, and d x B is added; what
    it gives is the state times C, and D x, and that is times silu of the gate.
    """

    width: int
    rank: int
    state: int
    taps: int
    activation: Activation
    eps: float | None = None
    normed: Literal["plain", "weighted"] = "plain"
    held: ClassVar[Mapping[str, str]] = {"state channels": "scan"}

    @property
    def extents(self) -> dict[str, int]:
        """See `spec.Recurrence`."""
        wide = dict.fromkeys(("scan", "scan_x", "scan_z"), self.width)
        read = {"scan_read": self.rank + 2 * self.state, "scan_rank": self.rank}
        return {**wide, **read, "scan_state": self.state, "recurrence_taps": self.taps}

    def rows(self, hf: str, bias: bool, kernel_bias: bool) -> list[Row]:
        """The rows of what HF calls `hf`; `bias` is that of the products before and behind."""
        found = make.recurrence(
            *(hf, "scan_x+scan_z", "scan", bias), kernel="conv1d", kernel_bias=kernel_bias
        )
        for name, axes, source in (
            ("scan_read.weight", "scan_read scan", "x_proj.weight"),
            ("scan_step.weight", "scan scan_rank", "dt_proj.weight"),
        ):
            found.append(replace(row(name, axes, (f"{hf}.{source}", axes)), dense=True))
        for name, axes, source in (
            ("scan_step_bias", "scan", "dt_proj.bias"),
            ("scan_decay", "scan scan_state", "A_log"),
            ("scan_skip", "scan", "D"),
        ):
            found.append(replace(row(name, axes, (f"{hf}.{source}", axes)), wide=True))
        if self.eps is not None:
            kind = Norm("rms", self.eps)
            for part, axis in (("dt", "scan_rank"), ("b", "scan_state"), ("c", "scan_state")):
                if self.normed == "weighted":
                    found += make.norm(kind, f"scan_{part}_norm", f"{hf}.{part}_layernorm", axis)
                else:
                    found += make.plain_norm(kind, f"scan_{part}_norm", axis)
        return found

    @property
    def passing(self) -> int:
        """See `spec.Recurrence`."""
        return 4 * self.width

    @property
    def multiplied(self) -> int:
        """See `spec.Recurrence`."""
        inner = 2 * self.rank + 2 * self.state
        return self.width * (self.taps + inner + 5 * self.state)

    def share(self, devices: Devices) -> list[tuple[Self, dict[str, Share]]]:
        """See `spec.Recurrence`: devices share the channels."""
        axes = "scan", "scan_x", "scan_z"
        return [
            (replace(self, width=share.extent), dict.fromkeys(axes, share))
            for share in devices.width("state channels", self.width)
        ]

    def layout(self, slots: int) -> tuple[Buffer, ...]:
        """See `spec.Recurrence`.

        The last tokens convolved, [N, taps - 1, I], and states, float32 [N, I, state].
        """
        past = Buffer((slots, self.taps - 1, self.width), heads=2)
        return past, Buffer((slots, self.width, self.state), dtype="float32")

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
        given, gate = cut(x, self.width, self.width)
        y, wide = convolve_past(m, w, visible(given, mask), past, segments)
        value, steps, b, c = self._parted(ops, w, y, x.dtype)
        mask = counted(m, x, mask, lengths)
        if mask is not None:  # other tokens leave a state as it is
            steps = m.where(mask[..., None], steps, 0.0)
        anew = None if segments is None else begins_anew(m, segments)
        y, state = self.scan(m, w, value, steps, b, c, state, anew)
        y = self._out(m, w, y, value, gate)
        return y, () if lengths is None else (last_tokens(m, w, wide, lengths), state)

    def token(
        self, ops: BlockOps, w: Weights, x: Array, states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """See `spec.Recurrence`."""
        m, (past, held) = ops.maths, states
        given, gate = cut(x, self.width, self.width)
        y, wide = convolve_past(m, w, given, past)
        value, steps, b, c = (part[:, 0] for part in self._parted(ops, w, y, x.dtype))
        decays = m.exp(steps[..., None] * -m.exp(w["scan_decay"]))
        state = m.add_product(held * decays, (value * steps)[..., None], b[:, None])
        y = (state * c[:, None]).sum(-1)
        return self._out(m, w, y[:, None], value[:, None], gate), (wide[:, 1:], state)

    @property
    def is_fused(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import selective_scan

        return self.activation == "silu" and selective_scan.serves(self.state, self.taps)

    @property
    def fuses_sequences(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        return True

    def fused_token(
        self, ops: LaunchingOps, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array, StateView] | None:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import conv_token, selective_scan

        past, state = cache.arrays
        early = {"pdl": ops.starts_early(len(x))}
        how = {"taps": w["recurrence_kernel"], "taps_bias": w.get("recurrence_kernel_bias")}
        how |= {"gated": False, **early}
        launch = Launch(conv_token.conv_token, (x, past, moves), how)
        value, (past,) = ops.launch(launch, (past,))
        given = x, value, *self._read(ops, w, value), self._known(w), state, moves
        y, (state,) = ops.launch(Launch(selective_scan.scan_token, given, early), (state,))
        return y, cache.of(past, state)

    def fused_sequence(
        self, ops: LaunchingOps, w: Weights, x: Array, mask: Array | None, rows: StateRows
    ) -> tuple[Array, StateView | None] | None:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import selective_scan

        early = ops.starts_early(x.shape[0] * x.shape[1])
        how = {"mask": mask, "pdl": early, **rows.numbers}
        begun = {name: value for name, value in how.items() if name != "lengths"}
        kernel = w["recurrence_kernel"], w.get("recurrence_kernel_bias")
        launch = Launch(selective_scan.convolve, (x, *kernel, *rows.held[:1]), begun)
        value, _ = ops.launch(launch)
        given = x, value, *self._read(ops, w, value), self._known(w), *rows.held
        y, held = ops.launch(Launch(selective_scan.scan, given, how), rows.held)
        return y, rows.after(held)

    def _known(self, w: Weights) -> Any:
        """Put the layer's weights together, for both kernels."""
        from ..kernels.triton.selective_scan import ScanLayer

        return ScanLayer(w["scan_step_bias"], w["scan_decay"], w["scan_skip"])

    def _parted(self, ops: BlockOps, w: Weights, y: Array, dtype: Any) -> list[Array]:
        """Inputs and steps [B, T, I], B and C [B, T, state], of what was convolved; float32."""
        m = ops.maths
        value = m.cast(m.activation(y, self.activation), dtype)
        numbers, b, c = self._read(ops, w, value)
        steps = m.softplus(m.wide(numbers) + w["scan_step_bias"])
        return [m.wide(value), steps, m.wide(b), m.wide(c)]

    def _read(self, ops: BlockOps, w: Weights, value: Array) -> tuple[Array, Array, Array]:
        """A number of each channel [..., I], and B and C [..., state], of inputs [..., I]."""
        read = ops.sum(ops.linear(value, w["scan_read.weight"]))
        numbers, b, c = cut(read, self.rank, self.state, self.state)
        norm = None
        if self.eps is not None:
            kind = Norm("rms", self.eps)
            norm, of_b, of_c = (NormOf.named(kind, w, f"scan_{x}_norm") for x in ("dt", "b", "c"))
            b, c = ops.norm(b, of_b), ops.norm(c, of_c)
        return ops.linear(numbers, w["scan_step.weight"], Epilogue(norm=norm)), b, c

    def scan(
        self,
        m: Maths,
        w: Weights,
        x: Array,
        steps: Array,
        b: Array,
        c: Array,
        state: Array | None,
        anew: Array | None = None,
    ) -> tuple[Array, Array]:
        """Results of states over sequences, [B, T, I], and the last ones [B, I, state]; float32.

        `x`, `steps`, `b` and `c` as `_parted` gives them; `state` is the one before, None for
        zeros, and bool `anew` [B, T] are the tokens that none is before. A chunk's tokens are rows
        of a few, and a token of each row is taken at a time: first from zeros, with what a state
        before the row would be times; then a state goes from row to row, and joins each token.
        """
        rows = len(x)
        own = -m.exp(w["scan_decay"])
        first = m.zeros((rows, *own.shape), m.float32, x) if state is None else state

        def advance(
            last: Array, x: Array, steps: Array, b: Array, c: Array, *anew: Array
        ) -> tuple[Array, Array]:
            tokens = x.shape[1]

            def by_row(a: Array) -> list[Array]:
                a = m.pad(a, 1, 0, -tokens % _SIDE)
                a = a.reshape(rows, -1, _SIDE, *a.shape[2:])
                return [a[:, :, i] for i in range(_SIDE)]

            x, steps, b, c, *begins = (by_row(a) for a in (x, steps, b, c, *anew))
            since, kept = [], []  # states [B, rows, I, state] from zeros, and what earlier ones get
            for i in range(_SIDE):
                logs = steps[i][..., None] * own
                if begins:
                    logs = m.where(begins[0][i][..., None, None], -float("inf"), logs)
                decay, added = m.exp(logs), (x[i] * steps[i])[..., None] * b[i][:, :, None]
                since.append(m.add_product(added, since[-1], decay) if since else added)
                kept.append(kept[-1] * decay if kept else decay)
            before = [last]
            for j in range(kept[-1].shape[1]):
                before.append(m.add_product(since[-1][:, j], before[-1], kept[-1][:, j]))
            begun = m.stack(before[:-1], 1)
            found = [
                (m.add_product(a, begun, k) * own_c[:, :, None]).sum(-1)
                for a, k, own_c in zip(since, kept, c, strict=True)
            ]
            y = m.stack(found, 2)
            return before[-1], y.reshape(rows, -1, y.shape[-1])[:, :tokens]

        parts = (x, steps, b, c) if anew is None else (x, steps, b, c, anew)
        y, last = m.scan(advance, first, parts, _CHUNK)
        return y, last

    def _out(self, m: Maths, w: Weights, y: Array, x: Array, gate: Array) -> Array:
        """Results y and inputs x, float32 [..., I], gated, in the gate's dtype."""
        y = y + x * w["scan_skip"]
        return m.cast(y * m.activation(m.wide(gate), "silu"), gate.dtype)
