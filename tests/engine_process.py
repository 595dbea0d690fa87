"""The client of ``engine_server``: an Engine in a process of its own, which can be killed, frozen, or made to answer garbage."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mcore_agent.protocols import Completion, EngineDown, Request
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from mcore_agent.rollout.requests import check_request
from tests.engine_server import VOCAB, next_token

SERVER = Path(__file__).with_name("engine_server.py")


def expected(request: Request) -> list[int]:
    """What an undisturbed server answers."""
    row, state = request.tokens.tolist(), 0
    for i in range(1, len(row)):
        state = next_token(row[i - 1 : i], 0, 0.0, state)[1]
    found: list[int] = []
    while len(found) < request.max_new and not (found and found[-1] in request.stop):
        token, state = next_token(row[-1:], request.seed, request.temperature, state)
        row.append(token)
        found.append(token)
    return found


class ProcessEngine:
    """Make it with ``spawn``. Every call opens its own connection; a closed or garbled one raises EngineDown."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, version: int):
        self.process, self.port, self.version = process, port, version

    @classmethod
    async def spawn(cls, delay: float = 0.002, version: int = 0) -> "ProcessEngine":
        """A server that takes ``delay`` seconds for a token."""

        def start() -> tuple["subprocess.Popen[str]", int]:
            words = [sys.executable, "-S", "-E", str(SERVER), str(delay), str(version)]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            return process, int(process.stdout.readline())

        process, port = await asyncio.to_thread(start)
        return cls(process, port, version)

    # ------------------------------------------------------------------------------------------------- faults

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def set(self, **values: Any) -> None:
        """``garbage``, ``mute`` or ``delay``; see the server."""
        await self._call("set", **values)

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    # --------------------------------------------------------------------------------------------- the engine

    async def _call(self, call: str, **values: Any) -> dict[str, Any]:
        writer = None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
            writer.write(json.dumps({"call": call, **values}).encode() + b"\n")
            answer = json.loads(await reader.readline())
        except OSError as e:
            raise EngineDown(f"{call}: {e!r}") from e
        except ValueError as e:
            raise EngineDown(f"{call}: the connection closed, or the answer is garbage: {e}") from e
        finally:
            if writer is not None:
                writer.close()
        if "refused" in answer:
            raise EngineStateError(answer["refused"])
        return answer

    @contextmanager
    def client(self) -> Iterator[None]:
        yield

    async def generate(self, request: Request) -> Completion:
        check_request(request, VOCAB)
        asked = {"id": request.id, "tokens": request.tokens.tolist(), "max_new": request.max_new, "stop": request.stop}
        done = await self._call("generate", **asked, seed=request.seed, temperature=request.temperature, session=request.session)
        return Completion(
            np.array(done["tokens"], dtype=np.int64),
            np.array(done["logp"], dtype=np.float32),
            np.array(done["version"], dtype=np.int32),
            done["finish"],
            done["cached"],
        )

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        await self._call("abort", ids=None if ids is None else list(ids))

    async def pause(self, mode: str = "in_place") -> None:
        await self._call("pause", mode=mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        await self._call("sleep", tags=list(tags))

    async def wake(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        await self._call("wake", tags=list(tags))

    async def begin_update(self) -> None:
        await self._call("begin")

    async def update(self, bucket) -> None:
        await self._call("update", names=[name for name, _ in bucket])

    async def end_update(self, version: int) -> None:
        twice = (await self._call("end", version=version))["twice"]
        if twice:
            raise WeightUpdateError(f"more than once: {', '.join(twice)}")
        self.version = version

    async def flush(self) -> None:
        await self._call("flush")

    async def checksum(self) -> dict[str, str]:
        return {"version": str((await self._call("look"))["version"])}

    async def progress(self) -> int:
        return (await self._call("look"))["progress"]

    async def memory(self) -> dict[str, int]:
        asleep = (await self._call("look"))["asleep"]
        return {tag: 0 if tag in asleep else 1 for tag in ("weights", "kv_cache")}

    async def close(self) -> None:
        """Kills the process, a frozen one too, and waits for it."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def capabilities(self) -> frozenset[str]:
        return frozenset({"abort", "pause", "sleep", "update", "prefix_cache"})


@asynccontextmanager
async def processes(count: int, delay: float = 0.002, version: int = 0):
    """``count`` servers. Append what you restart to the list: every one of them is gone at the end."""
    engines = list(await asyncio.gather(*(ProcessEngine.spawn(delay, version) for _ in range(count))))
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.close()
        assert all(engine.gone for engine in engines)
