"""Pallas' attention of one new token a slot, interpreted; and that it lowers for a GPU."""

from typing import Any

import numpy as np
import pytest

from dualinfer.kernels import reference

from .cases import DTYPES, assert_close, normal
from .test_norms import gain

jax = pytest.importorskip("jax")

from dualinfer.kernels.pallas.decode_attention import (  # noqa: E402
    DecodeConfig,
    decode_attention,
    default_config,
)

from .arrays import INTERPRETED, check_lowers, get, put, struct  # noqa: E402

ONE, SPLIT = DecodeConfig(16, 4, 1), DecodeConfig(16, 4, 3, 2)
EPS = 1e-6
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
FLOAT32, BFLOAT16, FLOAT16 = DTYPES
both_configs = pytest.mark.parametrize("config", [ONE, SPLIT], ids=["one program", "splits"])
# Float32 and the 16-bit dtypes differ in what the kernel does; every pair would take minutes.
some = pytest.mark.parametrize(
    ("dtype", "config"), [(FLOAT32, SPLIT), (BFLOAT16, SPLIT), (FLOAT16, ONE)], ids=str
)


class Step:
    """A decode step's qkv, lengths and cache as arrays."""

    def __init__(
        self, dtype: np.dtype, heads: int, kv_heads: int, dim: int, tokens: int, lengths: list[int]
    ) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.lengths = np.array(lengths, np.int32)
        count = len(lengths)
        self.qkv = normal(1, count, (heads + 2 * kv_heads) * dim, dtype=dtype)
        self.cache = [normal(i, count, kv_heads, tokens, dim, dtype=dtype) for i in (2, 3)]
        for n, length in enumerate(lengths):  # what lies beyond is never read
            for part in self.cache:
                part[n, :, length:] = np.nan

    def forget(self, window: int) -> None:
        """NaN, too, where a window of so many tokens does not reach."""
        for n, length in enumerate(self.lengths):
            for part in self.cache:
                part[n, :, : max(length + 1 - window, 0)] = np.nan

    def new_heads(self, **how: Any) -> list[np.ndarray]:
        """Queries, keys and values [N, heads, D] of the new tokens, float32, normed and turned."""
        x = self.qkv.reshape(len(self.lengths), -1, self.dim).astype(np.float32)
        parts = np.split(x, [self.heads, self.heads + self.kv_heads], axis=1)
        offset = how.get("norm_unit_offset", False)
        for i, name in enumerate(("q_norm", "k_norm")):
            if name in how:
                parts[i] = reference.rms_norm(parts[i], how[name], EPS, unit_offset=offset)
            if "inv_freq" in how:
                turns = self.lengths.astype(np.float32)[:, None, None] * how["inv_freq"]
                cos, sin = (how.get("scaling", 1.0) * f(turns) for f in (np.cos, np.sin))
                turned = reference.rotary(
                    parts[i][:, None], cos, sin, how.get("interleaved", False)
                )
                parts[i] = turned[:, 0]
        return parts

    def expected(self, scale: float, **how: Any) -> tuple[np.ndarray, list[np.ndarray]]:
        """The result [N, H D], and the new keys and values."""
        q, k, v = self.new_heads(**how)
        old = self.cache[0].astype(np.float32), self.cache[1].astype(np.float32)
        cache = reference.append(old, k, v, self.lengths)
        scoring = {n: how[n] for n in ("window", "alibi", "softcap", "sinks") if n in how}
        seen = np.minimum(self.lengths + 1, cache[0].shape[2])
        y = reference.decode_attention(q, cache, seen, scale=scale, **scoring)
        return y.reshape(len(y), -1), [k, v]


Found = tuple[np.ndarray, list[np.ndarray]]


