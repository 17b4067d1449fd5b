"""threefry2x32 and gumbel."""

import math
from typing import Any

import numpy as np
import pytest

from dualinfer.ops import sampling

# Random123's kat_vectors, threefry2x32 with 20 rounds: key, counter, expected.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
KNOWN_WORDS = [np.array([k + c for k, c, _ in KNOWN], np.int64)[:, i] for i in range(4)]


def words(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape)


def assert_known(result: tuple[np.ndarray, np.ndarray]) -> None:
    for i in range(2):
        assert [int(w) for w in result[i]] == [expected[i] for _, _, expected in KNOWN]


def test_threefry_gives_the_published_answers(maths):
    assert_known(maths.threefry2x32(*KNOWN_WORDS))


@pytest.mark.parametrize("rows", [1, 3])
def test_threefry_has_the_bits_of_jax(maths, rows):
    """Keys of their own for `rows`, each with many counters."""
    args = [words(i, *shape) for i, shape in enumerate([(rows, 1), (rows, 1), (1, 999), (1, 1)])]
    found = maths.threefry2x32(*args)
    for word, expected in zip(found, np.stack([*map(by_jax, *over(*args))], 1), strict=True):
        np.testing.assert_array_equal(word.astype(np.int64), expected)


def over(*args: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(a) for a in np.broadcast_arrays(*args)]


def by_jax(key0: np.ndarray, key1: np.ndarray, counter0: np.ndarray, counter1: np.ndarray) -> Any:
    """JAX's two words, int64, of one key, and of counters [n]."""
    from jax.extend.random import threefry_2x32

    counters = np.concatenate((counter0, counter1)).astype(np.uint32)
    key = (np.uint32(key.flat[0]) for key in (key0, key1))
    return np.asarray(threefry_2x32(tuple(key), counters)).astype(np.int64).reshape(2, -1)


def noise_of(bits: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, of the middle of what the upper 23 bits choose of (0, 1)."""
    return -np.log(-np.log(((bits >> 9) + 0.5) / 2**23))


def test_gumbel_is_finite_and_exact_for_every_word(maths, monkeypatch):
    """All 2**23 values that the noise can take, the two extreme ones among them."""
    every = np.arange(2**23, dtype=np.uint32) << 9
    every[-1] = 0xFFFFFFFF
    zero = np.zeros(1, np.int64)

    def given(*_):
        return bits, bits

    def noise(bits_of_backend, ids):
        nonlocal bits
        bits = bits_of_backend[None]
        return sampling.gumbel(maths.maths, ids, ids, ids, ids, len(every))

    bits = None
    monkeypatch.setattr(sampling, "threefry2x32", given)
    found = maths.run(noise, every, zero)[0]
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    expected = noise_of(every)
    error = np.abs(found.astype(np.float64) - expected)
    # A word's noise differs from its neighbour's by 2**-23 or more; 0 is crossed at 1/e.
    assert error.max() < 2e-6, f"max error {error.max():.2e} at word {every[error.argmax()]:#x}"


def draw(rows: int) -> tuple[np.ndarray, ...]:
    """Two words of seed, return index and position, [N] each."""
    rng = np.random.default_rng(3)
    return (
        words(4, rows),
        words(5, rows) >> 1,
        rng.integers(0, 9, rows),
        rng.integers(0, 5000, rows),
    )


@pytest.mark.parametrize("vocab", [1, 63, 1000])
def test_gumbel_is_of_the_words_that_a_seed_and_a_place_lead_to(maths, vocab):
    found = maths.gumbel(*draw(5), vocab)
    assert found.dtype == np.float32
    ids = np.arange(vocab)
    for row, given in zip(found, np.stack(draw(5), 1), strict=True):
        key = by_jax(*given[:, None])
        bits, _ = by_jax(*key, ids, 0 * ids)
        np.testing.assert_allclose(row, noise_of(bits), atol=2e-6)


def test_gumbel_depends_on_each_of_its_arguments(maths):
    changed = [np.zeros(5, np.int64) for _ in range(4)]
    for i in range(4):
        changed[i][i + 1] = 1
    rows = maths.gumbel(*changed, 63)
    assert len(np.unique(rows)) > 0.99 * rows.size


def test_gumbel_has_its_mean_and_variance(maths):
    noise = maths.gumbel(*draw(1000), 1000).astype(np.float64)
    # Standard errors of a million draws: 0.0013 and 0.0035.
    assert abs(noise.mean() - 0.5772157) < 0.005
    assert abs(noise.var() - math.pi**2 / 6) < 0.014
