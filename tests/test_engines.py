"""The engines of a rank: calls to all of them end, whatever one of them does."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from mcore_agent.engines import Engines
from mcore_agent.rollout.watchdog import Watchdog


class Mute:
    """Frozen: its connection stands, and no answer comes."""

    own_process = True

    def __init__(self, mute: bool):
        self.mute = mute

    async def memory(self) -> dict[str, int]:
        if self.mute:
            await asyncio.Event().wait()
        return {"rss": 3}

    async def close(self) -> None:
        pass


@pytest.mark.defect("H1")
def test_a_frozen_engine_keeps_nobody():
    config = SimpleNamespace(rollout=SimpleNamespace(engine="local", engines=0, tp=1, placement="colocated", stall_s=0.2), world=1)
    with ExitStack() as stack:
        engines = Engines(config, {}, 1, None, Watchdog(0, 1, 0, print), stack)  # type: ignore[arg-type]
        engines.engines = {0: Mute(True), 1: Mute(False)}  # type: ignore[dict-item]
        assert engines.memory() == {"engine_rss": 3}
        assert list(engines.down) == [0] and "no answer to memory" in engines.down[0]
