"""Decide for both backends what Triton's kernels serve, and how they are launched."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Protocol

from ..model.spec import Attention, Experts, Mixing, ModelSpec, Recurrence, Router
from ..model.weights import Weight
from ..ops.caches import LATENTS, CacheSpec, CacheView, StateView
from ..ops.contract import (
    Array,
    Epilogue,
    LayerAttention,
    NormOf,
    Routing,
    Seen,
    StateRows,
    Unnormed,
    Weights,
)
from ..ops.recurrence_kernels import FusedRecurrence, Launch, LaunchingOps
from .served import served


class Launcher(LaunchingOps, Protocol):
    """The interface that launches need of ops by kernels."""

    configurations: Any


def unserved(spec: ModelSpec) -> str | None:
    """Name the parts of a model beyond the kernels, for people; None if they serve it."""
    from ..kernels.triton import attention, latent, norm, thresholds

    attentions = spec.attentions
    wide = [a for a in attentions if has_wide_heads(a.head_dim)]
    everywhere = len(wide) == len(attentions) or spec.encoder or any(a.latent for a in wide)
    if wide and everywhere:  # of some layers of a decoder the attention alone is plain
        dim = max(a.head_dim for a in wide)
        return f"a head_dim of {dim} (at most {attention.LARGEST_HEAD})"
    ranks = [a.latent.rank for a in attentions if a.latent]
    if max(ranks, default=0) > latent.LARGEST_RANK:
        return f"latent vectors of {max(ranks)} elements (at most {latent.LARGEST_RANK})"
    if spec.embed > norm.WIDEST:
        return f"a hidden size of {spec.embed} (at most {norm.WIDEST})"
    widths = [own.norm_width for layer in spec.layers for own in layer.edits]
    widths += [a.wiring.norm_width for a in attentions if a.wiring is not None]
    shared = max(widths, default=0)
    if shared > norm.WIDEST:
        return f"norms of {shared} elements (at most {norm.WIDEST})"
    if spec.can_generate and spec.vocab > thresholds.MOST_TOKENS:
        return f"a vocabulary of {spec.vocab} (at most {thresholds.MOST_TOKENS})"
    return None


def left_plain(spec: ModelSpec, layers: Sequence[Weights] | None = None) -> dict[str, str]:
    """The ops that kernels leave to plain ones in this model: for what, for people; "" for all.

    `layers` are the weights of its layers; None where they are not known.
    """
    from ..kernels.triton import attention, routing

    left = {}
    wide = [has_wide_heads(a.head_dim) for a in spec.attentions]
    if any(wide):
        left["attention"] = f"for heads of over {attention.LARGEST_HEAD} elements"
    if not routing.serves_all(spec):
        left["router"] = ""
    known = [
        _knows_experts(own.mlp) if layers is None else _takes_experts(own.mlp, layers[i])
        for i, own in enumerate(spec.all_layers)
        if isinstance(own.mlp, Experts)
    ]
    if not all(known):
        left["experts"] = "for some layers" if any(known) else ""
    recurrences = [fused(own.recurrence) for own in spec.layers if own.recurrence is not None]
    if None in recurrences:
        left["recurrence"] = "for some layers" if any(recurrences) else ""
    elif not all(own is not None and own.fuses_sequences for own in recurrences):
        left["recurrence"] = "for prompts"
    return left


def fused(own: Recurrence) -> FusedRecurrence | None:
    """A recurrence that kernels serve, or None."""
    return own if isinstance(own, FusedRecurrence) and own.is_fused else None


def fused_sequence(
    ops: Launcher, own: Recurrence, w: Weights, x: Array, seen: Seen, rows: StateRows
) -> tuple[Array, StateView | None] | None:
    """A recurrence over sequences by kernels; None for plain operations."""
    kernels = fused(own) if seen.segments is None else None
    return kernels.fused_sequence(ops, w, x, seen.mask, rows) if kernels else None


def fused_token(
    ops: Launcher, own: Recurrence, w: Weights, x: Array, cache: StateView, moves: Array
) -> tuple[Array | Unnormed, StateView] | None:
    """A recurrence's token, x [N, 1, W], by kernels; None for plain operations."""
    kernels = fused(own)
    found = kernels.fused_token(ops, w, x[:, 0], cache, moves) if kernels else None
    if found is None:
        return None
    y, cache = found
    return y._replace(y=y.y[:, None]) if isinstance(y, Unnormed) else y[:, None], cache


def has_wide_heads(head_dim: int) -> bool:
    """True if heads have more elements than the kernels of attention take."""
    from ..kernels.triton import attention

    return head_dim > attention.LARGEST_HEAD


def is_wide(cache: CacheSpec | CacheView) -> bool:
    """True if a cache is known to keep keys of such heads; not of a latent one, which has none."""
    if not isinstance(cache, CacheSpec) or cache.kind in LATENTS:
        return False
    return has_wide_heads(cache.key_dim)


