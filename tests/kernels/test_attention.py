"""attention of whole sequences."""

import ml_dtypes
import numpy as np
import pytest

from . import oracles
from .cases import GARBAGE, assert_close, normal


def inputs(
    dtype: np.dtype, batch: int, tokens: int, heads: int, kv_heads: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q = normal(1, batch, tokens, heads, dim, dtype=dtype)
    k = normal(2, batch, tokens, kv_heads, dim, dtype=dtype)
    v = normal(3, batch, tokens, kv_heads, dim, dtype=dtype)
    return q, k, v


def left_padding(tokens: int, *pads: int) -> np.ndarray:
    return np.arange(tokens)[None] >= np.array(pads)[:, None]


def packed(tokens: int, *lengths: int) -> np.ndarray:
    """Segment numbers [1, T] of sequences one after another."""
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    assert len(numbers) == tokens
    return numbers[None].astype(np.int32)


SHAPES = {
    "one token": (2, 1, 5, 5, 80),
    "odd": (2, 63, 6, 3, 80),
    "one kv head": (3, 17, 5, 1, 80),
    "long": (1, 1000, 6, 3, 16),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_the_reference(maths, dtype, shape, causal):
    q, k, v = inputs(dtype, *shape)
    how = {"scale": shape[-1] ** -0.5, "causal": causal}
    expected = oracles.attention(q, k, v, **how)
    # Weights and their products with the values are rounded too.
    assert_close(maths.attention(q, k, v, **how), expected, dtype, length=shape[1], roundings=2)


PADDED = left_padding(63, 0, 11)
OPTIONS = {
    "window of 1": {"causal": True, "window": 1},
    "window of 7": {"causal": True, "window": 7},
    "window of T": {"causal": True, "window": 63},
    "window beyond T": {"causal": True, "window": 2000},
    "mask": {"causal": True, "mask": PADDED},
    "mask, bidirectional": {"causal": False, "mask": PADDED},
    "one token left": {"causal": True, "mask": left_padding(63, 62, 40)},
    "holes": {"causal": False, "mask": np.random.default_rng(6).random((2, 63)) < 0.3},
    "nothing left": {"causal": False, "mask": np.zeros((2, 63), bool)},
    "segments": {"causal": True, "segments": np.repeat(packed(63, 1, 30, 32), 2, 0)},
    "segments, bidirectional": {"causal": False, "segments": np.repeat(packed(63, 40, 23), 2, 0)},
    "all": {
        "causal": True,
        "window": 7,
        "mask": PADDED,
        "segments": np.repeat(packed(63, 5, 20, 38), 2, 0),
    },
}


SLOPES = np.array([2.0**-n for n in (1, 2, 4, 6, 0, 8)], np.float32)
ROUNDED = np.array([0.0031, 0.0273, 0.0131, 0.0523, 0.0017, 0.0008], ml_dtypes.bfloat16)
ROUNDED = ROUNDED.astype(np.float32)
SINKS = np.array([0.0, 3.0, -3.0, 20.0, 0.5, -40.0], np.float32)
RELATIVE = normal(11, 6, 2 * 10 + 1, dtype=np.float32)  # alike from 10 tokens on
COUNTED = np.maximum(PADDED.cumsum(1) - 1, 0).astype(np.int32)
SCORING = {
    "alibi": {"causal": True, "alibi": SLOPES},
    "alibi, bidirectional": {"causal": False, "alibi": -SLOPES},
    "alibi, positions": {
        "causal": True,
        "alibi": SLOPES,
        "mask": PADDED,
        "positions": COUNTED,
    },
    "alibi, positions with gaps": {
        "causal": True,
        "alibi": SLOPES,
        "positions": np.sort(np.random.default_rng(7).integers(0, 200, (2, 63))).astype(np.int32),
    },
    "alibi, rounded": {
        **{"causal": True, "alibi": ROUNDED, "alibi_scale": 0.3},
        "positions": np.sort(np.random.default_rng(8).integers(0, 2000, (2, 63))).astype(np.int32),
    },
    "relative": {"causal": True, "relative": RELATIVE},
    "relative, bidirectional": {"causal": False, "relative": RELATIVE, "mask": PADDED},
    "softcap": {"causal": True, "softcap": 2.5},
    "softcap, bidirectional": {"causal": False, "softcap": 50.0},
    "sinks": {"causal": True, "sinks": SINKS},
    "softcap, window": {"causal": True, "softcap": 2.5, "window": 7},
    "all": {
        "causal": True,
        "window": 30,
        "mask": PADDED,
        "segments": np.repeat(packed(63, 5, 20, 38), 2, 0),
        "alibi": SLOPES,
        "positions": COUNTED,
        "softcap": 2.5,
        "sinks": SINKS,
    },
}


@pytest.mark.parametrize("options", SCORING.values(), ids=SCORING)
def test_attention_scores_as_the_options_say(maths, dtype, options):
    q, k, v = inputs(dtype, 2, 63, 6, 3, 80)
    expected = oracles.attention(q, k, v, scale=0.2, **options)
    actual = maths.attention(q, k, v, scale=0.2, **options)
    assert_close(actual, expected, dtype, length=63, roundings=2)


@pytest.mark.parametrize("kv_heads", [1, 6])
def test_attention_gives_each_head_its_slope_and_sink(maths, kv_heads):
    dtype = np.dtype(np.float32)
    q, k, v = inputs(dtype, 1, 17, 6, kv_heads, 16)
    options = {"scale": 0.25, "causal": True, "alibi": SLOPES, "sinks": SINKS}
    expected = oracles.attention(q, k, v, **options)
    assert_close(maths.attention(q, k, v, **options), expected, dtype, length=17)


def test_attention_counts_distances_alike_at_far_positions(maths):
    """Slope times position alone would lose the digits that tell neighbours apart."""
    dtype = np.dtype(np.float32)
    q, k, v = inputs(dtype, 1, 17, 6, 3, 16)
    how = {"scale": 0.25, "causal": True, "alibi": SLOPES}
    near = np.arange(17, dtype=np.int32)[None]
    np.testing.assert_array_equal(
        maths.attention(q, k, v, positions=near + 1_000_000, **how),
        maths.attention(q, k, v, positions=near, **how),
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_hides_what_the_options_say(maths, dtype, options):
    q, k, v = inputs(dtype, 2, 63, 6, 3, 80)
    expected = oracles.attention(q, k, v, scale=0.2, **options)
    actual = maths.attention(q, k, v, scale=0.2, **options)
    assert_close(actual, expected, dtype, length=63, roundings=2)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_attention_does_not_see_garbage_in_padding(maths, dtype, causal):
    q, k, v = inputs(dtype, 2, 63, 6, 3, 80)
    k[~PADDED], v[~PADDED] = GARBAGE, -GARBAGE
    how = {"scale": 80**-0.5, "causal": causal, "mask": PADDED}
    expected = oracles.attention(q, k, v, **how)
    actual = maths.attention(q, k, v, **how)
    assert np.isfinite(actual.astype(np.float32)).all(), "a padded query is not finite"
    assert_close(actual[PADDED], expected[PADDED], dtype, length=63, roundings=2)


def test_attention_of_packed_sequences_is_that_of_each_alone(maths):
    dtype = np.dtype(np.float32)
    q, k, v = inputs(dtype, 1, 63, 6, 3, 80)
    how = {"scale": 80**-0.5, "causal": True}
    whole = maths.attention(q, k, v, segments=packed(63, 23, 40), **how)
    for part in (slice(0, 23), slice(23, 63)):
        alone = maths.attention(q[:, part], k[:, part], v[:, part], **how)
        assert_close(whole[:, part], alone, dtype, length=63)


def test_attention_holds_at_large_scores(maths, dtype):
    """The scores reach 20000, and a softmax that does not subtract their maximum overflows."""
    q, k, v = inputs(dtype, 1, 63, 6, 3, 80)
    q, k = np.sign(q.astype(np.float32)).astype(dtype), np.sign(k.astype(np.float32)).astype(dtype)
    how = {"scale": 256.0, "causal": True}
    expected = oracles.attention(q, k, v, **how)
    assert_close(maths.attention(q, k, v, **how), expected, dtype, roundings=2)


def test_reference_attention_is_that_of_hf():
    """Gemma 2's scores, BLOOM's ALiBi and gpt-oss' sinks."""
    torch = pytest.importorskip("torch")
    from transformers.models.bloom import modeling_bloom
    from transformers.models.falcon import modeling_falcon
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    q, k, v = inputs(np.dtype(np.float32), 2, 63, 6, 6, 16)
    heads_first = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
    hidden = torch.full((63, 63), float("-inf")).triu(1)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 1, torch.from_numpy(SINKS)
    how = {"attention_mask": hidden, "scaling": 0.4}
    capped, _ = modeling_gemma2.eager_attention_forward(module, *heads_first, **how, softcap=2.5)
    sunk, _ = modeling_gpt_oss.eager_attention_forward(module, *heads_first, **how)
    padding = torch.from_numpy(PADDED.astype(np.int64))
    bias = modeling_bloom.build_alibi_tensor(padding, 6, torch.float32).view(2, 6, 1, 63)
    scores = heads_first[0] @ heads_first[1].transpose(2, 3) * 0.4 + bias + hidden
    scores = scores.masked_fill(padding[:, None, None] == 0, float("-inf"))
    sloped = (scores.softmax(-1) @ heads_first[2]).transpose(1, 2).numpy()
    slopes = modeling_bloom._get_alibi_slopes(6, torch.device("cpu")).numpy()
    far = torch.ones(2, 963, dtype=torch.int64)
    bias = modeling_falcon.build_alibi_tensor(far, 6, torch.float32).view(2, 6, 1, -1)[..., -63:]
    scores = heads_first[0] @ heads_first[1].transpose(2, 3) * 0.4 + bias * 0.05 + hidden
    rounded = (scores.softmax(-1) @ heads_first[2]).transpose(1, 2).numpy()
    coarse = {"alibi": slopes.astype(ml_dtypes.bfloat16).astype(np.float32), "alibi_scale": 0.05}
    coarse["positions"] = np.broadcast_to(np.arange(900, 963), (2, 63))
    found = {
        name: oracles.attention(q, k, v, scale=0.4, causal=True, **options)
        for name, options in (
            ("capped", {"softcap": 2.5}),
            ("sunk", {"sinks": SINKS}),
            ("sloped", {"alibi": slopes, "mask": PADDED, "positions": COUNTED}),
            ("rounded", coarse),
        )
    }
    dtype = np.dtype(np.float32)
    assert_close(found["capped"], capped.numpy(), dtype, length=63)
    assert_close(found["sunk"], sunk.numpy(), dtype, length=63)
    assert_close(found["sloped"][PADDED], sloped[PADDED], dtype, length=63)
    assert_close(found["rounded"], rounded, dtype, length=63)


def test_reference_query_sees_itself_only_where_it_would_see_nothing():
    mask = np.array([[False, False, True, True], [True, True, True, False]])
    causal = oracles.visible_keys(4, causal=True, mask=mask)
    assert causal.astype(int).tolist() == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]],
    ]
    both = oracles.visible_keys(4, causal=False, mask=mask)
    assert (both == mask[:, None, :]).all()
    windowed = oracles.visible_keys(4, causal=True, window=1, mask=mask[1:])
    assert (windowed[0] == np.eye(4, dtype=bool)).all()


