"""Engines in processes of their own are killed, frozen and garbled under a pool: every request gets its one right answer."""

import asyncio
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from mcore_agent.protocols import EngineDown, InfraError, Request
from mcore_agent.rollout.pool import Pool
from mcore_agent.rollout.router import CacheRouter, RoundRobin
from mcore_agent.rollout.watch import Watch
from tests.engine_process import ProcessEngine, expected, processes

QUICK: dict[str, Any] = {"probe_s": 0.05, "stall_s": 60.0}


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, 300))


def requests(count: int, max_new: int = 30, prefix: str = "r") -> list[Request]:
    prompts = np.random.default_rng(3).integers(0, 900, (count, 12))
    return [Request(f"{prefix}{i}", p, max_new, temperature=i % 2, seed=i, session=f"s{i}") for i, p in enumerate(prompts)]


def right(asked: list[Request], done: list) -> None:
    """Each whole and once, in tokens that the fault cannot have changed."""
    assert len(done) == len(asked)
    for request, c in zip(asked, done, strict=True):
        assert (c.finish, c.tokens.tolist()) == ("length", expected(request))
        assert len(c.logp) == len(c.version) == len(c.tokens)


class Nurse:
    """Starts a new engine, with the weights of the day, in the place of every one that is lost."""

    def __init__(self, engines: list[ProcessEngine], **limits: Any):
        self.engines, self.births = engines, set()
        self.pool = Pool(list(engines), CacheRouter(), on_down=self.down, **{**QUICK, **limits})
        self.lost: list[str] = []
        self.killed: list[ProcessEngine] = []

    def down(self, index: int, reason: str) -> None:
        self.lost.append(reason)
        self.births.add(asyncio.create_task(self.birth(index)))

    async def kill(self, choose: Random) -> None:
        """Kills one that lives, and waits for one if none does."""
        while not (living := [s.engine for s in self.pool._slots if s.alive and s.engine not in self.killed]):
            await asyncio.sleep(0.01)
        victim = choose.choice(living)
        self.killed.append(victim)
        victim.kill()

    async def birth(self, index: int) -> None:
        engine = await ProcessEngine.spawn(version=self.pool.version)
        self.engines.append(engine)
        self.pool.engine_back(index, engine)


@asynccontextmanager
async def nursed(count: int, delay: float = 0.002, **limits: Any):
    async with processes(count, delay) as engines:
        nurse = Nurse(engines, **limits)
        async with nurse.pool.watching():
            try:
                yield nurse
            finally:
                await asyncio.gather(*nurse.births)


@pytest.mark.defect("H1")
@pytest.mark.defect("C7")
def test_twenty_kills_at_random_moments_lose_nothing():
    """Two engines, one of them killed twenty times while sixteen requests at a time run; each is answered once, as undisturbed."""

    async def body() -> None:
        moments = Random(11)
        async with nursed(2, retries=40) as nurse:
            pool = nurse.pool

            async def kills() -> None:
                for _ in range(20):
                    await asyncio.sleep(moments.uniform(0.0, 0.15))
                    await nurse.kill(moments)

            async def asking(lane: int) -> list[tuple[Request, Any]]:
                found, number = [], 0
                while len(nurse.killed) < 20 or number < 3:
                    number += 1
                    (request,) = requests(1, 20 + lane, f"{lane}/{number}/")
                    found.append((request, await pool.generate(request)))
                return found

            lanes, _ = await asyncio.gather(asyncio.gather(*(asking(i) for i in range(16))), kills())
            pairs = [pair for lane in lanes for pair in lane]
            right([r for r, _ in pairs], [c for _, c in pairs])
            while len(nurse.lost) < 20:
                await asyncio.sleep(0.02)  # the last one may have been idle
            await asyncio.gather(*nurse.births)
            stats = pool.stats()
            assert stats["pool/lost"] == stats["pool/recoveries"] == 20 and stats["pool/alive"] == 2
            assert stats["pool/repeated"] > 0 and stats["pool/load/0"] == stats["pool/load/1"] == 0
            assert 0 < stats["pool/detect_s_max"] < 10 and stats["pool/recover_s_max"] >= stats["pool/detect_s_max"]

    run(body())


