"""Triton's attention of whole prompts."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from . import oracles
from .cases import DTYPES, assert_close
from .tensors import get, needs_triton, put, strict, strided, torch
from .test_attention import inputs, left_padding, packed
from .test_triton_decode_attention import in_blocks

from dualinfer.kernels.triton.attention import Config, attention  # isort: skip
from dualinfer.kernels.triton.launch import INTERPRETED  # isort: skip
from dualinfer.kernels.triton.attention_choice import (  # isort: skip
    attention_configs,
    sdpa_backends,
)

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

FLOAT32 = np.dtype(np.float32)
SMALL = Config(32, 16, 4, 2)  # 63 tokens make blocks of every kind


def run(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    options = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    put_all = [put(x) if isinstance(x, np.ndarray) else x for x in (q, k, v)]
    return get(attention(*put_all, **{"config": SMALL, **options}))


SHAPES = {
    "one token": (2, 1, 5, 5, 80),
    "80 is 64 and 16": (2, 63, 4, 2, 80),
    "96 is 64 and 32": (1, 33, 2, 2, 96),
    "one block of keys": (1, 16, 2, 1, 64),
    "odd dim, so no descriptor": (1, 63, 3, 1, 33),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_the_reference(dtype, shape, causal):
    q, k, v = inputs(dtype, *shape)
    how = {"scale": shape[-1] ** -0.5, "causal": causal}
    expected = oracles.attention(q, k, v, **how)
    assert_close(run(q, k, v, **how), expected, dtype, length=shape[1], roundings=2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_is_the_reference_with_its_own_configuration(dtype, dim):
    q, k, v = inputs(dtype, 1, 150, 2, 1, dim)
    how = {"scale": dim**-0.5, "causal": True}
    expected = oracles.attention(q, k, v, **how)
    assert_close(run(q, k, v, config=None, **how), expected, dtype, length=150, roundings=2)


def numbers(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


PADDED = left_padding(63, 0, 11)
HOLES = np.random.default_rng(6).random((2, 63)) < 0.3
PACKED = np.repeat(packed(63, 5, 20, 38), 2, 0)
SLOPES = numbers(7, 4, low=0.01, high=0.7)
ROUNDED = (SLOPES / 100).astype(ml_dtypes.bfloat16).astype(np.float32)
SINKS = numbers(8, 4, low=-2, high=3)
RELATIVE = numbers(10, 4, 2 * 10 + 1)  # alike from 10 tokens on
COUNTED = np.maximum(PADDED.cumsum(1) - 1, 0).astype(np.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": {"causal": True, "window": 1},
    "window of 7": {"causal": True, "window": 7},
    "window of 40": {"causal": True, "window": 40},
    "window of T": {"causal": True, "window": 63},
    "window beyond T": {"causal": True, "window": 2000},
    "window, bidirectional": {"causal": False, "window": 20},
    "window of 1, bidirectional": {"causal": False, "window": 1},
    "window, mask, segments, bidirectional": {
        **{"causal": False, "window": 9, "mask": PADDED},
        "segments": PACKED,
    },
    "mask": {"causal": True, "mask": PADDED},
    "holes": {"causal": False, "mask": HOLES},
    "nothing left": {"causal": True, "mask": np.zeros((2, 63), bool)},
    "nothing left but sinks": {"causal": True, "mask": left_padding(63, 63, 9), "sinks": SINKS},
    "segments": {"causal": True, "segments": PACKED},
    "segments, bidirectional": {"causal": False, "segments": PACKED},
    "window, mask, segments": {"causal": True, "window": 7, "mask": PADDED, "segments": PACKED},
    "alibi": {"causal": True, "alibi": SLOPES},
    "alibi, bidirectional": {"causal": False, "alibi": SLOPES},
    "alibi by position": {
        "causal": True,
        "alibi": SLOPES,
        "positions": COUNTED,
        "mask": PADDED,
    },
    "alibi, rounded": {
        **{"causal": True, "alibi": ROUNDED, "alibi_scale": 0.3, "mask": PADDED},
        "positions": np.sort(np.random.default_rng(9).integers(0, 2000, (2, 63))).astype(np.int32),
    },
    "relative": {"causal": True, "relative": RELATIVE},
    "relative, mask, bidirectional": {"causal": False, "relative": RELATIVE, "mask": HOLES},
    "relative, soft cap, window": {
        **{"causal": True, "relative": RELATIVE, "softcap": 2.0, "window": 20}
    },
    "soft cap": {"causal": True, "softcap": 2.0},
    "soft cap, window": {"causal": True, "softcap": 30.0, "window": 20},
    "sinks": {"causal": True, "sinks": SINKS},
    "sinks, window": {"causal": True, "sinks": SINKS, "window": 9},
    "scores": {"causal": True, "softcap": 2.0, "alibi": SLOPES, "sinks": SINKS},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [FLOAT32] if INTERPRETED else DTYPES, ids=str)
def test_attention_does_what_the_options_say(dtype, options):
    q, k, v = inputs(dtype, 2, 63, 4, 2, 16)
    expected = oracles.attention(q, k, v, scale=0.4, **options)
    actual = run(q, k, v, scale=0.4, **options)
    # Exponents as large as the cap or the distance are rounded, too: a dozen units.
    assert_close(actual, expected, dtype, length=200, roundings=2)


IN_PARTS = {"segments": np.repeat(np.arange(13, dtype=np.int32), 5)[None, :63].repeat(2, 0)}


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20}, {"alibi": SLOPES}, IN_PARTS],
    ids=["", "window", "alibi", "parts"],
)
def test_rows_give_what_the_whole_prompt_gives(options):
    """Rows of a cache [N, K, S, D] that is longer than what has been written, from any place on.

    Several are of one slot, one ends behind the cache and one is of a slot that is not there. What
    a sequence before has left behind a row's end is not finite.
    """
    q, k, v = inputs(FLOAT32, 2, 63, 4, 2, 16)
    whole = oracles.attention(q, k, v, scale=0.3, causal=True, **options)
    written = [np.pad(x, [(0, 0), (0, 5), (0, 0), (0, 0)]).swapaxes(1, 2) for x in (k, v)]
    for x in written:
        x[0, :, 63:] = np.nan
    cache = [put(np.stack((x[1], 7.0 + 0 * x[0], x[0]))).transpose(1, 2) for x in written]
    rows = [(0, 0), (1, 17), (0, 17), (0, 40), (1, 51), (0, 0)]  # of which prompt, and from where
    queries = np.zeros((len(rows), 23, *q.shape[2:]), np.float32)
    for own, (b, start) in zip(queries, rows, strict=True):
        own[: 63 - start] = q[b, start : start + 23]
    slots = np.array([2, 0, 2, 2, 0, 3])
    starts = np.array([start for _, start in rows])
    if "segments" in options:
        options = {"segments": np.pad(IN_PARTS["segments"], [(0, 0), (0, 5)], "edge")[[0] * 6]}
    how = {"scale": 0.3, "causal": True, "starts": starts, "slots": slots, **options}
    found = run(queries, *cache, **how)
    assert np.isfinite(found).all()
    for got, (b, start) in zip(found[:-1], rows, strict=False):
        expected = whole[b, start : start + 23]
        assert_close(got[: len(expected)], expected, FLOAT32, length=63)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no GPU: TMA and the matrix units are what this looks at")
@pytest.mark.parametrize("options", [{}, {"window": 100, "sinks": SINKS}], ids=["", "window"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_rows_of_a_large_cache_are_the_reference(dtype, dim, options):
    """As panels of prompts read them, a grain at a time, by rectangles and by blocks."""
    tokens, grain = 448, 64
    q, k, v = inputs(dtype, 3, tokens, 4, 2, dim)
    how: dict[str, Any] = {"scale": dim**-0.5, "causal": True, **options}
    expected = oracles.attention(q, k, v, **how)
    how["config"] = None
    parts = [(b, start) for b in range(3) for start in range(0, tokens, grain)]
    queries = np.stack([q[b, start : start + grain] for b, start in parts])
    how["starts"] = np.array([start for _, start in parts])
    slots = np.array([b for b, _ in parts])
    cache = [put(x.swapaxes(1, 2)).transpose(1, 2) for x in (k, v)]
    pools, table = in_blocks([x.swapaxes(1, 2) for x in (k, v)], [tokens] * 3, grain)
    wanted = np.stack([expected[b, start : start + grain] for b, start in parts])
    for held, more in ((cache, {"slots": slots}), (pools, {"slots": slots, "table": table})):
        for _ in range(3):
            found = run(queries, *held, **how, **more)
            assert_close(found, wanted, dtype, length=tokens, roundings=2)


@pytest.mark.parametrize(
    ("start", "options"),
    [
        (0, {}),
        (65, {"window": 20}),
        (17, {"alibi": SLOPES[:2], "softcap": 2.0, "sinks": SINKS[:2]}),
        (17, {"mask": np.random.default_rng(6).random((2, 320)) < 0.02}),  # some see nothing
    ],
    ids=["plain", "window", "scores", "mask"],
)
def test_blocks_by_a_table_give_the_bits_of_the_whole_cache(start, options):
    """Of 129 keys: two blocks and one token."""
    q, k, v = inputs(FLOAT32, 2, 129, 2, 1, 40)
    how = {"scale": 0.3, "causal": True, "config": Config(32, 32, 4, 2), **options}
    how["starts"], q = np.full(2, start), q[:, start:]
    expected = run(q, *(np.pad(x, [(0, 0), (0, 191), (0, 0), (0, 0)]) for x in (k, v)), **how)
    pools, table = in_blocks([x.swapaxes(1, 2) for x in (k, v)], [129, 129], 64)
    table = np.pad(table, [(0, 0), (0, 2)], constant_values=-1)
    np.testing.assert_array_equal(run(q, *pools, table=table, **how), expected)


def test_jax_gets_by_a_table_what_torch_gets():
    jnp = pytest.importorskip("jax.numpy")
    from dualinfer.kernels.xla.launches import call

    q, k, v = inputs(FLOAT32, 2, 70, 2, 1, 16)
    pools, table = in_blocks([x.swapaxes(1, 2) for x in (k, v)], [70, 20], 64)
    how = {"scale": 0.3, "causal": True, "config": Config(32, 64, 4, 2)}
    arrays = [jnp.asarray(np.nan_to_num(x)) for x in (q, *pools)]
    found, _ = call(attention, *arrays, table=jnp.asarray(table), capability=90, **how)
    np.testing.assert_array_equal(np.asarray(found), run(q, *pools, table=table, **how))


def test_blocks_that_a_table_does_not_have_are_zeros():
    """As where a prompt's padding has none; steps of keys are no larger than blocks."""
    q, k, v = inputs(FLOAT32, 1, 64, 4, 2, 16)
    how = {"scale": 0.3, "causal": False, "config": Config(32, 64, 4, 2)}
    pools, table = in_blocks([x.swapaxes(1, 2) for x in (k, v)], [20], 16)
    whole = [oracles.read_blocks(x, table).swapaxes(1, 2) for x in pools]
    expected = oracles.attention(q, *whole, scale=0.3, causal=False)
    assert_close(run(q, *pools, table=table, **how), expected, FLOAT32, length=64, roundings=2)


