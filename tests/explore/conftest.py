"""Sessions that the tests of the explorer share."""

from __future__ import annotations

import pytest

import lrrn
from sessions import fitted, session_of


@pytest.fixture(scope="module", autouse=True)
def hurry():
    """Bounds are as good as their budget; their quality is tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lrrn.bounds.BUDGET, "auto", 0.5)
        yield


@pytest.fixture(scope="module")
def plain():
    return session_of(fitted())


@pytest.fixture(scope="module")
def scaled():
    """A model of features from 0 to 16 that are centred and scaled inside."""
    return session_of(fitted(scale=16.0, standardize=True), 16.0)


@pytest.fixture(scope="module")
def by_feature():
    """A model of pixels that are divided by their standard deviations inside."""
    return session_of(fitted(standardize="features"))


@pytest.fixture(params=["plain", "scaled", "by_feature"])
def session(request):
    return request.getfixturevalue(request.param)
