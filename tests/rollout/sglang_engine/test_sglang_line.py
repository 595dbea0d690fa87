"""HTTP to a server that misbehaves in every way a real one can."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import pytest

from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.sglang.line import Line, Refused

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]


def reply(status: int, body: bytes, kind: str = "application/json") -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def serve(answer: Answer) -> tuple[asyncio.Server, Line]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                await reader.readexactly(size[0] if size else 0)
                await answer(reader, writer, head.split()[1].decode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    return server, Line(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def fixed(data: bytes, close: bool = False) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
        writer.write(data)
        if close:
            await writer.drain()
            writer.close()

    return answer


def ask(answer: Answer, limit_s: float | None = 30.0, do: bool = False, **fields):
    async def body():
        server, line = await serve(answer)
        try:
            return await (line.do if do else line.call)("/x", {"a": 1}, limit_s, **fields)
        finally:
            await line.close()
            server.close()

    return asyncio.run(asyncio.wait_for(body(), 60))


def test_answers():
    assert ask(fixed(reply(200, b'{"a": [1]}'))) == {"a": [1]}
    assert ask(fixed(reply(200, b""))) is None
    assert ask(fixed(reply(200, b"Cache flushed.", "text/plain")), text=True) == "Cache flushed."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (reply(200, b"<html>"), "not JSON: '<html>'"),
        (reply(200, b'{"a": '), "not JSON"),
        (reply(500, b"boom"), "status 500: boom"),
        (b"garbage\r\n\r\n", "gone"),
        (b"", "gone"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "gone"),
    ],
)
def test_garbage_means_down(data: bytes, message: str):
    with pytest.raises(EngineDown, match=message):
        ask(fixed(data, close=True))


def test_no_server():
    async def body() -> None:
        server, line = await serve(fixed(b""))
        server.close()
        await server.wait_closed()
        with pytest.raises(EngineDown, match="gone"):
            await line.call("/x")

    asyncio.run(body())


@pytest.mark.parametrize(
    "said", [b'{"error": {"message": "too long"}}', b'{"message": "too long"}', b'{"success": false, "message": "too long"}', b"too long"]
)
def test_a_no_is_told(said: bytes):
    with pytest.raises(Refused, match="too long") as e:
        ask(fixed(reply(400, said)))
    assert e.value.status == 400


def test_a_success_that_is_none():
    with pytest.raises(Refused, match="no session"):
        ask(fixed(reply(200, b'{"success": false, "message": "no session"}')), do=True)
    assert ask(fixed(reply(200, b'{"success": true, "message": ""}')), do=True) is None


@pytest.mark.defect("C21")
def test_only_what_has_a_limit_times_out():
    """An answer that takes longer than any default of an HTTP client is waited for; one with a limit is not."""

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
        await asyncio.sleep(6)  # longer than many a client waits
        writer.write(reply(200, b"{}"))

    assert ask(slow, limit_s=None) == {}
    with pytest.raises(EngineDown, match=r"no answer within 0.2 s"):
        ask(slow, limit_s=0.2)


@pytest.mark.defect("C21")
def test_three_hundred_requests_wait_at_once_and_no_connection_is_left():
    open_now = most = 0
    everyone = asyncio.Event()

    async def together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 300:
            everyone.set()
        await everyone.wait()
        writer.write(reply(200, json.dumps(path).encode()))

    async def body() -> None:
        server, line = await serve(together)
        answers = await asyncio.gather(*(line.call(f"/{i}", {}, 30) for i in range(300)))
        assert answers == [f"/{i}" for i in range(300)]
        await line.close()
        server.close()
        await server.wait_closed()

    asyncio.run(asyncio.wait_for(body(), 60))
    assert most == 300


@pytest.mark.defect("C21")
def test_an_idle_connection_that_the_server_closed_is_not_used():
    """The server says goodbye to idle connections; the next call opens a new one."""
    served = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
        nonlocal served
        served += 1
        writer.write(reply(200, b"{}"))
        await writer.drain()
        writer.close()

    async def body() -> None:
        server, line = await serve(once)
        for _ in range(5):
            assert await line.call("/x", {}) == {}
            await asyncio.sleep(0.02)
        await line.close()
        server.close()

    asyncio.run(body())
    assert served == 5


def test_a_line_works_in_one_event_loop_after_another():
    async def start() -> tuple[asyncio.Server, Line]:
        return await serve(fixed(reply(200, b"{}")))

    loop = asyncio.new_event_loop()
    server, line = loop.run_until_complete(start())
    loop.run_until_complete(line.call("/x"))
    other = Line(line.url)
    begun = time.monotonic()

    async def elsewhere() -> None:
        with pytest.raises(EngineDown, match="no answer"):  # the server's loop stands still: only the client is tested
            await line.call("/x", limit_s=0.2)

    asyncio.run(elsewhere())
    assert time.monotonic() - begun < 30
    assert loop.run_until_complete(line.call("/x")) == {}
    loop.run_until_complete(other.close())
    server.close()
    loop.run_until_complete(line.close())
    loop.close()