def test_slices_of_a_packed_projection_and_other_strides_agree():
    q, k, v = inputs(FLOAT32, 2, 63, 4, 2, 16)
    how = {"scale": 0.3, "causal": True}
    plain = run(q, k, v, **how)
    qkv = put(np.concatenate([x.reshape(2, 63, -1) for x in (q, k, v)], -1)).view(2, 63, 8, 16)
    np.testing.assert_array_equal(run(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:], **how), plain)
    np.testing.assert_array_equal(run(*(strided(x) for x in (q, k, v)), **how), plain)


def test_masks_and_positions_may_be_strided():
    q, k, v = inputs(FLOAT32, 2, 63, 4, 2, 16)
    rows = {"mask": HOLES, "segments": PACKED, "positions": COUNTED}
    wide = {n: put(np.pad(x, [(0, 0), (0, 9)]))[:, :63] for n, x in rows.items()}
    how = {"scale": 0.3, "causal": False, "alibi": SLOPES}
    np.testing.assert_array_equal(run(q, k, v, **how, **wide), run(q, k, v, **how, **rows))


def test_attention_holds_at_large_scores(dtype):
    q, k, v = inputs(dtype, 1, 63, 2, 1, 80)
    q, k = np.sign(q.astype(np.float32)).astype(dtype), np.sign(k.astype(np.float32)).astype(dtype)
    how = {"scale": 256.0, "causal": True}
    assert_close(run(q, k, v, **how), oracles.attention(q, k, v, **how), dtype, roundings=2)


