"""Long tests: a sample of them runs each time, chosen by the commit, so that all get their turn.

MCORE_AGENT_SLOW=all runs every one, MCORE_AGENT_SLOW=none runs none, a number runs that many.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = 1
SERVERS = "servers"


def shares_servers(item) -> bool:
    return bool({"contracts", "sglang_engine"} & set(item.path.parts))


def pytest_runtest_teardown(item, nextitem):
    """SGLang servers that tests share end with the last of these: three hold 9 GB."""
    if shares_servers(item) and not (nextitem and shares_servers(nextitem)) and "tests.sglang_servers" in sys.modules:
        sys.modules["tests.sglang_servers"].close()


def place_of(item) -> tuple[int, str]:
    """What takes long comes first; the files that start servers follow one another."""
    return (0 if scope_of(item.nodeid) == SERVERS else 1 if "e2e" in item.path.parts else 2), str(item.path)


def scope_of(nodeid: str) -> str:
    """What one worker runs alone, in order: a file, or all that start SGLang servers, for which there is memory once."""
    path = nodeid.partition("::")[0]
    return SERVERS if {"contracts", "sglang_engine", "test_sglang.py"} & set(path.split("/")) else path


def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByScope(config, log)


def pytest_collection_modifyitems(config, items):
    items.sort(key=place_of)
    slow = [item for item in items if item.get_closest_marker("slow")]
    wanted = os.environ.get("MCORE_AGENT_SLOW", str(SAMPLE))
    if wanted == "all" or "slow" in (config.option.markexpr or ""):
        return
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    count = 0 if wanted == "none" else min(int(wanted), len(slow))
    chosen = random.Random(head.stdout.strip()).sample(slow, count)
    for item in slow:
        if item not in chosen:
            item.add_marker(pytest.mark.skip(reason="long; not in this commit's sample (MCORE_AGENT_SLOW=all runs it)"))
