"""Fixtures that plug every implementation and dtype into the cases of this folder."""

import numpy as np
import pytest

from .cases import DTYPES
from .implementations import IMPLEMENTATIONS, Implementation


@pytest.fixture(params=["torch", "jax"], scope="session")
def backend(request: pytest.FixtureRequest) -> Implementation:
    """Ops that each framework has for itself."""
    return _made(request)


@pytest.fixture(params=IMPLEMENTATIONS, scope="session")
def maths(request: pytest.FixtureRequest) -> Implementation:
    """Ops that are one text over Maths, which NumPy has as well."""
    return _made(request)


def _made(request: pytest.FixtureRequest) -> Implementation:
    if request.param != "exact":
        pytest.importorskip(request.param)
    return IMPLEMENTATIONS[request.param]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NumPy rounds nothing, so that one dtype shows it."""

    def is_one(item: pytest.Item) -> bool:
        call = getattr(item, "callspec", None)
        params = call.params if call else {}
        return params.get("maths") != "exact" or params.get("dtype", DTYPES[0]) == DTYPES[0]

    items[:] = [item for item in items if is_one(item)]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    return request.param
