"""Weights into a server: one complete update at a time, inside a session of SGLang that is always closed."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from mcore_agent.rollout.sglang.buckets import Transport, act
from mcore_agent.rollout.sglang.gate import Gate
from mcore_agent.rollout.sglang.line import Refused
from mcore_agent.rollout.sglang.names import EMBEDDING, HEAD, Kind, Ledger


class Updates:
    """Updates of the server behind ``gate``. ``selector``: which of SGLang's models they are for (target, draft or all).

    ``tied``: a checkpoint has no output layer, for it is the embedding. Some models of SGLang (Qwen3-MoE) keep an output layer of
    their own all the same, so it is sent and compared too.
    """

    def __init__(
        self,
        gate: Gate,
        transport: Transport,
        expected: Callable[[], Mapping[str, Kind]],
        folder: Path,
        ranks: int,
        selector: str,
        tied: bool,
    ):
        self._gate, self._transport, self._make_expected = gate, transport, expected
        self._folder, self._ranks, self._selector, self._tied = folder, ranks, selector, tied
        self._expected: Mapping[str, Kind] = {}
        self._ledger: Ledger | None = None

    async def begin(self) -> None:
        """A former update that was not ended is void. What the server runs is kept, without keys and values."""
        if "weights" in self._gate.served.asleep:
            raise EngineStateError("begin_update while the weights sleep; wake them first")
        kinds = await self._kinds()
        await self._gate.clear()
        await self._session()
        self._ledger = Ledger(kinds)
        await self._gate.become(updating=True, ready=False)

    async def _kinds(self) -> Mapping[str, Kind]:
        if not self._expected:
            self._expected = await asyncio.to_thread(self._make_expected)
        return self._expected

    async def _session(self) -> None:
        """Opens SGLang's own session; one that somebody left open is ended."""
        try:
            await self._gate.line.do("/begin_weight_update", {"selector": self._selector})
        except Refused:
            await self._gate.line.do("/end_weight_update")
            await self._gate.line.do("/begin_weight_update", {"selector": self._selector})

    async def put(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Sends tensors. Raises WeightUpdateError for a wrong shape or type; after any error the update is void."""
        ledger = self._open("update")
        well = False
        try:
            chosen = [(name, tensor) for name, tensor in bucket if ledger.take(name, tensor)]
            if chosen:  # SGLang has no empty bucket
                await self._transport.send(chosen)
            for name, tensor in chosen:
                if self._tied and name == EMBEDDING:
                    await self._transport.send([(HEAD, tensor)])
            well = True
        except Refused as e:
            raise WeightUpdateError(f"the server refused weights: {e}") from e
        finally:
            if not well:
                await self._void()

    async def end(self, version: int) -> None:
        """Serves the weights as ``version``. Raises WeightUpdateError unless each name was given exactly once."""
        ledger = self._open("end_update")
        before = self._gate.served.version
        if version < max(before, 0):
            raise WeightUpdateError(f"version is {version}, but {before} was served; versions start at 0 and do not go back")
        well = False
        try:
            ledger.finish()
            await self._transport.end()
            await self._gate.line.do("/end_weight_update")
            await self._gate.flush()
            well = True
        except Refused as e:
            raise WeightUpdateError(f"the server refused weights: {e}") from e
        finally:
            if not well:
                await self._void()
        self._ledger = None
        await self._gate.become(version=version, ready=True, updating=False)

    def _open(self, what: str) -> Ledger:
        if self._ledger is None:
            raise EngineStateError(f"{what} outside begin_update … end_update; begin an update first")
        return self._ledger

    async def _void(self) -> None:
        """The update is over and nothing is served. SGLang's session is closed whatever happened."""
        self._ledger = None
        for step in (self._transport.close(), self._gate.line.do("/end_weight_update"), self._gate.become(ready=False, updating=False)):
            with suppress(EngineDown, Refused):
                await step

    async def checksum(self) -> dict[str, str]:
        """Of every weight, by checkpoint name, from the memory of the ranks. Raises WeightUpdateError if it cannot be read back."""
        if "weights" in self._gate.served.asleep:
            raise EngineStateError("checksum while the weights sleep; wake them first")
        shapes = {name: list(kind.shape) for name, kind in (await self._kinds()).items()}
        await self._gate.close("in_place")
        try:
            if self._ledger is None:
                await self._session()
            try:
                reply = await act(self._gate.line, self._folder, self._ranks, action="checksum", shapes=shapes)
            finally:
                if self._ledger is None:
                    await self._gate.line.do("/end_weight_update")
        except Refused as e:
            raise WeightUpdateError(f"the server cannot say which weights it holds: {e}") from e
        finally:
            await self._gate.settle()
        sums: dict[str, str] = reply["sums"]
        if self._tied and sums.get(HEAD) == sums.get(EMBEDDING):
            sums.pop(HEAD, None)
        return sums

    async def close(self) -> None:
        """Frees what transporting holds."""
        with suppress(EngineDown, Refused):
            await self._transport.close()
