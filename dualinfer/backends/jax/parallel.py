"""Tensor parallelism's seams: what one device's ops ask of the others. Traced, in shard_map."""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...model.spec import ModelSpec
from ...parallel.shard import pads_heads
from ...parallel.sharding import ShardingPlan
from .mesh import ManyDevices, Place

_ALL = 1e30  # as a logit it takes the whole softmax, and none of it where it is negative


class Split(NamedTuple):
    """The seams that join a device's ops with the others' along a mesh's `axis`, by `plan`.

    All devices trace the same code: what differs between them follows from their place.
    """

    axis: str
    plan: ShardingPlan

    @classmethod
    def of(cls, place: Place, plan: ShardingPlan) -> Self | None:
        """The seams of a plan; None where every device has the whole model."""
        if not isinstance(place, ManyDevices) or plan.size == 1:
            return None
        return cls(place.axis, plan)

    @property
    def _rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    def own_experts(self, count: int) -> jax.Array | None:
        """This device's of a layer's `count` experts, from which to before which number: int32 [2].

        None where every device has all.
        """
        shares = self.plan.own_experts(count)
        if shares is None:
            return None
        return jnp.asarray(np.array([(s.start, s.stop) for s in shares], np.int32))[self._rank]

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of every device's `x`, on all of them."""
        with jax.named_scope("reduce"):
            return lax.psum(x, self.axis)

    def most(self, x: jax.Array) -> jax.Array:
        """The largest of every device's `x`, element by element."""
        return lax.pmax(x, self.axis)

    def gather_logits(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] from each device's share of the vocabulary, without its padding."""
        with jax.named_scope("gather"):
            joined = lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)
        return joined[..., : self.plan.table.spec.vocab]  # only the last shares are padded

    def is_here(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row of each id in this device's share of the vocabulary, and whether it is there.

        Ids outside of the vocabulary are clipped.
        """
        extent = self.plan.shards[0].share("vocab").extent
        rows = jnp.clip(ids, 0, self.plan.table.spec.vocab - 1) - self._rank * extent
        return jnp.clip(rows, 0, extent - 1), (rows >= 0) & (rows < extent)

    def whole(self, spec: ModelSpec, index: int) -> tuple[int, int, jax.Array] | None:
        """See `contract.LayerAttention`; of a layer of `spec`, the model's or its encoder's."""
        layer = self.plan.table.spec.number(spec, index)
        a = self.plan.table.spec.all_layers[layer].attending
        if a.qk_norm is None or a.qk_norm_over != "all":
            return None
        parts = np.array(self.plan.key_parts(layer), np.float32)
        return *a.qkv_sizes[:2], jnp.asarray(parts)[self._rank]

    def sinks(self, spec: ModelSpec, index: int, given: jax.Array | None) -> jax.Array | None:
        """The logits `given` [H] that join a layer's softmax, such that heads of padding give 0.

        They share a KV head with real ones: without a sink that takes all they would give the mean
        of its values. None where there are neither; as in `whole`.
        """
        layer = self.plan.table.spec.number(spec, index)
        if not pads_heads(self.plan.shards, layer):
            return given
        a = self.plan.shards[0].spec.all_layers[layer].attending
        pairs = a.halves  # which follow one another
        counts = [own.share("heads", layer).real // pairs for own in self.plan.shards]
        real = jnp.asarray(counts)[self._rank]
        padding = jnp.arange(a.heads) % (a.heads // pairs) >= real
        if pairs == 2:  # each head is there for both its values, after those of its KV head
            twice = (a.kv_heads, 2, a.heads // a.kv_heads)
            padding = jnp.broadcast_to(padding.reshape(twice[0], 1, twice[2]), twice).reshape(-1)
        return jnp.where(padding, _ALL, -_ALL if given is None else given)

    def slopes(self, spec: ModelSpec, index: int) -> jax.Array | None:
        """This device's ALiBi slopes, float32 [H], of a layer; as in `whole`."""
        layer = self.plan.table.spec.number(spec, index)
        slopes = [shard.spec.all_layers[layer].attending.alibi for shard in self.plan.shards]
        return None if slopes[0] is None else jnp.asarray(np.array(slopes, np.float32))[self._rank]
