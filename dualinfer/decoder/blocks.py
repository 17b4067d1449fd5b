"""The blocks of a layer: attention and feed-forward, with their norms and residuals."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..model.spec import (
    XIELU,
    Activation,
    Adapter,
    Bottleneck,
    Experts,
    Layer,
    Mlp,
    Norm,
    Page,
    Pairs,
    Router,
    Spans,
    Streams,
)
from ..ops import heads, mixtures
from ..ops.contract import (
    Array,
    BlockOps,
    Epilogue,
    LatentQkv,
    NormOf,
    Routing,
    Unnormed,
    Weights,
)
from ..ops.convolutions import convolve, convolve_each, mix_spans
from ..ops.feed_forward import gate, gate_scaled, gate_sparsely, gate_within, times_logistic
from ..ops.norms import norm_shared
from ..ops.streams import add_to_rest, correct_streams, mix_streams, parted, unweave, weave

# Attention of a layer, by its number, over packed queries, keys and values, or over the pair that
# latent attention takes; across, over queries.
Attend = Callable[[int, Array], Array]
Recur = Callable[[int, Array], Array]  # a layer's recurrence, likewise, over what it has projected
_SIDES = Router(2)  # the softmax of two numbers


class Seen(NamedTuple):
    """Which tokens of a batch are real, bool [B, T], and int [B, T] the sequence of each.

    None where all are, and where a row is one sequence.
    """

    mask: Array | None = None
    segments: Array | None = None


_ALL = Seen()


def normed(ops: BlockOps, x: Array | Unnormed) -> Array:
    """A layer's output [B, T, E], with the norm behind it where that is still to be made."""
    return ops.norm(x.y, x.norm, residual=x.residual) if isinstance(x, Unnormed) else x


def block(
    layer: Layer,
    w: Weights,
    ops: BlockOps,
    x: Array | Unnormed,
    index: int,
    attend: Attend,
    spend: bool,
    across: Attend | None = None,
    lent: dict[int, Array] | None = None,
    own: Array | None = None,
    seen: Seen = _ALL,
    late: list[Array] | None = None,
    recur: Recur | None = None,
) -> Array | Unnormed:
    """One layer's output; with `spend` its input may be overwritten.

    `across` attends to what an encoder gave, where the layer does. `lent` has the packed queries,
    keys and values of the layers whose keys and values others have; that of a lender is put there.
    `own` is this layer's own embedding of each token, where it `reads` one. What a mixture gives
    that `is_late` is put into `late`. `recur` is that of a layer with a recurrence. A norm over the
    sum of a sub-layer and what it read is left to the product that comes next.
    """
    if layer.placement == "post":
        if layer.adapter is not None:
            y, residual, norm = _post_block(layer, w, ops, x, index, attend, across, seen)
            return Unnormed(
                *_adapted(layer.adapter, layer.norm, w, ops, ops.add(residual, y)), norm
            )
        if layer.convolution is None:
            return _post_block(layer, w, ops, x, index, attend, across, seen)
        x = normed(ops, x)
        kernel, how = (w["conv.kernel"], w["conv.bias"]), layer.convolution
        y = convolve(ops.maths, x, *kernel, 1, how.activation, seen.segments)
        x = normed(ops, _post_block(layer, w, ops, x, index, attend, across, seen))
        return Unnormed(y, x, NormOf.named(layer.norm, w, "conv_norm"))
    if layer.bottleneck is not None:
        return _narrow_block(layer, layer.bottleneck, w, ops, normed(ops, x), index, attend)
    if layer.page is not None:
        return _paged_block(layer, layer.page, w, ops, normed(ops, x), index, attend)
    if layer.streams is not None:
        assert lent is None or own is not None
        return _streamed_block(
            layer, layer.streams, w, ops, normed(ops, x), index, attend, lent, own
        )
    more = across, lent, seen, late, recur
    x = _sublayers(layer, w, ops, normed(ops, x), index, attend, spend, *more)
    if layer.adapter is not None:
        x = ops.add(*_adapted(layer.adapter, layer.norm, w, ops, x))
    if layer.reads:
        h = ops.linear(x, w["read.weight"], Epilogue(activation=_plain_activation(layer)))
        y = ops.linear(h * own, w["read_out.weight"])
        x = ops.add(x, y, NormOf.named(layer.norm, w, "read_norm"))
    return x * w["multiplier"] if layer.multiplied else x


