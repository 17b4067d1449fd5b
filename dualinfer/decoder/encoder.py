"""Encode a sequence, and attend to it from a decoder's layers."""

from collections.abc import Sequence

from ..model.spec import ModelSpec
from ..ops.attention import weigh_across
from ..ops.contract import Array, BlockOps, Ops, Params, Tokens, Weights
from ..ops.projection import project
from .forward import hidden_states
from .head import last_hidden_state
from .run import Attend, Mixers


def encoded(
    spec: ModelSpec,
    params: Params,
    ops: Ops,
    source: Tokens,
    keep: bool = False,
) -> list[Array]:
    """The encoder's states [B, S, E] of a `source` with positions, the last one after its norm.

    With `keep` all L+1 are given, else the last; where HF's states end before that norm, one more.
    """
    encoder, own = spec.encoder, params.of_encoder(len(spec.layers))
    assert encoder is not None
    angles = ops.angles(encoder, own, source.positions)

    def attend(i: int, qkv: Array) -> Array:
        return ops.attend(ops.layer_attention(encoder, own, i), qkv, angles, source.seen)[0]

    with ops.span("encoder"):
        *states, last = hidden_states(encoder, own, ops, source, Mixers(attend), keep)
        if keep and encoder.states == "raw":
            states.append(last)
        return [*states, last_hidden_state(encoder, own, ops, last)]


def cross_keys(w: Weights, ops: BlockOps, states: Array) -> Array:
    """Keys and values [B, S, 2 K D] that a layer keeps of what an encoder gave, [B, S, E]."""
    return project(ops, w, "cross_kv", states)


def encoder_states(spec: ModelSpec, states: list[Array]) -> tuple[Array, ...]:
    """HF's L+1 hidden states of an encoder, of all that `encoded` gave."""
    assert spec.encoder is not None
    return tuple(states[: len(spec.encoder.layers) + 1])


def across_whole(
    spec: ModelSpec,
    params: Params,
    ops: Ops,
    states: Array,
    mask: Array | None,
    watched: Sequence[tuple[int, int]] = (),
    seen: dict[tuple[int, int], Array] | None = None,
) -> Attend:
    """Attention of whole sequences to an encoder's states [B, S, E]; `mask` [B, S] shows them.

    How `watched` heads attend, pairs of a layer and its head, is put into `seen`, [B, T, S] each.
    """

    def across(i: int, q: Array) -> Array:
        a = spec.layers[i].cross
        assert a is not None
        kv = cross_keys(params.layers[i], ops, states)
        if heads := [head for layer, head in watched if layer == i]:
            assert seen is not None
            found = weigh_across(ops.maths, a, q, kv, heads, mask)
            seen.update(((i, head), one) for head, one in zip(heads, found, strict=True))
        return ops.attend_across(a, q, kv, mask)[0]

    return across
