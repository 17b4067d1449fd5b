"""Triton's embed."""

import numpy as np
import pytest

from .cases import normal
from .tensors import get, needs_triton, put, strict, strided

from dualinfer.kernels.triton.embedding import embed  # isort: skip

pytestmark = [needs_triton, pytest.mark.usefixtures(strict.__name__)]


def integers(seed: int, below: int, *shape: int, dtype: type = np.int64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape).astype(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3, 7), (2, 0), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("width", [1, 63, 1000, 2050])
def test_embed_is_the_reference(dtype, shape, width):
    ids, weight = integers(1, 97, *shape), normal(1, 97, width, dtype=dtype)
    found = get(embed(put(ids), put(weight)))
    np.testing.assert_array_equal(found, weight[ids])


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
def test_rows_are_added_as_the_plain_path_rounds_them(dtype, ids_dtype):
    """Token, token type, position: each sum is rounded."""
    tables = [normal(i, rows, 63, dtype=dtype) for i, rows in enumerate((97, 2, 40))]
    ids, types, at = (integers(i, len(t), 3, 7, dtype=ids_dtype) for i, t in enumerate(tables))
    at = np.minimum(at, 37)
    x = tables[0][ids]
    for rows in (tables[1][types], tables[2][at + 2]):
        x = (x.astype(np.float32) + rows.astype(np.float32)).astype(dtype)
    found = embed(
        put(ids),
        strided(tables[0]),
        token_types=put(types)[:, :],
        type_weight=put(tables[1]),
        positions=put(at),
        position_weight=put(tables[2]),
        position_offset=2,
    )
    np.testing.assert_array_equal(get(found), x)


def test_scale_multiplies_the_token_row_alone(dtype):
    weight, places = normal(1, 97, 63, dtype=dtype), normal(2, 9, 63, dtype=dtype)
    ids = integers(1, 97, 2, 9)
    at = put(np.arange(9)).expand(2, 9)
    scaled = (weight[ids].astype(np.float32) * np.float32(7.3)).astype(dtype)
    np.testing.assert_array_equal(get(embed(put(ids), put(weight), scale=7.3)), scaled)
    expected = (scaled.astype(np.float32) + places.astype(np.float32)).astype(dtype)
    found = get(embed(put(ids), put(weight), scale=7.3, positions=at, position_weight=put(places)))
    if dtype == np.float32:  # there product and sum may be one fused operation
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(found, expected)


def test_ids_outside_of_a_table_take_its_nearest_row(dtype):
    weight, places = normal(1, 97, 63, dtype=dtype), normal(2, 9, 63, dtype=dtype)
    ids, at = np.array([-1, 97, 2**31, -(2**40), 5]), np.array([-7, 9, 2**40, 8, 0])
    found = embed(put(ids), put(weight), positions=put(at), position_weight=put(places))
    rows = weight[ids.clip(0, 96)].astype(np.float32) + places[at.clip(0, 8)].astype(np.float32)
    np.testing.assert_array_equal(get(found), rows.astype(dtype))


def test_a_share_of_a_table_gives_zeros_for_ids_of_the_others(dtype):
    weight = normal(1, 97, 63, dtype=dtype)
    ids = integers(1, 97, 3, 9)
    parts = [embed(put(ids), put(weight[a:b]), first=a) for a, b in ((0, 40), (40, 97))]
    here = (ids >= 40)[..., None]
    np.testing.assert_array_equal(get(parts[0]), np.where(here, 0, weight[ids]))
    np.testing.assert_array_equal(get(parts[1]), np.where(here, weight[ids], 0))


def test_ids_of_any_strides(dtype):
    ids, weight = put(integers(1, 97, 6, 8)), put(normal(1, 97, 63, dtype=dtype))
    for view in (ids.T, ids[::2, 1::3], ids[:, -1:], ids[:, 0]):
        np.testing.assert_array_equal(
            get(embed(view, weight)), get(embed(view.contiguous(), weight))
        )


def test_what_cannot_be_run_is_refused():
    ids, weight = put(np.zeros((4, 6), np.int64)), put(np.ones((9, 6), np.float32))
    with pytest.raises(ValueError, match="positions and position_weight belong together"):
        embed(ids, weight, positions=ids)
    with pytest.raises(ValueError, match="int32 or int64"):
        embed(ids.short(), weight)
    with pytest.raises(ValueError, match="token_types is"):
        embed(ids, weight, token_types=ids[:2], type_weight=weight)
    with pytest.raises(ValueError, match=r"\[rows, 6\]"):
        embed(ids, weight, token_types=ids, type_weight=weight.half())
