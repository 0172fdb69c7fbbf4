"""Fixtures of the op tests."""

import pytest

from tests import kit


@pytest.fixture(params=kit.DEVICES)
def ops(request: pytest.FixtureRequest) -> kit.Ops:
    """The ops on each device."""
    return kit.Ops(request.param)
