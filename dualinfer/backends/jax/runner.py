"""The JAX runner: compiled forward, prefill and decode; the donated cache never leaves it."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import StepError
from ...spec import ModelSpec
from ..base import (
    MAX_STEPS,
    NO_TOKEN,
    SMALLEST_CACHE,
    ForwardInputs,
    LiveSlots,
    Request,
    SamplingFeatures,
    bucket,
    cache_specs,
    sampling_rows,
)
from . import decoder, ops
from .cache import Cache, grow, make_cache, write
from .params import Model, Params, split_model
from .sampler import WORDS, SlotState, sample

_SMALLEST_PROMPT = 16


class PendingTokens:
    """Tokens that a dispatched step is computing."""

    def __init__(self, tokens: jax.Array, steps: int, columns: int):
        tokens.copy_to_host_async()
        self._tokens, self._steps, self._columns = tokens, steps, columns

    def fetch(self) -> np.ndarray:
        """int32 [steps, columns]."""
        return np.asarray(self._tokens)[: self._steps, : self._columns]


class JaxRunner:
    """One model on one JAX device. `compilations` counts the executables traced so far."""

    def __init__(self, spec: ModelSpec, model: Model, dtype: Any, device: jax.Device) -> None:
        self.spec = spec
        self.model: Model | None = model
        self.params = split_model(model)
        self.dtype, self.device = dtype, device
        self.compilations = 0
        self._cache_specs = cache_specs(spec) if spec.causal else ()
        self._cache: Cache = []
        self._state: SlotState | None = None
        self._live = LiveSlots()
        self._run_forward = jax.jit(self._trace_forward, static_argnums=6)
        self._run_prefill = jax.jit(self._trace_prefill, static_argnums=6, donate_argnums=(1, 2))
        self._run_decode = jax.jit(self._trace_decode, static_argnums=4, donate_argnums=(1, 2))

    def _put(self, array: np.ndarray | None) -> jax.Array | None:
        return None if array is None else jax.device_put(array, self.device)

    def forward(self, inputs: ForwardInputs) -> dict[str, Any]:
        """Outputs of whole sequences; see `base.Runner`. Padded to a bucket, cut back after."""
        batch, tokens = inputs.ids.shape
        size = bucket(batch), bucket(tokens, _SMALLEST_PROMPT)

        def pad(array: np.ndarray | None) -> jax.Array | None:
            if array is None:
                return None
            padded = np.zeros(size, array.dtype)
            padded[:batch, :tokens] = array
            return self._put(padded)

        mask = inputs.mask
        if mask is None and not self.spec.causal:
            mask = np.ones((batch, tokens), bool)  # hides the bucket's own padding
        outputs = self._run_forward(
            self.params,
            pad(inputs.ids),
            pad(inputs.positions),
            pad(mask),
            pad(inputs.token_types),
            pad(inputs.segments),
            inputs.output_hidden_states,
        )

        def cut(x: jax.Array) -> jax.Array:
            index = (slice(batch), slice(tokens))[: x.ndim - 1]
            return x if x.shape[: len(index)] == (batch, tokens)[: len(index)] else x[index]

        return jax.tree.map(cut, outputs)

    def _trace_forward(
        self,
        params: Params,
        ids: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        token_types: jax.Array | None,
        segments: jax.Array | None,
        keep: bool,
    ) -> dict[str, Any]:
        self.compilations += 1

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            a = self.spec.layers[i].attention
            return ops.attention(
                q,
                k,
                v,
                scale=a.scale,
                causal=a.causal,
                window=a.window,
                mask=mask,
                segments=segments,
            )

        states = decoder.hidden_states(
            self.spec, params, ids, positions, token_types, attend, keep=keep
        )
        outputs: dict[str, Any] = {}
        if self.spec.head:
            outputs["logits"] = decoder.logits(self.spec, params, states[-1])
        else:
            outputs["last_hidden_state"] = states[-1]
        if "pooler.weight" in params.outer:
            outputs["pooler_output"] = decoder.pooled(params, states[-1])
        if keep:
            outputs["hidden_states"] = tuple(states)
        return outputs

    def prefill(self, requests: Sequence[Request], slots: Sequence[int]) -> PendingTokens:
        """Fill the cache of `slots` and sample the first token of each request."""
        idle = not self._live
        self._live.add(slots, requests)
        self._reserve(idle)
        features = SamplingFeatures.of(requests)
        assert self._state is not None
        free = self._state.active.shape[0]
        count = bucket(len(requests))
        longest = max(len(r.tokens) for r in requests)
        ids = np.zeros((count, bucket(longest, _SMALLEST_PROMPT)), np.int32)
        lengths = np.ones(count, np.int32)
        where = np.full(count, free, np.int32)  # rows of the bucket beyond the requests: dropped
        where[: len(slots)] = slots
        for i, r in enumerate(requests):
            ids[i, : len(r.tokens)] = r.tokens
            lengths[i] = len(r.tokens)
        padded = [*requests, *[requests[0]] * (count - len(requests))]
        columns = sampling_rows(padded, self._state.eos.shape[1])
        columns |= {name: columns[name].astype(np.uint32) for name in WORDS}
        rows = SlotState.make(count, 1, self.spec.vocab, features.penalty)._replace(
            active=np.ones(count, bool), length=lengths, **columns
        )
        if rows.seen is not None:
            for i, r in enumerate(requests):
                rows.seen[i, r.tokens] = True
        token = self._advance(
            self._run_prefill, *jax.device_put((ids, where, rows), self.device), features
        )
        return PendingTokens(token[None], 1, len(requests))

    def _advance(self, run: Any, *args: Any) -> jax.Array:
        """Call a step that takes over cache and state, and keep what it gives back.

        A step that fails once it runs has consumed them; the next prefill then makes new ones.
        """
        try:
            self._cache, self._state, tokens = run(self.params, self._cache, self._state, *args)
        except BaseException:
            if any(x.is_deleted() for x in jax.tree.leaves((self._cache, self._state))):
                self._cache, self._state = [], None
            raise
        return tokens

    def _trace_prefill(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        ids: jax.Array,
        slots: jax.Array,
        rows: SlotState,
        features: SamplingFeatures,
    ) -> tuple[Cache, SlotState, jax.Array]:
        self.compilations += 1
        filled = list(cache)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            a = self.spec.layers[i].attention
            filled[i] = write(filled[i], slots, k, v)
            return ops.attention(q, k, v, scale=a.scale, causal=True, window=a.window)

        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        x = decoder.hidden_states(self.spec, params, ids, positions, None, attend)[-1]
        last = jnp.take_along_axis(x, (rows.length - 1)[:, None, None], axis=1)[:, 0]
        scores = decoder.logits(self.spec, params, last).astype(jnp.float32)
        token = sample(scores, rows, rows.length, features)
        rows = _count(rows, token)
        merged = {
            name: column.at[slots].set(getattr(rows, name), mode="drop")
            for name, column in state._asdict().items()
            if column is not None and getattr(rows, name) is not None
        }
        return filled, state._replace(**merged), token

    def decode(self, steps: int) -> PendingTokens:
        """Up to `steps` tokens, at most MAX_STEPS, for each live slot; ends early on the device."""
        assert self._live and steps <= MAX_STEPS
        if self._state is None:
            raise StepError("The step before failed and took the cache with it.")
        self._live.advance(steps)
        if self._live.reach > self._cache[0].k.shape[2]:
            tokens = bucket(self._live.reach, SMALLEST_CACHE)
            self._cache = grow(self._cache, self._live.width, tokens)
        features = SamplingFeatures.of(self._live.requests)
        slots = self._state.active.shape[0]
        tokens = self._advance(self._run_decode, np.int32(steps), features)
        return PendingTokens(tokens, steps, slots)

    def _trace_decode(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        steps: jax.Array,
        features: SamplingFeatures,
    ) -> tuple[Cache, SlotState, jax.Array]:
        self.compilations += 1

        def step(carry: tuple) -> tuple:
            i, cache, state, tokens = carry
            cache, state, token = self._step(params, cache, state, features)
            return i + 1, cache, state, tokens.at[i].set(token)

        def unfinished(carry: tuple) -> jax.Array:
            i, _, state, _ = carry
            return (i < steps) & state.active.any()

        tokens = jnp.full((MAX_STEPS, state.active.shape[0]), NO_TOKEN, jnp.int32)
        carry = (jnp.int32(0), cache, state, tokens)
        _, cache, state, tokens = jax.lax.while_loop(unfinished, step, carry)
        return cache, state, tokens

    def _step(
        self, params: Params, cache: Cache, state: SlotState, features: SamplingFeatures
    ) -> tuple[Cache, SlotState, jax.Array]:
        """One token for each active slot."""
        filled = list(cache)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            a = self.spec.layers[i].attention
            filled[i] = ops.append(filled[i], k[:, 0], v[:, 0], state.length)
            y = ops.decode_attention(
                q[:, 0], filled[i], state.length + 1, scale=a.scale, window=a.window
            )
            return y[:, None]

        ids, positions = state.last[:, None], state.length[:, None]
        x = decoder.hidden_states(self.spec, params, ids, positions, None, attend)[-1]
        scores = decoder.logits(self.spec, params, x[:, 0]).astype(jnp.float32)
        token = sample(scores, state, state.length + 1, features)
        out = jnp.where(state.active, token, NO_TOKEN)
        length = state.length + state.active.astype(jnp.int32)
        return filled, _count(state._replace(length=length), token), out

    def _reserve(self, idle: bool) -> None:
        """Fit cache and state to what the live slots need to start; `idle`: none held before.

        Then the buffers take exactly the bucket's size, since a step reads all of them; with
        something live they only grow.
        """
        requests = self._live.requests
        count, tokens = self._live.width, bucket(self._live.reserved, SMALLEST_CACHE)
        eos_width = bucket(max(len(r.eos_ids) for r in requests))
        penalty = any(r.sampling.repetition_penalty != 1 for r in requests)
        old = self._state
        if idle:
            if self._cache and self._cache[0].k.shape[::2] != (count, tokens):
                self._cache = []
            old = None
        if not self._cache:
            self._cache = make_cache(self._cache_specs, count, tokens, self.dtype, self.device)
        self._cache = grow(self._cache, count, tokens)
        if old is not None:
            count = max(count, old.active.shape[0])
            eos_width = max(eos_width, old.eos.shape[1])
            penalty = penalty or old.seen is not None
        state = SlotState.make(count, eos_width, self.spec.vocab, penalty)
        if old is not None:
            state = _copy_rows(old, state)
        self._state = jax.device_put(state, self.device)

    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self._live.remove(slots)
        if self._state is not None and slots:
            active = self._state.active.at[np.array(slots)].set(False)
            self._state = self._state._replace(active=active)

    def draw_seeds(self, count: int) -> list[int]:
        """Seeds from the operating system."""
        return [secrets.randbits(63) for _ in range(count)]

    def report(self) -> Mapping[str, Any]:
        """Facts for `engine.report()`."""
        data = [w.data for w in self.params.weights()]
        return {
            "device": f"{self.device.platform}:{self.device.id}",
            "device_name": self.device.device_kind,
            "ops": dict(ops.IMPLEMENTATIONS),
            "parameters": sum(x.size for x in data),
            "parameter_bytes": sum(x.nbytes for x in data),
            "compilations": self.compilations,
            "cache_bytes": sum(x.nbytes for layer in self._cache for x in layer),
        }

    def close(self) -> None:
        """Let go of parameters, cache, state and executables."""
        self._cache, self._state, self.model = [], None, None
        self._live = LiveSlots()
        self.params = Params({}, ())
        for run in (self._run_forward, self._run_prefill, self._run_decode):
            run.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


def _count(state: SlotState, token: jax.Array) -> SlotState:
    """Book a sampled token; a slot ends at its EOS or its last allowed token."""
    active = state.active
    remaining = state.remaining - active.astype(jnp.int32)
    is_eos = (token[:, None] == state.eos).any(-1)
    seen = state.seen
    if seen is not None:
        rows = jnp.arange(token.shape[0])
        seen = seen.at[rows, token].max(active)
    return state._replace(
        active=active & ~is_eos & (remaining > 0),
        last=jnp.where(active, token, state.last),
        new=state.new + active.astype(jnp.int32),
        remaining=remaining,
        seen=seen,
    )


def _copy_rows(old: SlotState, new: SlotState) -> SlotState:
    """`new` with the rows of a smaller `old`."""
    for name, column in old._asdict().items():
        if column is not None:
            getattr(new, name)[tuple(slice(n) for n in column.shape)] = np.asarray(column)
    return new
