"""The JAX runner: compiled forward, prefill and decode; the donated cache never leaves it."""

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
    cache_bytes,
    cache_specs,
    sampling_rows,
)
from . import decoder, ops
from .cache import Cache, check_room, free_bytes, grow, make_cache, write
from .graphs import Clock, Executables, check_compile, check_concrete
from .params import Model, Params, split_model
from .sampler import WORDS, SlotState, book, copy_rows, sample

_SMALLEST_PROMPT = 16


class PendingTokens:
    """Tokens that a dispatched step is computing."""

    def __init__(self, tokens: jax.Array, steps: int, columns: int):
        tokens.copy_to_host_async()
        self._tokens, self._steps, self._columns = tokens, steps, columns

    def fetch(self) -> np.ndarray:
        """int32 [steps, columns]."""
        return np.asarray(self._tokens)[: self._steps, : self._columns]

    def block_until_ready(self) -> "PendingTokens":
        """Itself, once the step has run: what jax.block_until_ready asks of a leaf."""
        self._tokens.block_until_ready()
        return self


class JaxRunner:
    """One model on one JAX device. `module` is the nnx container that shares its weights."""

    is_compiled = True

    def __init__(
        self,
        spec: ModelSpec,
        module: Model,
        dtype: Any,
        device: jax.Device,
        options: Mapping[str, str | bool] | None = None,
    ) -> None:
        self.spec = spec
        self.module: Model | None = module
        self.params = split_model(module)
        self.dtype, self.device = dtype, device
        self._executables = Executables(options)
        self._cache_specs = cache_specs(spec) if spec.causal else ()
        self._cache: Cache = []
        self._state: SlotState | None = None
        self._live = LiveSlots()

    @property
    def compilations(self) -> int:
        """Executables compiled so far: one for each bucket and set of features."""
        return self._executables.compilations

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
        arrays = (inputs.ids, inputs.positions, mask, inputs.token_types, inputs.segments)
        padded = [pad(x) for x in arrays]
        check_concrete(padded)
        keep = inputs.output_hidden_states
        with jax.profiler.TraceAnnotation("dualinfer/forward"):
            outputs = self._executables.run(
                ("forward", size, tuple(x is None for x in arrays), keep),
                partial(self._trace_forward, keep=keep),
                self.params,
                *padded,
            )

        def cut(x: jax.Array) -> jax.Array:
            index = (slice(batch), slice(tokens))[: x.ndim - 1]
            return x if x.shape[: len(index)] == (batch, tokens)[: len(index)] else x[index]

        return jax.tree.map(cut, outputs)

    @jax.named_scope("dualinfer")
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

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            a = self.spec.layers[i].attention
            return ops.attention(
                q,
                k,
                v,
                causal=a.causal,
                mask=mask,
                segments=segments,
                positions=positions,
                **decoder.scoring(a),
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
        with jax.profiler.TraceAnnotation("dualinfer/prefill"):
            token = self._advance(
                ("prefill", ids.shape, features),
                partial(self._trace_prefill, features=features),
                *jax.device_put((ids, where, rows), self.device),
            )
        return PendingTokens(token[None], 1, len(requests))

    def _advance(self, key: tuple, step: Callable[..., Any], *args: Any) -> jax.Array:
        """Run a step that takes over cache and state, and keep what it gives back.

        `key` names what fixes it beside the shapes of those. A step that fails once it runs has
        consumed them; the next prefill then makes new ones.
        """
        cache, state = self._cache, self._state
        assert state is not None
        slots, _, tokens, _ = cache[0].k.shape
        key = (*key, slots, tokens, *state.eos.shape, state.seen is not None)
        try:
            self._cache, self._state, tokens = self._executables.run(
                key, step, self.params, cache, state, *args, donate=(1, 2)
            )
        except BaseException:
            if any(x.is_deleted() for x in jax.tree.leaves((self._cache, self._state))):
                self._cache, self._state = [], None
            raise
        return tokens

    @jax.named_scope("dualinfer")
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
        filled = list(cache)

        def attend(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            filled[i] = write(filled[i], slots, k, v)
            how = decoder.scoring(self.spec.layers[i].attention)
            return ops.attention(q, k, v, causal=True, **how)

        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        x = decoder.hidden_states(self.spec, params, ids, positions, None, attend)[-1]
        last = jnp.take_along_axis(x, (rows.length - 1)[:, None, None], axis=1)[:, 0]
        scores = decoder.logits(self.spec, params, last).astype(jnp.float32)
        token = sample(scores, rows, rows.length, features)
        rows = book(rows, token)
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
            self._grow(self._live.width, bucket(self._live.reach, SMALLEST_CACHE))
        features = SamplingFeatures.of(self._live.requests)
        slots = self._state.active.shape[0]
        with jax.profiler.TraceAnnotation("dualinfer/decode"):
            tokens = self._advance(
                ("decode", features),
                partial(self._trace_decode, features=features),
                np.int32(steps),
            )
        return PendingTokens(tokens, steps, slots)

    @jax.named_scope("dualinfer")
    def _trace_decode(
        self,
        params: Params,
        cache: Cache,
        state: SlotState,
        steps: jax.Array,
        features: SamplingFeatures,
    ) -> tuple[Cache, SlotState, jax.Array]:

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
            filled[i] = ops.append(filled[i], k[:, 0], v[:, 0], state.length)
            how = decoder.scoring(self.spec.layers[i].attention)
            return ops.decode_attention(q[:, 0], filled[i], state.length + 1, **how)[:, None]

        ids, positions = state.last[:, None], state.length[:, None]
        x = decoder.hidden_states(self.spec, params, ids, positions, None, attend)[-1]
        scores = decoder.logits(self.spec, params, x[:, 0]).astype(jnp.float32)
        token = sample(scores, state, state.length + 1, features)
        out = jnp.where(state.active, token, NO_TOKEN)
        length = state.length + state.active.astype(jnp.int32)
        return filled, book(state._replace(length=length), token), out

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
                with contextlib.suppress(Exception):  # of an abandoned step
                    jax.block_until_ready(self._cache)  # else its bytes still count as in use
                self._cache = []
            old = None
        if self._cache:
            self._grow(count, tokens)
        else:
            check_room(self.cache_bytes_for(count, tokens), count, tokens, self.device)
            self._cache = make_cache(self._cache_specs, count, tokens, self.dtype, self.device)
        if old is not None:
            count = max(count, old.active.shape[0])
            eos_width = max(eos_width, old.eos.shape[1])
            penalty = penalty or old.seen is not None
        state = SlotState.make(count, eos_width, self.spec.vocab, penalty)
        if old is not None:
            state = copy_rows(old, state)
        self._state = jax.device_put(state, self.device)

    def _grow(self, slots: int, tokens: int) -> None:
        """Hold at least `slots` by `tokens`; OutOfMemoryError if the new buffers have no room.

        The old ones are there until all is copied.
        """
        held = self._cache[0].k.shape
        slots, tokens = max(slots, held[0]), max(tokens, held[2])
        if (slots, tokens) != (held[0], held[2]):
            check_room(self.cache_bytes_for(slots, tokens), slots, tokens, self.device)
            self._cache = grow(self._cache, slots, tokens)

    def release(self, slots: Sequence[int]) -> None:
        """End these slots."""
        self._live.remove(slots)
        if self._state is not None and slots:
            active = self._state.active.at[np.array(slots)].set(False)
            self._state = self._state._replace(active=active)

    def draw_seeds(self, count: int) -> list[int]:
        """Seeds from the operating system."""
        return [secrets.randbits(63) for _ in range(count)]

    def free_bytes(self) -> int | None:
        """Bytes that the device can still allocate; None if it does not say."""
        return free_bytes(self.device)

    def cache_bytes_for(self, slots: int, tokens: int) -> int:
        """Bytes of a cache for `slots` sequences of `tokens` tokens, in the buckets it takes."""
        slots, tokens = bucket(slots), bucket(tokens, SMALLEST_CACHE)
        return cache_bytes(self._cache_specs, slots, tokens, jnp.dtype(self.dtype).itemsize)

    def stopwatch(self, use_cuda_events: bool) -> Clock:
        """A running clock; JAX has no events, so that both forms time to completion."""
        return Clock(self._executables)

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Nothing to do, since every step is compiled; UnsupportedError for another compiler."""
        check_compile(backend, compile_kwargs)

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
        self._cache, self._state, self.module = [], None, None
        self._live = LiveSlots()
        self.params = Params({}, ())
        self._executables.clear()
