"""pool: one vector of each of several texts that lie in a row."""

import numpy as np
import pytest

from . import oracles
from .cases import assert_close, normal

SEGMENTS = np.repeat([[0, 1, 2, 4, 5]], [1, 30, 3, 20, 9], axis=1)  # none is number 3
WEIGHTS = np.random.default_rng(4).uniform(-1, 1, (2, 63)).astype(np.float32)
WEIGHTS[:, 31:34] = 0  # nothing of number 2 counts


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("count", [None, 1, 5])
def test_pool_is_the_reference(maths, dtype, count, largest):
    x = normal(1, 2, 63, 17, dtype=dtype)
    how = (None, 1) if count is None else (np.repeat(SEGMENTS, 2, axis=0), count)
    expected = oracles.pool(x, WEIGHTS, *how, largest)
    found = maths.pool(x, WEIGHTS, *how, largest)
    assert found.dtype == np.float32
    assert_close(found, expected, np.dtype(np.float32))
    if count == 5:
        assert not found[:, 2:4].any()
