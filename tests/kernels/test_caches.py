"""Kinds of cache: what is written is read by position, and what lies behind is finite."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from dualinfer.ops.cache_kinds import kinds_over
from dualinfer.ops.caches import LATENTS, CacheSpec, block_table, buffers

from . import oracles
from .cases import normal

F32 = np.dtype(np.float32)
N, K, D, TOKENS = 3, 2, 4, 70  # of blocks two a slot
LONG, SHORT = 65, 9
TABLES = {"blocks": 2, "latent_blocks": 1}  # their place among a kind's arrays
KINDS = {
    **{"full": None, "full-int8": "int8", "blocks": None},
    **dict.fromkeys(("latent", "latent_blocks")),
}


def started(kind: str, codes: str | None) -> list[np.ndarray]:
    """The arrays of a new cache that earlier sequences have left full of NaN."""
    heads = 1 if kind in LATENTS else K
    layout = buffers(CacheSpec(kind, heads, D, D, codes), N, TOKENS)
    filled = [b.first(b.shape) if b.first else np.full(b.shape, np.nan, F32) for b in layout]
    if codes:
        filled[:2] = (np.full(b.shape, 3, np.int8) for b in layout[:2])
    if (table := TABLES.get(kind)) is not None:
        filled[table] = block_table(layout[table].shape)[::-1].copy()
    return filled


@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_tokens_are_read_where_they_were_written(maths, name):
    """Slot 2 has a long prompt, slot 0 a short one; slot 1 steps as well, of another sequence."""
    kind, codes = name.partition("-")[0], KINDS[name]
    cls, heads = kinds_over(maths.maths)[kind], 1 if kind in LATENTS else K
    k, v = (normal(i, 2, LONG, heads, D, dtype=F32) for i in (1, 2))
    tokens = [normal(i, N, heads, D, dtype=F32) for i in (3, 4)]
    slots, lengths = np.array([2, 0]), np.array([SHORT, 999, LONG])
    arrays = started(kind, codes)
    if kind in LATENTS:
        v, tokens[1] = k, tokens[0]

    def run(k: Any, v: Any, k1: Any, v1: Any, slots: Any, lengths: Any, *held: Any) -> Any:
        m = maths.maths
        own = [x if codes is None or i > 1 else m.as_codes(x, codes) for i, x in enumerate(held)]
        cache = cls(*own).write(slots[:1], k[:1], v[:1])
        cache = cache.write(slots[1:], k[1:, :SHORT], v[1:, :SHORT])
        return tuple(m.wide(x) for x in cache.append(k1, v1, lengths).read())

    held = [a.astype(np.float32) if a.dtype == np.int8 else a for a in arrays]
    found = maths.run(run, k, v, *tokens, slots, lengths, *held)
    for got, prompts, token in zip(found, (k, v), tokens, strict=True):
        expected = np.zeros((N, heads, got.shape[2], D), np.float32)
        expected[2, :, :LONG], expected[0, :, :SHORT] = (
            prompts[0].swapaxes(0, 1),
            prompts[1, :SHORT].swapaxes(0, 1),
        )
        expected, _ = oracles.append((expected, expected), token, token, lengths)
        if codes:
            expected = oracles.decode_heads(*oracles.encode_heads(expected, codes))
        near = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        near(got[2], expected[2])
        zeros = 64 if kind in TABLES else TOKENS  # behind, in the last block that is written
        near(got[0, :, :zeros], expected[0, :, :zeros])
        near(got[1, :, -1], expected[1, :, -1])  # a full slot overwrites its last token


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_tokens_go_on_in_their_slots(maths, name):
    """Two rows of one slot, one that ends behind its last place, and of padding nothing."""
    kind, codes = name.partition("-")[0], KINDS[name]
    cls, heads = kinds_over(maths.maths)[kind], 1 if kind in LATENTS else K
    k, v = (normal(i, 3, 8, heads, D, dtype=F32) for i in (1, 2))
    v = k if kind in LATENTS else v
    capacity = 128 if kind in TABLES else TOKENS
    slots, starts, lengths = np.array([2, 2, 0]), np.array([59, 67, capacity - 5]), (8, 3, 8)

    def run(k: Any, v: Any, slots: Any, starts: Any, lengths: Any, *held: Any) -> Any:
        m = maths.maths
        own = [x if codes is None or i > 1 else m.as_codes(x, codes) for i, x in enumerate(held)]
        cache = cls(*own).extend(slots, starts, lengths, k, v)
        return tuple(m.wide(x) for x in (*cache.read(), *cache.read(slots)))

    held = [a if a.dtype == np.int32 else np.zeros(a.shape, F32) for a in started(kind, codes)]
    found = maths.run(run, k, v, slots, starts, np.array(lengths), *held)
    for got, rows, new in zip(found[:2], found[2:], (k, v), strict=True):
        expected = np.zeros((N, heads, capacity, D), np.float32)
        for slot, start, length, row in zip(slots, starts, lengths, new, strict=True):
            own = row[:length].swapaxes(0, 1)
            if codes:
                own = oracles.decode_heads(*oracles.encode_heads(own, codes))
            expected[slot, :, start : start + length] = own[:, : capacity - start]
        near = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        near(got, expected)
        near(rows, expected[slots])


def test_what_an_encoder_gave_is_kept_with_zeros_behind(maths):
    cls, k = kinds_over(maths.maths)["cross"], normal(1, 1, SHORT, K, D, dtype=F32)
    held = np.full((N, K, TOKENS, D), np.nan, F32)

    def run(k: Any, held: Any, slots: Any, lengths: Any) -> Any:
        cache = cls(held * 1, held * 1, lengths * 0).keep(slots, k, 2 * k, lengths[:1])
        return *cache.read(), cache.lengths

    keys, values, lengths = maths.run(run, k, held, np.array([1]), np.array([SHORT, 1, 1]))
    expected = np.zeros((K, TOKENS, D), np.float32)
    expected[:, :SHORT] = k[0].swapaxes(0, 1)
    np.testing.assert_array_equal(keys[1], expected)
    np.testing.assert_array_equal(values[1], 2 * expected)
    assert [int(n) for n in lengths] == [0, SHORT, 0]


def test_states_move_where_it_is_their_turn(maths):
    cls = kinds_over(maths.maths)["state"]
    past, state = (normal(i, N, 3, 4, dtype=F32) for i in (1, 2))
    new = [normal(i, N, 3, 4, dtype=F32) for i in (3, 4)]
    kept = [normal(i, 1, 3, 4, dtype=F32) for i in (5, 6)]

    def run(past: Any, state: Any, moves: Any, slots: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        cache = cls(past * 1, state * 1).keep(slots, a, b).move(moves, c, d)
        return cache.arrays

    moves = np.array([True, False, False])
    found = maths.run(run, past, state, moves, np.array([1]), *kept, *new)
    for got, old, own, moved in zip(found, (past, state), kept, new, strict=True):
        np.testing.assert_array_equal(got, [moved[0], own[0], old[2]])


def test_a_cache_grows_with_its_contents_and_its_views_are_its_first_slots(maths):
    names = "full", "blocks", "latent", "latent_blocks"
    arrays = {name: started(name, None) for name in names}
    for name, held in arrays.items():
        held[:] = [
            np.arange(a.size, dtype=F32).reshape(a.shape) if a.dtype == F32 else a for a in held
        ]
        cls = kinds_over(maths.maths)[name]

        def run(*held: Any, cls: Any = cls) -> Any:
            cache = cls(*held)
            grown = cache.grown(N + 1, 2 * TOKENS)
            return cache.read()[0], grown.read()[0], grown.view(N, TOKENS).read()[0]

        if (table := TABLES.get(name)) is not None:
            held[table] = held[table].astype(np.int32)
        old, grown, view = maths.run(run, *held)
        assert grown.shape[0] == N + 1 and grown.shape[2] >= 2 * TOKENS
        np.testing.assert_array_equal(grown[:N, :, : old.shape[2]], old)
        assert not grown[N].any() and not grown[:N, :, old.shape[2] :].any()
        np.testing.assert_array_equal(view[:, :, :TOKENS], old[:, :, :TOKENS])
