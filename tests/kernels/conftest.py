"""Fixtures that plug every implementation and dtype into the cases of this folder."""

import numpy as np
import pytest

from .cases import DTYPES
from .implementations import IMPLEMENTATIONS, Implementation


@pytest.fixture(params=IMPLEMENTATIONS, scope="session")
def backend(request: pytest.FixtureRequest) -> Implementation:
    pytest.importorskip(request.param)
    return IMPLEMENTATIONS[request.param]()


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    return request.param