def run(step: Step, config: DecodeConfig | None, scale: float = 0.2, **how: Any) -> Found:
    """The result and the cache left behind."""
    how = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
    counters = np.zeros(len(step.lengths) * step.kv_heads + 3, np.int32)
    args = [put(x) for x in (step.qkv, *step.cache, step.lengths, counters)]

    def attend(qkv: Any, keys: Any, values: Any, lengths: Any, counters: Any) -> Any:
        given: dict[str, Any] = {"heads": step.heads, "scale": scale, "counters": counters} | how
        given |= {"config": config, "norm_eps": EPS, "sms": 5, "interpret": INTERPRETED}
        return decode_attention(qkv, (keys, values), lengths, **given)

    # Nearly all of the time is XLA's, which optimises what runs in a millisecond.
    y, cache, counters = jax.jit(attend).lower(*args).compile(FAST_TO_COMPILE)(*args)
    assert not counters.any()
    return get(y), [get(x) for x in cache]


def check(step: Step, config: DecodeConfig | None, scale: float = 0.2, **how: Any) -> None:
    """Compare the result, slot by slot, and every element of the cache, with the reference."""
    dtype = step.qkv.dtype
    expected, new = step.expected(scale, **how)
    found, cache = run(step, config, scale, **how)
    for n, length in enumerate(step.lengths):  # long means are small, and one slot may hide
        assert_close(found[n], expected[n], dtype, length=200 + length, roundings=3)
    for part, before, token in zip(cache, step.cache, new, strict=True):
        at = np.minimum(step.lengths, part.shape[2] - 1)
        slots = np.arange(len(at))
        assert_close(part[slots, :, at], token, dtype, length=200 + step.dim, roundings=2)
        wanted = before.copy()
        wanted[slots, :, at] = part[slots, :, at]
        assert part.tobytes() == wanted.tobytes()  # NaN where there was NaN


# Query heads, KV heads, head_dim.
HEADS = [(1, 1, 64), (3, 3, 20), (4, 2, 20), (5, 1, 16), (2, 1, 63)]


@pytest.mark.parametrize(("dtype", "config"), [(FLOAT32, SPLIT), (BFLOAT16, ONE)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS, ids=str)
def test_decode_attention_is_the_reference(dtype, heads, kv_heads, dim, config):
    check(Step(dtype, heads, kv_heads, dim, 37, [0, 17, 36]), config, scale=dim**-0.5)


@pytest.mark.parametrize(("dtype", "splits"), [(FLOAT32, 2), (BFLOAT16, 7)], ids=str)
def test_splits_without_tokens_take_no_part(dtype, splits):
    """A block is 16 tokens: none, one, just one full one, one more, all."""
    step = Step(dtype, 2, 1, 16, 65, [0, 1, 16, 17, 64])
    check(step, DecodeConfig(16, 4, splits, 2))


@pytest.mark.parametrize(
    ("window", "config"), [(1, SPLIT), (7, SPLIT), (7, ONE), (16, ONE), (2000, SPLIT)], ids=str
)
def test_it_sees_its_window_only(window, config):
    step = Step(FLOAT32, 4, 2, 16, 40, [0, 7, 39])
    step.forget(window)
    check(step, config, window=window)


def numbers(seed: int, count: int, low: float, high: float) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, count).astype(np.float32)


SLOPES, SINKS = numbers(7, 6, 0.01, 0.7), np.array([0, 3, -3, 20, 0.5, -40], np.float32)
SCORING = {
    "alibi": {"alibi": SLOPES},
    "soft cap": {"softcap": 2.5},
    "sinks": {"sinks": SINKS},
    "all": {"alibi": SLOPES, "softcap": 2.5, "sinks": SINKS, "window": 20},
}


@pytest.mark.parametrize(("dtype", "kv_heads", "config"), [(FLOAT32, 6, SPLIT), (BFLOAT16, 2, ONE)])
@pytest.mark.parametrize("options", SCORING.values(), ids=SCORING)
def test_scores_are_what_the_options_say(dtype, options, config, kv_heads):
    check(Step(dtype, 6, kv_heads, 16, 40, [0, 39]), config, **options)


# Head_dim, elements that turn, whether neighbours are pairs.
TURNS = [(16, 16, False), (20, 6, False), (20, 6, True), (20, 20, True), (64, 2, False)]


