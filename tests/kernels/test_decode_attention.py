"""append and decode_attention."""

import ml_dtypes
import numpy as np
import pytest

from . import oracles
from .cases import GARBAGE, assert_close, normal


def cache_of(
    dtype: np.dtype, lengths: np.ndarray, kv_heads: int, tokens: int, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [N, K, S, D], garbage wherever no query may look."""
    k = normal(1, len(lengths), kv_heads, tokens, 80, dtype=dtype)
    v = normal(2, len(lengths), kv_heads, tokens, 80, dtype=dtype)
    for n, length in enumerate(lengths):
        k[n, :, length:], v[n, :, length:] = GARBAGE, -GARBAGE
        if window is not None:
            k[n, :, : max(length - window, 0)] = -GARBAGE
            v[n, :, : max(length - window, 0)] = GARBAGE
    return k, v


@pytest.mark.parametrize(
    ("tokens", "heads"), [(1, (6, 3)), (63, (5, 1)), (63, (6, 3)), (1000, (5, 5)), (1000, (6, 3))]
)
def test_decode_attention_is_the_reference(backend, dtype, tokens, heads):
    lengths = np.array([1, tokens, max(tokens - 1, 1), (tokens + 1) // 2, 1], np.int32)
    cache = cache_of(dtype, lengths, heads[1], tokens)
    q = normal(3, len(lengths), heads[0], 80, dtype=dtype)
    expected = oracles.decode_attention(q, cache, lengths, scale=80**-0.5)
    actual = backend.decode_attention(q, cache, lengths, scale=80**-0.5)
    for n in range(len(lengths)):  # each by itself: long means are small, and one slot may hide
        assert_close(actual[n], expected[n], dtype, length=lengths[n], roundings=2)


@pytest.mark.parametrize("window", [1, 7, 63, 2000])
def test_decode_attention_sees_its_window_only(backend, dtype, window):
    lengths = np.array([1, 6, 7, 8, 62, 63], np.int32)
    cache = cache_of(dtype, lengths, 3, 63, window)
    q = normal(4, len(lengths), 6, 80, dtype=dtype)
    how = {"scale": 80**-0.5, "window": window}
    expected = oracles.decode_attention(q, cache, lengths, **how)
    actual = backend.decode_attention(q, cache, lengths, **how)
    for n in range(len(lengths)):
        assert_close(actual[n], expected[n], dtype, length=lengths[n], roundings=2)


@pytest.mark.parametrize("chunk", [1, 7, 2000])
def test_decode_attention_sees_its_chunk_only(backend, chunk):
    dtype, lengths = np.dtype(np.float32), np.array([1, 7, 8, 63], np.int32)
    cache = cache_of(dtype, lengths, 3, 63)
    for n, length in enumerate(lengths):
        for part in cache:
            part[n, :, : (length - 1) // chunk * chunk] = GARBAGE
    q, how = normal(4, len(lengths), 6, 80, dtype=dtype), {"scale": 80**-0.5, "chunk": chunk}
    expected = oracles.decode_attention(q, cache, lengths, **how)
    actual = backend.decode_attention(q, cache, lengths, **how)
    for n in range(len(lengths)):
        assert_close(actual[n], expected[n], dtype, length=lengths[n], roundings=2)


SLOPES = np.array([2.0**-n for n in (1, 2, 4, 6, 0, 8)], np.float32)
ROUNDED = np.array([0.31, 0.273, 0.131, 0.523, 0.17, 0.08], ml_dtypes.bfloat16).astype(np.float32)
SINKS = np.array([0.0, 3.0, -3.0, 20.0, 0.5, -40.0], np.float32)
SCORING = {
    "alibi": {"alibi": SLOPES},
    "alibi, rounded": {"alibi": ROUNDED, "alibi_scale": 0.3},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": SINKS},
    "all": {"alibi": SLOPES, "softcap": 2.5, "sinks": SINKS, "window": 7},
}


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("options", SCORING.values(), ids=SCORING)
def test_decode_attention_scores_as_the_options_say(backend, dtype, options, kv_heads):
    lengths = np.array([1, 6, 7, 8, 62, 63], np.int32)
    cache = cache_of(dtype, lengths, kv_heads, 63, options.get("window"))
    q = normal(4, len(lengths), 6, 80, dtype=dtype)
    expected = oracles.decode_attention(q, cache, lengths, scale=0.2, **options)
    actual = backend.decode_attention(q, cache, lengths, scale=0.2, **options)
    for n in range(len(lengths)):
        assert_close(actual[n], expected[n], dtype, length=lengths[n], roundings=2)


def test_append_writes_one_place_of_each_slot(backend, dtype):
    lengths = np.array([0, 1, 31, 62], np.int32)
    cache = (normal(5, 4, 3, 63, 80, dtype=dtype), normal(6, 4, 3, 63, 80, dtype=dtype))
    k, v = normal(7, 4, 3, 80, dtype=dtype), normal(8, 4, 3, 80, dtype=dtype)
    actual = backend.append(cache, k, v, lengths)
    for found, wanted in zip(actual, oracles.append(cache, k, v, lengths), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_append_to_a_full_slot_harms_no_other(backend):
    """An ended slot stays in the batch with a full cache, whose end it may overwrite."""
    dtype = np.dtype(np.float32)
    lengths = np.array([7, 3, 6], np.int32)
    cache = (normal(5, 3, 3, 7, 80, dtype=dtype), normal(6, 3, 3, 7, 80, dtype=dtype))
    k, v = normal(7, 3, 3, 80, dtype=dtype), normal(8, 3, 3, 80, dtype=dtype)
    actual = backend.append(cache, k, v, lengths)
    for found, wanted in zip(actual, oracles.append(cache, k, v, lengths), strict=True):
        np.testing.assert_array_equal(found[1:], wanted[1:])


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"alibi": SLOPES, "softcap": 2.5, "sinks": SINKS}],
    ids=["plain", "window", "scoring"],
)
def test_decoding_token_by_token_is_attention_of_the_whole(backend, options):
    dtype, tokens = np.dtype(np.float32), 7
    q = normal(1, 2, tokens, 6, 80, dtype=dtype)
    k, v = normal(2, 2, tokens, 3, 80, dtype=dtype), normal(3, 2, tokens, 3, 80, dtype=dtype)
    whole = backend.attention(q, k, v, scale=0.1, causal=True, **options)
    cache = tuple(np.full((2, 3, 9, 80), GARBAGE, dtype) for _ in range(2))
    for t in range(tokens):
        lengths = np.full(2, t, np.int32)
        cache = backend.append(cache, k[:, t], v[:, t], lengths)
        step = backend.decode_attention(q[:, t], cache, lengths + 1, scale=0.1, **options)
        assert_close(step, whole[:, t], dtype, length=tokens)