@pytest.mark.defect("H1")
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_killed_engine_is_noticed(busy: bool):
    async def body() -> None:
        async with nursed(1) as nurse:
            if busy:
                running = asyncio.gather(*(nurse.pool.generate(r) for r in requests(4, 60)))
                await asyncio.sleep(0.05)
            nurse.engines[0].kill()
            while not nurse.lost:
                await asyncio.sleep(0.01)
            if busy:
                right(requests(4, 60), await running)
            assert nurse.pool.stats()["pool/detect_s_max"] < 10

    run(body())


@pytest.mark.parametrize("how", ["freeze", "mute"])
def test_a_frozen_engine_is_lost_after_stall_s_and_its_requests_go_elsewhere(how: str):
    """Frozen: the whole process stands still. Mute: it says how far it is, but gets no further."""

    async def body() -> None:
        async with nursed(2, delay=0.01, stall_s=2.0) as nurse:
            asked = requests(8, 60)
            running = asyncio.gather(*(nurse.pool.generate(r) for r in asked))
            await asyncio.sleep(0.2)
            if how == "freeze":
                nurse.engines[1].freeze()
            else:
                await nurse.engines[1].set(mute=True)
            right(asked, await running)
            assert ("no answer" if how == "freeze" else "no progress") in nurse.lost[0]
            assert nurse.pool.stats()["pool/repeated"] >= 4

    run(body())


def test_an_idle_engine_is_not_frozen():
    async def body() -> None:
        async with nursed(2, stall_s=2.0) as nurse:
            for prefix in ("a", "b"):
                asked = requests(3, 10, prefix)
                right(asked, await asyncio.gather(*(nurse.pool.generate(r) for r in asked)))
                await asyncio.sleep(2.5)
            assert not nurse.lost

    run(body())


@pytest.mark.defect("E12")
def test_requests_that_are_paused_in_place_are_not_frozen():
    async def body() -> None:
        async with nursed(2, delay=0.01, stall_s=2.0) as nurse:
            asked = requests(6, 300)
            running = asyncio.gather(*(nurse.pool.generate(r) for r in asked))
            for engine in nurse.engines:
                while await engine.progress() < 9:  # three requests each
                    await asyncio.sleep(0.01)
            nurse.pool.hold()
            for engine in nurse.engines:
                await engine.pause()
            await asyncio.sleep(2.5)
            for engine in nurse.engines:
                await engine.begin_update()
                await engine.end_update(1)
                await engine.resume()
            nurse.pool.release()
            done = await running
            right(asked, done)
            assert not nurse.lost and nurse.pool.stats()["pool/continued"] == 0
            assert all(set(c.version) == {0, 1} and sorted(c.version) == c.version.tolist() for c in done)

    run(body())


def test_garbage_takes_an_engine_out_at_once():
    async def body() -> None:
        async with nursed(2) as nurse:
            await nurse.engines[0].set(garbage=True)
            asked = requests(6)
            right(asked, await asyncio.gather(*(nurse.pool.generate(r) for r in asked)))
            assert len(nurse.lost) == 1 and "garbage" in nurse.lost[0]
            assert nurse.pool.stats()["pool/repeated"] == 3

    run(body())


def test_a_request_that_is_lost_too_often_is_given_up():
    async def body() -> None:
        async with nursed(3, retries=2) as nurse:
            for engine in nurse.engines:
                await engine.set(garbage=True)
            with pytest.raises(InfraError, match="request r0: 3 engines were lost.*garbage"):
                await nurse.pool.generate(requests(1)[0])

    run(body())


