"""HTTP to one server: answers that are what they should be, or EngineDown."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from mcore_agent.protocols import EngineDown

CONNECT_S = 10.0
CONTROL_S = 120.0  # an answer to anything but a request for tokens
IDLE_S = 60.0  # how long an idle connection is kept; the server keeps it for longer


class Refused(RuntimeError):
    """The server answered, and its answer is no. ``status`` is HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Line:
    """Calls of one server. A connection belongs to an event loop; a call from another loop opens new ones."""

    def __init__(self, url: str):
        self.url = url
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            # As many connections as there are requests: with fewer, a request that waits for one would count as slow.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
            self._session, self._loop = aiohttp.ClientSession(connector=connector, trust_env=False), loop
        return self._session

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    async def call(
        self, route: str, body: Mapping[str, Any] | None = None, limit_s: float | None = CONTROL_S, text: bool = False
    ) -> Any:
        """POST with ``body``, GET without. Returns what the JSON says, None for an empty answer.

        ``limit_s`` bounds the wait for the answer; None waits as long as the connection lives. ``text``: the answer is a text,
        which is returned. Raises EngineDown when there is no server, no answer in time, or one that is not JSON; Refused when the
        server says no.
        """
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        try:
            asked = self._open().request("GET" if body is None else "POST", self.url + route, json=body, timeout=timeout)
            async with asked as answer:
                status, data = answer.status, await answer.read()
        except TimeoutError as e:
            raise EngineDown(f"{self.url}{route} gave no answer within {limit_s} s") from e
        except aiohttp.ClientError as e:
            raise EngineDown(f"{self.url}{route} is gone: {type(e).__name__}: {e}") from e
        if status >= 500:
            raise EngineDown(f"{self.url}{route} failed with status {status}: {_text(data)}")
        if status != 200:
            raise Refused(status, _message(data))
        if text or not data:
            return _text(data) if text else None
        try:
            return json.loads(data)
        except ValueError as e:
            raise EngineDown(f"{self.url}{route} answered what is not JSON: {_text(data)!r}") from e

    async def do(self, route: str, body: Mapping[str, Any] | None = None, limit_s: float | None = CONTROL_S) -> None:
        """A call that must succeed: where the answer has a field ``success``, it is true. Raises Refused or EngineDown."""
        answer = await self.call(route, {} if body is None else body, limit_s)
        if isinstance(answer, dict) and not answer.get("success", True):
            raise Refused(200, f"{route}: {answer.get('message', answer)}")


def _text(data: bytes) -> str:
    return data[:500].decode(errors="replace")


def _message(data: bytes) -> str:
    """What a refusal says, from any of the shapes that the server uses."""
    try:
        said = json.loads(data)
    except ValueError:
        return _text(data)
    error = said.get("error", said) if isinstance(said, dict) else said
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