@pytest.mark.parametrize("config", [(16, 64, 4, 1), (64, 16, 4, 2), (16, 16, 4, 2)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"mask": HOLES}], ids=["", "window", "mask"]
)
def test_every_cut_gives_the_same(dtype, config, options):
    q, k, v = inputs(dtype, 2, 63, 2, 1, 80)
    how = {"scale": 0.3, "causal": True, **options}
    expected = oracles.attention(q, k, v, **how)
    actual = run(q, k, v, config=Config(*config), **how)
    assert_close(actual, expected, dtype, length=63, roundings=2)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_nothing_gives_nothing(batch, tokens):
    q, k, v = (np.zeros((batch, tokens, heads, 16), np.float32) for heads in (4, 2, 2))
    assert run(q, k, v, scale=1.0, causal=True).shape == q.shape


WRONG = [
    ({"q": (1, 5, 3, 16)}, "multiple of K"),
    ({"k": (1, 5, 2, 32)}, r"\[B, S, K, D\]"),
    ({"starts": (2,)}, r"starts \(2,\): expected \[1\]"),
    ({"window": 0}, "window=0"),
    ({"softcap": 0.0}, "softcap=0.0"),
    ({"scale": -1.0}, "scale=-1.0"),
    ({"mask": (1, 4)}, r"mask \(1, 4\): expected \[1, 5\]"),
    ({"alibi": (3,)}, r"alibi \(3,\)"),
    ({"positions": (1, 5)}, "alibi only"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_does_not_fit_is_refused(wrong, message):
    good: dict[str, Any] = {"q": (1, 5, 4, 16), "k": (1, 5, 2, 16), "v": (1, 5, 2, 16)}
    given: dict[str, Any] = {"scale": 1.0, "causal": True, **good, **wrong}
    dtypes = {"mask": torch.bool, "positions": torch.int32}
    for name, x in given.items():
        if isinstance(x, tuple):
            given[name] = torch.zeros(x, dtype=dtypes.get(name, torch.float32))
    with pytest.raises(ValueError, match=message):
        attention(**given)


def test_tables_and_blocks_that_do_not_fit_are_refused():
    q, pool = torch.zeros(2, 5, 4, 16), torch.zeros(9, 2, 16, 16)
    how: dict[str, Any] = {"scale": 1.0, "causal": True}
    table = torch.zeros(2, 3, dtype=torch.int32)
    for wrong, message in (
        ({"table": table[:1]}, "or with starts those of a cache"),
        ({"table": table.long()}, "table is .* torch.int64"),
        ({"table": table, "starts": torch.zeros(2)}, r"starts is torch.float32; expected int32"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(q, pool, pool, **how, **wrong)
    for size in (8, 48):
        other = torch.zeros(9, 2, size, 16)
        with pytest.raises(ValueError, match=f"blocks of {size} tokens"):
            attention(q, other, other, table=table, **how)


def test_a_strided_last_axis_and_mixed_dtypes_are_refused():
    x = torch.zeros(1, 5, 2, 32)
    with pytest.raises(ValueError, match="stride 2 in its last axis"):
        attention(x[..., ::2], x[..., :16], x[..., :16], scale=1.0, causal=True)
    with pytest.raises(ValueError, match="dtypes"):
        attention(x.half(), x, x, scale=1.0, causal=True)
    for option, shape in (("mask", (1, 5)), ("alibi", (2,))):
        given = {option: torch.zeros(shape, dtype=torch.float64)}
        with pytest.raises(ValueError, match=f"{option} is torch.float64"):
            attention(x, x, x, scale=1.0, causal=True, **given)
    with pytest.raises(ValueError, match="head_dim 320"):
        attention(*[torch.zeros(1, 5, 2, 320)] * 3, scale=1.0, causal=True)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 160, 256])
def test_every_head_has_configurations_and_short_prompts_smaller_blocks(itemsize, dim):
    long = attention_configs(itemsize=itemsize, head_dim=dim, tokens=4096, pairs=64)
    short = attention_configs(itemsize=itemsize, head_dim=dim, tokens=128, pairs=16)
    assert long[0].block_m >= short[0].block_m


def test_sdpa_serves_no_call_on_the_cpu():
    q = torch.zeros(1, 5, 2, 64, dtype=torch.bfloat16)
    assert sdpa_backends(q, causal=True) == ()
