"""rotary."""

import numpy as np
import pytest

from dualinfer.kernels import reference

from .cases import assert_close, normal


def angles(positions: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [B, T, D/2], of positions [B, T] at rope_theta 10000."""
    frequencies = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    turns = positions[..., None] * frequencies
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 2), (63, 5, 80), (7, 6, 64), (1000, 3, 6)], ids=str
)
def test_rotary_is_the_reference(maths, dtype, tokens, heads, dim):
    x = normal(1, 2, tokens, heads, dim, dtype=dtype)
    start = np.array([[0], [100_000]])  # left-padded rows have positions of their own
    cos, sin = angles(start + np.arange(tokens), dim)
    assert_close(maths.rotary(x, cos, sin), reference.rotary(x, cos, sin), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "turning"), [(80, 80), (80, 20), (84, 2), (28, 10)])
def test_rotary_of_a_part_of_each_head_is_the_reference(maths, dtype, dim, turning, interleaved):
    x = normal(1, 2, 63, 5, dim, dtype=dtype)
    cos, sin = angles(np.arange(63) + np.array([[0], [1000]]), turning)
    expected = reference.rotary(x, cos, sin, interleaved)
    actual = maths.rotary(x, cos, sin, interleaved)
    assert_close(actual, expected, dtype)
    np.testing.assert_array_equal(actual[..., turning:], x[..., turning:])


def test_rotary_at_position_zero_changes_nothing(maths, dtype):
    x = normal(2, 1, 1, 5, 80, dtype=dtype)
    cos, sin = angles(np.zeros((1, 1)), 80)
    np.testing.assert_array_equal(maths.rotary(x, cos, sin), x)


def test_rotary_applies_the_scaling_in_cos_and_sin(maths, dtype):
    """Yarn multiplies cos and sin, so that the length of a head changes."""
    x = normal(3, 1, 63, 5, 80, dtype=dtype)
    cos, sin = (1.25 * part for part in angles(np.arange(63)[None], 80))
    assert_close(maths.rotary(x, cos, sin), reference.rotary(x, cos, sin), dtype)


def test_reference_rotary_is_that_of_hf():
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = normal(4, 2, 63, 5, 80, dtype=np.dtype(np.float32))
    cos, sin = angles(np.stack([np.arange(63), 9 + np.arange(63)]), 80)
    full = [torch.from_numpy(np.concatenate([part, part], -1)) for part in (cos, sin)]
    heads_first = torch.from_numpy(x).transpose(1, 2)
    turned, _ = apply_rotary_pos_emb(heads_first, heads_first, *full)
    expected = turned.transpose(1, 2).numpy()
    assert_close(reference.rotary(x, cos, sin), expected, np.dtype(np.float32))


def test_reference_rotary_of_pairs_is_that_of_hf():
    torch = pytest.importorskip("torch")
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    x = normal(4, 2, 63, 5, 80, dtype=np.dtype(np.float32))
    cos, sin = angles(np.stack([np.arange(63), 9 + np.arange(63)]), 20)
    part = torch.from_numpy(x[..., :20])
    turned = apply_rotary_pos_emb(part, torch.from_numpy(sin), torch.from_numpy(cos)).numpy()
    expected = np.concatenate([turned, x[..., 20:]], axis=-1)
    assert_close(reference.rotary(x, cos, sin, True), expected, np.dtype(np.float32))
