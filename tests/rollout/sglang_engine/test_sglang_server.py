"""Real server processes: how they start, how they die, and what they leave."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.sglang import SGLangEngine
from mcore_agent.rollout.sglang.server import ServerDown
from tests import sglang_servers
from tests.required import need
from tests.rollout.tiny import CONFIGS, answer, checkpoint, prompt, publish, requests

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).parents[3]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def gone(pids: list[int], within: float = 30.0) -> bool:
    deadline = time.monotonic() + within
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def test_a_server_that_dies_at_its_start_shows_its_log():
    server = sglang_servers.start("qwen3", options={"attention_backend": "no_such_backend"})
    told = r"ended before it answered with status \d+[\s\S]*The end of .*server.log[\s\S]*no_such_backend"
    with pytest.raises(ServerDown, match=told) as e:
        server.ready()
    assert str(e.value).count("\n") <= 31
    server.close()


@pytest.mark.defect("H11")
def test_a_port_in_use():
    """One that is asked for by number and taken is named; without a number the server finds its own, whoever starts at the same time."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = sglang_servers.start("qwen3", options={"port": port})
        with pytest.raises(ServerDown, match=rf"port {port} \(rollout.options.server.port\) is in use: leave it out"):
            server.ready()
        server.close()


def test_the_wait_for_a_server_has_an_end():
    need("sglang")
    from mcore_agent.rollout.sglang import Server

    server = Server(CONFIGS["qwen3"], start_s=0.5)
    with pytest.raises(ServerDown, match="did not answer within 0 s; raise rollout.options.start_s"):
        server.ready()
    assert gone([server.pid])


@pytest.mark.defect("H1")
def test_a_killed_server_is_found_out():
    """While it generates, updates and idles: every call says so, quickly, and nothing of the server is left."""

    async def body() -> None:
        need("sglang")
        engine = SGLangEngine(CONFIGS["qwen3"], start_s=sglang_servers.START_S)
        try:
            root = psutil.Process((await asyncio.to_thread(lambda: engine.address)).pid)
            pids = [root.pid, *(child.pid for child in root.children(recursive=True))]
            await engine.wake()
            await publish(engine, checkpoint("qwen3"), 0)
            running = asyncio.gather(*(engine.generate(r) for r in requests([5, 9], max_new=140)), return_exceptions=True)
            await asyncio.sleep(0.05)
            assert engine._server is not None
            engine._server.kill()
            killed = time.monotonic()
            assert all(isinstance(found, EngineDown) for found in await running)
            for call in (engine.progress, engine.pause, engine.begin_update, engine.checksum, engine.flush):
                with pytest.raises(EngineDown):
                    await call()
            with pytest.raises(EngineDown, match="ended with status"):
                await engine.generate(requests([4])[0])
            assert time.monotonic() - killed < 60
            assert gone(pids)
        finally:
            await engine.close()

    asyncio.run(body())


STARTER = """
import sys, time
from mcore_agent.rollout.sglang import Server
from tests.rollout.tiny import CONFIGS
server = Server(CONFIGS["qwen3"], start_s=900, folder=sys.argv[1])
server.ready()
print(server.pid, flush=True)
time.sleep(900)
"""


@pytest.mark.defect("H1")
def test_a_server_does_not_outlive_a_killed_starter(tmp_path: Path):
    need("sglang")
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert starter.stdout is not None
    root = psutil.Process(int(starter.stdout.readline()))
    pids = [root.pid, *(child.pid for child in root.children(recursive=True))]
    assert len(pids) >= 4  # keeper, front, scheduler, detokenizer
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    assert gone(pids)
    starter.stdout.close()


