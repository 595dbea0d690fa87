"""A sandbox that isolates, where this machine can make one.

MCORE_AGENT_REQUIRE=bwrap makes tests of it fail, not skip, where it cannot.
"""

import os

import pytest

from mcore_agent.sandbox.bubblewrap import Bubblewrap, NoBubblewrap, probe


def isolating() -> Bubblewrap:
    """One that is not started. Skips or fails the test that calls it where there is none."""
    try:
        probe()
    except NoBubblewrap as e:
        if "bwrap" in os.environ.get("MCORE_AGENT_REQUIRE", "").split(","):
            pytest.fail(str(e))
        pytest.skip(str(e))
    return Bubblewrap()