def frequencies(part: int) -> np.ndarray:
    return (10000.0 ** -(np.arange(0, part, 2) / part)).astype(np.float32)


@pytest.mark.parametrize(("dim", "part", "interleaved"), TURNS, ids=str)
def test_queries_and_keys_are_turned(dim, part, interleaved):
    dtype = FLOAT32 if dim == 20 else BFLOAT16
    how = {"inv_freq": frequencies(part), "interleaved": interleaved, "scaling": 1.25}
    check(Step(dtype, 4, 2, dim, 24, [0, 5, 23]), SPLIT, scale=dim**-0.5, **how)


@pytest.mark.parametrize(("part", "offset"), [(0, False), (8, True), (20, False)])
def test_heads_are_normed_before_they_turn(part, offset):
    dtype = FLOAT32 if part else FLOAT16
    how: dict[str, Any] = {"q_norm": gain(dtype, 20), "k_norm": normal(8, 20, dtype=dtype)}
    how["norm_unit_offset"] = offset
    if part:
        how |= {"inv_freq": frequencies(part), "interleaved": part == 8}
    check(Step(dtype, 4, 2, 20, 24, [0, 5, 23]), ONE, scale=20**-0.5, **how)


@some
def test_all_options_at_once(dtype, config):
    how: dict[str, Any] = SCORING["all"] | {"inv_freq": frequencies(20), "norm_unit_offset": True}
    how |= {"q_norm": gain(dtype, 20), "k_norm": normal(8, 20, dtype=dtype)}
    check(Step(dtype, 6, 2, 20, 40, [0, 21, 39]), config, **how)


@both_configs
def test_a_full_slot_harms_no_other(config):
    """An ended slot stays in the batch; its own result means nothing, but is no NaN."""
    step = Step(FLOAT32, 4, 2, 16, 20, [19, 20, 3, 25])
    expected, _ = step.expected(0.2)
    found, cache = run(step, config)
    assert np.isfinite(found).all()
    for n in (0, 2):
        assert_close(found[n], expected[n], FLOAT32, length=20)
    for part, before in zip(cache, step.cache, strict=True):
        np.testing.assert_array_equal(part[[1, 3], :, :19], before[[1, 3], :, :19])
        assert np.isfinite(part[[1, 3]]).all()


def test_default_configuration_is_the_reference():
    assert default_config(2, 40, 64, 2, 5).splits > 1
    check(Step(BFLOAT16, 2, 1, 64, 40, [39, 0]), None, scale=0.125)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_results_are_the_same_bits_every_time_and_in_any_batch(dtype):
    step, config = Step(dtype, 6, 2, 20, 40, [39, 3, 33]), SPLIT
    first, _ = run(step, config)
    np.testing.assert_array_equal(run(step, config)[0], first)
    step.lengths, step.qkv = step.lengths[2:], step.qkv[2:]
    step.cache = [x[2:] for x in step.cache]
    np.testing.assert_array_equal(run(step, config)[0], first[2:])


@pytest.mark.parametrize("config", [SPLIT])
def test_it_holds_at_large_scores(dtype, config):
    step = Step(dtype, 4, 2, 20, 24, [23, 10])
    step.qkv = np.sign(step.qkv.astype(np.float32)).astype(dtype)
    step.cache[0] = np.sign(step.cache[0].astype(np.float32)).astype(dtype)
    check(step, config, scale=256.0)


def test_splits_are_joined_where_all_scores_are_far_below_zero():
    step = Step(FLOAT32, 4, 2, 20, 24, [23, 10])
    queries, keys = 4 * step.dim, 6 * step.dim
    step.qkv[:, :queries], step.qkv[:, queries:keys] = 1.0, -1.0
    cached = np.where(step.cache[0] > 0, -1.0, -0.5).astype(np.float32)
    step.cache[0] = cached
    check(step, SPLIT, scale=16.0)


