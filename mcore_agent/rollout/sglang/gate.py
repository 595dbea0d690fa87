"""What a server says of itself, and whether it lets requests in: only while it is awake, has complete weights, and is not paused."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.errors import EngineStateError
from mcore_agent.rollout.sglang.line import Line, Refused
from mcore_agent.rollout.sglang.wire import Served

TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})
FLUSH_S = 30.0  # for the scheduler to be done with the step that it is in


def tags_of(tags: Iterable[str]) -> frozenset[str]:
    """What is to sleep or to wake. Raises ValueError for a tag that does not exist."""
    chosen = frozenset(tags)
    if chosen - TAGS:
        raise ValueError(f"sleep and wake know the tags {', '.join(sorted(TAGS))}, not {', '.join(sorted(chosen - TAGS))}")
    return chosen


class Gate:
    """Of one server. ``served`` is kept in the server as its weight version, so that every engine of it knows."""

    def __init__(self, line: Line):
        self.line = line
        self.served = Served(ready=False)
        self.paused = False  # on request, beside the reasons that ``served`` gives
        self.shut = True  # the server holds requests back
        self.known = False

    def require_serving(self) -> None:
        """Raises EngineStateError when a request could not be answered, now or after ``resume``."""
        if self.served.asleep:
            raise EngineStateError(f"generate while {sorted(self.served.asleep)} sleep; wake them first")
        if not self.served.ready and not self.paused:
            raise EngineStateError("generate without complete weights; finish a weight update first")

    async def sync(self) -> int:
        """Reads the server's state; returns the version that it serves. Raises EngineDown."""
        info = await self.line.call("/model_info")
        try:
            self.served = Served.parse(info["weight_version"])
        except (KeyError, TypeError) as e:
            raise EngineDown(f"{self.line.url} does not answer as SGLang does: {str(info)[:200]}") from e
        self.shut = True
        with suppress(Refused, EngineDown):  # status 503 while it holds requests back
            await self.line.call("/ready")
            self.shut = False
        self.known = True
        return self.served.version

    async def become(self, **changes: Any) -> None:
        """Changes what the server says of itself, and lets requests in exactly if it then can serve them."""
        self.served = replace(self.served, **changes)
        await self.line.do("/update_weight_version", {"new_version": self.served.text(), "abort_all_requests": False})
        await self.settle()

    async def settle(self) -> None:
        """Opens or shuts, as state and ``paused`` ask."""
        if self.served.serves and not self.paused:
            if self.shut:
                await self.line.do("/continue_generation", {"torch_empty_cache": False})
                self.shut = False
        else:
            await self.close("in_place")

    async def close(self, mode: str) -> None:
        """The server goes on with nothing. ``retract``: what it ran loses its keys and values, so that they can be dropped."""
        if not self.shut or mode == "retract":
            await self.line.do("/pause_generation", {"mode": mode})
            self.shut = True

    async def clear(self) -> None:
        """Holds requests back, for as long as weights travel or sleep. What still runs is kept, without keys and values.

        A paused scheduler of SGLang turns in circles and takes a whole core. So where nothing runs only the entrance is shut, by the
        mode ``abort``; a request that slips in is aborted, and its engine, which did not ask for that, sends it again.
        """
        if self.paused:
            return await self.close("retract")
        if self.shut:
            return
        loads = (await self.line.call("/v1/loads?include=core"))["loads"]
        busy = any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in loads)
        await self.close("retract" if busy else "abort")

    async def flush(self) -> None:
        """Drops all keys and values. Raises EngineStateError when the server does not become idle."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FLUSH_S
        while True:
            try:
                await self.line.call("/flush_cache", {}, text=True)
                return
            except Refused as e:
                if loop.time() > deadline:
                    raise EngineStateError(f"keys and values were not dropped within {FLUSH_S:.0f} s, requests are in flight: {e}") from e
            await asyncio.sleep(0.05)
