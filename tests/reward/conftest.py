"""The reward ``fixed``, registered while a test wants it."""

import pytest

from mcore_agent import registry
from tests.reward.episodes import Fixed


@pytest.fixture
def fixed():
    """Makes specs: ``fixed(0.5, "name")``."""
    before = dict(registry.variants("reward"))
    registry.register("reward", "fixed")(Fixed)
    yield lambda values, key="fixed": {"name": "fixed", "values": values, "key": key}
    registry._found["reward"].clear()
    registry._found["reward"].update(before)
