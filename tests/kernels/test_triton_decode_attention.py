"""Triton's attention of one new token a slot, with head norms, rotary embedding and append."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from . import oracles
from .cases import DTYPES, GARBAGE, assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, torch
from .test_norms import gain

from dualinfer.kernels.triton.decode_attention import (  # isort: skip
    DecodeConfig,
    decode_attention,
    default_config,
)
from dualinfer.kernels.triton.launch import INTERPRETED, has_pdl  # isort: skip
from dualinfer.kernels.triton.operands import Recording  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]

FLOAT32 = np.dtype(np.float32)
few_dtypes = pytest.mark.parametrize("dtype", [FLOAT32] if INTERPRETED else DTYPES, ids=str)
ONE, SPLIT = DecodeConfig(16, 4, 1), DecodeConfig(16, 4, 3, 2)
EPS = 1e-6


class Step:
    """A decode step's qkv, lengths and cache as arrays."""

    def __init__(
        self, dtype: np.dtype, heads: int, kv_heads: int, dim: int, tokens: int, lengths: Any
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.room = heads, kv_heads, dim, tokens
        self.lengths = np.array(lengths, np.int64)
        count = len(self.lengths)
        self.qkv = normal(1, count, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.cache = tuple(normal(i, count, kv_heads, tokens, dim, dtype=dtype) for i in (2, 3))
        for n, length in enumerate(self.lengths):  # what lies beyond is never read
            for part, value in zip(self.cache, (GARBAGE, -GARBAGE), strict=True):
                part[n, :, length:] = value

    def forget(self, window: int) -> None:
        """Garbage, too, where a window of so many tokens does not reach."""
        for n, length in enumerate(self.lengths):
            for part, value in zip(self.cache, (-GARBAGE, GARBAGE), strict=True):
                part[n, :, : max(length + 1 - window, 0)] = value

    def new_heads(self, **how: Any) -> list[np.ndarray]:
        """Queries, keys and values [N, heads, D] of the new tokens, float32, normed and turned."""
        x = self.qkv.reshape(len(self.lengths), -1, self.dim).astype(np.float32)
        parts = np.split(x, [self.heads, self.heads + self.kv_heads], axis=1)
        offset, last = how.get("norm_unit_offset", False), how.get("norm_turned", False)
        for i, name in enumerate(("q_norm", "k_norm")):
            if name in how and not last:
                parts[i] = meaning.rms_norm(parts[i], how[name], EPS, unit_offset=offset)
            if "inv_freq" in how:
                turns = self.lengths.astype(np.float32)[:, None, None] * how["inv_freq"]
                cos, sin = (how.get("scaling", 1.0) * f(turns) for f in (np.cos, np.sin))
                turned = meaning.rotary(parts[i][:, None], cos, sin, how.get("interleaved", False))
                parts[i] = turned[:, 0]
            if name in how and last:
                parts[i] = meaning.rms_norm(parts[i], how[name], EPS, unit_offset=offset)
        return parts

    def expected(self, scale: float, **how: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        """The result [N, H D], and the new keys and values."""
        q, k, v = self.new_heads(**how)
        old = self.cache[0].astype(np.float32), self.cache[1].astype(np.float32)
        cache = oracles.append(old, k, v, self.lengths)
        names = "window", "chunk", "alibi", "alibi_scale", "softcap", "sinks", "relative"
        scoring = {n: how[n] for n in names if n in how}
        seen = np.minimum(self.lengths + 1, cache[0].shape[2])
        y = oracles.decode_attention(q, cache, seen, scale=scale, **scoring)
        return y.reshape(len(y), -1), [k, v]


def run(step: Step, config: DecodeConfig | None, **how: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """The result and the cache left behind; nothing outside the views given is touched."""
    how = {"sms": 5} | {n: put(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
    count, tokens = len(step.lengths), step.cache[0].shape[2]
    results = []
    for pdl in (False, True):
        whole = [
            put(np.pad(x, [(0, 2), (0, 0), (0, 3), (0, 0)], constant_values=GARBAGE))
            for x in step.cache
        ]
        views = whole[0][:, :, :tokens], whole[1][:, :, :tokens]  # of more slots than rows
        wide = put(np.pad(step.qkv, [(0, 0), (0, 5)], constant_values=np.nan))
        counters = torch.zeros(count * step.heads + 3, dtype=torch.int32, device=wide.device)
        y = decode_attention(
            wide[:, : step.qkv.shape[1]],
            views,
            put(step.lengths),
            heads=step.heads,
            counters=counters,
            config=config,
            norm_eps=EPS,
            pdl=pdl,
            **how,
        )
        assert not counters.any()
        for x in whole:
            assert (x[count:] == GARBAGE).all() and (x[:, :, tokens:] == GARBAGE).all()
        results.append((get(y), [get(x)[:count] for x in views]))
        if not has_pdl(y):
            return results[0]
    np.testing.assert_array_equal(results[0][0], results[1][0])  # to the bit, and the cache too
    np.testing.assert_array_equal(results[0][1], results[1][1])
    return results[0]


def check(step: Step, config: DecodeConfig | None, scale: float = 0.2, **how: Any) -> None:
    """Compare the result, slot by slot, and every element of the cache, with the reference."""
    dtype = step.qkv.dtype
    expected, new = step.expected(scale, **how)
    found, cache = run(step, config, scale=scale, **how)
    for n, length in enumerate(step.lengths):  # long means are small, and one slot may hide
        assert_close(found[n], expected[n], dtype, length=200 + length, roundings=3)
    for part, before, token in zip(cache, step.cache, new, strict=True):
        at = np.minimum(step.lengths, part.shape[2] - 1)
        slots = np.arange(len(at))
        assert_close(part[slots, :, at], token, dtype, length=200 + step.dim, roundings=2)
        wanted = before.copy()
        wanted[slots, :, at] = part[slots, :, at]
        np.testing.assert_array_equal(part, wanted)


# Query heads, KV heads, head_dim.
HEADS = [(1, 1, 64), (3, 3, 80), (4, 2, 96), (5, 1, 128), (4, 2, 256), (2, 1, 63), (37, 1, 40)]


@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS, ids=str)
def test_decode_attention_is_the_reference(dtype, heads, kv_heads, dim, config):
    check(Step(dtype, heads, kv_heads, dim, 63, [0, 33, 62]), config, scale=dim**-0.5)


@pytest.mark.parametrize("splits", [1, 2, 7, 32])
@few_dtypes
def test_splits_without_tokens_take_no_part(dtype, splits):
    """A block is 16 tokens: none, one, just one full one, one more, all."""
    step = Step(dtype, 2, 1, 16, 65, [0, 1, 16, 17, 64])
    check(step, DecodeConfig(16, 4, splits, 2))


@pytest.mark.parametrize("window", [1, 7, 16, 63, 2000])
@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
@few_dtypes
def test_it_sees_its_window_only(dtype, window, config):
    step = Step(dtype, 4, 2, 16, 63, [0, 6, 7, 62])
    step.forget(window)
    check(step, config, window=window)


@pytest.mark.parametrize("chunk", [1, 7, 16, 2000])
@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
def test_it_sees_its_chunk_only(config, chunk):
    step = Step(np.dtype(np.float32), 4, 2, 16, 63, [0, 6, 7, 62])
    for n, length in enumerate(step.lengths):
        for part in step.cache:
            part[n, :, : length // chunk * chunk] = GARBAGE
    check(step, config, chunk=chunk)


def numbers(seed: int, count: int, low: float, high: float) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, count).astype(np.float32)


SLOPES, SINKS = numbers(7, 6, 0.01, 0.7), np.array([0, 3, -3, 20, 0.5, -40], np.float32)
ROUNDED = SLOPES.astype(ml_dtypes.bfloat16).astype(np.float32)
SCORING = {
    "alibi": {"alibi": SLOPES},
    "alibi, rounded": {"alibi": ROUNDED, "alibi_scale": 0.3},
    "soft cap": {"softcap": 2.5},
    "sinks": {"sinks": SINKS},
    "all": {"alibi": SLOPES, "softcap": 2.5, "sinks": SINKS, "window": 20},
}


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
@pytest.mark.parametrize("options", SCORING.values(), ids=SCORING)
@few_dtypes
def test_scores_are_what_the_options_say(dtype, options, config, kv_heads):
    check(Step(dtype, 6, kv_heads, 16, 63, [0, 62]), config, **options)


# head_dim, elements that turn.
TURNS = [(16, 16), (16, 6), (80, 32), (80, 80), (64, 2), (256, 64)]


def frequencies(part: int) -> np.ndarray:
    return (10000.0 ** -(np.arange(0, part, 2) / part)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("dim", "part"), TURNS, ids=str)
@few_dtypes
def test_queries_and_keys_are_turned(dtype, dim, part, interleaved):
    how = {"inv_freq": frequencies(part), "interleaved": interleaved, "scaling": 1.25}
    check(Step(dtype, 4, 2, dim, 40, [0, 5, 39]), SPLIT, scale=dim**-0.5, **how)


@pytest.mark.parametrize("part", [0, 32, 80])
@pytest.mark.parametrize("offset", [False, True])
def test_heads_are_normed_before_they_turn(dtype, part, offset):
    how: dict[str, Any] = {"q_norm": gain(dtype, 80), "k_norm": normal(8, 80, dtype=dtype)}
    how["norm_unit_offset"] = offset
    if part:
        how |= {"inv_freq": frequencies(part), "interleaved": part == 32}
    check(Step(dtype, 4, 2, 80, 40, [0, 5, 39]), ONE, scale=80**-0.5, **how)


@pytest.mark.parametrize("part", [32, 80])
def test_heads_are_normed_after_they_have_turned(dtype, part):
    how: dict[str, Any] = {"q_norm": gain(dtype, 80), "k_norm": normal(8, 80, dtype=dtype)}
    how |= {"inv_freq": frequencies(part), "interleaved": part == 32, "scaling": 1.25}
    check(Step(dtype, 4, 2, 80, 40, [0, 5, 39]), ONE, scale=80**-0.5, norm_turned=True, **how)


def test_long_sequences_turn_by_the_second_table(dtype):
    """By each slot's own length."""
    lengths, tables = [0, 19, 20, 39], np.stack([frequencies(32), frequencies(32) / 3])
    for i, own in enumerate(([0, 1], [2, 3])):
        step = Step(dtype, 4, 2, 80, 40, lengths)
        expected, _ = step.expected(0.1, inv_freq=tables[i])
        found, _ = run(step, ONE, scale=0.1, inv_freq=tables, original=20)
        assert_close(found[own], expected[own], dtype, length=40)


def test_long_sequences_turn_by_stretched_frequencies(dtype):
    """As much as each slot's own length asks for (dynamic NTK)."""
    lengths, own = [0, 19, 20, 39], frequencies(32)
    step, found = Step(dtype, 4, 2, 80, 40, lengths), None
    found, _ = run(step, ONE, scale=0.1, inv_freq=own, original=20, stretch=3.0)
    for i, length in enumerate(lengths):
        base = 3.0 * max(length + 1, 20) / 20 - 2.0
        stretched = (own * base ** -(np.arange(16) / 15)).astype(np.float32)
        expected, _ = step.expected(0.1, inv_freq=stretched)
        assert_close(found[i], expected[i], dtype, length=40)


@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
def test_a_full_slot_harms_no_other(config):
    """An ended slot stays in the batch; its own result means nothing, but is no NaN."""
    step = Step(FLOAT32, 4, 2, 16, 20, [19, 20, 3, 25])
    expected, _ = step.expected(0.2)
    found, cache = run(step, config, scale=0.2)
    assert np.isfinite(found).all()
    for n in (0, 2):
        assert_close(found[n], expected[n], FLOAT32, length=20)
    for part, before in zip(cache, step.cache, strict=True):
        np.testing.assert_array_equal(part[[1, 3], :, :19], before[[1, 3], :, :19])
        assert np.isfinite(part).all()


@pytest.mark.parametrize("tokens", [40, 600])
@pytest.mark.parametrize("dim", [64, 256])
def test_default_configurations_are_the_reference(tokens, dim):
    assert default_config(2, tokens, dim, 4, 5).splits > 1
    check(Step(FLOAT32, 2, 1, dim, tokens, [tokens - 1, 0]), None, scale=dim**-0.5)


def test_queries_of_a_short_cache_have_programs_of_their_own_where_they_are_few():
    step = Step(np.dtype(np.float16), 6, 2, 40, 70, [69, 0, 40, 33])
    check(step, None, sms=132)
    check(step, None, sms=132, window=7, alibi=numbers(3, 6, 0.1, 0.5))


@pytest.mark.parametrize("config", [ONE, SPLIT, DecodeConfig(16, 4, 9, 2)], ids=str)
@few_dtypes
def test_results_are_the_same_bits_every_time_and_in_any_batch(dtype, config):
    step = Step(dtype, 6, 2, 80, 100, [99, 3, 77])
    first, _ = run(step, config, scale=0.1)
    for _ in range(1 if INTERPRETED else 20):
        np.testing.assert_array_equal(run(step, config, scale=0.1)[0], first)
    step.lengths, step.qkv = step.lengths[2:], step.qkv[2:]
    step.cache = tuple(x[2:] for x in step.cache)
    np.testing.assert_array_equal(run(step, config, scale=0.1)[0], first[2:])


@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
def test_it_holds_at_large_scores(dtype, config):
    step = Step(dtype, 4, 2, 80, 40, [39, 20])
    step.qkv = np.sign(step.qkv.astype(np.float32)).astype(dtype)
    step.cache[0][:] = np.sign(step.cache[0].astype(np.float32)).astype(dtype)
    check(step, config, scale=256.0)


def test_splits_are_joined_where_all_scores_are_far_below_zero():
    step = Step(FLOAT32, 4, 2, 80, 40, [39, 20])
    queries, keys = 4 * step.dim, 6 * step.dim
    step.qkv[:, :queries], step.qkv[:, queries:keys] = 1.0, -1.0
    cached = np.where(step.cache[0] > 0, -1.0, -0.5).astype(np.float32)
    step.cache = cached, step.cache[1]
    check(step, SPLIT, scale=16.0)


def in_blocks(
    cache: Any, lengths: Any, size: int, begins: Any = None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Pools in which the caches [N, K, S, D] lie scattered, and the table; -1 beyond `lengths`.

    Nothing else in the pools is a number, nor what lies before `begins`, whose whole blocks the
    table names by one that no sequence has.
    """
    slots, kv_heads, tokens, dim = cache[0].shape
    each = -(-tokens // size)
    begins = np.zeros_like(lengths) if begins is None else np.asarray(begins)
    *table, nobodys = np.random.default_rng(5).permutation(slots * each + 3)[: slots * each + 1]
    table = np.array(table, np.int32).reshape(slots, each)
    pools = []
    for part in cache:
        pool = np.full((slots * each + 3, kv_heads, size, dim), np.nan, part.dtype)
        padded = np.pad(part, [(0, 0), (0, 0), (0, each * size - tokens), (0, 0)])
        for own, begin in zip(padded, begins, strict=True):
            own[:, :begin] = np.nan
        pool[table] = padded.reshape(slots, kv_heads, each, size, dim).swapaxes(1, 2)
        pools.append(pool)
    table[np.arange(each) * size >= np.asarray(lengths)[:, None]] = -1
    table[np.arange(1, each + 1) * size <= begins[:, None]] = nobodys
    return pools, table


def run_blocks(
    step: Step,
    size: int,
    config: DecodeConfig,
    free: tuple[int, ...] = (),
    begins: Any = None,
    **how: Any,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """As `run`, from blocks, of which the `free` slots have none; `begins` as in `in_blocks`."""
    how = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
    lengths = np.minimum(step.lengths, step.room - 1) + 1
    pools, table = in_blocks(step.cache, lengths, size, begins)
    table[list(free)] = -1
    tensors = [put(pool) for pool in pools]
    wide = put(np.pad(table, [(0, 0), (0, 3)], constant_values=10**6))[:, : table.shape[1]]
    counters = torch.zeros(len(table) * step.heads, dtype=torch.int32, device=wide.device)
    y = decode_attention(
        put(step.qkv),
        tuple(tensors),
        put(step.lengths),
        table=wide,
        heads=step.heads,
        counters=counters,
        config=config,
        norm_eps=EPS,
        **how,
    )
    live = np.array([n not in free for n in range(len(table))])
    for pool, found in zip(pools, map(get, tensors), strict=True):
        written = (found != pool) & ~(np.isnan(found) & np.isnan(pool))
        assert written.any((1, 2, 3)).sum() == live.sum()  # a block a slot
    return get(y), [oracles.read_blocks(get(x), table) for x in tensors]


EDGES = [0, 63, 64, 65, 127]
BLOCKS = {
    "blocks larger than a step": (64, DecodeConfig(16, 4, 1), {}),
    "splits": (64, DecodeConfig(32, 4, 3, 2), {}),
    "steps of several blocks": (64, DecodeConfig(128, 4, 1), {}),
    "small blocks": (4, DecodeConfig(16, 4, 2, 2), {}),
    "a window": (4, DecodeConfig(16, 4, 2, 2), {"window": 50}),
    "scores": (64, DecodeConfig(16, 4, 2, 2), {"alibi": SLOPES[:4], "sinks": SINKS[:4]}),
    "turns": (64, DecodeConfig(64, 4, 1), {"inv_freq": frequencies(16)}),
}


@pytest.mark.parametrize(("size", "config", "options"), BLOCKS.values(), ids=BLOCKS)
@few_dtypes
def test_blocks_by_a_table_give_the_bits_of_the_whole_cache(dtype, size, config, options):
    step = Step(dtype, 4, 1 if config.splits == 1 else 2, 16, 128, EDGES)
    expected, cache = run(step, config, scale=0.2, **options)
    found, parts = run_blocks(step, size, config, scale=0.2, **options)
    np.testing.assert_array_equal(found, expected)
    for part, whole in zip(parts, cache, strict=True):
        for n, length in enumerate(step.lengths):
            np.testing.assert_array_equal(part[n, :, : length + 1], whole[n, :, : length + 1])


@pytest.mark.parametrize("config", [DecodeConfig(64, 4, 1), DecodeConfig(32, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("sees", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_what_lies_before_a_window_is_not_read_from_blocks(kind, sees, config):
    """It is no number, and may be in a block that the window has given back."""
    lengths = np.array([sees - 1, sees, sees + 30, 1099])
    begins = lengths // sees * sees if kind == "chunk" else np.maximum(lengths + 1 - sees, 0)
    step = Step(FLOAT32, 2, 1, 16, 1100, lengths)
    expected, cache = run(step, config, scale=0.2, **{kind: sees})
    found, parts = run_blocks(step, 64, config, begins=begins, scale=0.2, **{kind: sees})
    np.testing.assert_array_equal(found, expected)
    for part, whole in zip(parts, cache, strict=True):
        for own, other, begin, length in zip(part, whole, begins, lengths, strict=True):
            np.testing.assert_array_equal(own[:, begin : length + 1], other[:, begin : length + 1])


def test_programs_load_entries_of_their_window_once_however_long_sequences_are():
    found = []
    for how in ({}, {"window": 1000}, {"chunk": 1000}, {"window": 1000, "reach": 90}):
        recording = Recording()
        qkv, pool = recording.operand((1, 384), "float32"), (2000, 1, 64, 128)
        table, lengths = (recording.operand(x, "int32") for x in ((1, 2000), (1,)))
        decode_attention(
            qkv,
            (recording.operand(pool, "float32"), recording.operand(pool, "float32")),
            lengths,
            heads=1,
            scale=1.0,
            counters=recording.operand((8,), "int32"),
            table=table,
            config=DecodeConfig(64, 4, 1),
            **how,
        )
        found.append(dict(recording.launches[0].arguments)["ENTRIES"])
    assert found == [0, 32, 32, 4]


def test_a_full_slot_overwrites_the_last_place_of_its_last_block():
    step = Step(FLOAT32, 4, 2, 16, 128, [127, 128, 500, 3])
    found, parts = run_blocks(step, 64, SPLIT, scale=0.2)
    expected, cache = run(step, SPLIT, scale=0.2)
    np.testing.assert_array_equal(found, expected)
    for part, whole in zip(parts, cache, strict=True):
        np.testing.assert_array_equal(part[:3], whole[:3])


@pytest.mark.parametrize("sees", [{}, {"window": 50}], ids=str)
def test_slots_without_blocks_write_nowhere_and_harm_no_other(sees):
    step = Step(FLOAT32, 4, 2, 16, 128, [70, 64, 20])
    expected, _ = run(step, SPLIT, scale=0.2, **sees)
    found, _ = run_blocks(step, 64, SPLIT, free=(1,), scale=0.2, **sees)
    np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])
    assert np.isfinite(found).all()


def test_what_cannot_be_run_is_refused():
    x = put(np.zeros((2, 2, 6, 4), np.float32))
    qkv, lengths = put(np.zeros((2, 32), np.float32)), put(np.array([0, 3]))
    counters = put(np.zeros(4, np.int32))
    good: dict[str, Any] = {"heads": 4, "scale": 1.0, "counters": counters}
    refused: dict[str, Any] = {
        r"qkv \(2, 31\) does not fit 4 heads": (qkv[:, :31], (x, x), lengths, {}),
        r"qkv \(2, 32\) does not fit 5 heads": (qkv, (x, x), lengths, {"heads": 5}),
        "3 heads are no multiple of 2": (qkv[:, :28].contiguous(), (x, x), lengths, {"heads": 3}),
        "both must be the same": (qkv, (x, x[:, :, :5]), lengths, {}),
        "with a contiguous last axis": (qkv, (x.mT.contiguous().mT,) * 2, lengths, {}),
        "the cache torch.float16": (qkv, (x.half(), x.half()), lengths, {}),
        "one for each of 2 slots": (qkv, (x, x), lengths[:1], {}),
        "3 counters; 4 are needed": (qkv, (x, x), lengths, {"counters": counters[:3]}),
        "int32 .N, blocks. with": (qkv, (x, x), lengths, {"table": lengths[:, None]}),
        "3 frequencies turn more than 4": (qkv, (x, x), lengths, {"inv_freq": qkv[0, :3]}),
    }
    for message, (*args, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            decode_attention(*args, **good | options)


@pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)], ids=str)
@few_dtypes
def test_a_bias_by_distance_is_added(dtype, heads, kv_heads, config):
    step = Step(dtype, heads, kv_heads, 16, 63, [0, 5, 62])
    for most in (10, 100):  # some tokens lie farther, and none
        check(step, config, relative=normal(5, heads, 2 * most + 1, dtype=dtype))


@pytest.mark.parametrize("config", [ONE, SPLIT, None], ids=["one program", "splits", "own"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)], ids=str)
@few_dtypes
def test_a_token_attends_to_what_slots_keep_of_another_sequence(dtype, heads, kv_heads, config):
    """Nothing is written; the places are as many as there are, and not one more."""
    lengths, dim = np.array([1, 20, 63], np.int32), 40
    q = normal(1, 3, 1, heads, dim, dtype=dtype)
    cache = [normal(i, 3, kv_heads, 63, dim, dtype=dtype) for i in (2, 3)]
    visible = np.arange(63) < lengths[:, None]
    for part in cache:
        part[~np.broadcast_to(visible[:, None], part.shape[:3])] = GARBAGE
    capped = {"scale": 0.3, "softcap": 0.8 if heads == kv_heads else None}
    expected = oracles.cross_attention(q, *cache, visible, **capped)
    held, counters = [put(x) for x in cache], torch.zeros(99, dtype=torch.int32)
    found = decode_attention(
        put(q.reshape(3, -1)),
        held,
        put(lengths),
        heads=heads,
        **capped,
        counters=counters.to(held[0].device),
        cross=True,
        config=config,
        sms=5,
    )
    assert_close(get(found), expected.reshape(3, -1), dtype, length=200, roundings=3)
    for part, before in zip(held, cache, strict=True):
        np.testing.assert_array_equal(get(part), before)


def test_a_slot_that_keeps_nothing_gives_numbers():
    cache = [torch.zeros(2, 2, 33, 16) for _ in range(2)]
    counters, lengths = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    how = {"heads": 2, "scale": 1.0, "counters": counters, "cross": True}
    where = put(np.zeros(1)).device
    moved = [x.to(where) for x in (torch.ones(2, 32), *cache, lengths)]
    how["counters"] = counters.to(where)
    for config in (ONE, SPLIT):
        y = decode_attention(moved[0], moved[1:3], moved[3], config=config, **how)
        assert not y.isnan().any()
