"""The fake engine that other tests play with keeps the promises of the real one: same waves, same shapes, same ends."""

import asyncio
from contextvars import copy_context
from random import Random

import numpy as np
import pytest

from mcore_agent.protocols import Engine, Request
from tests.contracts.test_engine import serving
from tests.fakes import FakeEngine, completion

STOP = (2,)
CLIENTS, TURNS = 7, 3


def fake() -> FakeEngine:
    def policy(request: Request):
        r = Random(request.seed)
        return completion(request, [r.randint(2, 6) for _ in range(request.max_new)], version=3)

    engine = FakeEngine(policy)
    engine.version = 3
    return engine


async def played(engine, delays: int) -> dict[str, tuple]:
    """Clients of one to three turns, each pausing for a while between its turns."""
    wait, all_open, opened = Random(delays), asyncio.Event(), 0

    async def client(i: int) -> dict[str, tuple]:
        nonlocal opened
        found = {}
        with engine.client():
            opened += 1
            if opened == CLIENTS:
                all_open.set()
            await all_open.wait()
            for turn in range(1 + i % TURNS):
                await asyncio.sleep(wait.random() / 50)
                request = Request(f"{i}/{turn}", np.arange(3, 8 + i), 5, STOP, seed=10 * i + turn, order=(i, turn))
                c = await engine.generate(request)
                found[request.id] = (c.finish, c.tokens.tolist(), c.logp.tolist(), c.version.tolist())
        return found

    parts = await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    return {k: v for part in parts for k, v in part.items()}


def sound(answers: dict[str, tuple]) -> None:
    assert len(answers) == sum(1 + i % TURNS for i in range(CLIENTS))
    for finish, tokens, logp, version in answers.values():
        assert 1 <= len(tokens) <= 5 and len(logp) == len(version) == len(tokens)
        assert (finish == "stop") == (tokens[-1] in STOP) and not set(tokens[:-1]) & set(STOP)
        assert finish == "stop" or (finish == "length" and len(tokens) == 5)
        assert set(version) == {3} and all(value < 0 for value in logp)


def test_same_waves_whatever_the_clock_says():
    async def real() -> tuple[list[list[str]], dict[str, tuple], dict[str, tuple]]:
        async with serving("local") as engine:
            waves: list[list[str]] = []
            work = engine._decoder.run  # type: ignore[attr-defined]

            def seen(chunk, *rest):
                waves.append([row.request.id for row in chunk.rows])
                return work(chunk, *rest)

            engine._decoder.run = seen  # type: ignore[attr-defined]
            return waves, await played(engine, 1), await played(engine, 2)

    waves, first, second = asyncio.run(real())
    imitation = fake()
    played_fake = asyncio.run(played(imitation, 3))
    assert waves == imitation.waves * 2, "the fake must batch as the real engine does"
    assert first == second
    sound(first)
    sound(played_fake)


@pytest.mark.parametrize("kind", ["fake", "local"])
def test_abort_ends_a_waiting_request(kind):
    async def body(engine) -> None:
        apart = copy_context()  # a task started inside a client would act on that client's behalf
        with engine.client():  # an open client that never asks: the wave cannot form
            ask = asyncio.create_task(outside(engine), context=apart)
            await asyncio.sleep(0.05)
            await engine.abort()
            assert (await asyncio.wait_for(ask, 5)).finish == "abort"

    async def outside(engine):
        with engine.client():
            return await engine.generate(Request("r", np.arange(3, 9), 4, STOP))

    async def main() -> None:
        if kind == "fake":
            await body(fake())
        else:
            async with serving("local") as engine:
                await body(engine)

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("kind", ["fake", "local"])
def test_a_pause_keeps_requests_unless_it_aborts(kind, mode):
    async def body(engine) -> None:
        await engine.pause()
        before = await engine.progress()
        ask = asyncio.create_task(engine.generate(Request("r", np.arange(3, 9), 4, seed=1)))
        await asyncio.sleep(0.05)
        await engine.pause(mode)
        await asyncio.sleep(0.05)
        assert ask.done() == (mode == "abort") and await engine.progress() == before
        await engine.resume()
        done = await asyncio.wait_for(ask, 60)
        assert done.finish == ("abort" if mode == "abort" else "length")
        assert await engine.progress() == before + len(done.tokens)
        assert all(size >= 0 for size in (await engine.memory()).values())

    async def main() -> None:
        if kind == "fake":
            await body(fake())
        else:
            async with serving("local") as engine:
                await body(engine)

    asyncio.run(main())


def test_the_fake_is_an_engine():
    assert isinstance(fake(), Engine)
