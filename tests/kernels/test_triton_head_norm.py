"""Triton's norms of queries and keys that are a launch of their own."""

import numpy as np
import pytest

from .cases import assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict

from dualinfer.kernels.triton.head_norm import norm_heads  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]
BATCH, TOKENS, EPS = 2, 3, 1e-5


def weights(seed: int, over: str, heads: int, dim: int, dtype: np.dtype) -> np.ndarray:
    shape = {"head": (dim,), "own": (heads, dim), "all": (heads * dim,)}[over]
    return normal(seed, *shape, dtype=dtype)


@pytest.mark.parametrize("kind", ["rms", "rms_offset", "layer", "layer_bias"])
@pytest.mark.parametrize("over", ["head", "own", "all"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 1), (6, 2, 80), (5, 1, 63)], ids=str)
def test_queries_and_keys_are_normed_in_place(dtype, heads, kv_heads, dim, over, kind):
    qkv = normal(1, BATCH, TOKENS, (heads + 2 * kv_heads) * dim, dtype=dtype, scale=2.0)
    larger = np.pad(qkv, [(0, 1), (1, 1), (0, 0)], constant_values=np.nan)
    whole = put(larger)
    offset, expected, how = kind == "rms_offset", [], {}
    parts = np.split(qkv.reshape(BATCH, TOKENS, -1, dim), [heads, heads + kv_heads], axis=2)
    for i, (name, part) in enumerate(zip("qk", parts[:2], strict=True)):
        x = part.reshape(BATCH, TOKENS, -1) if over == "all" else part
        how[f"{name}_weight"] = weight = weights(2 + i, over, part.shape[2], dim, dtype)
        bias = None
        if kind == "layer_bias":
            how[f"{name}_bias"] = bias = weights(4 + i, over, part.shape[2], dim, dtype)
        if kind.startswith("rms"):
            y = meaning.rms_norm(x, weight, EPS, offset)
        else:
            y = meaning.layer_norm(x, weight, bias, EPS)
        expected.append(y.reshape(BATCH, TOKENS, -1))
    expected.append(parts[2].reshape(BATCH, TOKENS, -1).astype(np.float32))
    norm_heads(
        whole[:BATCH, 1 : 1 + TOKENS],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        over=over,
        center=kind.startswith("layer"),
        eps=EPS,
        unit_offset=offset,
        **{name: put(part) for name, part in how.items()},
    )
    found = get(whole)[:BATCH, 1 : 1 + TOKENS]
    length = heads * dim if over == "all" else dim
    assert_close(found, np.concatenate(expected, -1), dtype, length=length)
    outside = get(whole).copy()
    outside[:BATCH, 1 : 1 + TOKENS] = np.nan
    assert np.isnan(outside.astype(np.float32)).all()


@pytest.mark.parametrize(("normed", "ahead"), [(False, 1), (True, 0)])
def test_queries_alone_grow_with_their_position(dtype, normed, ahead):
    heads, kv_heads, dim = 6, 2, 20
    qkv = normal(1, BATCH, TOKENS, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = np.array([[0, 15, 16], [31, 32, 100_000]])
    q, k, v = np.split(qkv.reshape(BATCH, TOKENS, -1, dim), [heads, heads + kv_heads], axis=2)
    how = {}
    if normed:
        gains = {f"{x}_weight": normal(i, dim, dtype=dtype) for i, x in enumerate("qk", 2)}
        q, k = (meaning.rms_norm(x, w, EPS) for x, w in zip((q, k), gains.values(), strict=True))
        how = {name: put(gain) for name, gain in gains.items()}
    grown = 1 + 0.3 * np.log(1 + (positions + ahead) // 16)
    q = q.astype(np.float64) * grown[..., None, None]
    expected = np.concatenate([x.reshape(BATCH, TOKENS, -1) for x in (q, k, v)], -1)
    x = put(qkv)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "eps": EPS}
    norm_heads(x, positions=put(positions), growth=(0.3, 16.0, ahead), **sizes, **how)
    assert_close(get(x), expected.astype(np.float32), dtype, length=dim)


def test_what_cannot_be_run_is_refused():
    x, sizes = put(np.ones((1, 3, 8), np.float32)), {"heads": 2, "kv_heads": 1, "head_dim": 2}
    two = put(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"\[B, T, 10\] is expected"):
        norm_heads(x, heads=3, kv_heads=1, head_dim=2)
    with pytest.raises(ValueError, match="over='each'"):
        norm_heads(x, over="each", **sizes)
    with pytest.raises(ValueError, match=r"q_weight has shape \(2,\); \(4,\) is expected"):
        norm_heads(x, q_weight=two, k_weight=two, over="all", **sizes)
    with pytest.raises(ValueError, match="k_weight is missing"):
        norm_heads(x, q_weight=two, **sizes)
    with pytest.raises(ValueError, match="Queries grow by int positions"):
        norm_heads(x, growth=(0.1, 4.0, 0), **sizes)
    assert (x == 1).all()
