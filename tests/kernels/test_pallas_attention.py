"""Pallas' attention of whole prompts, interpreted; and that it lowers for a GPU."""

from typing import Any

import numpy as np
import pytest

from dualinfer.kernels import reference

from .cases import DTYPES, GARBAGE, assert_close
from .test_attention import inputs, left_padding, packed

jax = pytest.importorskip("jax")

from dualinfer.kernels.pallas.attention import attention, packed_attention  # noqa: E402
from dualinfer.kernels.pallas.attention_choice import (  # noqa: E402
    Config,
    attention_configs,
    cudnn_serves,
)

from .arrays import INTERPRETED, check_lowers, get, put, struct  # noqa: E402

FLOAT32, BFLOAT16, FLOAT16 = DTYPES
SMALL = Config(32, 16, 4, 2)  # 70 tokens make blocks of every kind
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def run(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    options = {"config": SMALL, "interpret": INTERPRETED, **options}
    arrays = {n: put(x) for n, x in options.items() if isinstance(x, np.ndarray)}
    fixed = {n: x for n, x in options.items() if n not in arrays}

    def attend(q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
        return attention(q, k, v, **fixed, **arrays)

    args = put(q), put(k), put(v), arrays
    # Nearly all of the time is XLA's, which optimises what runs in a millisecond.
    return get(jax.jit(attend).lower(*args).compile(FAST_TO_COMPILE)(*args))


SHAPES = {
    "one token": (2, 1, 5, 5, 20),
    "one block of queries": (1, 17, 2, 1, 64),
    "80 is 64 and 16": (1, 33, 2, 2, 80),
    "odd head": (1, 33, 3, 1, 33),
    "many blocks": (1, 70, 4, 2, 16),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_the_reference(shape, causal):
    q, k, v = inputs(FLOAT32, *shape)
    how = {"scale": shape[-1] ** -0.5, "causal": causal}
    expected = reference.attention(q, k, v, **how)
    assert_close(run(q, k, v, **how), expected, FLOAT32, length=shape[1])


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("dim", [20, 80])
def test_attention_is_the_reference_in_16_bits(dtype, dim):
    q, k, v = inputs(dtype, 1, 70, 2, 1, dim)
    how = {"scale": dim**-0.5, "causal": True}
    expected = reference.attention(q, k, v, **how)
    # Weights and their products with the values are rounded too.
    assert_close(run(q, k, v, **how), expected, dtype, length=70, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_attention_is_the_reference_with_its_own_configuration(dtype):
    q, k, v = inputs(dtype, 1, 70, 2, 1, 64)
    how = {"scale": 0.125, "causal": True}
    expected = reference.attention(q, k, v, **how)
    assert_close(run(q, k, v, config=None, **how), expected, dtype, length=70, roundings=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_packed_heads_give_the_same_bits_as_apart(heads, kv_heads, causal):
    rng = np.random.default_rng(0)
    qkv = rng.normal(size=(2, 33, heads + 2 * kv_heads, 20)).astype(np.float32)
    mask = put(rng.random((2, 33)) > 0.3)
    how: dict[str, Any] = {"scale": 0.2, "causal": causal, "mask": mask}
    how |= {"config": SMALL, "interpret": INTERPRETED}
    apart = map(put, np.split(qkv, (heads, heads + kv_heads), axis=2))
    packed = put(qkv.reshape(2, 33, -1))
    found = jax.jit(lambda x: packed_attention(x, heads, kv_heads, **how))(packed)
    np.testing.assert_array_equal(get(found), get(attention(*apart, **how)))
    with pytest.raises(ValueError, match=rf"expected \[B, T, {heads + 2 * kv_heads} D\]"):
        packed_attention(packed[:, :, 1:], heads, kv_heads, **how)


def numbers(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


PADDED = left_padding(70, 0, 35)  # the second hides a whole block of queries, and 3 of the next
HOLES = np.random.default_rng(6).random((2, 70)) < 0.3
PACKED = np.repeat(packed(70, 5, 20, 45), 2, 0)
SLOPES = numbers(7, 4, low=0.01, high=0.7)
SINKS = numbers(8, 4, low=-2, high=3)
COUNTED = np.maximum(PADDED.cumsum(1) - 1, 0).astype(np.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "window of 1": {"causal": True, "window": 1},
    "window of 7": {"causal": True, "window": 7},
    "window of 47, a block of queries and of keys less one": {"causal": True, "window": 47},
    "window of 50": {"causal": True, "window": 50},
    "window beyond T": {"causal": True, "window": 2000},
    "window, bidirectional": {"causal": False, "window": 20},
    "mask": {"causal": True, "mask": PADDED},
    "holes": {"causal": False, "mask": HOLES},
    "holes, window": {"causal": True, "mask": HOLES, "window": 3},
    "nothing left": {"causal": True, "mask": np.zeros((2, 70), bool)},
    "nothing left but scores": {
        "causal": True,
        "mask": left_padding(70, 70, 9),
        "sinks": SINKS,
        "softcap": 2.0,
        "alibi": SLOPES,
    },
    "nothing left but sinks": {"causal": True, "mask": left_padding(70, 70, 9), "sinks": SINKS},
    "segments": {"causal": True, "segments": PACKED},
    "segments, bidirectional": {"causal": False, "segments": PACKED},
    "window, mask, segments": {"causal": True, "window": 7, "mask": PADDED, "segments": PACKED},
    "alibi": {"causal": True, "alibi": SLOPES},
    "alibi, bidirectional": {"causal": False, "alibi": SLOPES},
    "alibi by position": {"causal": True, "alibi": SLOPES, "positions": COUNTED, "mask": PADDED},
    "soft cap": {"causal": True, "softcap": 2.0},
    "soft cap, window": {"causal": True, "softcap": 30.0, "window": 20},
    "sinks": {"causal": True, "sinks": SINKS},
    "sinks, window": {"causal": True, "sinks": SINKS, "window": 9},
    "all": {
        "causal": True,
        "window": 30,
        "mask": PADDED,
        "segments": PACKED,
        "alibi": SLOPES,
        "positions": COUNTED,
        "softcap": 2.0,
        "sinks": SINKS,
    },
}


def check(dtype: np.dtype, dim: int, options: dict[str, Any], **more: Any) -> None:
    q, k, v = inputs(dtype, 2, 70, 4, 2, dim)
    expected = reference.attention(q, k, v, scale=0.4, **options)
    actual = run(q, k, v, scale=0.4, **options, **more)
    # Exponents as large as the cap or the distance are rounded, too: a dozen units.
    assert_close(actual, expected, dtype, length=200, roundings=2)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_does_what_the_options_say(options):
    check(FLOAT32, 16, options)


@pytest.mark.parametrize("name", ["soft cap, window", "nothing left but sinks", "all"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_attention_does_what_the_options_say_in_16_bits(dtype, name):
    check(dtype, 20, OPTIONS[name])


@pytest.mark.parametrize("config", [(16, 64, 4, 1), (64, 16, 4, 2)], ids=str)
@pytest.mark.parametrize("name", ["window of 50", "nothing left but scores"])
def test_every_cut_gives_the_same(config, name):
    check(FLOAT32, 80, OPTIONS[name], config=Config(*config))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [None, 20], ids=["", "window"])
def test_ragged_sequences_are_those_alone(causal, window):
    q, k, v = inputs(FLOAT32, 3, 70, 4, 2, 16)
    lengths = np.array([70, 31, 1], np.int32)
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = GARBAGE, -GARBAGE
    how = {"scale": 0.3, "causal": causal, "window": window}
    actual = run(q, k, v, lengths=lengths, **how)
    assert np.isfinite(actual).all()
    for b, length in enumerate(lengths):
        alone = [x[b : b + 1, :length] for x in (q, k, v)]
        expected = reference.attention(*alone, **how)
        assert_close(actual[b : b + 1, :length], expected, FLOAT32, length=70)
        dead = -(-length // SMALL.block_m) * SMALL.block_m
        assert not actual[b, dead:].any()


def test_attention_holds_at_large_scores():
    q, k, v = inputs(FLOAT32, 1, 70, 2, 1, 80)
    q, k = np.sign(q), np.sign(k)
    how = {"scale": 256.0, "causal": True}
    # XLA fuses the exponent's product and difference, so that it is rounded at the scores' size.
    assert_close(run(q, k, v, **how), reference.attention(q, k, v, **how), FLOAT32, length=1 << 16)


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_nothing_gives_nothing(batch, tokens):
    q, k, v = (np.zeros((batch, tokens, heads, 16), np.float32) for heads in (4, 2, 2))
    assert run(q, k, v, scale=1.0, causal=True).shape == q.shape


VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bidirectional, lengths": {"causal": False, "lengths": True},
    "window, soft cap": {"causal": True, "window": 100, "softcap": 30.0},
    "mask": {"causal": True, "mask": True},
    "segments, alibi by position": {
        "causal": True,
        "segments": True,
        "alibi": True,
        "positions": True,
    },
    "sinks": {"causal": True, "sinks": True},
    "all": {
        "causal": True,
        "window": 100,
        "softcap": 30.0,
        **dict.fromkeys(("mask", "segments", "alibi", "positions", "sinks", "lengths"), True),
    },
}


def lower(dtype: np.dtype, dim: int, tokens: int, options: dict[str, Any]) -> None:
    batch, heads, kv_heads = 2, 8, 2
    shapes: dict[str, Any] = {
        "mask": struct(batch, tokens, dtype=np.bool_),
        "segments": struct(batch, tokens, dtype=np.int32),
        "positions": struct(batch, tokens, dtype=np.int32),
        "alibi": struct(heads, dtype=np.float32),
        "sinks": struct(heads, dtype=np.float32),
        "lengths": struct(batch, dtype=np.int32),
    }
    arrays = {n: x for n, x in shapes.items() if n in options}
    fixed = {n: x for n, x in options.items() if n not in arrays}

    def attend(q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
        return attention(q, k, v, scale=0.1, **fixed, **arrays)

    q = struct(batch, tokens, heads, dim, dtype=dtype)
    kv = struct(batch, tokens, kv_heads, dim, dtype=dtype)
    assert "attention" in check_lowers(attend, q, kv, kv, arrays)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_option_lowers_for_a_gpu(dtype, options):
    lower(dtype, 64, 300, options)


@pytest.mark.parametrize("dim", [20, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_every_head_lowers_for_a_gpu(dtype, dim):
    lower(dtype, dim, 4096, VARIANTS["window, soft cap"])
    lower(dtype, dim, 17, VARIANTS["all"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": (1, 5, 3, 16)}, "multiple of K"),
    ({"k": (1, 5, 2, 32)}, r"\[B, T, K, D\]"),
    ({"k": (1, 6, 2, 16), "v": (1, 6, 2, 16)}, r"\[B, T, K, D\]"),
    (dict.fromkeys("qkv", (1, 5, 2, 320)), "head_dim 320"),
    ({"window": 0}, "window=0"),
    ({"softcap": 0.0}, "softcap=0.0"),
    ({"scale": -1.0}, "scale=-1.0"),
    ({"mask": (1, 4)}, r"mask \(1, 4\): expected \[1, 5\]"),
    ({"segments": (2, 5)}, r"segments \(2, 5\)"),
    ({"alibi": (3,)}, r"alibi \(3,\)"),
    ({"lengths": (2,)}, r"lengths \(2,\)"),
    ({"positions": (1, 5)}, "alibi only"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_does_not_fit_is_refused(wrong, message):
    good: dict[str, Any] = {"q": (1, 5, 4, 16), "k": (1, 5, 2, 16), "v": (1, 5, 2, 16)}
    given: dict[str, Any] = {"scale": 1.0, "causal": True, **good, **wrong}
    dtypes = {"mask": bool, **dict.fromkeys(("lengths", "positions", "segments"), np.int32)}
    for name, x in given.items():
        if isinstance(x, tuple):
            given[name] = put(np.zeros(x, dtypes.get(name, np.float32)))
    with pytest.raises(ValueError, match=message):
        attention(**given)


def test_dtypes_that_do_not_fit_are_refused():
    x, half = put(np.zeros((1, 5, 2, 16), np.float32)), put(np.zeros((1, 5, 2, 16), np.float16))
    with pytest.raises(ValueError, match="dtypes"):
        attention(half, x, x, scale=1.0, causal=True)
    for option, shape, dtype in (
        ("mask", (1, 5), np.int32),
        ("alibi", (2,), np.float16),
        ("lengths", (1,), np.float32),
    ):
        given: dict[str, Any] = {option: put(np.zeros(shape, dtype))}
        with pytest.raises(ValueError, match=f"{option} is {np.dtype(dtype)}"):
            attention(x, x, x, scale=1.0, causal=True, **given)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 160, 256])
def test_every_head_has_configurations_and_short_prompts_smaller_blocks(itemsize, dim):
    long = attention_configs(itemsize=itemsize, head_dim=dim, tokens=4096, pairs=64)
    short = attention_configs(itemsize=itemsize, head_dim=dim, tokens=128, pairs=16)
    assert long[0].block_m >= short[0].block_m


def served(dtype: Any = BFLOAT16, tokens: Any = 1024, dim: Any = 128, **how: Any) -> bool:
    q, k = (struct(2, tokens, heads, dim, dtype=dtype) for heads in (8, 2))
    return cudnn_serves(q, k, **{"causal": True, **how})


def test_cudnn_serves_long_prompts_without_a_mask():
    assert served() and served(dtype=FLOAT16) and served(causal=False) and served(dim=80)
    assert served(window=1024) and served(window=100, windows=True)
    assert not served(window=100) and not served(window=100, windows=True, causal=False)
    assert not served(dtype=FLOAT32) and not served(dim=100) and not served(dim=256)
    assert not served(tokens=17) and not served(softcap=30.0)
    for option in ("mask", "segments", "alibi", "sinks", "lengths"):
        assert not served(**{option: np.zeros(8)})
