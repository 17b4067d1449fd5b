"""Triton's rotary embedding, with head norms and the cache's append."""

from typing import Any

import numpy as np
import pytest

from . import oracles
from .cases import assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, strided, torch
from .test_norms import gain

from dualinfer.kernels.triton.rotary import rotary_append  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]


class Prompt:
    """Inputs of `rotary_append` as arrays, and what it should leave behind."""

    def __init__(self, dtype: np.dtype, heads: int, kv_heads: int, dim: int, part: int) -> None:
        self.sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
        self.batch, self.tokens = 3, 3
        shape = self.batch, self.tokens, (heads + 2 * kv_heads) * dim
        self.qkv = normal(1, *shape, dtype=dtype, scale=2.0)
        self.positions = np.array([[0], [17], [131_000]]) + np.arange(self.tokens)
        exponents = np.arange(0, part, 2) / max(part, 1)
        self.inv_freq = (10000.0**-exponents).astype(np.float32)
        self.cache = tuple(normal(i, 4, kv_heads, 9, dim, dtype=dtype) for i in (2, 3))
        self.slots, self.starts = np.array([2, 0, 3]), np.array([0, 4, 3])

    def expected(
        self,
        scaling: float,
        interleaved: bool,
        norms: Any = None,
        offset: float = 0.0,
        turned: bool = False,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v [B, T, heads, D], float32."""
        h, k = self.sizes["heads"], self.sizes["kv_heads"]
        x = self.qkv.reshape(self.batch, self.tokens, -1, self.sizes["head_dim"])
        q, k, v = np.split(x.astype(np.float64), [h, h + k], axis=2)

        def normed(*parts: np.ndarray) -> Any:
            return (
                meaning.rms_norm(p, n.astype(np.float64) + offset, 1e-6)
                for p, n in zip(parts, norms, strict=True)
            )

        if norms and not turned:
            q, k = normed(q, k)
        if self.inv_freq.size:
            turns = self.positions.astype(np.float32)[..., None] * self.inv_freq
            cos, sin = (scaling * f(turns.astype(np.float64)) for f in (np.cos, np.sin))
            q, k = (meaning.rotary(p, cos, sin, interleaved) for p in (q, k))
        if turned:
            q, k = normed(q, k)
        return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def check(prompt: Prompt, dtype: np.dtype, expected: Any, cached: bool = True, **options: Any):
    """Run the op on a strided qkv and cache, and compare all that it may write."""
    larger = np.pad(prompt.qkv, [(0, 1), (1, 1), (0, 0)], constant_values=np.nan)
    whole = put(larger)
    qkv = whole[: prompt.batch, 1 : 1 + prompt.tokens]
    cache = tuple(strided(part) for part in prompt.cache) if cached else None
    positions = put(prompt.positions)
    apart = rotary_append(qkv, positions, **prompt.sizes, apart=True, **options)
    same = (x.astype(np.float32) for x in (get(whole), larger))
    np.testing.assert_array_equal(*same)
    if cached:
        options |= {"slots": put(prompt.slots), "starts": put(prompt.starts).int()}
    rotary_append(qkv, positions, **prompt.sizes, cache=cache, **options)
    q, k, v = expected
    heads = get(qkv).reshape(prompt.batch, prompt.tokens, -1, prompt.sizes["head_dim"])
    split = np.split(heads, [q.shape[2], q.shape[2] + k.shape[2]], axis=2)
    for part, its in zip(apart, split, strict=True):
        np.testing.assert_array_equal(get(part), its)
    length = prompt.sizes["head_dim"]
    assert_close(split[0], q, dtype, length=length)
    assert_close(split[1], k, dtype, length=length)
    np.testing.assert_array_equal(split[2].astype(np.float32), v)
    outside = get(whole).copy()
    outside[: prompt.batch, 1 : 1 + prompt.tokens] = np.nan
    assert np.isnan(outside.astype(np.float32)).all()
    if cache is None:
        return
    for found, old, new in zip(cache, prompt.cache, split[1:], strict=True):
        wanted = old.copy()
        for b, (slot, start) in enumerate(zip(prompt.slots, prompt.starts, strict=True)):
            wanted[slot, :, start : start + prompt.tokens] = new[b].swapaxes(0, 1)
        np.testing.assert_array_equal(get(found), wanted)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "part"),
    [(1, 1, 2, 2), (6, 2, 64, 64), (5, 1, 80, 32), (20, 4, 96, 96), (3, 3, 63, 20)],
    ids=str,
)
def test_prefill_turns_and_appends(dtype, heads, kv_heads, dim, part, interleaved):
    prompt = Prompt(dtype, heads, kv_heads, dim, part)
    expected = prompt.expected(1.25, interleaved)
    inv_freq = put(prompt.inv_freq)
    check(prompt, dtype, expected, inv_freq=inv_freq, scaling=1.25, interleaved=interleaved)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("dim", "part"), [(64, 64), (80, 32), (63, 0)], ids=str)
def test_prefill_norms_heads_before_it_turns_them(dtype, dim, part, offset):
    prompt = Prompt(dtype, 6, 2, dim, part)
    norms = gain(dtype, dim), normal(8, dim, dtype=dtype)
    expected = prompt.expected(1.0, part == 32, norms, float(offset))
    options = {
        "inv_freq": put(prompt.inv_freq) if part else None,
        "interleaved": part == 32,
        "q_norm": put(norms[0]),
        "k_norm": put(norms[1]),
        "norm_eps": 1e-6,
        "norm_unit_offset": offset,
    }
    check(prompt, dtype, expected, **options)
    check(prompt, dtype, expected, cached=False, **options)


@pytest.mark.parametrize(("dim", "part"), [(64, 64), (80, 32)], ids=str)
def test_prefill_norms_heads_after_it_has_turned_them(dtype, dim, part):
    prompt = Prompt(dtype, 6, 2, dim, part)
    norms = gain(dtype, dim), normal(8, dim, dtype=dtype)
    expected = prompt.expected(1.25, part == 32, norms, turned=True)
    options = {"inv_freq": put(prompt.inv_freq), "interleaved": part == 32, "scaling": 1.25}
    options |= {"q_norm": put(norms[0]), "k_norm": put(norms[1]), "norm_eps": 1e-6}
    check(prompt, dtype, expected, norm_turned=True, **options)


def test_long_sequences_turn_by_the_second_table(dtype):
    """From one position of their last token on, whatever that of the others is."""
    short, long = (Prompt(dtype, 6, 2, 80, 32) for _ in range(2))
    long.inv_freq = long.inv_freq / 3
    ends = np.array([40, 39, 131_002])
    parts = short.expected(1.25, False), long.expected(1.25, False)
    is_long = (ends >= 40)[:, None, None, None]
    expected = tuple(np.where(is_long, b, a) for a, b in zip(*parts, strict=True))
    both = put(np.stack([short.inv_freq, long.inv_freq]))
    check(short, dtype, expected, inv_freq=both, scaling=1.25, ends=put(ends), original=40)
    with pytest.raises(ValueError, match="go with frequencies by length"):
        check(short, dtype, expected, inv_freq=both, original=40)


def test_long_sequences_turn_by_stretched_frequencies(dtype):
    """As much as the position of each one's last token asks for (dynamic NTK)."""
    prompt, ends, expected = Prompt(dtype, 6, 2, 80, 32), np.array([2, 40, 131_002]), []
    own = prompt.inv_freq
    for i, end in enumerate(ends):
        base = 3.0 * max(end + 1, 40) / 40 - 2.0
        prompt.inv_freq = (own * base ** -(np.arange(16) / 15)).astype(np.float32)
        expected.append([part[i] for part in prompt.expected(1.25, False)])
    prompt.inv_freq, prompt.positions = own, prompt.positions[:2]
    parts = tuple(np.stack(part)[:2] for part in zip(*expected, strict=True))
    prompt.qkv, prompt.batch = prompt.qkv[:2], 2
    prompt.slots, prompt.starts = prompt.slots[:2], prompt.starts[:2]
    how = {"inv_freq": put(own), "scaling": 1.25, "original": 40, "stretch": 3.0}
    check(prompt, dtype, parts, ends=put(ends[:2]), **how)


@pytest.mark.parametrize("only", ["q", "k"])
def test_one_norm_alone_leaves_the_other_heads(dtype, only):
    prompt = Prompt(dtype, 6, 2, 80, 0)
    weight = gain(dtype, 80)
    q, k, v = prompt.expected(1.0, False, (weight, weight))
    q_old, k_old, _ = prompt.expected(1.0, False)
    expected = (q, k_old, v) if only == "q" else (q_old, k, v)
    for cached in (False, True):
        check(prompt, dtype, expected, cached, norm_eps=1e-6, **{f"{only}_norm": put(weight)})


@pytest.mark.parametrize("dim", [1, 63, 80])
def test_without_rope_the_cache_gets_what_is_there(dtype, dim):
    prompt = Prompt(dtype, 6, 2, dim, 0)
    check(prompt, dtype, prompt.expected(1.0, False))


def test_without_anything_to_do_nothing_is_launched(monkeypatch):
    from dualinfer.kernels.triton import rotary as module

    monkeypatch.delattr(module, "launch")
    qkv = put(np.ones((1, 3, 8), np.float32))
    rotary_append(qkv, None, heads=2, kv_heads=1, head_dim=2)
    assert (qkv == 1).all()


def test_slots_and_starts_default_to_the_sequence_and_the_beginning():
    qkv = put(normal(1, 2, 3, 8, dtype=np.dtype(np.float32)))
    cache = tuple(put(np.zeros((2, 1, 4, 2), np.float32)) for _ in range(2))
    rotary_append(qkv, None, heads=2, kv_heads=1, head_dim=2, cache=cache)
    for i, part in enumerate(cache):
        assert torch.equal(part[:, 0, :3], qkv[..., 4 + 2 * i : 6 + 2 * i])
        assert (part[:, 0, 3] == 0).all()


def test_tokens_behind_the_cache_are_dropped():
    qkv = put(normal(1, 1, 5, 6, dtype=np.dtype(np.float32)))
    whole = put(np.zeros((2, 2, 1, 4, 2), np.float32))
    cache, starts = (whole[0, :1], whole[1, :1]), put(np.array([2]))
    rotary_append(qkv, None, heads=1, kv_heads=1, head_dim=2, cache=cache, starts=starts)
    assert torch.equal(whole[0, 0, 0, 2:], qkv[0, :2, 2:4])
    assert torch.equal(whole[1, 0, 0, 2:], qkv[0, :2, 4:])
    assert whole.count_nonzero() == 8


def test_a_table_says_where_tokens_go():
    """Slots have blocks of 4 tokens: over the edges of blocks, behind the last, where none is."""
    prompt = Prompt(np.dtype(np.float32), 6, 2, 80, 32)
    prompt.starts = np.array([3, 6, 1])
    prompt.cache = tuple(x[:, :, :8] for x in prompt.cache)
    table = np.array([[6, 1], [-1, -1], [0, 7], [5, -1]], np.int32)
    pools = [normal(i, 9, 2, 4, 80, dtype=np.dtype(np.float32)) for i in (4, 5)]
    found, tables = [put(x) for x in pools], put(np.pad(table, [(0, 0), (0, 3)]))[:, :2]
    whole = [put(oracles.read_blocks(x, table)) for x in pools]
    for cache, how in ((tuple(found), {"table": tables}), (tuple(whole), {})):
        qkv = put(prompt.qkv)
        how = {**how, "slots": put(prompt.slots), "starts": put(prompt.starts)}
        how |= {"inv_freq": put(prompt.inv_freq), "cache": cache}
        rotary_append(qkv, put(prompt.positions), **prompt.sizes, **how)
    for pool, left, expected in zip(pools, found, map(get, whole), strict=True):
        left = get(left)
        unnamed = np.setdiff1d(np.arange(9), table)
        np.testing.assert_array_equal(left[unnamed], pool[unnamed])
        expected[3, :, 4:] = 0  # of a block that is not there
        np.testing.assert_array_equal(oracles.read_blocks(left, table), expected)


def test_a_slot_behind_the_cache_takes_nothing():
    """Padding rows of a batch have one."""
    qkv = put(normal(1, 2, 3, 6, dtype=np.dtype(np.float32)))
    whole = put(np.zeros((2, 3, 1, 4, 2), np.float32))
    cache, slots = (whole[0, :2], whole[1, :2]), put(np.array([2, 1], np.int32))
    rotary_append(qkv, None, heads=1, kv_heads=1, head_dim=2, cache=cache, slots=slots)
    assert torch.equal(whole[0, 1, 0, :3], qkv[1, :, 2:4])
    assert torch.equal(whole[1, 1, 0, :3], qkv[1, :, 4:])
    assert whole.count_nonzero() == 12


def test_what_cannot_be_run_is_refused():
    x = put(np.ones((1, 3, 2, 4), np.float32))
    qkv, sizes = x.view(1, 3, 8), {"heads": 2, "kv_heads": 1, "head_dim": 2}
    at, one = put(np.arange(3))[None], put(np.ones(1, np.float32))
    with pytest.raises(ValueError, match=r"\[B, T, 10\] is expected"):
        rotary_append(qkv, at, heads=3, kv_heads=1, head_dim=2)
    with pytest.raises(ValueError, match="3 angles turn 6 elements; a head has 2"):
        rotary_append(qkv, at, inv_freq=put(np.ones(3, np.float32)), **sizes)
    with pytest.raises(ValueError, match="positions is None"):
        rotary_append(qkv, None, inv_freq=one, **sizes)
    with pytest.raises(ValueError, match="inv_freq has dtype"):
        rotary_append(qkv, at, inv_freq=one.half(), **sizes)
    with pytest.raises(ValueError, match="without a cache"):
        rotary_append(qkv, at, slots=at[0, :1], **sizes)
    with pytest.raises(ValueError, match=r"\[N, 1, S, 2\]"):
        rotary_append(qkv, at, cache=(x, x), **sizes)