def test_with_no_engine_left_requests_wait_for_one_to_come_back():
    async def body() -> None:
        async with processes(2) as engines:
            pool = Pool(list(engines), RoundRobin(), back_s=30.0, **QUICK)
            async with pool.watching():
                asked = requests(5, 60)
                running = asyncio.gather(*(pool.generate(r) for r in asked))
                await asyncio.sleep(0.05)
                for engine in engines:
                    engine.kill()
                while pool.alive:
                    await asyncio.sleep(0.01)
                late = asyncio.create_task(pool.generate(requests(1, 10, "late")[0]))
                await asyncio.sleep(0.1)
                assert not running.done() and not late.done()
                engines.append(await ProcessEngine.spawn(version=pool.version))
                pool.engine_back(1, engines[-1])
                right(asked, await running)
                right(requests(1, 10, "late"), [await late])
                assert pool.alive == [1]

    run(body())


def test_with_no_engine_left_there_is_a_limit():
    async def body() -> None:
        async with processes(1) as engines:
            pool = Pool(list(engines), RoundRobin(), back_s=0.1, **QUICK)
            engines[0].kill()
            with pytest.raises(InfraError, match=r"no engine is left.*0\.1 s"):
                await pool.generate(requests(1)[0])
            pool.hold()  # time that the pool is held does not count
            held = asyncio.create_task(pool.generate(requests(1)[0]))
            await asyncio.sleep(0.3)
            assert not held.done()
            pool.release()
            with pytest.raises(InfraError):
                await held

    run(body())


@pytest.mark.defect("C8")
@pytest.mark.parametrize("keep", [True, False])
def test_drain_over_several_engines_and_an_update(keep: bool):
    """Kept requests go on under the new version with the tokens they would have had; dropped ones end with what they have."""

    async def body() -> None:
        async with nursed(2, delay=0.005) as nurse:
            pool, asked = nurse.pool, [r for r in requests(12, 40) if not r.temperature]
            running = asyncio.gather(*(pool.generate(r) for r in asked))
            await asyncio.sleep(0.08)
            await pool.drain(keep)
            for engine in nurse.engines:
                await engine.sleep()  # refused unless nothing is in flight there
                await engine.wake()
                await engine.begin_update()
                await engine.end_update(1)
            assert running.done() != keep
            pool.release()
            done = await running
            if keep:
                right(asked, done)
                assert {*done[0].version} == {0, 1} and all(sorted(c.version) == c.version.tolist() for c in done)
            for request, c in zip(asked, done, strict=True):
                assert c.finish == ("length" if keep else "abort")
                assert len(c.logp) == len(c.version) == len(c.tokens)
                assert c.tokens.tolist() == expected(request)[: len(c.tokens)]
            assert not nurse.lost

    run(body())


@pytest.mark.defect("C11")
def test_many_drains_and_kills_and_a_first_turn_that_starts_again():
    """Drains at random moments, some before the first token, some while an engine dies: the answer is the undisturbed one."""

    async def body() -> None:
        moments = Random(4)
        async with nursed(2, retries=20) as nurse:
            pool, asked = nurse.pool, [r for r in requests(16, 120) if not r.temperature]
            running = asyncio.gather(*(pool.generate(r) for r in asked))
            for i in range(12):
                if i % 4 == 1:
                    await nurse.kill(moments)
                await pool.drain(keep=True)
                assert pool.stats()["pool/waiting"] >= 0 and not any(f for s in pool._slots for f in s.flights if not f.answer.done())
                pool.release()
                await asyncio.sleep(moments.choice((0.0, 0.003, 0.03)))
            right(asked, await running)
            await asyncio.gather(*nurse.births)
            assert len(nurse.lost) == 3 and pool.stats()["pool/continued"] > 8

    run(body())


def test_a_drain_ends_also_when_an_engine_is_frozen():
    async def body() -> None:
        async with nursed(2, delay=0.01, stall_s=1.0) as nurse:
            asked = requests(6, 40)
            running = asyncio.gather(*(nurse.pool.generate(r) for r in asked))
            await asyncio.sleep(0.1)
            nurse.engines[0].freeze()
            await nurse.pool.drain(keep=True)
            assert len(nurse.lost) == 1 and not running.done()
            nurse.pool.release()
            done = await running
            assert [len(c.tokens) for c in done] == [40] * 6

    run(body())