def meets_latents(a: Attention, tokens: int) -> bool:
    """True if latent attention to a row of `tokens` makes no head's keys and values for it."""
    from ..kernels.triton import latent

    own = a.latent
    assert own is not None
    return latent.meets_latents(tokens, a.head_dim, own.value_dim, own.rank, own.turning)


def head_arguments(layer: LayerAttention, frequencies: Array | None) -> dict[str, Any]:
    """The kernels' arguments for the norms and the rotation of a layer's queries and keys."""
    rope, q_norm, k_norm = layer.spec.rope, layer.q_norm, layer.k_norm
    return {
        "inv_freq": frequencies,
        "scaling": rope.scaling if rope else 1.0,
        "interleaved": rope.interleaved if rope else False,
        "q_norm": q_norm.weight if q_norm else None,
        "k_norm": k_norm.weight if k_norm else None,
        "norm_eps": q_norm.spec.eps if q_norm else 0.0,
        "norm_unit_offset": q_norm.spec.unit_offset if q_norm else False,
        "norm_turned": layer.spec.norm_turned,
        "original": rope.original if rope else 0,
        "stretch": rope.stretch if rope else 0.0,
    }


def turn_arguments(layer: LayerAttention, frequencies: Array | None) -> dict[str, Any]:
    """`head_arguments`, and what only `rotary_append` takes: whether cos and sin are rounded."""
    rope = layer.spec.rope
    return head_arguments(layer, frequencies) | {"rounded": rope.rounded if rope else False}


def linear_key(x: Array, weight: Weight, epilogue: Epilogue) -> tuple[Any, ...]:
    """The tuning key of a product by a kernel, which norms x itself if there is a norm."""
    from ..kernels.triton import eight_bit, linear, quantized

    own, count = served(weight), prod(x.shape[:-1])
    size = (weight.data if own.dense else x).dtype.itemsize
    features = own.features // 2 if epilogue.gated else own.features
    eight = own.in_eight_bits(count, size)
    if eight is not None:
        return eight_bit.tuning_key(count, features, eight.weight, eight.block, epilogue.gated)
    if own.codes is not None:
        normed = epilogue.norm is not None
        return quantized.tuning_key(count, features, own.codes, size, epilogue.gated, normed)
    return linear.tuning_key(count, features, own.width, size, epilogue.gated)


def serves_product(x: Array, weight: Weight, epilogue: Epilogue) -> bool:
    """True if the kernel for few rows serves a product."""
    from ..kernels.triton import linear, quantized

    own, count, size = served(weight), prod(x.shape[:-1]), x.dtype.itemsize
    if not own.dense:
        known = own.codes is not None
        return known and count <= (1 if size == 4 else quantized.MOST_ROWS)
    fused = epilogue.activation is not None or epilogue.residual is not None
    return linear.serves(count, own.features, own.width, size, fused)


def reads_unnormed(x: Unnormed, weight: Weight) -> bool:
    """True if the product that reads a stream makes its norm, and keeps what it normed."""
    from ..kernels.triton import linear

    alone = prod(x.y.shape[:-1]) == 1
    return alone and weight.scheme is None and linear.fuses_norm(x.norm)


def few_rows_launch(
    ops: Launcher,
    x: Array,
    weight: Weight,
    epilogue: Epilogue,
    config: Any = None,
    before: Array | None = None,
) -> Launch:
    """The launch of a product that `serves_product` names; a norm goes with a single row.

    With `before` the norm is of x + before, and comes along. `config` None is the one for these
    shapes.
    """
    from ..kernels.triton import linear, quantized

    codes = served(weight).codes
    how: dict[str, Any] = {
        "norm": linear.NormArguments.of(epilogue.norm),
        "activation": epilogue.activation,
        "gated": epilogue.gated,
        "residual": epilogue.residual,
        "dtype": "float32" if epilogue.wide else None,
        "config": config or ops.configurations.find(linear_key(x, weight, epilogue)),
        "pdl": ops.starts_early(prod(x.shape[:-1])),
    }
    if before is not None:
        how["before"] = before
    if codes is None:
        return Launch(linear.linear, (x, weight.data, epilogue.bias), how)
    return Launch(quantized.linear, (x, codes, epilogue.bias), how)