def test_a_frozen_scheduler_makes_no_progress():
    """It answers as before, or not at all: never that it went on."""

    async def body() -> None:
        address = sglang_servers.shared("qwen3")
        engine = SGLangEngine(CONFIGS["qwen3"], address=address)
        await engine.wake()
        await publish(engine, checkpoint("qwen3"), 0)
        await answer(engine, requests([5]))
        schedulers = [p for p in psutil.Process(address.pid).children(recursive=True) if "scheduler" in p.name() + " ".join(p.cmdline())]
        assert schedulers
        running = asyncio.create_task(engine.generate(requests([8], max_new=140)[0]))
        for process in schedulers:
            process.suspend()
        try:
            first = await engine.progress()
            await asyncio.sleep(1.0)
            assert await engine.progress() == first and not running.done()
        finally:
            for process in schedulers:
                process.resume()
        assert (await running).finish == "length"
        assert await engine.progress() > first
        await engine.close()

    asyncio.run(body())


def test_two_engines_use_one_server():
    """One updates and sleeps, the other, which could be in another process, generates; it needs nobody to tell it what is served."""

    async def body() -> None:
        address = sglang_servers.shared("qwen3")
        owner, player = (SGLangEngine(CONFIGS["qwen3"], address=address) for _ in range(2))
        await owner.wake()
        await publish(owner, checkpoint("qwen3"), 5)
        (c,) = await answer(player, requests([6]))
        assert c.version.tolist() == [5] * 11 and player.version == 5
        await publish(owner, checkpoint("qwen3", 1), 6)
        (c,) = await answer(player, requests([6]))
        assert c.version.tolist() == [6] * 11 and await player.sync() == 6
        # While the server sleeps a request that does not know waits at its gate.
        await owner.sleep()
        running = asyncio.create_task(player.generate(requests([7])[0]))
        await asyncio.sleep(0.3)
        assert not running.done()
        await owner.wake()
        await publish(owner, checkpoint("qwen3"), 7)
        assert (await running).version.tolist() == [7] * 11
        # An abort ends also what waits there.
        await owner.pause()
        running = asyncio.create_task(player.generate(requests([7])[0]))
        await asyncio.sleep(0.3)
        await player.abort()
        assert (await running).finish == "abort"
        await owner.resume()
        assert (await answer(player, [*requests([6])]))[0].finish == "length"
        await player.close()
        assert (await answer(owner, requests([6])))[0].finish == "length"  # the server goes on
        await owner.close()

    asyncio.run(body())


@pytest.mark.defect("E12")
@pytest.mark.parametrize("mode", ["in_place", "retract", ""])
def test_requests_of_another_engine_live_through_an_update(mode: str):
    """The engine that updates has no requests of its own; paused or not, those of the other go on under the new weights."""

    async def body() -> None:
        address = sglang_servers.shared("qwen3")
        owner, player = (SGLangEngine(CONFIGS["qwen3"], address=address) for _ in range(2))
        await owner.wake()
        await publish(owner, checkpoint("qwen3"), 0)
        mixed = 0
        for version in range(1, 30):
            running = asyncio.gather(*(player.generate(r) for r in requests([5, 9, 12], max_new=140)))
            await asyncio.sleep(0.05 * (version % 5))
            if mode:
                await owner.pause(mode)
            await publish(owner, checkpoint("qwen3", version % 2), version)
            if mode:
                await owner.resume()
            for c in await running:
                assert (c.finish, len(c.tokens)) == ("length", 140)
                assert set(c.version.tolist()) <= {version - 1, version} and (c.version[1:] >= c.version[:-1]).all()
                mixed += len(set(c.version.tolist())) == 2
            if mixed >= 3:
                break
        assert mixed
        await player.close()
        await owner.close()

    asyncio.run(body())


def test_prompts_of_two_sessions_share_a_prefix():
    """The server's cache is for all: a second episode on the same prompt starts with it."""

    async def body() -> None:
        engine = SGLangEngine(CONFIGS["qwen3"], address=sglang_servers.shared("qwen3"))
        await engine.wake()
        await publish(engine, checkpoint("qwen3"), 0)
        asked = [requests([1])[0].__class__(name, prompt(40), 5) for name in "ab"]
        first, second = [(await answer(engine, [r]))[0] for r in asked]
        assert (first.cached, second.cached) == (0, 39)
        await engine.close()

    asyncio.run(body())
