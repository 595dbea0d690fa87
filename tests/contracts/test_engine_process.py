"""The engine in a process of its own that faults are injected into keeps the promises of the real one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from mcore_agent.protocols import Completion, Engine, EngineDown, Request
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from tests.contracts.test_engine import serving
from tests.engine_process import ProcessEngine, expected, processes
from tests.rollout.tiny import NEAR, checkpoint, prompt

both = pytest.mark.parametrize("kind", ["process", "local"])
LONG = 100


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, 300))


@asynccontextmanager
async def engine_of(kind: str) -> AsyncIterator[Engine]:
    if kind == "local":
        async with serving("local") as engine:
            yield engine
    else:
        async with processes(1, delay=0.001, version=3) as (engine,):
            yield engine


def asked(name: str, length: int, max_new: int = 11, **fields) -> Request:
    return Request(name, prompt(length), max_new, **{"temperature": 0.0, **fields})


def same(a: Completion, b: Completion) -> bool:
    return a.tokens.tolist() == b.tokens.tolist() and np.allclose(a.logp, b.logp, atol=NEAR) and a.finish == b.finish


async def begun(engine: Engine, request: Request) -> "asyncio.Task[Completion]":
    """A request that has given at least one token, or none if it did not take long enough."""
    before = await engine.progress()
    task = asyncio.create_task(engine.generate(request))
    while not task.done() and await engine.progress() == before:
        await asyncio.sleep(0.002)
    return task


@both
def test_answers(kind: str):
    async def body() -> None:
        async with engine_of(kind) as engine:
            assert isinstance(engine, Engine) and engine.version == 3
            free = await engine.generate(asked("1", 7))
            assert (free.finish, len(free.tokens), free.version.tolist()) == ("length", 11, [3] * 11)
            assert (free.tokens.dtype, free.logp.dtype, free.version.dtype) == (np.int64, np.float32, np.int32)
            assert (free.logp < 0).all()
            stop = int(free.tokens[4])
            stopped = await engine.generate(asked("2", 7, stop=(stop,)))
            end = free.tokens.tolist().index(stop) + 1
            assert stopped.finish == "stop" and stopped.tokens.tolist() == free.tokens[:end].tolist()
            longer = np.concatenate([prompt(7), free.tokens[:4]])
            rest = await engine.generate(Request("3", longer, 7, temperature=0.0))
            assert rest.tokens.tolist() == free.tokens[4:].tolist(), "a request that goes on gives the tokens it would have given"
            drawn = [await engine.generate(asked(str(seed), 7, temperature=1.0, seed=seed)) for seed in (5, 5, 6)]
            assert same(drawn[0], drawn[1]) and drawn[0].tokens.tolist() != drawn[2].tokens.tolist()
            with pytest.raises(ValueError, match="max_new"):
                await engine.generate(asked("4", 7, 0))
            assert min((await engine.memory()).values()) >= 0

    run(body())


@both
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_keeps_requests_and_an_update_changes_their_version(kind: str, mode: str):
    async def body() -> None:
        async with engine_of(kind) as engine:
            plain = await engine.generate(asked("1", 7, LONG))
            for update in (False, True):
                running = await begun(engine, asked("2", 7, LONG))
                await engine.pause(mode)
                at = await engine.progress()
                await asyncio.sleep(0.02)
                assert await engine.progress() == at
                with pytest.raises(EngineStateError, match="in flight"):
                    await engine.sleep()
                if update:
                    await engine.begin_update()
                    await engine.update(checkpoint("qwen3").items())
                    await engine.end_update(4)
                await engine.resume()
                done = await running
                assert same(done, plain)
                assert sorted(done.version) == done.version.tolist() and set(done.version) <= ({3, 4} if update else {3})
            assert engine.version == 4

    run(body())


@both
def test_an_abort_keeps_what_there_is(kind: str):
    async def body() -> None:
        async with engine_of(kind) as engine:
            plain = await engine.generate(asked("1", 7, LONG))
            for by_pause in (False, True):
                running = await begun(engine, asked("2", 7, LONG))
                await (engine.pause("abort") if by_pause else engine.abort(["2", "nobody"]))
                done = await running
                n = len(done.tokens)
                assert done.finish in ("abort", "length") and done.tokens.tolist() == plain.tokens[:n].tolist()
                assert len(done.logp) == len(done.version) == n
            await engine.resume()
            assert same(await engine.generate(asked("3", 7, LONG)), plain)

    run(body())


@both
def test_what_is_refused(kind: str):
    async def body() -> None:
        async with engine_of(kind) as engine:
            items = list(checkpoint("qwen3").items())
            with pytest.raises(EngineStateError, match="begin"):
                await engine.update(items)
            with pytest.raises(EngineStateError, match="begin"):
                await engine.end_update(4)
            await engine.begin_update()
            with pytest.raises(EngineStateError, match="update"):
                await engine.generate(asked("1", 7))
            await engine.update([*items, items[0]])
            with pytest.raises(WeightUpdateError, match="more than once"):
                await engine.end_update(4)
            await engine.sleep()
            with pytest.raises(EngineStateError, match="weights"):
                await engine.generate(asked("1", 7))

    run(body())


@both
def test_the_past_of_a_session_is_reused_until_an_update(kind: str):
    async def body() -> None:
        async with engine_of(kind) as engine:
            with engine.client():
                one = await engine.generate(asked("1", 9, 6, session="s"))
                longer = np.concatenate([prompt(9), one.tokens, prompt(4)])
                two = await engine.generate(Request("2", longer, 6, session="s"))
                assert one.cached == 0 and 9 + 6 - 1 <= two.cached <= 9 + 6
                await engine.begin_update()
                await engine.update(checkpoint("qwen3").items())
                await engine.end_update(4)
                assert (await engine.generate(Request("3", longer, 6, session="s"))).cached == 0

    run(body())


def test_faults():
    """What only the process can do: each fault is EngineDown to whoever waits, and the answers are those that tests expect."""

    async def body() -> None:
        async with processes(2, delay=0.001) as (engine, other):
            request = asked("1", 7, 40)
            assert (await engine.generate(request)).tokens.tolist() == expected(request)
            drawn = asked("2", 7, 40, temperature=1.0, seed=9)
            assert (await engine.generate(drawn)).tokens.tolist() == expected(drawn)
            await other.set(garbage=True)
            with pytest.raises(EngineDown, match="garbage"):
                await other.generate(request)
            running = await begun(engine, asked("3", 7, 10_000))
            engine.kill()
            with pytest.raises(EngineDown):
                await running
            with pytest.raises(EngineDown):
                await engine.progress()
            frozen = await ProcessEngine.spawn()
            frozen.freeze()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(frozen.progress(), 0.2)
            frozen.thaw()
            assert await frozen.progress() == 0
            await frozen.close()
            orphan = await ProcessEngine.spawn()
            orphan.process.stdin.close()  # what happens when the parent dies
            assert await asyncio.to_thread(orphan.process.wait, 30) == 0

    run(body())
