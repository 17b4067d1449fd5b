"""The gated delta rule in attention's place: Gated DeltaNet and Kimi Delta Attention.

arXiv:2412.06464, arXiv:2510.26692; HF's `Qwen3NextGatedDeltaNet` and `KimiLinearDeltaAttention`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from ..model import rows as make
from ..model.spec import Activation, Norm
from ..model.weights import Row, Source, row
from ..ops.caches import Buffer, StateView
from ..ops.contract import Array, BlockOps, Seen, StateRows, Weights
from ..ops.maths import Maths, cut, flat, heads
from ..ops.projection import project
from ..ops.recurrence_kernels import Launch, LaunchingOps, StateStep
from ..ops.recurrences import (
    begins_anew,
    convolve_past,
    counted,
    last_tokens,
    step_token,
    visible,
)
from ..parallel.sharding import Devices, Share

CHUNK = 64  # tokens whose updates are solved at a time; cuts of a prompt at multiples change no bit
_ROWS = 16  # of them, of which all pairs have a decay of their own for each channel
_LENGTH_EPS = 1e-6  # of the lengths of queries and keys

# The input projection's outputs, in their order.
READS = "delta_q", "delta_k", "delta_v", "delta_gate", "delta_beta", "delta_decay"
KERNELS = "q_conv1d", "k_conv1d", "v_conv1d"  # as files of some families have them


@dataclass(frozen=True)
class DeltaRule:
    """See `spec.Recurrence`.

    A token's projection has these elements, in this order: queries and keys of `keys` heads of
    `key_dim` elements, values of `values` heads of `value_dim`, then its gates, a number b of each
    value head, and what its decays are made of. Gates are value_dim elements of each value head, or
    `gate_rank` elements of which a second projection makes them. Decays are one number of each
    value head, or of each of its `key_dim` channels; then they may be `decay_rank` elements of
    which a second projection makes them.

    Queries, keys and values are convolved over the token and the `taps` - 1 before it, and the
    `activation` taken. Queries and keys are over their lengths, and queries over the root of
    key_dim. A key head is that of as many value heads in a row. A head's log-decay g is
    -exp(A) softplus(decay + bias), or with a `floor` f it is f times the logistic function of
    exp(A) (decay + bias). Its step b is the logistic function of its number, twice that if
    `doubled`. Its state S, float32 [key_dim, value_dim], becomes S' = exp(g) S + k u^T, where
    u = b (v - (exp(g) S)^T k), and gives S'^T q. That is normed over value_dim, and times a
    function of its gates.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    taps: int
    activation: Activation
    norm: Norm
    by_channel: bool = False
    floor: float | None = None
    gate: Literal["silu", "sigmoid"] = "silu"
    doubled: bool = False
    decay_rank: int = 0
    gate_rank: int = 0
    held: ClassVar[Mapping[str, str]] = {"delta heads": "delta_heads"}

    @property
    def width(self) -> int:
        """Elements that it gives of a token."""
        return self.values * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token that are convolved: queries, keys and values."""
        return 2 * self.keys * self.key_dim + self.width

    @property
    def decays(self) -> int:
        """Log-decays of a token."""
        return self.values * (self.key_dim if self.by_channel else 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the parts of a token's projection, in their order."""
        key, gate, decay = self.keys * self.key_dim, self.gate_rank, self.decay_rank
        return key, key, self.width, gate or self.width, self.values, decay or self.decays

    @property
    def extents(self) -> dict[str, int]:
        """See `spec.Recurrence`."""
        return {
            **dict(zip(READS, self.sizes, strict=True)),
            "delta_given": self.width,
            "delta_keys": self.keys,
            "delta_heads": self.values,
            "delta_decays": self.decays,
            "delta_value": self.value_dim,
            "recurrence_taps": self.taps,
        }

    def rows(
        self,
        hf: str,
        reads: Sequence[tuple[str, str]],
        *,
        decay: str = "",
        kernels: tuple[str, ...] = (),
        gate_up: str = "",
        decay_up: str = "",
        stored_scale: str = "delta_heads",
        norm: str = "norm",
        out: str = "out_proj",
    ) -> list[Row]:
        """The rows of what HF calls `hf`.

        `reads` are its projections, each by name and axes, in the order of `READS`; files may have
        three `kernels` in the place of one. `decay` is the module of A_log, whose axes are
        `stored_scale`, and of dt_bias, and `gate_up` and `decay_up` are the second projections,
        which are never quantized.
        """
        sources = [(f"{hf}.{name}.weight", f"{axes} embed") for name, axes in reads]
        convolved = "+".join(READS[:3])
        kernel = row(
            "recurrence_kernel",
            f"{convolved} recurrence_taps",
            (f"{hf}.conv1d.weight", f"{convolved} one recurrence_taps"),
        )
        if kernels:
            own = (
                Source(f"{hf}.{name}.weight", (axis, "one", "recurrence_taps"))
                for name, axis in zip(kernels, READS[:3], strict=True)
            )
            kernel = replace(kernel, sources=tuple(own), others=kernel.sources)
        found = [
            row("recurrence_in.weight", f"{'+'.join(READS)} embed", *sources),
            *make.linear("recurrence_out", f"{hf}.{out}", "embed delta_given", bias=False),
            kernel,
        ]
        for ours, rank, name, axes in (
            ("delta_gate", self.gate_rank, gate_up, "delta_given delta_gate"),
            ("delta_decay", self.decay_rank, decay_up, "delta_decays delta_decay"),
        ):
            if rank:
                second = make.linear(ours, f"{hf}.{name}", axes, bias=False)
                found += [replace(each, dense=True) for each in second]
        inner = f"{hf}.{decay}." if decay else f"{hf}."
        for ours, axis, source in (
            ("delta_decay_scale", "delta_heads", ("A_log", stored_scale)),
            ("delta_decay_bias", "delta_decays", ("dt_bias", "delta_decays")),
        ):
            own = row(ours, axis, (inner + source[0], source[1]))
            found.append(replace(own, wide=True))
        return found + make.norm(self.norm, "delta_norm", f"{hf}.{norm}", "delta_value")

    @property
    def passing(self) -> int:
        """See `spec.Recurrence`."""
        return 2 * (self.channels + self.width) + self.decays

    @property
    def multiplied(self) -> int:
        """See `spec.Recurrence`."""
        return self.taps * self.channels + 4 * self.width * self.key_dim

    def share(self, devices: Devices) -> list[tuple[Self, dict[str, Share]]]:
        """See `spec.Recurrence`: devices share key heads, with their value heads.

        Where there are more devices, several have one key head, and share its value heads.
        """
        parts = []
        for own, keys in zip(*devices.heads(self.values, self.keys), strict=True):
            given, decays = own.times(self.value_dim), own.times(self.decays // self.values)
            shares = dict.fromkeys(READS[:2], keys.times(self.key_dim))
            shares |= dict.fromkeys(("delta_v", "delta_given"), given)
            shares |= {
                "delta_keys": keys,
                "delta_heads": own,
                "delta_beta": own,
                "delta_decays": decays,
            }
            shares |= {} if self.gate_rank else {"delta_gate": given}
            shares |= {} if self.decay_rank else {"delta_decay": decays}
            parts.append((replace(self, values=own.extent, keys=keys.extent), shares))
        return parts

    def layout(self, slots: int) -> tuple[Buffer, ...]:
        """See `spec.Recurrence`.

        The last tokens convolved, [N, taps - 1, C], and states, float32 [N, values, key_dim,
        value_dim].
        """
        past = Buffer((slots, self.taps - 1, self.channels), heads=2)
        return past, Buffer((slots, self.values, self.key_dim, self.value_dim), dtype="float32")

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
        given, gates, steps, decays = self._parted(ops, w, x)
        y, wide = convolve_past(m, w, visible(given, mask), past, segments)
        mask = counted(m, x, mask, lengths)
        if mask is not None:  # other tokens leave a state as it is
            steps = m.where(mask[..., None, None], steps, 0.0)
            decays = m.where(mask[..., None, None, None], decays, 0.0)
        if segments is not None:
            anew = begins_anew(m, segments)[..., None, None, None]
            decays = m.where(anew, -float("inf"), decays)
        y, state = self.scan(m, *self._heads(m, y), steps, decays, state)
        y = self._out(m, w, y, gates)
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
        given, gates, steps, decays = self._parted(ops, w, x)
        y, wide = convolve_past(m, w, given, rest[0])
        step = StateStep(*self._heads(m, y[:, 0]), steps[:, 0], decays[:, 0])
        return step, lambda y: self._out(m, w, y[:, None], gates), (wide[:, 1:],)

    @property
    def is_fused(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import delta_token

        known = delta_token.serves(self.key_dim, self.value_dim, self.taps)
        return self.activation == "silu" and known

    @property
    def fuses_sequences(self) -> bool:
        """See `recurrence_kernels.FusedRecurrence`."""
        return True

    def fused_token(
        self, ops: LaunchingOps, w: Weights, x: Array, cache: StateView, moves: Array
    ) -> tuple[Array, StateView] | None:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import delta_token

        if not delta_token.counts(len(x), self.keys, self.values):
            return None
        own = x, self._known(ops, w, x), *cache.arrays, moves
        launch = Launch(delta_token.delta_token, own, {"pdl": ops.starts_early(len(x))})
        y, held = ops.launch(launch, cache.arrays, counts=True)
        return y, cache.of(*held)

    def fused_sequence(
        self, ops: LaunchingOps, w: Weights, x: Array, mask: Array | None, rows: StateRows
    ) -> tuple[Array, StateView | None] | None:
        """See `recurrence_kernels.FusedRecurrence`."""
        from ..kernels.triton import delta_prompt

        early = ops.starts_early(x.shape[0] * x.shape[1])
        how = {"mask": mask, "pdl": early, **rows.numbers}
        own = x, self._known(ops, w, x), *rows.held
        y, held = ops.launch(Launch(delta_prompt.delta_prompt, own, how), rows.held)
        return y, rows.after(held)

    def _known(self, ops: BlockOps, w: Weights, x: Array) -> Any:
        """Put the layer's facts, weights and second projections together, for both kernels."""
        from ..kernels.triton.delta_token import DeltaLayer

        gates = decays = None
        if self.gate_rank or self.decay_rank:
            _, gates, _, decays = self._projected(ops, w, x)
        return DeltaLayer(
            *(self.keys, self.values, self.key_dim, self.value_dim, sum(self.sizes[:4])),
            *(w["recurrence_kernel"], w["delta_decay_scale"], w["delta_decay_bias"]),
            *(w["delta_norm.weight"], self.norm.eps, gates, decays),
            floor=self.floor,
            doubled=self.doubled,
            gate=self.gate,
        )

    def _projected(self, ops: BlockOps, w: Weights, x: Array) -> list[Array]:
        """The convolved channels, gates, steps and decays of x [..., W], behind both projections.

        [..., C], [..., width], [..., values] and [..., decays], in x's dtype.
        """
        given, gates, steps, decays = cut(x, self.channels, *self.sizes[3:])
        if self.gate_rank:
            gates = project(ops, w, "delta_gate", gates)
        if self.decay_rank:
            decays = project(ops, w, "delta_decay", decays)
        return [given, gates, steps, decays]

    def _parted(self, ops: BlockOps, w: Weights, x: Array) -> tuple[Array, ...]:
        """The convolved channels, gates, steps and log-decays of a projection x [B, T, ...].

        [B, T, C], [B, T, width], and float32 [B, T, keys, values of each] and [B, T, keys, values
        of each, key_dim or 1].
        """
        m = ops.maths
        given, gates, steps, decays = self._projected(ops, w, x)
        steps = m.sigmoid(m.wide(steps))
        decays = heads(m.wide(decays) + w["delta_decay_bias"], self.values)
        scale = m.exp(w["delta_decay_scale"])[:, None]
        if self.floor is None:
            decays = -scale * m.softplus(decays)
        else:
            decays = self.floor * m.sigmoid(scale * decays)
        by_key = (*x.shape[:2], self.keys, self.values // self.keys)
        steps = (2.0 * steps if self.doubled else steps).reshape(by_key)
        return given, gates, steps, decays.reshape(*by_key, -1)

    def _heads(self, m: Maths, y: Array) -> tuple[Array, Array, Array]:
        """Queries and keys [..., keys, key_dim], and values [..., keys, values of each, value_dim].

        Of what was convolved, float32 [..., C].
        """
        parts = cut(m.activation(y, self.activation), *self.sizes[:3])
        q, k = (heads(part, self.keys) for part in parts[:2])
        q, k = (a * m.rsqrt((a * a).sum(-1, keepdims=True) + _LENGTH_EPS) for a in (q, k))
        shape = self.keys, self.values // self.keys, self.value_dim
        return q * self.key_dim**-0.5, k, parts[2].reshape(*y.shape[:-1], *shape)

    def scan(
        self,
        m: Maths,
        q: Array,
        k: Array,
        v: Array,
        steps: Array,
        decays: Array,
        state: Array | None,
    ) -> tuple[Array, Array]:
        """Results of sequences, [B, T, values, value_dim], and the states behind them; float32.

        Arguments as `_heads` and `_parted` give them; `state` [B, values, key_dim, value_dim] is
        the one before, None for zeros. In a chunk of tokens each u is what its own update would
        be, less what the updates before it have put in the place of its key: a triangular system
        (arXiv:2406.06484).
        """
        rows, tokens = q.shape[:2]
        shape = rows, self.keys, self.values // self.keys, self.key_dim, self.value_dim
        first = m.zeros(shape, m.float32, q) if state is None else state.reshape(shape)

        def advance(
            last: Array, q: Array, k: Array, v: Array, steps: Array, decays: Array
        ) -> tuple[Array, Any]:
            both = m.stack((k, q), 0)
            scores, since, until = _between(m, both, k, decays)
            read = m.einsum("sblgrd,bgrdv->sbgrlv", both[..., None, :] * since, last)
            steps = m.moveaxis(steps, 1, -1)[..., None]
            u = steps * (m.moveaxis(v, 1, 3) - read[0])
            u = m.solve(steps * scores[0], u)
            y = read[1] + m.einsum("bgrlm,bgrmv->bgrlv", scores[1], u)
            added = m.einsum("bmgrd,bgrmv->bgrdv", k[:, :, :, None] * until, u)
            return last * since[:, -1, ..., None] + added, m.moveaxis(y, 3, 1)

        # Whole chunks, so that all are computed alike.
        parts = [m.pad(part, 1, 0, -tokens % CHUNK) for part in (q, k, v, steps, decays)]
        y, last = m.scan(advance, first, parts, CHUNK)
        y = y[:, :tokens].reshape(rows, tokens, self.values, -1)
        return y, last.reshape(rows, self.values, *shape[3:])

    def _out(self, m: Maths, w: Weights, y: Array, gates: Array) -> Array:
        """Float32 y [B, T, values, value_dim], normed, times a function of its gates."""
        y = y * m.rsqrt((y * y).mean(-1, keepdims=True) + self.norm.eps)
        y = flat(y * m.wide(w["delta_norm.weight"]))
        gate = m.wide(gates)
        gate = m.sigmoid(gate) if self.gate == "sigmoid" else m.activation(gate, self.gate)
        return m.cast(y * gate, gates.dtype)


def _between(m: Maths, left: Array, right: Array, decays: Array) -> tuple[Array, Array, Array]:
    """Products of tokens of a chunk with those before and themselves, decayed since; 0 for later.

    left [S, B, T, g, d] and right [B, T, g, d] by log-decays [B, T, g, r, d or 1]: [S, B, g, r, T,
    T]. Then what is left of a state before the chunk at each token, and of each token at the end,
    both [B, T, g, r, d or 1]. A sum of decays is made by itself, never as the difference of two
    sums, which would round; and of many channels in blocks, relative to the block's start, so that
    no factor is above 1 and no array has all channels of all pairs.
    """
    since = m.exp(decays.cumsum(1))
    if decays.shape[-1] == 1:
        spans = _spans(m, decays[..., 0])
        scores = m.einsum("sblgd,bmgd->sbglm", left, right)[:, :, :, None]
        spans_of_pairs = m.exp(m.moveaxis(m.moveaxis(spans, 1, -1), 1, -1))
        return scores * spans_of_pairs, since, m.exp(spans[:, -1])[..., None]
    tokens, rows, until = right.shape[1], [], None
    for start in range(0, tokens, _ROWS):
        end = min(start + _ROWS, tokens)
        own, inner = left[:, :, start:end], decays[:, start:end]
        spans = _spans(m, inner)
        pairs = right[:, None, start:end, :, None] * m.exp(spans)
        found = [m.einsum("sblgd,blmgrd->sbgrlm", own, pairs)]
        sums = inner.cumsum(1)
        if until is not None:
            near = own[:, :, :, :, None] * m.exp(sums)
            far = right[:, :start, :, None] * m.exp(until)
            found.insert(0, m.einsum("sblgrd,bmgrd->sbgrlm", near, far))
        rows.append(m.pad(m.join(found, -1), -1, 0, tokens - end))
        tail = spans[:, -1]
        until = tail if until is None else m.join((until + sums[:, -1:], tail), 1)
    return m.join(rows, -2), since, m.exp(until)


def _spans(m: Maths, decays: Array) -> Array:
    """Sums of log-decays [B, T, ...] from behind a token to another: [B, T, T, ...].

    The first of both is the later one; -inf where it is the earlier one.
    """
    at = m.arange(decays.shape[1], decays)
    shape = (len(at), len(at), *[1] * (decays.ndim - 2))
    before, upto = ((at[:, None] > at).reshape(shape), (at[:, None] >= at).reshape(shape))
    sums = m.where(before, decays[:, :, None], 0.0).cumsum(1)
    return m.where(upto, sums, -float("inf"))
