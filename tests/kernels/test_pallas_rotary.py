"""Pallas' rotary_append; and that it lowers for a GPU."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from dualinfer.kernels import reference

from .cases import DTYPES, assert_close, normal
from .test_norms import gain

jax = pytest.importorskip("jax")

from dualinfer.kernels.pallas import rotary  # noqa: E402

from .arrays import INTERPRETED, check_lowers, get, put, struct  # noqa: E402

rotary_append = partial(rotary.rotary_append, interpret=INTERPRETED)
EPS = 1e-6
FLOAT32 = np.dtype(np.float32)


def expected_heads(qkv: np.ndarray, heads: int, kv_heads: int, **how: Any) -> list[np.ndarray]:
    """Queries, keys and values [B, T, heads, D], float32."""
    x = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, -1).astype(np.float32)
    parts = np.split(x, [heads, heads + kv_heads], axis=2)
    for i, name in enumerate(("q_norm", "k_norm")):
        if how.get(name) is not None:
            offset = how.get("norm_unit_offset", False)
            parts[i] = reference.rms_norm(parts[i], how[name], EPS, unit_offset=offset)
        if how.get("cos") is not None:
            turn = how["cos"], how["sin"], how.get("interleaved", False)
            parts[i] = reference.rotary(parts[i], *turn)
    return parts


def angles(batch: int, tokens: int, half: int) -> dict[str, np.ndarray]:
    turns = normal(7, batch, tokens, half, dtype=FLOAT32) * 3
    return {"cos": np.cos(turns), "sin": np.sin(turns)}


CASES: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    # batch, tokens, heads, KV heads, head_dim, options
    "bare": (2, 5, 3, 3, 16, {}),
    "turned": (2, 7, 4, 2, 16, {"half": 8}),
    "partly": (1, 33, 2, 1, 20, {"half": 4}),
    "interleaved": (3, 6, 2, 1, 16, {"half": 4, "interleaved": True}),
    "normed": (2, 9, 2, 1, 16, {"half": 8, "normed": True}),
    "unit offset": (2, 9, 2, 1, 20, {"normed": True, "norm_unit_offset": True}),
    "wide": (1, 40, 2, 1, 128, {"half": 64}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_and_cache_are_those_of_the_reference(name, dtype):
    batch, tokens, heads, kv_heads, dim, options = CASES[name]
    options = dict(options)
    how = angles(batch, tokens, options.pop("half")) if "half" in options else {}
    if options.pop("normed", False):
        how |= {"q_norm": gain(dtype, dim), "k_norm": gain(dtype, dim)[::-1].copy()}
    qkv = normal(1, batch, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    old = [normal(i, batch + 2, kv_heads, tokens + 3, dim, dtype=dtype) for i in (2, 3)]
    slots = np.array([batch + 1, 0, batch + 2][:batch], np.int32)  # the third one is not there
    arrays = {n: put(x) for n, x in how.items()}
    q, k, v, cache = rotary_append(
        put(qkv),
        arrays.pop("cos", None),
        arrays.pop("sin", None),
        heads=heads,
        kv_heads=kv_heads,
        cache=(put(old[0]), put(old[1])),
        slots=put(slots),
        norm_eps=EPS,
        **arrays,
        **options,
    )
    expected = expected_heads(qkv, heads, kv_heads, **how, **options)
    for found, wanted in zip((q, k, v), expected, strict=True):
        assert_close(get(found), wanted, dtype, length=dim)
    assert cache is not None
    for kept, new, before in zip(cache, (k, v), old, strict=True):
        before = before.copy()
        for row, slot in enumerate(slots):
            if slot < len(before):
                before[slot, :, :tokens] = get(new)[row].swapaxes(0, 1)
        np.testing.assert_array_equal(get(kept), before)


def test_without_a_cache_there_is_none():
    qkv = normal(1, 1, 3, 4 * 16, dtype=FLOAT32)
    q, k, v, cache = rotary_append(put(qkv), None, None, heads=2, kv_heads=1)
    assert cache is None and q.shape == (1, 3, 2, 16) and k.shape == v.shape == (1, 3, 1, 16)
    np.testing.assert_array_equal(get(q).reshape(3, -1), qkv[0, :, :32])


def test_wrong_shapes_are_refused():
    qkv, cache = put(normal(1, 1, 8, 64, dtype=FLOAT32)), put(np.zeros((2, 1, 4, 16), np.float32))
    with pytest.raises(ValueError, match="does not hold 3 heads"):
        rotary_append(qkv, None, None, heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="goes with slots"):
        rotary_append(qkv, None, None, heads=2, kv_heads=1, cache=(cache, cache))
    slots = put(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="cannot hold 8 tokens of 1 heads"):
        rotary_append(qkv, None, None, heads=2, kv_heads=1, cache=(cache, cache), slots=slots)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "half"), [(64, 0), (80, 16), (128, 64), (256, 32)])
def test_it_lowers_for_a_gpu(dim, half, dtype):
    def call(qkv, cos, sin, keys, values, slots):
        how = {"heads": 4, "kv_heads": 2, "interleaved": dim == 256}
        return rotary.rotary_append(qkv, cos, sin, cache=(keys, values), slots=slots, **how)

    turn = struct(3, 100, half, dtype=np.float32) if half else None
    cache = struct(4, 2, 128, dim, dtype=dtype)
    slots = struct(3, dtype=np.int32)
    assert "triton" in check_lowers(
        call, struct(3, 100, 8 * dim, dtype=dtype), turn, turn, cache, cache, slots
    )
