"""The delta rule against a loop over tokens, and at every cut of a prompt."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dualinfer.blocks import delta_rule
from dualinfer.blocks.delta_rule import CHUNK, DeltaRule
from dualinfer.model.spec import Norm
from dualinfer.ops.contract import Seen
from dualinfer.ops.recurrence_kernels import StateStep
from dualinfer.ops.recurrences import take_in

from .models import BACKENDS, relative_rms

SCALAR = DeltaRule(2, 6, 10, 14, 4, "silu", Norm("rms", 1e-6))
CHANNELS = replace(SCALAR, keys=3, values=3, by_channel=True, gate="sigmoid")
KINDS = {
    "head": SCALAR,
    "doubled": replace(SCALAR, doubled=True),
    "channel": CHANNELS,
    "bounded": replace(CHANNELS, floor=-5.0),
}
ROWS, TOKENS = 2, 150


def maths_of(backend):
    """Maths of a backend, how arrays get into it, and out of it."""
    if backend == "torch":
        import torch

        from dualinfer.backends.torch.maths import MATHS

        return MATHS, torch.as_tensor, lambda x: x.numpy()
    import jax.numpy as jnp

    from dualinfer.backends.jax.maths import MATHS

    return MATHS, jnp.asarray, np.asarray


def drawn(own, tokens=TOKENS, strength=1.0, alike=False, seed=0):
    """Queries, keys, values, steps and log-decays; keys may be nearly `alike`."""
    rng = np.random.default_rng(seed)
    lead, group = (ROWS, tokens, own.keys), own.values // own.keys
    q, k = (rng.standard_normal((*lead, own.key_dim)) for _ in range(2))
    k = k * 0.1 + 1 if alike else k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((*lead, group, own.value_dim))
    steps = rng.uniform(0.5, 1, (*lead, group)) * (2 if own.doubled else 1)
    width = own.key_dim if own.by_channel else 1
    decays = -strength * rng.exponential(size=(*lead, group, width))
    return [x.astype(np.float32) for x in (q, k, v, steps, decays)]


def looped(q, k, v, steps, decays, state):
    """Token by token and head by head in float64, as the papers write it."""
    given, state = np.zeros(v.shape), state.astype(np.float64)
    for b, t, g, r in np.ndindex(v.shape[:4]):
        own = state[b, g * v.shape[3] + r]
        own *= np.exp(decays[b, t, g, r].astype(np.float64))[:, None]
        error = v[b, t, g, r] - own.T @ k[b, t, g]
        own += np.outer(k[b, t, g], steps[b, t, g, r] * error)
        given[b, t, g, r] = own.T @ q[b, t, g]
    return given.reshape(*v.shape[:2], -1, v.shape[-1]), state


def first_state(own):
    shape = ROWS, own.values, own.key_dim, own.value_dim
    return np.random.default_rng(9).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strength", "alike"), [(0.1, False), (0.0, True), (30.0, False), (1e4, True)]
)
def test_chunks_give_what_a_loop_gives(kind, strength, alike, backend):
    """With states that last and states that are gone at once; keys alike are the hardest."""
    own, (m, put, out) = KINDS[kind], maths_of(backend)
    parts, state = drawn(own, strength=strength, alike=alike), first_state(KINDS[kind])
    y, last = own.scan(m, *map(put, parts), put(state))
    expected, behind = looped(*parts, state)
    limit = 1e-4 if own.doubled and alike else 1e-5  # steps of 2 keep every error
    assert relative_rms(out(y), expected) < limit
    assert relative_rms(out(last), behind) < limit
    for t in range(3):
        step = StateStep(*(put(part[:, t]) for part in parts))
        y, state = take_in(m, step, put(np.asarray(state)))
        assert relative_rms(out(y), expected[:, t]) < 1e-5
        state = out(state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_a_cut_at_whole_chunks_changes_no_bit(kind, backend):
    own, (m, put, out) = KINDS[kind], maths_of(backend)
    parts = drawn(own)

    def read(cuts):
        found, state = [], put(first_state(own))
        for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
            y, state = own.scan(m, *(put(part[:, start:end]) for part in parts), state)
            found.append(out(y))
        return np.concatenate(found, 1), out(state)

    whole, last = read(())
    for cuts in ((CHUNK,), (2 * CHUNK,), (CHUNK, 2 * CHUNK)):
        y, state = read(cuts)
        np.testing.assert_array_equal(y, whole)
        np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("head", "torch"),
        ("channel", "torch"),
        pytest.param("channel", "jax", marks=pytest.mark.slow),
    ],
)
def test_pieces_of_a_sequence_go_on_from_states(kind, backend):
    """Pieces may be shorter than the convolution's kernel, and end within a row.

    torch gives the same bits after a cut at whole chunks. XLA computes the last few elements of an
    array otherwise than the rest, so that what is beside the rule differs by rounding.
    """
    own, (m, put, out) = KINDS[kind], maths_of(backend)
    ops, rng = SimpleNamespace(maths=m), np.random.default_rng(3)
    shapes = {
        "recurrence_kernel": (own.channels, 4),
        "delta_decay_scale": (own.values,),
        "delta_decay_bias": (own.decays,),
        "delta_norm.weight": (own.value_dim,),
    }
    w = {name: put(rng.standard_normal(own).astype(np.float32)) for name, own in shapes.items()}
    x = rng.standard_normal((ROWS, TOKENS, sum(own.sizes))).astype(np.float32)
    zeros = np.zeros((ROWS, 3, own.channels), np.float32), np.zeros_like(first_state(own))

    def read(cuts):
        found, states = [], tuple(map(put, zeros))
        for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
            lengths = put(np.full(ROWS, end - start, np.int32))
            piece = put(np.pad(x[:, start:end], [(0, 0), (0, 5), (0, 0)], constant_values=7))
            y, states = own.sequence(ops, w, piece, states, Seen(), lengths)
            found.append(out(y)[:, : end - start])
        return np.concatenate(found, 1), out(states[1])

    whole, last = read(())
    for cuts in ((CHUNK, 2 * CHUNK), (1, 3, 50)):
        y, state = read(cuts)
        assert relative_rms(y, whole) < 1e-5 and relative_rms(state, last) < 1e-5
        if backend == "torch" and CHUNK in cuts:
            np.testing.assert_array_equal(y, whole)
            np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_a_sequence_behind_another_begins_anew(kind, backend, monkeypatch):
    """A log-decay of -inf, within a block of rows and at its edges, ends all that was before."""
    monkeypatch.setattr(delta_rule, "CHUNK", 32)
    own, (m, put, out) = KINDS[kind], maths_of(backend)
    parts = drawn(own, 40)
    starts = (16, 23, 32)
    for at in starts:
        parts[4][:, at] = -np.inf
    y, last = own.scan(m, *map(put, parts), put(first_state(own)))
    alone = []
    for start, end in zip((0, *starts), (*starts, 40), strict=True):
        state = first_state(own) * (start == 0)
        alone.append(looped(*(part[:, start:end] for part in parts), state))
    assert relative_rms(out(y), np.concatenate([own[0] for own in alone], 1)) < 1e-5
    assert relative_rms(out(last), alone[-1][1]) < 1e-5