def route_launch(
    ops: Launcher,
    x: Array,
    weight: Weight,
    router: Router,
    norm: NormOf | None,
    beside: Mapping[str, Array | None],
    config: Any = None,
) -> Launch | None:
    """The launch of a router, with the biases `beside`; None if the kernels know no such.

    `config` None is the one for these shapes.
    """
    from ..kernels.triton import linear, routing

    total, width = weight.shape
    if weight.scheme is not None or not routing.serves(router, total):
        return None
    count, matrix = prod(x.shape[:-1]), weight.data
    # Some checkpoints have an axis of one in front.
    beside = {name: None if x is None else x.reshape(-1) for name, x in beside.items()}
    if norm is not None and not (routing.fuses_norm(count) and linear.fuses_norm(norm)):
        x, norm = ops.norm(x, norm), None
    if config is None:
        key = routing.tuning_key(count, total, width, matrix.dtype.itemsize)
        config = ops.configurations.find(key)
    how = {
        **beside,
        **routing.arguments(router),
        "norm": linear.NormArguments.of(norm),
        "config": config,
        "pdl": ops.starts_early(count),
    }
    return Launch(routing.route, (x, matrix), how)


def experts_launch(
    ops: Launcher,
    x: Array,
    mixture: Any,
    routing: Routing,
    epilogue: Epilogue,
    partial: Array | None,
    config: Any = None,
) -> Launch:
    """The launch of this device's experts, `kernels.triton.mixture.Mixture`.

    With all that is added; in float32 if asked. `config` None is the one for these shapes.
    """
    from ..kernels.triton import experts, experts_choice, linear

    count, chosen, norm = prod(x.shape[:-1]), routing.experts.shape[-1], epilogue.norm
    if norm is not None and not (experts_choice.is_few(count) and linear.fuses_norm(norm)):
        x, norm = ops.norm(x, norm), None
    if config is None:
        key = experts.tuning_key(count, chosen, mixture, x.dtype.itemsize)
        config = ops.configurations.find(key)
    how = {
        "norm": linear.NormArguments.of(norm),
        "residual": epilogue.residual,
        "partial": partial,
        "dtype": "float32" if epilogue.wide else None,
        "config": config,
        "pdl": ops.starts_early(count),
    }
    return Launch(experts.experts, (x, mixture, routing), how)


def experts_of(
    mixture: Experts, w: Mapping[str, Any], shared: bool = False, own: Any = None
) -> Any:
    """A layer's experts as the kernels take them, a `mixture.Mixture`; None if they know no such.

    `shared` says that the expert of all tokens is one of them, and `own`, int32 [2], from which to
    before which number they are here.
    """
    from ..kernels.triton.mixture import Mixture, Shared

    if not _takes_experts(mixture, w):
        return None
    weights = _matrices(w)
    held = [own.data if served(own).dense else served(own).codes for own in weights]
    of_all, mixing = None, mixture.mixing or Mixing()
    if shared:
        parts = [w[f"shared.{name}.weight"].data for name in ("up", "down")]
        gate = w.get("shared.gate.weight")
        of_all = Shared(parts[0], parts[1], None if gate is None else gate.data.reshape(-1))
    return Mixture(
        *held,
        *(w.get(f"experts.{name}.bias") for name in ("up", "down")),
        activation=mixture.activation,
        gated=mixture.gated,
        limit=mixing.clamp,
        offset=mixing.offset,
        shared=of_all,
        own=own,
        among=0 if own is None else mixture.count,
    )


def _takes_experts(mixture: Experts, w: Weights) -> bool:
    """True if the kernels know what these experts do, and how their matrices are held."""
    from ..kernels.triton.mixture import MOST_EXPERTS

    weights = _matrices(w)
    if not _knows_experts(mixture) or weights[0].shape[0] > MOST_EXPERTS:
        return False
    found = [served(weight) for weight in weights]
    if any(own.rounds for own in found):
        return False
    return _are_dense(weights) or all(own.codes is not None for own in found)


def _matrices(w: Weights) -> list[Weight]:
    return [w[f"experts.{name}.weight"] for name in ("up", "down")]


def _knows_experts(mixture: Experts) -> bool:
    """True if the kernels know what these experts do.

    They do not where some have no weights, or where a mixing makes their hidden values.
    """
    from ..kernels.triton import activation

    if mixture.idle or (mixture.mixing is not None and mixture.mixing.hidden is not None):
        return False
    return mixture.activation in activation.KINDS


def shares_launches(mixture: Experts, w: Mapping[str, Any], tokens: int) -> bool:
    """True if the kernels have the expert of all tokens in the launches of the others."""
    from ..kernels.triton import experts_choice

    names = [f"{of}.{part}.weight" for of in ("experts", "shared") for part in ("up", "down")]
    names += ["shared.gate.weight"] * ("shared.gate.weight" in w)
    own = mixture.mixing
    others = own is not None and (own.sublayer is not None or own.shared is not None)
    known = mixture.shared > 0 and not others and experts_choice.is_few(tokens)
    return known and _are_dense([w[name] for name in names])


def _are_dense(weights: Iterable[Weight]) -> bool:
    return all(served(weight).dense for weight in weights)