def test_what_a_frozen_engine_still_says_reaches_nobody():
    async def body() -> None:
        async with nursed(1, delay=0.01, stall_s=1.5) as nurse:
            asked = requests(3, 30)
            running = asyncio.gather(*(nurse.pool.generate(r) for r in asked))
            await asyncio.sleep(0.1)
            nurse.engines[0].freeze()
            right(asked, await running)
            nurse.engines[0].thaw()
            await asyncio.sleep(0.3)
            assert len(nurse.lost) == 1 and nurse.pool.alive == [0] and nurse.pool.stats()["pool/recoveries"] == 1

    run(body())


@pytest.mark.defect("G1")
def test_the_loop_is_never_blocked_while_an_engine_is_frozen():
    async def body() -> float:
        async with nursed(2, delay=0.01, stall_s=1.0) as nurse:
            nurse.engines[0].freeze()
            running = asyncio.gather(*(nurse.pool.generate(r) for r in requests(6, 20)))
            loop, turns = asyncio.get_running_loop(), 0
            cpu, began = 0.0, loop.time()
            while not running.done():
                await asyncio.sleep(0.005)
                turns += 1
            cpu = (loop.time() - began) / turns
            await running
            return cpu

    assert run(body()) < 0.5, "other tasks of the loop got a turn only now and then"


# ---------------------------------------------------------------------------------------------- the judgement


def watch(**limits: float) -> Watch:
    return Watch(**{"stall_s": 60.0, "dead_s": 10.0, "probe_s": 1.0, **limits})


def test_only_work_without_progress_adds_up():
    w = watch()
    w.heard(5, 0.0, True)
    assert [w.heard(5, 0.0, True) for _ in range(59)] == [""] * 59
    assert "no progress for 60.0 s" in w.heard(5, 0.0, True)
    w = watch()
    for progress in (0, 1):
        for _ in range(50):
            assert w.heard(progress, 0.0, True) == ""
    for _ in range(500):
        assert w.heard(1, 0.0, False) == "", "an idle engine has nothing to get on with"
    assert w.heard(1, 0.0, True) == ""


def test_silence_refusal_and_a_loop_that_was_held_up():
    w = watch()
    assert w.answer_s == 5.0
    assert [bool(w.missed(True)) for _ in range(10)] == [False] * 9 + [True]  # (5 + 1) * 10
    w = watch()
    assert [bool(w.failed(0.0, ConnectionRefusedError())) for _ in range(10)] == [False] * 9 + [True]
    w = watch()
    assert w.failed(1e6, OSError()) == "", "one probe counts for no more than its deadline"
    w.heard(3, 0.0, True)
    assert w.heard(3, 1e6, True) == "" and w.refused == 0
    assert [w.missed(False) for _ in range(100)] == [""] * 100, "it sleeps, or loads weights"


def test_a_probe_that_says_down_is_final_and_an_unknown_error_is_raised():
    class Odd:
        version, says = 0, EngineDown("gone")

        def capabilities(self) -> frozenset[str]:
            return frozenset()

        async def progress(self) -> int:
            raise self.says

    async def body() -> None:
        odd = Odd()
        assert await watch().probe(odd, True, False) == "gone"  # type: ignore[arg-type]
        odd.says = ConnectionResetError("x")
        assert "not reachable" in await watch(dead_s=0.5).probe(odd, False, False)  # type: ignore[arg-type]
        odd.says = KeyError("a fault of the program")
        pool = Pool([odd], RoundRobin(), **QUICK)  # type: ignore[list-item]
        with pytest.raises(KeyError):
            async with pool.watching():
                while pool.alive:
                    await asyncio.sleep(0.01)

    run(body())
