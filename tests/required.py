"""Packages that tests can do without, unless a run says that it has them.

MCORE_AGENT_REQUIRE=sglang makes tests of SGLang fail, not skip, where it is not installed.
"""

import importlib.util
import os

import pytest

EXTRAS = {"sglang": "make test-sglang"}


def need(package: str) -> None:
    """Skips the test that calls it, or fails it if the package is required. Imports nothing."""
    if importlib.util.find_spec(package) is not None:
        return
    reason = f"{package} is not installed ({EXTRAS[package]} installs it and runs this test)"
    if package in os.environ.get("MCORE_AGENT_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, but MCORE_AGENT_REQUIRE asks for it")
    pytest.skip(reason)
