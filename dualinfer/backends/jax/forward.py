"""The pass over whole sequences, which keeps nothing, as a pure function of parameters."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from ... import decoder
from ...model.spec import ModelSpec
from ...ops.contract import Tokens
from .ops.plain import PlainOps
from .params import Params

_PARTS = 2


def reads_others(spec: ModelSpec) -> bool:
    """True if layers read more of others than their output, so that all are one executable's."""
    return bool(spec.reads or spec.lenders) or any(layer.is_late for layer in spec.layers)


def parts_of(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Part arrays that have a row for each sequence from those that all sequences share."""
    blend = tokens.blend
    if blend is None or len(blend) > 1:
        return tokens._replace(kept=None), Tokens(kept=tokens.kept)
    return tokens._replace(kept=None, blend=None), Tokens(kept=tokens.kept, blend=blend)


def joined(by_row: Tokens, common: Tokens) -> Tokens:
    """Tokens of both `parts_of`."""
    blend = by_row.blend if common.blend is None else common.blend
    return by_row._replace(kept=common.kept, blend=blend)


class Forward:
    """A model's forward pass, to be traced; its last result is `ops.given_up()`.

    With `on_gpu` it is cut into `parts`, so that the GPU starts while the host launches the rest:
    the host prepares every kernel that XLA has captured before the first one runs.
    """

    def __init__(self, spec: ModelSpec, ops: PlainOps, on_gpu: bool = False) -> None:
        self.spec, self.ops = spec, ops
        count = len(spec.layers)
        bounds = [count * i // _PARTS for i in range(_PARTS + 1)]
        is_cut = on_gpu and count >= 2 * _PARTS and spec.encoder is None
        is_cut = is_cut and not reads_others(spec)
        self.parts = [range(*pair) for pair in pairwise(bounds)] if is_cut else [range(count)]
        self.of_one_length = spec.encoder is not None and spec.encoder.one_length > 0
        self._stride = 1 if spec.encoder is None else spec.encoder.stride
        attending = (own.attention.widened for own in spec.all_layers if own.attention)
        self._kv_heads = max((a.kv_heads for a in attending), default=1)

    def _scratch(self, params: Params, slots: int) -> Any:
        return self.ops.make_scratch(slots * self._kv_heads, params.mailboxes)

    def _goes_on(self, layers: range | None) -> bool:
        """True for a part of a pass that others follow."""
        return layers is not None and layers.stop < len(self.spec.layers)

    @jax.named_scope("dualinfer")
    def forward(
        self,
        params: Params,
        tokens: Tokens,
        x: jax.Array | None = None,
        *,
        keep: bool,
        texts: int = 0,
        largest: bool = False,
        of_encoder: bool = False,
        watched: tuple[tuple[int, int], ...] = (),
        layers: range | None = None,
    ) -> tuple[Any, jax.Array | None]:
        """Outputs of whole sequences; positions None are 0 to T-1, `keep` adds hidden states.

        `texts`, `largest`, `of_encoder` and `watched` are as in `base.ForwardInputs`.

        With `layers` a part of the pass, from `x`, which the part before gave: the next one's x, or
        the outputs where the last layer is among them. With `keep` as well a list of all that the
        part gives, x last; outputs then have the hidden states of their own part.
        """
        given = tokens.ids if tokens.embeds is None else tokens.embeds
        assert given is not None
        shape = batch, length = given.shape[:2]
        mask, positions, weights = tokens.mask, tokens.positions, tokens.weights
        ops = self.ops.using(self._scratch(params, batch))
        spec = self.spec
        if of_encoder and spec.encoder is not None:
            params, spec = params.of_encoder(len(spec.layers)), spec.encoder
        model = spec, params, ops
        counted = None if mask is None else positions
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length), shape)
        tokens = tokens._replace(positions=positions)
        if tokens.token_types is None and spec.embedding.own_types:
            tokens = tokens._replace(token_types=jnp.zeros(shape, jnp.int32))
        if tokens.embeds is not None:
            name = "embed.weight" if spec.patches is None else "patches.kernel"
            tokens = tokens._replace(embeds=tokens.embeds.astype(params.outer[name].dtype))
        last = None
        if mask is not None and spec.turns_by_length:
            last = jnp.where(mask, positions, 0).max(1)
        angles = ops.angles(spec, params, positions, last)

        def attend(i: int, qkv: jax.Array) -> jax.Array:
            layer = ops.layer_attention(spec, params, i)
            return ops.attend(layer, qkv, angles, tokens.seen, positions=counted)[0]

        def recur(i: int, x: jax.Array) -> jax.Array:
            own = spec.layers[i].recurrence
            assert own is not None
            return ops.recur(own, params.layers[i], x, tokens.seen)[0]

        across, more = None, {}
        seen: dict[tuple[int, int], jax.Array] = {}
        if tokens.source is not None:
            encoded = self._encoded(params, ops, tokens.source, keep)
            across = decoder.across_whole(*model, encoded[-1], tokens.source.mask, watched, seen)
            more = {"encoder_last_hidden_state": encoded[-1]}
            if keep and tokens.source.states is None:
                more["encoder_hidden_states"] = decoder.encoder_states(spec, encoded)
        mixers = decoder.Mixers(attend, across, recur)
        states = decoder.hidden_states(*model, tokens, mixers, keep, layers, x)
        if self._goes_on(layers):
            given = states if x is None and spec.states != "late" else states[1:]
            return given if keep else states[-1], ops.given_up()
        if texts:
            assert weights is not None and tokens.segments is not None
            how = weights, tokens.segments, (texts, largest)
            result = decoder.embeddings(*model, states[-1], *how)
            return result, ops.given_up()
        if watched:
            more["cross_weights"] = jnp.stack([seen[head] for head in watched], 2)
        result = {**decoder.outputs(*model, states, keep, tokens.kept, weights), **more}
        if keep and x is not None and spec.states != "late":
            result["hidden_states"] = result["hidden_states"][1:]
        return result, ops.given_up()

    def _encoded(self, params: Params, ops: PlainOps, source: Tokens, keep: bool) -> list[Any]:
        """Run the encoder over a source, as `decoder.encoded`, unless it has run before."""
        dtype = params.outer["embed.weight"].dtype
        if source.states is not None:
            return [source.states.astype(dtype)]
        read = source.ids if source.embeds is None else source.embeds
        assert read is not None
        if source.positions is None:
            places = read.shape[1] // self._stride
            at = jnp.broadcast_to(jnp.arange(places), (len(read), places))
            source = source._replace(positions=at)
        if source.embeds is not None:
            source = source._replace(embeds=source.embeds.astype(dtype))
        return decoder.encoded(self.spec, params, ops, source, keep)

    def forward_panels(
        self, params: Params, tokens: Tokens, x: None = None, *, keep: bool, rows: int, **how: Any
    ) -> tuple[Any, jax.Array | None]:
        """As `forward`, of so many rows at a time: only the outputs have the size of all."""
        by_row, common = parts_of(tokens)

        def some(part: Tokens) -> Any:
            return self.forward(params, joined(part, common), keep=keep, **how)

        parts = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), by_row)
        outputs, flags = jax.lax.map(some, parts)
        whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
        return whole, None if flags is None else flags.max(0)
