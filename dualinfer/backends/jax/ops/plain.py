"""The plain ops over JAX's Maths, and sampling; kernels.py has the same by Triton."""

from typing import Any, Self

import jax
import jax.numpy as jnp

from ....model.spec import ModelSpec, Rope
from ....model.weights import Weight, leaves_of
from ....ops import plain
from ....ops.contract import LayerAttention
from ....ops.schemes import rounds_input
from .. import sampler
from ..exchange import Exchange
from ..maths import MATHS
from ..parallel import Split
from ..params import Params
from ..sampler import SlotState
from .schemes import SCHEMES

IMPLEMENTATIONS = {
    "matmul": "XLA dot",
    "embed": "XLA gather",
    "rms_norm": "XLA",
    "layer_norm": "XLA",
    "qk_norm": "XLA",
    "rotary": "XLA",
    "activation": "XLA",
    "router": "XLA",
    "experts": "XLA, in blocks of one expert's",
    "attention": "XLA, dense softmax",
    "decode_attention": "XLA, dense softmax",
    "cross_attention": "XLA, dense softmax",
    "latent_attention": "XLA over latent vectors, a head's matrices before and behind it",
    "recurrence": "XLA",
    "sampling": "XLA, threefry2x32",
}


class PlainOps(plain.PlainOps):
    """All that a model's steps compute with, on any device, traced; see `contract.Ops`."""

    maths, schemes, implementations = MATHS, SCHEMES, IMPLEMENTATIONS
    holds_scores = True  # of all pairs of tokens, while a layer attends
    filtered: sampler.Filter | None = None  # in the place of `sampler.filter_logits`
    launches = False  # True of ops whose kernels XLA calls by a handler of ours
    modes: tuple[int, ...] = ()  # of sampling, that want loops of their own; none: one has them all

    def __init__(self, split: Split | None = None) -> None:
        super().__init__(split)
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone
        if split is not None:
            self.implementations = {**self.implementations, "sum over devices": "XLA"}

    def make_scratch(self, pairs: int, mailboxes: jax.Array | None = None) -> Any:
        """The scratch of `using` for so many pairs of slot and KV head; a pytree, perhaps empty.

        `mailboxes` are those of `Params`, this device's row [1, ...].
        """
        return None

    def using(self, scratch: Any) -> Self:
        """A copy of these ops for one trace, whose `scratch` the next one goes on with."""
        return self

    @property
    def scratch(self) -> Any:
        """Scratch memory after the ops traced so far."""
        return None

    def given_up(self) -> jax.Array | None:
        """int32 [1], not 0 once this device gave up an exchange; None where there is none."""
        return None

    def frequencies(self, params: Params | None, rope: Rope) -> jax.Array:
        """See `plain.PlainOps.frequencies`."""
        return jnp.array(rope.tables, jnp.float32)

    def layer_attention(self, spec: ModelSpec, params: Params, index: int) -> LayerAttention:
        """See `contract.Ops.layer_attention`; the ops make their own frequencies."""
        a = spec.layers[index].attending
        slopes = self.split.slopes(spec, index) if self.split else None
        if slopes is None and a.alibi is not None:
            slopes = jnp.array(a.alibi, jnp.float32)
        whole = self.split.whole(spec, index) if self.split else None
        w = params.layers[index]
        layer = LayerAttention.named(a, w, params.outer, slopes=slopes, whole=whole)
        if self.split is None:
            return layer
        # Else what heads of padding give meets zeros alone.
        weights = [own for leaf in w.values() for own in leaves_of(leaf) if isinstance(own, Weight)]
        reads_all = a.wiring is not None and a.wiring.reads_all
        if reads_all or any(map(rounds_input, weights)):
            layer = layer._replace(sinks=self.split.sinks(spec, index, layer.sinks))
        return layer

    def sample(
        self,
        logits: jax.Array,
        state: SlotState,
        position: jax.Array,
        features: jax.Array | int,
    ) -> jax.Array:
        """See `contract.Ops.sample`; `features` is a mode of `sampler`."""
        return sampler.sample(logits, state, position, features, None, self.filtered)

    def advance(
        self,
        logits: jax.Array,
        state: SlotState,
        features: jax.Array | int,
        out: jax.Array,
        step: jax.Array,
    ) -> tuple[SlotState, jax.Array, jax.Array]:
        """See `contract.Ops.advance`; `features` as in `sample`, `step` int32 [N] is the row.

        What the state has seen lacks the tokens of `out` until `ended`.
        """
        state, out = sampler.advance(logits, state, features, out, step[0], self.filtered)
        return state, out, step + 1

    def ended(self, state: SlotState, out: jax.Array) -> SlotState:
        """The state after some steps, which gave the tokens `out` [R, N]."""
        return state._replace(seen=sampler.mark(state.seen, out))