def test_many_heads_are_joined_in_pieces(monkeypatch):
    monkeypatch.setattr("dualinfer.kernels.pallas.decode_attention.JOINED", 4 * 16 * 2)
    check(Step(BFLOAT16, 5, 1, 16, 40, [39, 8]), SPLIT)


# Query heads, KV heads, head_dim.
LOWERED = [(8, 8, 64), (16, 2, 80), (16, 2, 128), (4, 4, 256), (71, 1, 64)]
OPTIONS = ["window", "alibi", "softcap", "sinks", "inv_freq", "q_norm"]


def lower(dtype: np.dtype, heads: int, kv_heads: int, dim: int, splits: int, *names: str) -> None:
    """Lower a step of this shape for CUDA, with the options named."""
    arrays = {
        "qkv": struct(3, (heads + 2 * kv_heads) * dim, dtype=dtype),
        "keys": struct(3, kv_heads, 500, dim, dtype=dtype),
        "values": struct(3, kv_heads, 500, dim, dtype=dtype),
        "lengths": struct(3, dtype=np.int32),
        "counters": struct(3 * kv_heads, dtype=np.int32),
        "alibi": struct(heads, dtype=np.float32),
        "sinks": struct(heads, dtype=np.float32),
        "inv_freq": struct(dim // 4, dtype=np.float32),
        "q_norm": struct(dim, dtype=dtype),
        "k_norm": struct(dim, dtype=dtype),
    }
    arrays = {n: x for i, (n, x) in enumerate(arrays.items()) if i < 5 or n in names}
    numbers = {n: x for n, x in {"window": 100, "softcap": 30.0}.items() if n in names}
    block = 16 if dim * dtype.itemsize > 256 else 64

    def step(*args: Any) -> Any:
        given = dict(zip(arrays, args, strict=True))
        qkv, cache = given.pop("qkv"), (given.pop("keys"), given.pop("values"))
        return decode_attention(
            qkv,
            cache,
            **given,
            **numbers,
            heads=heads,
            scale=0.1,
            interleaved=dim == 80,
            config=DecodeConfig(block, 4, splits, 2),
        )

    check_lowers(step, *arrays.values())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), LOWERED, ids=str)
def test_decode_attention_lowers_for_a_gpu(dtype, heads, kv_heads, dim):
    for splits in (1, 16):
        lower(dtype, heads, kv_heads, dim, splits)
        lower(dtype, heads, kv_heads, dim, splits, *OPTIONS, "k_norm")


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_lowers_for_a_gpu(dtype, option):
    lower(dtype, 4, 2, 80, 3, option)


def test_what_cannot_be_run_is_refused():
    zeros = jax.numpy.zeros
    x, qkv, lengths = zeros((2, 2, 6, 4)), zeros((2, 32)), zeros(2, np.int32)
    counters, half = zeros(4, np.int32), x.astype(np.float16)
    good: dict[str, Any] = {"heads": 4, "scale": 1.0, "counters": counters}
    good["interpret"] = INTERPRETED
    refused: dict[str, Any] = {
        r"qkv \(2, 31\) does not fit 4 heads": (qkv[:, :31], (x, x), lengths, {}),
        r"qkv \(2, 32\) does not fit 5 heads": (qkv, (x, x), lengths, {"heads": 5}),
        "3 heads are no multiple of 2": (qkv[:, :28], (x, x), lengths, {"heads": 3}),
        "both must be the same": (qkv, (x, x[:, :, :5]), lengths, {}),
        "the cache float16": (qkv, (half, half), lengths, {}),
        "one for each of 2 slots": (qkv, (x, x), lengths[:1], {}),
        "4 or more int32": (qkv, (x, x), lengths, {"counters": counters[:3]}),
        "int32 are needed": (qkv, (x, x), lengths, {"counters": zeros(4)}),
        "3 frequencies turn more than 4": (qkv, (x, x), lengths, {"inv_freq": qkv[0, :3]}),
    }
    for message, (*args, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            decode_attention(*args, **good | options)
