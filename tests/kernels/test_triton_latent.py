"""Triton's launches of latent attention: norm, rotary and append; one new token a slot."""

import numpy as np
import pytest

from . import oracles
from .cases import GARBAGE, assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, torch
from .test_norms import gain
from .test_triton_decode_attention import few_dtypes

from dualinfer.kernels.triton.latent import (  # isort: skip
    LatentConfig,
    decode_latents,
    turn_latents,
)

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

EPS = 1e-6
HEADS, RANK, TURNING, NOPE, VALUE = 5, 22, 10, 14, 9
WIDTH = RANK + TURNING


def turned(x, inv_freq, positions, interleaved):
    angles = positions.astype(np.float32)[..., None] * inv_freq
    return meaning.rotary(x, np.cos(angles) * 1.3, np.sin(angles) * 1.3, interleaved)


def in_blocks(cache: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The cache [N, S, D] as blocks of tokens, in no order, and the table [N, blocks]."""
    blocks = cache.reshape(-1, size, cache.shape[2])
    order = np.random.default_rng(0).permutation(len(blocks))
    return blocks[order], np.argsort(order).reshape(len(cache), -1).astype(np.int32)


@few_dtypes
@pytest.mark.parametrize(
    ("where", "by_table"),
    [("nowhere", 0), ("prompts", 0), ("tokens", 0), ("prompts", 1), ("tokens", 1)],
)
def test_what_heads_share_is_normed_turned_and_cached(where, by_table, dtype):
    tokens = 1 if where == "tokens" else 3
    queries = normal(1, 2, tokens, HEADS * (NOPE + TURNING), dtype=dtype)
    shared, weight = normal(2, 2, tokens, WIDTH, dtype=dtype), gain(dtype, RANK)
    inv_freq = np.geomspace(1, 0.01, TURNING // 2).astype(np.float32)
    interleaved = where != "prompts"
    full = np.array([[2], [7]])  # slot 1 is
    positions = full if where == "tokens" else np.arange(3)[None].repeat(2, 0) + 2
    cache = np.full((3, 4, WIDTH), GARBAGE, dtype)
    blocks, table = in_blocks(cache, 2)
    q, s, c = put(queries), put(shared), put(blocks if by_table else cache)
    how = {"cache": None if where == "nowhere" else c}
    if by_table:
        how["table"] = put(table)
    if where == "prompts":  # slot 5 is not there; the third token has no room
        how["slots"] = put(np.array([2, 5]))
    given = {"heads": HEADS, "rank": RANK, "norm": put(weight), "eps": EPS}
    given |= {"inv_freq": put(inv_freq), "scaling": 1.3, "interleaved": interleaved}
    if where == "tokens":  # a second sequence of twice the length that frequencies are of
        given |= {"ends": put(positions[:, 0]), "original": 4, "stretch": 3.0}
        base = 3.0 * np.array([[1.0], [2.0]]) - 2.0
        inv_freq = (inv_freq * base ** -(np.arange(5) / 4)).astype(np.float32)[:, None]
    turn_latents(q, s, put(positions), **given, **how)
    parts = queries.reshape(2, tokens, HEADS, -1).astype(np.float32)
    turning = turned(parts[..., NOPE:], inv_freq, positions, interleaved)
    expected = np.concatenate([parts[..., :NOPE], turning], -1).reshape(queries.shape)
    assert_close(get(q), expected, dtype)
    vectors = meaning.rms_norm(shared[..., :RANK], weight, EPS)
    keys = turned(shared[:, :, None, RANK:], inv_freq, positions, interleaved)[:, :, 0]
    both = np.concatenate([vectors, keys], -1)
    assert_close(get(s), both, dtype)
    after = cache.astype(np.float32)
    if where == "prompts":
        after[2, 2:4] = both[0, :2]
    elif where == "tokens":
        after[0, 2], after[1, 3] = both[:, 0]
    held = get(c)[table].reshape(cache.shape) if by_table else get(c)
    assert_close(held, after, dtype)


def by_head(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [N, H, D] times each head's own weight [H, O, D], float32 [N, H, O]."""
    wide = (a.astype(np.float64) for a in (x, weight))
    return np.einsum("nhd,hod->nho", *wide).astype(np.float32)


@few_dtypes
@pytest.mark.parametrize(
    "config", [None, LatentConfig(16, 16, 4, 3)], ids=["one program", "three programs"]
)
@pytest.mark.parametrize(
    ("lengths", "by_table"), [([36], False), ([0, 16, 99], False), ([0, 16, 99], True)], ids=str
)
def test_a_token_attends_to_what_heads_share(config, lengths, by_table, dtype):
    slots, room = len(lengths), 48
    queries = normal(1, slots, 1, HEADS * (NOPE + TURNING), dtype=dtype)
    cache = normal(2, slots, room, WIDTH, dtype=dtype)
    kv = (normal(3, HEADS * (NOPE + VALUE), RANK, dtype=dtype) / 4).astype(dtype)
    counts = np.minimum(lengths, room - 1) + 1
    for n, count in enumerate(counts):  # what lies beyond is never read
        cache[n, count:] = GARBAGE
    how = {"heads": HEADS, "turning": TURNING, "scale": 0.3, "config": config, "sms": 1}
    given = put(np.array(lengths)), put(kv)
    y = decode_latents(put(queries), put(cache), *given, **how)
    if by_table:  # a turn of 16 tokens has one entry, which is loaded before; one of 32 has two
        whole, (blocks, table) = get(y), in_blocks(cache, 16)
        y = decode_latents(put(queries), put(blocks), *given, table=put(table), **how)
        np.testing.assert_array_equal(get(y), whole)
    q = queries.reshape(slots, HEADS, -1)
    keys = kv[: HEADS * NOPE].reshape(HEADS, NOPE, RANK)
    own = by_head(q[..., :NOPE], keys.swapaxes(1, 2)).astype(dtype)
    query = np.concatenate([own, q[..., NOPE:]], -1)
    pair = cache[:, None], cache[:, None]
    mean = oracles.decode_attention(query, pair, counts, scale=0.3)[..., :RANK].astype(dtype)
    values = kv[HEADS * NOPE :].reshape(HEADS, VALUE, RANK)
    expected = by_head(mean, values).reshape(slots, -1)
    assert_close(get(y), expected, dtype)


@few_dtypes
@pytest.mark.parametrize(
    "config",
    [None, LatentConfig(16, 16, 4, 3), LatentConfig(32, 32, 4, 2)],
    ids=["own", "three programs", "pairs of seven tokens"],
)
@pytest.mark.parametrize("by_table", [False, True], ids=["rows", "blocks"])
def test_rows_of_tokens_attend_to_what_stands_before_them(config, by_table, dtype):
    """Each to its slot's; one has no room for all, and one no slot: its result is finite."""
    slots, starts, tokens, room = np.array([2, 0, 1, 9]), np.array([0, 13, 45, 0]), 9, 48
    queries = normal(1, 4, tokens, HEADS * (NOPE + TURNING), dtype=dtype)
    cache = normal(2, 4, room, WIDTH, dtype=dtype)
    cache[3] = np.nan  # nobody's
    kv = (normal(3, HEADS * (NOPE + VALUE), RANK, dtype=dtype) / 4).astype(dtype)
    for slot, start in zip(slots[:3], starts, strict=False):  # what lies beyond is never read
        cache[slot, start + tokens :] = GARBAGE
    how = {"heads": HEADS, "turning": TURNING, "scale": 0.3, "config": config, "sms": 3}
    given, where = (put(starts), put(kv)), {"slots": put(slots)}
    y = get(decode_latents(put(queries), put(cache), *given, **where, **how))
    if by_table:
        blocks, table = in_blocks(cache, 16)
        table[2, 1] = -1  # nothing is read there, and nothing weighs as if there were zeros
        cache[2, 16:32] = 0
        found = decode_latents(put(queries), put(blocks), *given, table=put(table), **where, **how)
        np.testing.assert_array_equal(get(found)[tokens:], y[tokens:])
        y = get(found)
    y = y.reshape(4, tokens, -1)
    assert np.isfinite(y.astype(np.float32)).all()
    keys = kv[: HEADS * NOPE].reshape(HEADS, NOPE, RANK)
    values = kv[HEADS * NOPE :].reshape(HEADS, VALUE, RANK)
    for n, t in np.ndindex(3, tokens):
        count = starts[n] + t + 1
        if count > room:
            continue
        q = queries[n, t].reshape(1, HEADS, -1)
        own = by_head(q[..., :NOPE], keys.swapaxes(1, 2)).astype(dtype)
        query = np.concatenate([own, q[..., NOPE:]], -1)
        pair = (cache[slots[n]][None, None],) * 2
        mean = oracles.decode_attention(query, pair, np.array([count]), scale=0.3)
        expected = by_head(mean[..., :RANK].astype(dtype), values).reshape(-1)
        assert_close(y[n, t], expected, dtype)


def test_latents_that_the_kernels_would_misread_are_refused():
    queries, cache = torch.zeros(1, 1, HEADS * 24), torch.zeros(1, 8, WIDTH)
    lengths, kv = torch.zeros(1, dtype=torch.int64), torch.zeros(HEADS * 23, RANK)
    how = {"heads": HEADS, "turning": TURNING, "scale": 1.0}
    with pytest.raises(ValueError, match="expected"):
        decode_latents(queries, cache[..., :-1], lengths, kv, **how)
    with pytest.raises(ValueError, match="contiguous, of 5 heads"):
        decode_latents(queries, cache, lengths, kv[:-1], **how)
    wide = torch.zeros(1, 8, 1034)
    with pytest.raises(ValueError, match="at most 512"):
        decode_latents(queries, wide, lengths, torch.zeros(HEADS * 23, 1024), **how)
