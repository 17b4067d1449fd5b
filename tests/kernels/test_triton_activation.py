"""Triton's activation and gated_activation."""

import numpy as np
import pytest

from dualinfer.model.spec import Activation

from .cases import assert_close, normal
from .implementations import meaning
from .tensors import get, needs_triton, put, strict, strided, torch
from .test_activations import measured, xielu_case

from dualinfer.kernels.triton.activation import (  # isort: skip
    KINDS,
    activation,
    gated_activation,
    xielu,
)

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]


def test_every_activation_of_the_spec_has_a_kernel():
    assert set(KINDS) == set(Activation.__args__)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_the_reference(dtype, kind):
    x, expected, scale = measured(kind, dtype)
    assert_close(get(activation(put(x), kind)), expected, dtype, scale=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 7, 126), (2, 5000)], ids=str)
def test_gated_activation_is_the_reference_with_one_rounding(dtype, kind, shape):
    x = normal(1, *shape, dtype=dtype, scale=2.0)
    expected = meaning.gated_activation(x, kind)
    assert_close(get(gated_activation(put(x), kind)), expected, dtype)


@pytest.mark.parametrize("shape", [(7, 126), (3, 2, 64), (2, 3, 2, 30)], ids=str)
def test_strided_rows_and_contiguous_rows_agree(dtype, shape):
    x = normal(2, *shape, dtype=dtype)
    for op in (activation, gated_activation):
        np.testing.assert_array_equal(get(op(strided(x), "silu")), get(op(put(x), "silu")))


def test_one_row_and_no_row_are_rows():
    x = put(normal(3, 63, dtype=np.dtype(np.float32)))
    assert activation(x, "relu").tolist() == x.clamp(min=0).tolist()
    assert gated_activation(x[:0].view(0, 6), "silu").shape == (0, 3)


def test_xielu_is_the_reference(dtype):
    given, expected = xielu_case(dtype)
    scale = np.maximum(np.abs(expected), np.abs(given[0].astype(np.float32))).clip(1e-3)
    assert_close(get(xielu(*map(put, given))), expected, dtype, scale=scale)
    with pytest.raises(ValueError, match="contiguous memory"):
        xielu(put(given[0])[::2], *map(put, given[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(kind):
    x = torch.full((2, 2), torch.nan, device=put(np.zeros(1)).device)
    assert activation(x, kind).isnan().all()
    assert gated_activation(x, kind).isnan().all()


def test_what_cannot_be_run_is_refused():
    x = put(np.zeros((4, 6), np.float32))
    with pytest.raises(ValueError, match="'swish'; one of silu"):
        activation(x, "swish")
    with pytest.raises(ValueError, match="contiguous last axis"):
        activation(x.T, "silu")
    with pytest.raises(ValueError, match="even last axis"):
        gated_activation(x[:, :5], "silu")
    with pytest.raises(ValueError, match="float dtype"):
        activation(x.int(), "silu")