def _plain_activation(layer: Layer) -> Activation:
    assert layer.mlp.activation != "xielu"
    return layer.mlp.activation


def _adapted(
    adapter: Adapter, norm: Norm, w: Weights, ops: BlockOps, x: Array
) -> tuple[Array, Array]:
    """What an adapter makes of x [B, T, E], and what it adds to."""
    h = ops.norm(x, NormOf.named(norm, w, "adapter_norm")) if "adapter_norm.weight" in w else x
    by = Epilogue(w["adapter_up.bias"], activation=adapter.activation)
    y = ops.linear(h, w["adapter_up.weight"], by)
    y = ops.linear(y, w["adapter_down.weight"], Epilogue(w["adapter_down.bias"]))
    return y, h if adapter.normed else x


def _sublayers(
    layer: Layer,
    w: Weights,
    ops: BlockOps,
    x: Array,
    index: int,
    attend: Attend,
    spend: bool,
    across: Attend | None,
    lent: dict[int, Array] | None,
    seen: Seen,
    late: list[Array] | None,
    recur: Recur | None,
) -> Array:
    """`block` as far as most families have it: attention and feed-forward."""

    def norm(name: str) -> NormOf:
        return NormOf.named(layer.norm, w, name)

    def attention(x: Array, norm: NormOf | None, residual: Array | None) -> Array:
        """Attention of `x`, normed first where there is a norm, plus the residual if given."""
        if layer.attention.pairs is not None:
            return chosen(layer.attention.pairs, x, norm, residual)
        gates = numbers = None
        if layer.attention.latent is not None:
            qkv, gates = latent(x, norm)
        elif layer.attention.biased_keys:
            x, norm = ops.norm(x, norm) if norm else x, None
            qkv = ops.linear(x, w["qkv.weight"], Epilogue(w.get("qkv.bias")))
            values = ops.linear(x, w["all_values.weight"], Epilogue(w.get("all_values.bias")))
            by = Epilogue(w.get("key_bias.bias"))
            numbers = ops.linear(values, w["key_bias.weight"], by)
        else:
            qkv = ops.linear(x, w["qkv.weight"], Epilogue(w.get("qkv.bias"), norm))
        if layer.attention.clip is not None and not layer.attention.clip_normed:
            assert not isinstance(qkv, LatentQkv)
            qkv = qkv.clip(-layer.attention.clip, layer.attention.clip)
        if layer.attention.value_norm is not None:
            qkv = heads.norm_values(
                ops.maths,
                layer.attention,
                qkv,
                NormOf.named(layer.attention.value_norm, w, "v_norm"),
            )
        if lent is not None and (index in lent or layer.attention.lender is not None):
            qkv = _borrowed(layer, ops, qkv, index, lent)
        if widens := layer.attention.widened is not layer.attention:
            if numbers is None:
                qkv = heads.widen(ops.maths, layer.attention, qkv)
            else:
                qkv = heads.bias_keys(ops.maths, layer.attention, qkv, numbers, w)
        y = attend(index, qkv)
        if widens:
            y = heads.narrow(ops.maths, layer.attention, y, w)
        if layer.attention.gated:
            y = gate(ops, y, x, w["attn_gate.weight"], norm, layer.attention.gate)
        if gates is not None:
            y = times_logistic(ops.maths, y, gates)
        if layer.sub_norms:
            y = norm_shared(ops, y, NormOf.named(layer.norm, w, "out_norm"), layer.sub_norms[0])
        spends = spend and not layer.parallel  # whose MLP reads `x` again
        by = Epilogue(w.get("out.bias"), residual=residual, spend=spends)
        return ops.row_product(y, w["out.weight"], by)

    def chosen(pairs: Pairs, x: Array, norm: NormOf | None, residual: Array | None) -> Array:
        """As `attention`, by the pairs of projections that each token chooses."""
        x, a = ops.norm(x, norm) if norm else x, layer.attention
        routing, size = ops.route(x, w["pairs.router.weight"], pairs.router), a.head_dim
        q = mixtures.chosen_queries(ops.maths, x, w["pairs.query.weight"], routing, size)
        y = attend(index, ops.maths.join((q, ops.linear(x, w["kv.weight"])), -1))
        by = Epilogue(w["pairs.bias"], residual=residual, spend=spend)
        return mixtures.chosen_outputs(ops, y, w["pairs.out.weight"], routing, size, by)

    def latent(x: Array, norm: NormOf | None) -> tuple[LatentQkv, Array | None]:
        """Queries of `x`, what keys and values of all heads are made of, and perhaps gates."""
        own, gates = layer.attention.latent, None
        assert own is not None
        shared = ops.linear(x, w["latent.weight"], Epilogue(w.get("latent.bias"), norm))
        if own.query_rank:
            x = ops.linear(x, w["query_latent.weight"], Epilogue(w.get("query_latent.bias"), norm))
            norm = NormOf.named(own.norm, w, "query_norm")
        if own.gated:
            assert norm is not None
            both = ops.linear(ops.maths.join((ops.norm(x, norm), x), -1), w["query_gate.weight"])
            size = layer.attention.head_dim
            q, gates = parted(ops.maths, both, both.shape[-1] * size // (size + own.value_dim))
        else:
            q = ops.linear(x, w["query.weight"], Epilogue(norm=norm))
        return LatentQkv(q, shared), gates

    def cross(x: Array, norm: NormOf | None, residual: Array | None) -> Array:
        """Attention across, likewise; the residual may be overwritten."""
        assert across is not None
        q = ops.linear(x, w["cross_q.weight"], Epilogue(w.get("cross_q.bias"), norm))
        by = Epilogue(w.get("cross_out.bias"), residual=residual, spend=True)
        return ops.row_product(across(index, q), w["cross_out.weight"], by)

    def recurrence(x: Array, norm: NormOf | None, residual: Array | None) -> Array:
        """The recurrence of `x`, likewise; the residual may be overwritten."""
        assert recur is not None
        h = ops.linear(x, w["recurrence_in.weight"], Epilogue(w.get("recurrence_in.bias"), norm))
        by = Epilogue(w.get("recurrence_out.bias"), residual=residual, spend=spend)
        return ops.row_product(recur(index, h), w["recurrence_out.weight"], by)

    def mixing(x: Array, norm: NormOf | None, residual: Array | None) -> Array:
        """What mixes tokens of `x`, likewise: attention, a recurrence or both."""
        if layer.recurrence is None:
            return attention(x, norm, residual)
        if not layer.attends:
            return recurrence(x, norm, residual)
        y = attention(x, norm, None) * layer.attention_scale
        y = ops.add(y, recurrence(x, norm, None))
        return y if residual is None else ops.add(residual, y)

    def mlp(x: Array, norm: NormOf | None, residual: Array | None) -> Array:
        """Feed-forward of `x`, likewise; the residual may be overwritten."""
        if isinstance(layer.mlp, Experts):
            if layer.mlp.apart:
                return _apart(layer.mlp, layer.norm, w, ops, x)
            if layer.mlp.late:
                assert late is not None and norm is not None
                x = ops.norm(x, norm)
                late.append(mixture(replace(layer.mlp, shared=0), w, ops, x, None, None))
                by = Epilogue(activation=layer.mlp.activation, gated=layer.mlp.gated)
                h = ops.linear(x, w["shared.up.weight"], by)
                return ops.row_product(
                    h, w["shared.down.weight"], Epilogue(residual=residual, spend=True)
                )
            return mixture(layer.mlp, w, ops, x, norm, residual, seen)
        if layer.mlp.scales is not None:
            gate, out = layer.mlp.scales
            h = ops.linear(x, w["up.weight"], Epilogue(w.get("up.bias"), norm))
            h = gate_scaled(ops.maths, h, _plain_activation(layer), gate)
            y = ops.row_product(h, w["down.weight"], Epilogue(w.get("down.bias"))) * out
            return y if residual is None else ops.add(residual, y)
        if layer.mlp.activation == "xielu":
            h = ops.linear(x, w["up.weight"], Epilogue(w.get("up.bias"), norm))
            h = ops.xielu(h, [w[f"xielu.{name}"] for name in XIELU])
        else:
            h = _hidden(layer.mlp, w, ops, "up", x, norm, layer.mlp.limit)
        if layer.sub_norms:
            h = norm_shared(ops, h, NormOf.named(layer.norm, w, "down_norm"), layer.sub_norms[1])
        by = Epilogue(w.get("down.bias"), residual=residual, spend=True)
        return ops.row_product(h, w["down.weight"], by)

    def through(name: str, sublayer: Callable[..., Array], x: Array) -> Array:
        """`x` plus what a sub-layer makes of it, between the norms of its placement."""
        before, behind = _norms(layer, name)
        first = norm(before) if before else None
        if layer.gated_norms and f"{before}_up.weight" in w:
            assert first is not None and behind is None
            y = ops.norm(x, first)
            by = Epilogue(activation="silu")
            h = ops.linear(y, w[f"{before}_down.weight"], by)
            return sublayer(gate(ops, y, h, w[f"{before}_up.weight"]), None, x)
        if layer.keeps:
            return ops.add(x * w[f"{name}_kept"], sublayer(x, first, None))
        factor = w[f"{name}_scale"] if layer.scaled else layer.residual_scale
        if behind is None and not layer.scaled and layer.residual_scale == 1:
            return sublayer(x, first, x)
        y = sublayer(x, first, None)
        if behind is None:
            return ops.add(x, y * factor)
        if layer.residual_scale == 1:
            return ops.add(x, y, norm(behind))
        return ops.add(x, ops.norm(y, norm(behind)) * factor)

    if layer.parallel:
        total = attention(x, norm("attn_norm"), x)
        return mlp(x, norm("attn_norm" if layer.shared_norm else "mlp_norm"), total)
    if layer.attends or layer.recurrence is not None:
        x = through("attn", mixing, x)
    if layer.cross:
        x = through("cross", cross, x)
    return through("mlp", mlp, x) if layer.feeds else x


def _norms(layer: Layer, name: str) -> tuple[str | None, str | None]:
    """The norms before a sub-layer and behind it, within the residual."""
    if layer.placement == "behind":
        return None, f"{name}_norm"
    is_bare = layer.bare and name == "attn"
    is_normed = layer.placement == "around" or (layer.mlp_normed and name == "mlp")
    return None if is_bare else f"{name}_norm", f"{name}_post_norm" if is_normed else None


def _post_block(
    layer: Layer,
    w: Weights,
    ops: BlockOps,
    x: Array | Unnormed,
    index: int,
    attend: Attend,
    across: Attend | None,
    seen: Seen,
) -> Unnormed:
    """As `block`, with each norm over the sum of a sub-layer and what it read."""

    def read(
        x: Array | Unnormed, name: str, activation: Activation | None = None, gated: bool = False
    ) -> tuple[Array, Array]:
        """The product of `x`, and `x` itself, normed."""
        by = Epilogue(w.get(f"{name}.bias"), activation=activation, gated=gated)
        if isinstance(x, Unnormed):
            return ops.read(x, w[f"{name}.weight"], by)
        return ops.linear(x, w[f"{name}.weight"], by), x

    def written(y: Array, name: str, x: Array, norm: str) -> Unnormed:
        """The end of a sub-layer that read `x`."""
        y = ops.row_product(y, w[f"{name}.weight"], Epilogue(w.get(f"{name}.bias")))
        return Unnormed(y, x, NormOf.named(layer.norm, w, norm))

    qkv, x = read(x, "qkv")
    y = attend(index, qkv)
    if layer.spans is not None:
        y = ops.maths.join((y, _spanned(layer.spans, w, ops, x, seen)), -1)
    x = written(y, "out", x, "attn_norm")
    if layer.cross:
        assert across is not None
        q, x = read(x, "cross_q")
        x = written(across(index, q), "cross_out", x, "cross_norm")
    if isinstance(layer.mlp, Experts):
        x = normed(ops, x)
        y = mixture(layer.mlp, w, ops, x, None, None)
        return Unnormed(y, x, NormOf.named(layer.norm, w, "mlp_norm"))
    h, x = read(x, "up", _plain_activation(layer), layer.mlp.gated)
    return written(h, "down", x, "mlp_norm")


def _spanned(spans: Spans, w: Weights, ops: BlockOps, x: Array, seen: Seen) -> Array:
    """What the heads beside those of attention give of x [B, T, E]."""

    def product(x: Array, name: str) -> Array:
        return ops.linear(x, w[f"{name}.weight"], Epilogue(w[f"{name}.bias"]))

    key = product(convolve_each(ops.maths, x, w["span_depth"], seen.segments), "span_key")
    scores = product(key * product(x, "span_query"), "span_mixture")
    return mix_spans(ops.maths, product(x, "span_value"), scores, spans.taps, seen.segments)


def _narrow_block(
    layer: Layer,
    bottleneck: Bottleneck,
    w: Weights,
    ops: BlockOps,
    x: Array,
    index: int,
    attend: Attend,
) -> Array:
    """As `block`, within a bottleneck."""
    assert isinstance(layer.mlp, Mlp)

    def product(x: Array, name: str) -> Array:
        return ops.linear(x, w[f"{name}.weight"], Epilogue(w[f"{name}.bias"]))

    def norm(y: Array, name: str, residual: Array | None = None) -> Array:
        return ops.norm(y, NormOf.named(layer.norm, w, name), residual=residual)

    h = norm(product(x, "narrow"), "narrow_norm")
    read = norm(product(x, "narrow_qk"), "narrow_qk_norm")
    qkv = ops.maths.join((product(read, "query_key"), product(x, "value")), -1)
    y = ops.row_product(attend(index, qkv), w["out.weight"], Epilogue(w["out.bias"]))
    h = norm(y, "attn_norm", h)
    for i in range(bottleneck.feeds):
        by = Epilogue(w[f"up.{i}.bias"], activation=_plain_activation(layer))
        y = ops.linear(h, w[f"up.{i}.weight"], by)
        y = ops.row_product(y, w[f"down.{i}.weight"], Epilogue(w[f"down.{i}.bias"]))
        h = norm(y, f"mlp.{i}_norm", h)
    return norm(product(h, "wide"), "wide_norm", x)


def _paged_block(
    layer: Layer, page: Page, w: Weights, ops: BlockOps, x: Array, index: int, attend: Attend
) -> Array:
    """As `block`, of two streams."""

    def product(x: Array, name: str, activation: Activation | None = None) -> Array:
        by = Epilogue(w[f"{name}.bias"], activation=activation)
        return ops.linear(x, w[f"{name}.weight"], by)

    def written(y: Array, name: str, norm: str, residual: Array) -> Array:
        y = ops.row_product(y, w[f"{name}.weight"], Epilogue(w[f"{name}.bias"]))
        return ops.norm(y, NormOf.named(layer.norm, w, norm), residual=residual)

    activation, count = _plain_activation(layer), layer.attention.heads
    text, place = parted(ops.maths, x, x.shape[-1] - page.width)
    qkv = weave(ops.maths, count, product(text, "qkv"), product(place, "page_qkv"))
    y, z = unweave(ops.maths, count, attend(index, qkv), page.head_dim)
    text = written(y, "out", "attn_norm", text)
    place = written(z, "page_out", "page_attn_norm", place)
    text = written(product(text, "up", activation), "down", "mlp_norm", text)
    # Narrow enough to be whole on every device.
    z = product(product(place, "page_up", activation), "page_down")
    place = ops.norm(z, NormOf.named(layer.norm, w, "page_mlp_norm"), residual=place)
    return ops.maths.join((text, place), -1)


def _borrowed(layer: Layer, ops: BlockOps, qkv: Array, index: int, lent: dict[int, Array]) -> Array:
    """`qkv` with a lender's keys and values; a lender's own is a copy, since ops change it."""
    lender = layer.attention.lender
    if lender is None:
        lent[index] = qkv
    return heads.with_keys_of(
        ops.maths, layer.attention, qkv, lent[index if lender is None else lender]
    )


def _streamed_block(
    layer: Layer,
    streams: Streams,
    w: Weights,
    ops: BlockOps,
    x: Array,
    index: int,
    attend: Attend,
    lent: dict[int, Array] | None,
    own: Array | None,
) -> Array:
    """As `block`, of several streams [A, B, T, E]."""
    assert isinstance(layer.mlp, Mlp)
    activation, a = _plain_activation(layer), layer.attention
    # The learned scale, over the width as HF has it.
    scaled = NormOf(layer.norm, w["told_norm.weight"] * x.shape[-1] ** -1, None, made=True)

    def norm(name: str) -> NormOf:
        return NormOf.named(layer.norm, w, name)

    def told(y: Array, name: str) -> Array:
        """Coefficients [B, T, C] of a stream."""
        y = ops.linear(y, w["told.weight"], Epilogue(norm=scaled, activation="tanh"))
        return ops.linear(y, w[f"{name}.weight"])

    x = mix_streams(ops.maths, told(x[0], "predict"), x)
    first = x[0]
    read = ops.norm(first, norm("attn_norm"))
    learned = ops.linear(ops.linear(read, w["laurel_in.weight"]), w["laurel_out.weight"])
    learned = ops.add(read, learned, norm("laurel_norm"))
    qkv = ops.linear(read, w["qkv.weight"], Epilogue(w.get("qkv.bias")))
    if a.value_norm is not None:
        qkv = heads.norm_values(ops.maths, a, qkv, NormOf.named(a.value_norm, w, "v_norm"))
    if lent is not None and (index in lent or a.lender is not None):
        qkv = _borrowed(layer, ops, qkv, index, lent)
    y = ops.row_product(attend(index, qkv), w["out.weight"], Epilogue(w.get("out.bias")))
    y = (ops.add(first, y, norm("attn_post_norm")) + learned) * 2**-0.5
    if layer.mlp.sparse is None:
        h = ops.linear(y, w["up.weight"], Epilogue(None, norm("mlp_norm"), activation, True))
    else:
        h = ops.linear(y, w["up.weight"], Epilogue(None, norm("mlp_norm")))
        h = gate_sparsely(ops, h, activation, *layer.mlp.sparse)
    y = ops.add(y, ops.row_product(h, w["down.weight"]), norm("mlp_post_norm"))
    x = correct_streams(ops.maths, x, told(y, "correct") + 1, y - first)
    y = x[0] * w["corrected_scale"] if streams.scaled else x[0]
    h = ops.linear(y, w["read.weight"], Epilogue(activation=activation))
    y = ops.linear(h * own, w["read_out.weight"])
    return add_to_rest(ops.maths, x, ops.norm(y, norm("read_norm")))


def _apart(experts: Experts, norm: Norm, w: Weights, ops: BlockOps, x: Array) -> Array:
    """What a mixture and the expert of all tokens make of `x`, each between norms of its own."""
    by = Epilogue(None, NormOf.named(norm, w, "mlp_norm"), experts.activation, experts.gated)
    y = ops.row_product(ops.linear(x, w["shared.up.weight"], by), w["shared.down.weight"])
    y = ops.norm(y, NormOf.named(norm, w, "shared_post_norm"))
    # The router's learned scale, over the root of the width as HF has it.
    scaled = NormOf(norm, w["router_norm.weight"] * x.shape[-1] ** -0.5, None, made=True)
    experts_of, weights = ops.route(x, w["router.weight"], experts.router, norm=scaled)
    routing = Routing(experts_of, weights * w["router.scale"][experts_of])
    by = Epilogue(norm=NormOf.named(norm, w, "experts_norm"))
    z = ops.experts(x, experts, w, routing, by)
    return ops.add(y, z, NormOf.named(norm, w, "experts_post_norm"))


def cross_keys(w: Weights, ops: BlockOps, states: Array) -> Array:
    """Keys and values [B, S, 2 K D] that a layer keeps of what an encoder gave, [B, S, E]."""
    return ops.linear(states, w["cross_kv.weight"], Epilogue(w.get("cross_kv.bias")))


def _hidden(
    mlp: Mlp | Experts,
    w: Weights,
    ops: BlockOps,
    name: str,
    x: Array,
    norm: NormOf | None,
    limit: float | None,
) -> Array:
    """The hidden values of a feed-forward by the projection `name`, within a limit if given."""
    assert mlp.activation != "xielu"
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    if limit is None:
        return ops.linear(x, weight, Epilogue(bias, norm, mlp.activation, mlp.gated))
    return gate_within(
        ops.maths, ops.linear(x, weight, Epilogue(bias, norm)), mlp.activation, limit
    )


def mixture(
    experts: Experts,
    w: Weights,
    ops: BlockOps,
    x: Array,
    norm: NormOf | None,
    residual: Array | None,
    seen: Seen = _ALL,
) -> Array:
    """What the experts of each token make of `x`, normed first where there is a norm.

    The residual, which may be overwritten, is added if given. The shared expert's part goes into
    the one sum over devices with the others'.
    """
    routing = ops.route(
        x,
        w["router.weight"],
        experts.router,
        bias=w.get("router.bias"),
        choice_bias=w.get("router.choice_bias"),
        norm=norm,
    )
    if experts.capacity is not None:
        routing = mixtures.fill(ops.maths, routing, experts.count, experts.capacity, *seen)
    if experts.blended:
        sides = ops.route(x, w["sides.weight"], _SIDES, bias=w["sides.bias"], norm=norm)
        routing = mixtures.blend(ops.maths, routing, sides, experts.count - 1)
    partial = None
    if experts.shared and not ops.adds_shared(x, experts, w):
        h = _hidden(experts, w, ops, "shared.up", x, norm, experts.shared_limit)
        partial = ops.partial_product(h, w["shared.down.weight"])
        if experts.shared_gated:
            partial = gate(ops, partial, x, w["shared.gate.weight"], norm)
        if experts.shared_scale != 1:
            partial = partial * experts.shared_scale
    if experts.zeros:
        x = ops.norm(x, norm) if norm else x
        passed = (routing.weights * (routing.experts >= experts.count)).sum(-1)[..., None] * x
        y = ops.experts(x, experts, w, routing, Epilogue(residual=residual, spend=True), partial)
        return ops.add(y, ops.maths.cast(passed, y.dtype))
    by = Epilogue(norm=norm, residual=residual, spend=True)
    y = ops.experts(x, experts, w, routing, by, partial)
    return y + w["experts.bias"] if "experts.bias" in w else y