@pytest.mark.parametrize("option", ["causal", "bidirectional", "window", "mask", "segments", "all"])
def test_jax_attends_in_pieces_as_in_one(option, monkeypatch):
    """Long sequences: the scores of a piece of the queries at a time."""
    put = pytest.importorskip("jax").numpy.asarray
    from dualinfer.backends.jax import maths
    from dualinfer.ops.attention import attention
    from dualinfer.ops.maths import KeyScoring

    rng = np.random.default_rng(4)
    q, k, v = (normal(i, 2, 64, heads, 16, dtype=np.dtype(np.float32)) for i, heads in
               enumerate((4, 2, 2)))  # fmt: skip
    how: dict = {"causal": option != "bidirectional"}
    own: dict = {"scale": 0.25}
    if option in ("window", "all"):
        how["window"] = 19
    if option in ("mask", "all"):
        how["mask"] = rng.random((2, 64)) > 0.3
    if option in ("segments", "all"):
        how["segments"] = np.sort(rng.integers(0, 3, (2, 64)), axis=1)
    if option == "all":
        own |= {"alibi": put(np.linspace(0.1, 0.5, 4, dtype=np.float32)), "softcap": 3.0}
        own |= {"sinks": put(np.ones(4, np.float32))}
        how |= {"positions": rng.integers(0, 50, (2, 64))}
    how = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
    given = put(q), put(k), put(v), KeyScoring(**own)
    whole = attention(maths.MATHS, *given, **how)
    for size in (16, 24):  # the second does not divide the tokens
        monkeypatch.setattr(maths, "_WHOLE", size)
        pieces = attention(maths.MATHS, *given, **how)
        assert_close(np.asarray(pieces), np.asarray(whole), q.dtype, length=64)


@pytest.mark.parametrize(("tokens", "softcap"), [(1, None), (7, 0.7)])
@pytest.mark.parametrize("lengths", [None, (63, 1, 40)], ids=["all", "some"])
def test_cross_attention_is_the_reference(maths, dtype, tokens, softcap, lengths):
    q = normal(1, 3, tokens, 6, 80, dtype=dtype)
    k, v = (normal(i, 3, 3, 63, 80, dtype=dtype) for i in (2, 3))
    visible = None
    if lengths is not None:
        visible = np.arange(63) < np.array(lengths)[:, None]
        for part in (k, v):
            part[~np.broadcast_to(visible[:, None], part.shape[:3])] = GARBAGE
    how = {"scale": 0.2, "softcap": softcap}
    expected = oracles.cross_attention(q, k, v, visible, **how)
    actual = maths.cross_attention(q, k, v, visible, **how)
    assert_close(actual, expected, dtype, length=63, roundings=2)
