"""A gated convolution over the past, in attention's place (LFM2, HF's `Lfm2ShortConv`)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..model import rows as make
from ..model.weights import Row
from ..ops.caches import Buffer, StateView
from ..ops.contract import EVERY, Array, BlockOps, Seen, Weights
from ..ops.maths import Maths, cut
from ..ops.recurrence_kernels import Launch, LaunchingOps
from ..ops.recurrences import convolve_past, last_tokens, visible
from ..parallel.sharding import Devices, Share


@dataclass(frozen=True)
class ShortConvolution:
    """See `spec.Recurrence`.

    Three projections of a token have `width` elements each. The product of the first and the third
    is convolved over the token and the `taps` - 1 before it, each element by a kernel of its own,
    and the second times what that gives is projected back.
    """

    width: int
    taps: int
    held: ClassVar[Mapping[str, str]] = {"convolved channels": "conv"}

    @property
    def extents(self) -> dict[str, int]:
        """See `spec.Recurrence`."""
        wide = dict.fromkeys(("conv", "conv_in", "conv_out", "conv_x"), self.width)
        return {**wide, "recurrence_taps": self.taps}

    def rows(self, hf: str, bias: bool) -> list[Row]:
        """The rows of what HF calls `hf`; all of it has a bias, or nothing."""
        return make.recurrence(hf, "conv_in+conv_out+conv_x", "conv", bias)

    @property
    def passing(self) -> int:
        """See `spec.Recurrence`."""
        return 2 * self.width

    @property
    def multiplied(self) -> int:
        """See `spec.Recurrence`."""
        return (self.taps + 2) * self.width

    def share(self, devices: Devices) -> list[tuple[Self, dict[str, Share]]]:
        """See `spec.Recurrence`: devices share the elements."""
        axes = "conv", "conv_in", "conv_out", "conv_x"
        return [
            (replace(self, width=share.extent), dict.fromkeys(axes, share))
            for share in devices.width("conv", self.width)
        ]

    def layout(self, slots: int) -> tuple[Buffer, ...]:
        """See `spec.Recurrence`: the last tokens convolved, [N, taps - 1, C]."""
        return (Buffer((slots, self.taps - 1, self.width), heads=2),)

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
        past = None if states is None else states[0]
        y, wide = self._convolved(ops.maths, w, x, past, seen)
        return y, () if lengths is None else (last_tokens(ops.maths, w, wide, lengths),)

    def token(
        self, ops: BlockOps, w: Weights, x: Array, states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """See `spec.Recurrence`."""
        y, wide = self._convolved(ops.maths, w, x, states[0], EVERY)
        return y, (wide[:, 1:],)

    @property
    def is_fused(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        return self.taps > 1

    @property
    def fuses_sequences(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        return False

    def fused_token(
        self, ops: LaunchingOps, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array, StateView] | None:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import conv_token

        how = {"taps": w["recurrence_kernel"], "taps_bias": w.get("recurrence_kernel_bias")}
        how["pdl"] = ops.starts_early(len(x))
        launch = Launch(conv_token.conv_token, (x, *cache.arrays, moves), how)
        y, held = ops.launch(launch, cache.arrays)
        return y, cache.of(*held)

    def fused_sequence(self, *_: Any, **__: Any) -> None:
        """See `recurrence_kernels.FusedRecurrence`."""
        return None

    def _convolved(
        self, m: Maths, w: Weights, x: Array, past: Array | None, seen: Seen
    ) -> tuple[Array, Array]:
        """The values to project back, and the tokens convolved, with their past in front."""
        first, gate, third = cut(x, *[x.shape[-1] // 3] * 3)
        y, wide = convolve_past(m, w, visible(first * third, seen.mask), past, seen.segments)
        return m.cast(gate * y, x.dtype), wide
