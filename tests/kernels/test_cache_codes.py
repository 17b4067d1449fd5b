"""Codes of 8 bits in the cache: both backends' arithmetic, and the kernels that write and read."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dualinfer.ops import cache_codes

from . import oracles
from .cases import assert_close, normal
from .tensors import get, needs_triton, put, strict, torch
from .test_triton_decode_attention import SPLIT, DecodeConfig, Step, frequencies
from .test_triton_rotary import Prompt

from dualinfer.kernels.triton.attention import attention  # isort: skip
from dualinfer.kernels.triton.codes import served_codes  # isort: skip
from dualinfer.kernels.triton.decode_attention import decode_attention  # isort: skip
from dualinfer.kernels.triton.rotary import rotary_append  # isort: skip

CODES = ("fp8_e4m3", "int8")
each_code = pytest.mark.parametrize("codes", CODES)
kernels = [needs_triton, pytest.mark.usefixtures(strict.__name__)]
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)


def heads(dtype: np.dtype) -> np.ndarray:
    """Heads [2, 3, 63] of many sizes: zero, about 2**-100, one large element, ties of codes."""
    x = normal(1, 2, 3, 63, dtype=np.dtype(np.float32))
    x[0, 0] *= np.float32(1e-3)
    x[0, 1] = 0
    x[0, 2] *= np.float32(2.0**-97)
    x[1, 0, 5] = 3000.0
    x[1, 1] = np.arange(63) + 0.5
    x[1, 1, -1] = 448.0
    x[1, 2] = np.arange(63) - 31.5
    x[1, 2, -1] = -127.0
    return x.astype(dtype)


@each_code
def test_codes_and_scales_are_those_of_the_reference(maths, dtype, codes):
    x = heads(dtype)
    data, scale = oracles.encode_heads(x, codes)
    assert scale[0, 1] == 0 and not data[0, 1].any()
    values = oracles.decode_heads(data, scale)

    def both(x: Any) -> tuple[Any, ...]:
        found = cache_codes.encode(maths.maths, x, codes)
        return *found, cache_codes.values(maths.maths, *found)

    *found, meant = maths.run(both, x)
    np.testing.assert_array_equal(found[0], data)
    # XLA divides with an error of a unit in the last place on a GPU.
    np.testing.assert_array_almost_equal_nulp(
        found[1], scale, 1 if maths.maths.name == "XLA" else 0
    )
    np.testing.assert_array_equal(meant, oracles.decode_heads(found[0], found[1]))
    # Half a step: of e4m3 a sixteenth of the value, or of the smallest that is normal.
    largest = np.abs(x.astype(np.float32)).max(-1, keepdims=True)
    most = largest / 254
    if codes == "fp8_e4m3":
        most = np.maximum(np.abs(values), largest / 448 / 64) / 16
    assert (np.abs(values - x.astype(np.float32)) <= 1.0001 * most + 2.0**-90).all()


def encoded(x: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    return oracles.encode_heads(x, codes)


class TestRotary:
    pytestmark = kernels

    @each_code
    @pytest.mark.parametrize(
        ("kind", "dim", "part", "interleaved"),
        [
            *[(FLOAT32, 80, 32, True), (BFLOAT16, 63, 20, False)],
            *[(FLOAT16, 64, 64, False), (FLOAT32, 16, 0, False)],
        ],
        ids=str,
    )
    def test_heads_become_codes_of_what_the_dtype_has(self, kind, codes, dim, part, interleaved):
        prompt = Prompt(kind, 6, 2, dim, part)
        how: dict[str, Any] = {"slots": put(prompt.slots), "starts": put(prompt.starts)}
        if part:
            how |= {"inv_freq": put(prompt.inv_freq), "interleaved": interleaved}
        positions = put(prompt.positions)
        plain = tuple(put(x) for x in prompt.cache)
        whole = put(prompt.qkv)
        rotary_append(whole, positions, **prompt.sizes, cache=plain, **how)
        cache = [encoded(x, codes) for x in prompt.cache]
        held = [[put(x) for x in pair] for pair in zip(*cache, strict=True)]
        how |= {"cache": tuple(held[0]), "scales": tuple(held[1])}
        qkv = put(prompt.qkv)
        rotary_append(qkv, positions, **prompt.sizes, **how)
        apart = rotary_append(put(prompt.qkv), positions, **prompt.sizes, apart=True, **how)
        for data, scale, old, new in zip(*held, cache, plain, strict=True):
            wanted = [x.copy() for x in old]
            after = encoded(get(new), codes)
            for slot, start in zip(prompt.slots, prompt.starts, strict=True):
                for x, y in zip(wanted, after, strict=True):
                    x[slot, :, start : start + 3] = y[slot, :, start : start + 3]
            np.testing.assert_array_equal(get(data), wanted[0])
            np.testing.assert_array_equal(get(scale), wanted[1])
        before, found = (get(x).reshape(3, 3, -1, dim).astype(np.float32) for x in (whole, qkv))
        np.testing.assert_array_equal(found[:, :, :6], before[:, :, :6])
        meant = oracles.decode_heads(*encoded(before[:, :, 6:], codes)).astype(kind)
        np.testing.assert_array_equal(found[:, :, 6:], meant.astype(np.float32))
        joined = np.concatenate([get(x).astype(np.float32) for x in apart], axis=2)
        np.testing.assert_array_equal(joined, found)

    def test_a_table_says_where_codes_and_scales_go(self):
        prompt = Prompt(FLOAT32, 6, 2, 80, 32)
        table = np.array([[6, 1], [-1, -1], [0, 7], [5, -1]], np.int32)
        pools = [encoded(normal(i, 9, 2, 4, 80, dtype=FLOAT32), "int8") for i in (4, 5)]
        wide = [[oracles.read_blocks(d, table), s] for d, s in pools]
        wide = [(d, oracles.read_blocks(s[..., None], table)[..., 0]) for d, s in wide]
        prompt.starts = np.array([3, 6, 1])
        left = []
        for parts, how in ((pools, {"table": put(table)}), (wide, {})):
            held = [[put(x) for x in pair] for pair in zip(*parts, strict=True)]
            how = {**how, "slots": put(prompt.slots), "starts": put(prompt.starts)}
            how |= {"inv_freq": put(prompt.inv_freq), "cache": tuple(held[0])}
            how |= {"scales": tuple(held[1])}
            rotary_append(put(prompt.qkv), put(prompt.positions), **prompt.sizes, **how)
            left.append([[get(x) for x in kind] for kind in held])
        for by_table, flat in zip(*left, strict=True):
            for pool, expected in zip(by_table, flat, strict=True):
                if pool.ndim == 3:
                    pool, expected = pool[..., None], expected[..., None]
                expected[3, :, 4:] = 0  # of a block that is not there
                np.testing.assert_array_equal(oracles.read_blocks(pool, table), expected)


class TestDecodeAttention:
    pytestmark = kernels

    def run(self, step: Step, codes: str | None, config: Any, table: Any = None, **how: Any):
        """The result, and the cache with the new token, of codes with scales."""
        how = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
        cache, scales = step.cache, None
        if codes is not None:
            pairs = [encoded(x, codes) for x in step.cache]
            cache, scales = (tuple(kind) for kind in zip(*pairs, strict=True))
            scales = tuple(put(x) for x in scales)
        held = tuple(put(x) for x in cache)
        if table is not None:
            how["table"] = put(table)
        count = len(step.lengths) * step.kv_heads
        y = decode_attention(
            put(step.qkv),
            held,
            put(step.lengths),
            heads=step.heads,
            counters=torch.zeros(count, dtype=torch.int32, device=held[0].device),
            scales=scales,
            config=config,
            norm_eps=1e-6,
            sms=5,
            **how,
        )
        return get(y), [get(x) for x in held], [get(x) for x in scales or ()]

    @each_code
    @pytest.mark.parametrize(
        ("kind", "heads", "kv_heads", "dim", "config"),
        [
            (FLOAT32, 4, 2, 80, DecodeConfig(16, 4, 1)),
            *[(FLOAT32, 3, 3, 16, SPLIT), (BFLOAT16, 4, 2, 63, SPLIT)],
        ],
        ids=str,
    )
    def test_it_is_the_reference_over_what_codes_mean(
        self, kind, heads, kv_heads, dim, config, codes
    ):
        step = Step(kind, heads, kv_heads, dim, 40, [0, 5, 39])
        step.cache = tuple(normal(i, 3, kv_heads, 40, dim, dtype=kind) for i in (2, 3))
        part = dim // 4 * 2
        how = {"inv_freq": frequencies(part), "scaling": 1.25, "scale": dim**-0.5}
        how |= {"sinks": np.linspace(-1, 1, heads).astype(np.float32)}
        _, plain, _ = self.run(step, None, config, **how)
        found, cache, scales = self.run(step, codes, config, **how)
        at, slots = step.lengths, np.arange(3)
        meant = []
        for data, scale, old, new in zip(cache, scales, step.cache, plain, strict=True):
            wanted = encoded(old, codes)
            for x, y in zip(wanted, encoded(new, codes), strict=True):
                x[slots, :, at] = y[slots, :, at]
            np.testing.assert_array_equal(data, wanted[0])
            np.testing.assert_array_equal(scale, wanted[1])
            meant.append(oracles.decode_heads(data, scale))
        q = step.new_heads(**how)[0].astype(kind)
        expected = oracles.decode_attention(
            q, tuple(meant), at + 1, scale=how["scale"], sinks=how["sinks"]
        )
        for row, its in zip(found, expected.reshape(3, -1), strict=True):
            assert_close(row, its, kind, length=400, roundings=3)

    def test_small_values_stay_in_float16(self):
        """A weight times a scale is below what float16 has; many of them are a mean."""
        half, tokens = FLOAT16, 600
        step = Step(half, 2, 1, 16, tokens, [tokens - 1])
        step.qkv[:, :32] = 0  # all tokens weigh the same
        step.cache = tuple(normal(i, 1, 1, tokens, 16, dtype=half, scale=1e-3) for i in (2, 3))
        step.qkv[:, 32:] = 1e-3
        found, cache, scales = self.run(step, "int8", DecodeConfig(64, 4, 1), scale=1.0)
        meant = oracles.decode_heads(cache[1], scales[1])[0, 0].mean(0)
        np.testing.assert_allclose(found[0, :16], meant, rtol=3e-3, atol=1e-7)

    @each_code
    @pytest.mark.parametrize("sees", [{}, {"window": 20}], ids=str)
    def test_a_table_says_where_codes_and_scales_lie(self, codes, sees):
        step = Step(FLOAT32, 4, 2, 16, 48, [0, 17, 47])
        step.cache = tuple(normal(i, 3, 2, 48, 16, dtype=FLOAT32) for i in (2, 3))
        expected, flat, scales = self.run(step, codes, SPLIT, scale=0.25, **sees)
        table = np.random.default_rng(0).permutation(9).reshape(3, 3).astype(np.int32)
        pools = [np.zeros((9, 2, 16, 16), np.float32) for _ in range(2)]
        for pool, part in zip(pools, step.cache, strict=True):
            for n, i in np.ndindex(3, 3):
                pool[table[n, i]] = part[n, :, 16 * i : 16 * i + 16]
        step.cache = tuple(pools)
        found, cache, held = self.run(step, codes, SPLIT, table, scale=0.25, **sees)
        np.testing.assert_array_equal(found, expected)
        for pool, part in zip(cache, flat, strict=True):
            np.testing.assert_array_equal(oracles.read_blocks(pool, table), part)
        for pool, part in zip(held, scales, strict=True):
            rows = oracles.read_blocks(pool[..., None], table)[..., 0]
            np.testing.assert_array_equal(rows, part)


class TestAttention:
    pytestmark = kernels

    @pytest.mark.parametrize(
        ("codes", "by_table", "dim"),
        [("fp8_e4m3", False, 80), ("fp8_e4m3", True, 16), ("int8", True, 80), ("int8", False, 16)],
    )
    def test_a_later_piece_sees_what_codes_mean(self, codes, by_table, dim):
        q = normal(1, 1, 20, 4, dim, dtype=FLOAT32)
        cache = [encoded(normal(i, 1, 2, 64, dim, dtype=FLOAT32), codes) for i in (2, 3)]
        meant = [oracles.decode_heads(*pair) for pair in cache]
        wide = np.zeros((1, 53, 4, dim), np.float32)
        wide[:, 33:] = q
        k, v = (x[:, :, :53].swapaxes(1, 2) for x in meant)
        expected = oracles.attention(wide, k, v, scale=0.2, causal=True)[:, 33:]
        how: dict[str, Any] = {"scale": 0.2, "causal": True, "starts": put(np.array([33]))}
        if by_table:
            table = np.array([[2, 0, 3, 1]], np.int32)
            blocks = [
                [np.ascontiguousarray(x.reshape(1, 2, 4, 16, -1)[0].swapaxes(0, 1)) for x in pair]
                for pair in cache
            ]
            pools = [[x[[1, 3, 0, 2]] for x in pair] for pair in blocks]
            (k, v) = (put(d) for d, _ in pools)
            scales = tuple(put(s[..., 0]) for _, s in pools)
            found = attention(put(q), k, v, table=put(table), scales=scales, **how)
        else:
            k, v = (put(d).transpose(1, 2) for d, _ in cache)
            scales = tuple(put(s).transpose(1, 2) for _, s in cache)
            found = attention(put(q), k, v, scales=scales, **how)
        assert_close(get(found), expected, FLOAT32, length=64)


@needs_triton
def test_what_cannot_be_read_is_refused():
    x = put(np.zeros((1, 3, 12), np.float32))
    sizes = {"heads": 1, "kv_heads": 1, "head_dim": 4}
    data, scale = (put(y) for y in encoded(np.ones((1, 1, 8, 4), np.float32), "int8"))

    with pytest.raises(ValueError, match="without scales"):
        rotary_append(x, None, **sizes, cache=(data, data))
    cases = {
        "uint8 or int8 is expected": (data.float(), scale),
        "float32 .* is expected": (data, scale[:, :, :3]),
        "over 4": (data, scale.new_zeros(1, 1, 16)[:, :, ::2]),
    }
    for message, (cache, scales) in cases.items():
        with pytest.raises(ValueError, match=message):
            rotary_append(x, None, **sizes, cache=(cache, cache), scales=(scales, scales))


def test_floats_need_conversions_of_the_gpu():
    assert served_codes(80) == {"int8"} and served_codes(90) == {*CODES}
