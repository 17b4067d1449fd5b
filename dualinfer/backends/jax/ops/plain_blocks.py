"""The ops of the decoder's blocks, composed of XLA's primitives; kernels.py has them by Triton."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import jax
import jax.numpy as jnp

from ....model.spec import Activation, Attention, Experts, Gate, ModelSpec, Router, Waves
from ....model.weights import Weight
from ....ops.caches import CacheSpec, CacheView
from ....ops.contract import ALONE, Neighbours, NormOf, Routing, Unnormed, Weights
from ..exchange import Exchange
from ..parallel import Split
from . import heads, mixtures, primitives, schemes
from .schemes import SCHEMES


class PlainBlocks:
    """Fused ops on any device, as primitives of XLA, traced; see `contract.BlockOps`."""

    cache_kinds: frozenset[str] = frozenset()  # that kernels know
    cache_codes: frozenset[str] = frozenset()  # likewise, where a cache keeps codes
    implementations: Mapping[str, str] = primitives.IMPLEMENTATIONS
    kernels = ""  # whose, for people
    reads_codes: str | None = None  # by kernels: how, for people
    holds_scores = True  # of all pairs of tokens, while a layer attends
    modes: tuple[int, ...] = ()  # of sampling, that want loops of their own; none: one has them all

    def __init__(self, split: Split | None = None) -> None:
        self.split = split  # None: a device has the whole model
        self.exchange: Exchange | None = None  # peer to peer, of kernels alone
        if split is not None:
            self.implementations = {**self.implementations, "sum over devices": "XLA"}

    def left_plain(self, spec: ModelSpec, layers: Sequence[Weights]) -> Mapping[str, str]:
        """The ops that kernels serve in others, not in this model; see `served`.

        `layers` are the weights of its layers.
        """
        return {}

    def knows(self, cache: CacheSpec | CacheView) -> bool:
        """Whether kernels write and read a cache."""
        return cache.kind in self.cache_kinds and (
            not cache.codes or cache.codes in self.cache_codes
        )

    def make_scratch(self, pairs: int, mailboxes: jax.Array | None = None) -> Any:
        """What `using` needs for so many pairs of slot and KV head; a pytree, perhaps empty.

        `mailboxes` are those of `Params`, this device's row [1, ...].
        """
        return None

    def using(self, scratch: Any) -> Self:
        """These ops for one trace; `scratch` of the result is what a next one goes on with."""
        return self

    @property
    def scratch(self) -> Any:
        """Scratch memory after the ops traced so far."""
        return None

    def given_up(self) -> jax.Array | None:
        """int32 [1], not 0 once this device gave up an exchange; None where there is none."""
        return None

    def span(self, name: str) -> AbstractContextManager[Any]:
        """See `contract.BlockOps.span`."""
        return jax.named_scope(name)

    def embed(
        self,
        spec: ModelSpec,
        w: Weights,
        ids: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
    ) -> jax.Array:
        """See `contract.BlockOps.embed`."""
        table = w["embed.weight"]
        x = primitives.embed(ids, table) if spec.own_vocab else self._tokens(ids, table)
        if spec.embed_scale != 1:
            x = _scaled(x, spec)
        return self._with_positions(spec, w, x, positions, token_types)

    def embed_given(
        self,
        spec: ModelSpec,
        w: Weights,
        embeds: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
        blend: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.embed_given`."""
        if spec.patches is not None:
            embeds = primitives.patches(embeds, w["patches.kernel"], w.get("patches.bias"))
            if learned := spec.patches.learned:
                shape = len(embeds), learned, embeds.shape[-1]
                first = w["class_token"]
                if spec.patches.registers:
                    first = jnp.concatenate((first[None], w["registers"]))
                first = jnp.broadcast_to(first, shape)
                embeds = jnp.concatenate((first, embeds[:, learned:]), axis=1)
        if spec.sounds is not None:
            names = [f"conv{i + 1}" for i in range(len(spec.sounds.taps))]
            kernels: Any = [(w[f"{name}.kernel"], w.get(f"{name}.bias")) for name in names]
            if isinstance(spec.sounds, Waves):
                norm = w["sound_norm.weight"], w["sound_norm.bias"]
                embeds = primitives.hear_waves(spec.sounds, embeds, norm, *kernels)
            else:
                embeds = primitives.hear(embeds, *kernels)
        if spec.scales_embeds:
            embeds = _scaled(embeds, spec)
        return self._with_positions(spec, w, embeds, positions, token_types, blend)

    def take_rows(self, table: Weight, ids: jax.Array) -> jax.Array:
        """See `contract.BlockOps.take_rows`."""
        return primitives.embed(ids, table)

    def embed_trigrams(
        self,
        spec: ModelSpec,
        w: Weights,
        x: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.embed_trigrams`."""
        if x.ndim == 2:
            x = self._tokens(x, w["embed.weight"])
        x = primitives.trigrams(x, segments)
        by = Neighbours(w["project_in.bias"])
        x = PlainBlocks.linear(self, x, w["project_in.weight"], by)
        return self._with_positions(spec, w, x, positions, token_types)

    def _with_positions(
        self,
        spec: ModelSpec,
        w: Weights,
        x: jax.Array,
        positions: jax.Array,
        token_types: jax.Array | None,
        blend: jax.Array | None = None,
    ) -> jax.Array:
        """Embedded tokens in the layers' width, plus their types and positions."""
        if spec.normed == "tokens":
            assert spec.embed_norm is not None
            x = PlainBlocks.norm(self, x, NormOf.named(spec.embed_norm, w, "embed_norm"))
        if spec.projects:
            x = primitives.matmul(x, w["project_in.weight"])
        if token_types is not None:
            if spec.boxes:
                token_types, boxes = self._boxes(w, token_types)
                if spec.page is None:
                    for rows in boxes:
                        x = x + rows
            if spec.token_types_from_vocab:
                x = x + self._tokens(token_types, w["embed.weight"])
            else:
                x = x + primitives.embed(token_types, w["token_types.weight"])
        if blend is not None:
            return x + primitives.blend(blend, w["positions.weight"]).astype(x.dtype)
        if spec.learned_positions:
            x = x + primitives.embed(positions + spec.position_offset, w["positions.weight"])
        return x

    def _boxes(self, w: Weights, token_types: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Types of tokens, and rows for left, upper, right, lower, height and width."""
        boxes = jnp.zeros((*token_types.shape, 4), jnp.int32)
        if token_types.ndim == 3:
            token_types, boxes = token_types[..., 0], token_types[..., 1:]
        left, upper, right, lower = (boxes[..., i] for i in range(4))
        edges = ("x", left), ("y", upper), ("x", right), ("y", lower)
        sides = ("h", lower - upper), ("w", right - left)
        rows = [primitives.embed(at, w[f"boxes.{x}.weight"]) for x, at in (*edges, *sides)]
        return token_types, rows

    def embed_page(
        self, spec: ModelSpec, w: Weights, positions: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """See `contract.BlockOps.embed_page`."""
        _, boxes = self._boxes(w, token_types)
        by = Neighbours(w["page_project.bias"])
        y = PlainBlocks.linear(self, self.join(*boxes), w["page_project.weight"], by)
        return y + primitives.embed(positions, w["page_positions.weight"])

    def _tokens(self, ids: jax.Array, weight: Weight) -> jax.Array:
        """Rows of the embedding, of which each device has some."""
        if self.split is None:
            return primitives.embed(ids, weight)
        rows, here = self.split.is_here(ids)
        return self.split.sum(jnp.where(here[..., None], primitives.embed(rows, weight), 0))

    def read_by_layers(
        self, spec: ModelSpec, w: Weights, ids: jax.Array, x: jax.Array
    ) -> jax.Array:
        """See `contract.BlockOps.read_by_layers`."""
        own = self._tokens(ids, w["layers_embed.weight"])
        each = spec.layers[0].reads
        own = own * jnp.asarray(each**0.5, own.dtype)
        y = self.linear(x, w["layers_project.weight"]) * spec.embed**-0.5
        y, own = (part.reshape(*part.shape[:-1], -1, each) for part in (y, own))
        y = PlainBlocks.norm(self, y, NormOf.named(spec.layers[0].norm, w, "layers_norm"))
        return jnp.moveaxis((y + own) * 2**-0.5, -2, 0)

    def norm(self, x: jax.Array, norm: NormOf, residual: jax.Array | None = None) -> jax.Array:
        """See `contract.BlockOps.norm`."""
        if residual is not None:
            x = residual + x
        if norm.spec.kind == "affine":
            return x * norm.weight + norm.bias
        if norm.spec.kind == "rms":
            return primitives.rms_norm(x, norm.weight, norm.spec.eps, norm.spec.unit_offset)
        return primitives.layer_norm(
            x, norm.weight, norm.bias, norm.spec.eps, norm.spec.unit_offset
        )

    def norm_shared(self, x: jax.Array, norm: NormOf, width: int) -> jax.Array:
        """See `contract.BlockOps.norm_shared`."""
        if self.split is None:
            return self.norm(x, norm)
        assert norm.spec.kind == "rms"
        squares = self.split.sum(jnp.square(x.astype(jnp.float32)).sum(-1)) / width
        return primitives.rms_norm(x, norm.weight, norm.spec.eps, norm.spec.unit_offset, squares)

    def pool(
        self,
        x: jax.Array,
        weights: jax.Array,
        segments: jax.Array | None = None,
        count: int = 1,
        largest: bool = False,
    ) -> jax.Array:
        """See `contract.BlockOps.pool`."""
        return primitives.pool(x, weights, segments, count, largest)

    def repeat(self, x: jax.Array, rows: int) -> jax.Array:
        """See `contract.BlockOps.repeat`."""
        return jnp.broadcast_to(x, (rows, *x.shape[1:]))

    def weave(self, heads: int, first: jax.Array, second: jax.Array) -> jax.Array:
        """See `contract.BlockOps.weave`."""
        return primitives.weave(heads, first, second)

    def unweave(self, heads: int, x: jax.Array, second: int) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.unweave`."""
        return primitives.unweave(heads, x, second)

    def parted(self, x: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.parted`."""
        return x[..., :at], x[..., at:]

    def join(self, *parts: jax.Array) -> jax.Array:
        """See `contract.BlockOps.join`."""
        return jnp.concatenate(parts, -1)

    def stack(self, *parts: jax.Array) -> jax.Array:
        """See `contract.BlockOps.stack`."""
        return jnp.stack(parts)

    def mix_streams(self, coefficients: jax.Array, x: jax.Array) -> jax.Array:
        """See `contract.BlockOps.mix_streams`."""
        by = coefficients.reshape(*coefficients.shape[:-1], len(x), len(x))
        return x + schemes.einsum("btji,ibte->jbte", by, x)

    def correct_streams(
        self, x: jax.Array, coefficients: jax.Array, change: jax.Array
    ) -> jax.Array:
        """See `contract.BlockOps.correct_streams`."""
        return x + jnp.moveaxis(coefficients, -1, 0)[..., None] * change

    def add_to_rest(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """See `contract.BlockOps.add_to_rest`."""
        return jnp.concatenate((x[:1], x[1:] + y))

    def gate_sparsely(
        self, h: jax.Array, by: Activation, deviations: float, width: int
    ) -> jax.Array:
        """See `contract.BlockOps.gate_sparsely`."""
        gates, ups = jnp.split(h.astype(jnp.float32), 2, -1)
        sums = jnp.stack((gates.sum(-1), jnp.square(gates).sum(-1)))
        mean, square = (sums if self.split is None else self.split.sum(sums)) / width
        least = mean + deviations * jnp.sqrt(jnp.maximum(square - mean * mean, 0))
        gates = jnp.maximum(gates - least[..., None], 0).astype(h.dtype)
        return primitives.activation(gates, by) * ups.astype(h.dtype)

    def gate_within(self, h: jax.Array, by: Activation, limit: float) -> jax.Array:
        """See `contract.BlockOps.gate_within`."""
        return primitives.gate_within(h, by, limit)

    def gate_scaled(self, h: jax.Array, by: Activation, scale: float) -> jax.Array:
        """See `contract.BlockOps.gate_scaled`."""
        gate, up = jnp.split(h, 2, axis=-1)
        return primitives.activation(gate * scale, by) * up

    def like(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """See `contract.BlockOps.like`."""
        return x.astype(other.dtype)

    def linear(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.linear`."""
        y = self.matmul(PlainBlocks.norm(self, x, by.norm) if by.norm else x, weight, by.bias)
        y = self.activated(y, by)
        if by.residual is not None:
            y = by.residual + y
        return y.astype(jnp.float32) if by.wide else y

    def activated(self, y: jax.Array, by: Neighbours) -> jax.Array:
        """What is behind a product, if anything: an activation, with the gate of [..., 2F]."""
        if by.activation is None:
            return y
        act = primitives.gated_activation if by.gated else primitives.activation
        return act(y, by.activation)

    def read(self, x: Unnormed, weight: Weight, by: Neighbours) -> tuple[jax.Array, jax.Array]:
        """See `contract.BlockOps.read`."""
        normed = self.norm(x.y, x.norm, x.residual)
        return self.linear(normed, weight, by), normed

    def matmul(self, x: jax.Array, weight: Weight, bias: jax.Array | None) -> jax.Array:
        """x [..., in] times weight [out, in], plus bias [out]."""
        return primitives.matmul(x, weight, bias)

    def row_product(self, x: jax.Array, weight: Weight, by: Neighbours = ALONE) -> jax.Array:
        """See `contract.BlockOps.row_product`."""
        if self.split is None:
            return self.linear(x, weight, by)
        y = self.split.sum(self.partial_product(x, weight))
        if by.bias is not None:
            y = y + by.bias.astype(y.dtype)
        y = y.astype(x.dtype)
        return y if by.residual is None else by.residual + y

    def partial_product(self, x: jax.Array, weight: Weight) -> jax.Array:
        """See `contract.BlockOps.partial_product`; float32 where rows are few."""
        return primitives.partial_product(*self._share_input(x, weight))

    def _share_input(self, x: jax.Array, weight: Weight) -> tuple[jax.Array, Weight]:
        """A device's columns of a product's input, quantized as all of them, and the weight."""
        if self.split is None:
            return x, weight
        return SCHEMES.share_input(x, weight, self.split.most)

    def chosen_queries(
        self, x: jax.Array, weight: Weight, routing: Routing, head_dim: int
    ) -> jax.Array:
        """See `contract.BlockOps.chosen_queries`."""
        return mixtures.chosen_queries(x, weight.data, routing, head_dim)

    def chosen_outputs(
        self, y: jax.Array, weight: Weight, routing: Routing, head_dim: int, by: Neighbours
    ) -> jax.Array:
        """See `contract.BlockOps.chosen_outputs`."""
        dtype, y = y.dtype, mixtures.chosen_outputs(y, weight.data, routing, head_dim)
        if self.split is not None:
            y = self.split.sum(y)
        y = (y if by.bias is None else y + by.bias).astype(dtype)
        return y if by.residual is None else by.residual + y

    def route(
        self,
        x: jax.Array,
        weight: Weight,
        router: Router,
        *,
        bias: jax.Array | None = None,
        choice_bias: jax.Array | None = None,
        norm: NormOf | None = None,
    ) -> Routing:
        """See `contract.BlockOps.route`."""
        rows = self.norm(x, norm) if norm else x
        return mixtures.route(rows, weight, router, bias, choice_bias)

    def blend(self, routing: Routing, sides: Routing, expert: int) -> Routing:
        """See `contract.BlockOps.blend`."""
        return mixtures.blend(routing, sides.weights, expert)

    def fill(
        self,
        routing: Routing,
        count: int,
        capacity: int,
        mask: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> Routing:
        """See `contract.BlockOps.fill`."""
        return mixtures.fill(routing, count, capacity, mask, segments)

    def experts(
        self,
        x: jax.Array,
        mixture: Experts,
        w: Weights,
        routing: Routing,
        by: Neighbours = ALONE,
        partial: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.experts`."""
        rows = self.norm(x, by.norm) if by.norm else x
        own = None if self.split is None else self.split.own_experts(mixture.count)
        if own is None and mixture.zeros:
            own = jnp.array((0, mixture.count), jnp.int32)
        y = mixtures.experts(rows, mixture, w, routing, self._share_input, own)
        if partial is not None:
            y = y + partial.astype(jnp.float32)
        if self.split is not None:
            y = self.split.sum(y)
        if (bias := w.get("experts.down.bias")) is not None:
            y = y + mixtures.biases(bias, routing)
        y = y.astype(x.dtype)
        return y if by.residual is None else by.residual + y

    def adds_shared(self, x: jax.Array, mixture: Experts, w: Weights) -> bool:
        """See `contract.BlockOps.adds_shared`."""
        return False

    def gate(
        self,
        y: jax.Array,
        x: jax.Array,
        weight: Weight,
        norm: NormOf | None = None,
        by: Gate = "sigmoid",
    ) -> jax.Array:
        """See `contract.BlockOps.gate`."""
        gate = self.linear(x, weight, Neighbours(norm=norm, wide=True))
        gate = jax.nn.sigmoid(gate) if by == "sigmoid" else jax.nn.softplus(gate)
        if 1 < gate.shape[-1] < y.shape[-1]:
            gate = jnp.repeat(gate, y.shape[-1] // gate.shape[-1], axis=-1)
        return (y.astype(jnp.float32) * gate).astype(y.dtype)

    def times_logistic(self, y: jax.Array, gates: jax.Array) -> jax.Array:
        """See `contract.BlockOps.times_logistic`."""
        gates = jax.nn.sigmoid(gates.astype(jnp.float32))
        return (y.astype(jnp.float32) * gates).astype(y.dtype)

    def add(self, x: jax.Array, y: jax.Array, norm: NormOf | None = None) -> jax.Array:
        """See `contract.BlockOps.add`."""
        return x + (y if norm is None else self.norm(y, norm))

    def norm_values(self, a: Attention, qkv: jax.Array, norm: NormOf) -> jax.Array:
        """See `contract.BlockOps.norm_values`."""
        others, values = jnp.split(qkv, (qkv.shape[-1] - a.qkv_sizes[2],), axis=-1)
        heads = values.reshape(*values.shape[:-1], -1, a.head_dim)
        normed = PlainBlocks.norm(self, heads, norm).reshape(values.shape)
        return jnp.concatenate((others, normed), axis=-1)

    def with_keys_of(self, a: Attention, q: jax.Array, qkv: jax.Array) -> jax.Array:
        """See `contract.BlockOps.with_keys_of`."""
        queries = a.qkv_sizes[0]
        return jnp.concatenate((q[..., :queries], qkv[..., queries:]), axis=-1)

    def widen_heads(self, a: Attention, qkv: jax.Array) -> jax.Array:
        """See `contract.BlockOps.widen_heads`."""
        return heads.widen(a, qkv)

    def bias_keys(self, a: Attention, qkv: jax.Array, numbers: jax.Array, w: Weights) -> jax.Array:
        """See `contract.BlockOps.bias_keys`."""
        return heads.bias_keys(a, qkv, numbers, w)

    def narrow_heads(self, a: Attention, y: jax.Array, w: Weights) -> jax.Array:
        """See `contract.BlockOps.narrow_heads`."""
        return heads.narrow(a, y, w)

    def clip(self, x: jax.Array, limit: float) -> jax.Array:
        """See `contract.BlockOps.clip`."""
        return jnp.clip(x, -limit, limit)

    def xielu(self, x: jax.Array, numbers: Sequence[jax.Array]) -> jax.Array:
        """See `contract.BlockOps.xielu`."""
        return primitives.xielu(x, *numbers)

    def convolve(
        self,
        x: jax.Array,
        kernel: jax.Array,
        bias: jax.Array,
        stride: int,
        activation: Activation,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """See `contract.BlockOps.convolve`."""
        y = primitives.convolution(x, kernel, bias, stride, segments)
        return primitives.activation(y, activation)

    def convolve_each(
        self, x: jax.Array, kernel: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """See `contract.BlockOps.convolve_each`."""
        return primitives.convolve_each(x, kernel, segments)

    def mix_spans(
        self, x: jax.Array, scores: jax.Array, taps: int, segments: jax.Array | None = None
    ) -> jax.Array:
        """See `contract.BlockOps.mix_spans`."""
        return primitives.mix_spans(x, scores, taps, segments)

    def softcap(self, logits: jax.Array, cap: float) -> jax.Array:
        """See `contract.BlockOps.softcap`."""
        return (jnp.tanh(logits.astype(jnp.float32) / cap) * cap).astype(logits.dtype)

    def gather_logits(self, logits: jax.Array) -> jax.Array:
        """See `contract.BlockOps.gather_logits`."""
        return logits if self.split is None else self.split.gather_logits(logits)


def _scaled(x: jax.Array, spec: ModelSpec) -> jax.Array:
    """Embeddings times the spec's scale, rounded once, or with the scale as well."""
    scale = jnp.asarray(spec.embed_scale, x.dtype if spec.rounds_scale else jnp.float32)
    return (x * scale).astype(x.dtype)
