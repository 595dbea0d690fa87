"""The pool over one engine, the local one or the fake: it changes nothing, holds, drains, and survives weight updates."""

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest

from mcore_agent.protocols import Completion, InfraError, Request
from mcore_agent.rollout.errors import EngineStateError
from mcore_agent.rollout.pool import Pool
from mcore_agent.rollout.router import CacheRouter, RoundRobin
from tests.contracts.test_engine import play, serving
from tests.fakes import FakeEngine, completion
from tests.rollout.tiny import VOCAB, checkpoint, logprobs, prompt, publish, reference, requests, same_bits

LONG = 100


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, 300))


def fake(tokens: int = 5) -> FakeEngine:
    return FakeEngine(lambda r: completion(r, (1 + (r.seed + i) % 50 for i in range(tokens))))


def long_greedy(lengths: list[int]) -> list[Request]:
    return requests(lengths, max_new=LONG, temperature=0.0)


async def begun(pool: Pool, asked: list[Request], wait: float) -> asyncio.Future:
    running = asyncio.gather(*(pool.generate(r) for r in asked))
    await asyncio.sleep(wait)
    return running


def test_one_engine_and_no_fault_gives_the_same_bits_as_without_a_pool():
    """Twelve episodes, environments of random speed: waves, tokens and log-probabilities are those of a direct call."""

    async def body(pooled: bool, shuffle: int) -> tuple[list[list[str]], list[list[Completion]]]:
        async with serving("local") as engine:
            waves: list[list[str]] = []
            work = engine._decoder.run  # type: ignore[attr-defined]

            def seen(chunk, *rest):
                waves.append([row.request.id for row in chunk.rows])
                return work(chunk, *rest)

            engine._decoder.run = seen  # type: ignore[attr-defined]
            side = Pool([engine], CacheRouter()) if pooled else engine
            return waves, await asyncio.gather(*(play(side, i, Random(shuffle)) for i in range(12)))

    waves, plain = run(body(False, 1))
    for shuffle in (2, 3):
        waves_pooled, pooled = run(body(True, shuffle))
        assert waves_pooled == waves and len(waves) >= 3
        assert all(same_bits(a, b) for x, y in zip(plain, pooled, strict=True) for a, b in zip(x, y, strict=True))


def test_a_drain_that_keeps_leaves_greedy_tokens_as_they_were():
    async def body():
        async with serving("local") as engine:
            pool, asked = Pool([engine], RoundRobin()), long_greedy([6, 11])
            plain = await (await begun(pool, asked, 0.0))
            cuts = []
            for wait in (0.0, 0.03, 0.06):
                running = await begun(pool, asked, wait)
                await pool.drain(keep=True)
                await engine.sleep(("kv_cache",))  # nothing is left in the engine
                cuts.append(pool.stats()["pool/kept_tokens"])
                await asyncio.sleep(0.02)
                assert not running.done()
                await engine.wake(("kv_cache",))
                pool.release()
                for a, b in zip(plain, await running, strict=True):
                    assert a.finish == b.finish == "length" and a.tokens.tolist() == b.tokens.tolist()
                    np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
            assert cuts[-1] > cuts[0], "at least one cut must have met the requests at work"
            assert pool.stats()["pool/continued"] == 6

    run(body())


async def cut_once(pool: Pool, engine, asked: list[Request], meet) -> list[Completion]:
    """Drains at a moment that meets the requests at work, calls ``meet`` and lets them go on."""
    wait = 0.05
    for _ in range(12):
        before = pool.stats()["pool/kept_tokens"]
        running = await begun(pool, asked, wait)
        await pool.drain(keep=True)
        if running.done() or pool.stats()["pool/kept_tokens"] == before:
            wait = wait / 2 if running.done() else wait * 2
            pool.release()
            await running
            continue
        await meet()
        pool.release()
        return await running
    raise AssertionError("no drain met the requests at work")


@pytest.mark.defect("C8")
def test_a_request_that_lived_through_an_update_carries_both_versions():
    """Tokens before the boundary have the old model's log-probabilities, those behind it the new one's."""

    async def body():
        async with serving("local") as engine:
            pool = Pool([engine], CacheRouter())
            asked = long_greedy([6])

            async def update() -> None:
                await engine.sleep(("kv_cache",))
                await publish(engine, checkpoint("qwen3", 1), 4)
                await engine.wake(("kv_cache",))

            (c,) = await cut_once(pool, engine, asked, update)
            assert pool.version == 4
            return asked[0], c

    request, c = run(body())
    boundary = int((c.version == 3).sum())
    assert 0 < boundary < LONG and c.version.tolist() == [3] * boundary + [4] * (LONG - boundary)
    assert len(c.tokens) == len(c.logp) == len(c.version) == LONG
    old, new = (logprobs(reference("qwen3", seed), request.tokens, c.tokens) for seed in (0, 1))
    np.testing.assert_allclose(c.logp[:boundary], old[:boundary], atol=1e-5)
    np.testing.assert_allclose(c.logp[boundary:], new[boundary:], atol=1e-5)


def test_a_sampled_request_that_goes_on_does_not_draw_the_same_again():
    """With a uniform model the old draws would give the first tokens once more."""

    def uniform(r: Request) -> Completion:
        return completion(r, np.random.default_rng(r.seed).integers(3, VOCAB, r.max_new))

    async def body():
        engine = FakeEngine(uniform)
        pool = Pool([engine], RoundRobin())
        whole = await pool.generate(Request("a", prompt(4), 40, seed=5))
        engine.policy = lambda r: Completion(*(getattr(uniform(r), n)[:20] for n in ("tokens", "logp", "version")), "abort")
        running = asyncio.create_task(pool.generate(Request("b", prompt(4), 40, seed=5)))
        await asyncio.sleep(0)
        pool.hold()
        next(iter(pool._flights.values())).kept = True
        await asyncio.sleep(0.02)
        engine.policy = uniform
        pool.release()
        return whole, await running

    whole, cut = run(body())
    assert cut.tokens[:20].tolist() == whole.tokens[:20].tolist() and len(cut.tokens) == 40
    assert cut.tokens[20:].tolist() != whole.tokens[:20].tolist()


def test_a_drain_that_drops_ends_every_request_in_flight():
    """At the engine, waiting in it, and waiting at the pool after an earlier drain; later requests wait."""

    async def body():
        async with serving("local") as engine:
            pool, asked = Pool([engine], RoundRobin()), long_greedy([6, 11])
            running = await begun(pool, asked, 0.04)
            await pool.drain(keep=True)
            kept = int(pool.stats()["pool/kept_tokens"])
            waiting = await begun(pool, requests([7, 5, 4])[2:], 0.0)
            await pool.drain(keep=False)
            done = [*await running, *await waiting]
            assert [c.finish for c in done] == ["abort"] * 3
            assert sum(len(c.tokens) for c in done[:2]) == kept and len(done[2].tokens) == 0
            later = await begun(pool, requests([9]), 0.02)
            assert not later.done()
            pool.release()
            assert (await later)[0].finish == "length" and pool.stats()["pool/aborted"] == 3
            running = await begun(pool, asked, 0.01)
            await pool.drain(keep=False)
            assert [c.finish for c in await running] == ["abort"] * 2

    run(body())


def test_abort_by_id():
    async def body():
        async with serving("local") as engine:
            pool, asked = Pool([engine], RoundRobin()), long_greedy([6, 11, 4])
            plain = await (await begun(pool, asked, 0.0))
            running = await begun(pool, asked, 0.03)
            await pool.abort(["1", "nobody"])
            done = await running
            assert [c.finish for c in done] == ["length", "abort", "length"]
            assert done[0].tokens.tolist() == plain[0].tokens.tolist()
            running = await begun(pool, asked, 0.01)
            await pool.abort()
            assert {c.finish for c in await running} == {"abort"}

    run(body())


@pytest.mark.defect("E12")
def test_a_pause_in_place_keeps_requests_through_an_update():
    """Held, paused in the engine, published to, resumed: no abort, and nothing for the pool to continue."""

    async def body(wait: float) -> tuple[Completion, dict[str, float]]:
        async with serving("local") as engine:
            pool = Pool([engine], RoundRobin())
            running = await begun(pool, long_greedy([6]), wait)
            pool.hold()
            await engine.pause()
            await publish(engine, checkpoint("qwen3", 1), 4)
            await engine.resume()
            pool.release()
            return (await running)[0], pool.stats()

    for wait in (0.02, 0.04, 0.08, 0.16):
        c, stats = run(body(wait))
        assert c.finish == "length" and stats["pool/aborted"] == stats["pool/continued"] == stats["pool/lost"] == 0
        if {3, 4} <= set(c.version.tolist()):
            return
    raise AssertionError("no pause met the request at work")


def test_held_requests_wait_for_a_sleeping_engine():
    async def body():
        async with serving("local") as engine:
            pool = Pool([engine], CacheRouter())
            await pool.drain(keep=True)
            await engine.sleep()
            running = await begun(pool, requests([5, 9]), 0.02)
            assert not running.done() and pool.stats()["pool/waiting"] == 2
            await engine.wake()
            await publish(engine, checkpoint("qwen3", 1), 4)
            pool.release()
            return await running

    assert [c.version.tolist() for c in run(body())] == [[4] * 11] * 2


def test_a_caller_that_is_cancelled_takes_its_request_along():
    async def body():
        async with serving("local") as engine:
            pool = Pool([engine], RoundRobin())
            (request,) = long_greedy([6])
            task = asyncio.create_task(pool.generate(request))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            done = await pool.generate(request)  # the id is free
            assert done.finish == "length" and pool.stats()["pool/load/0"] == 0
            pool.hold()
            task = asyncio.create_task(pool.generate(request))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            assert pool.stats()["pool/waiting"] == 0

    run(body())


def test_errors_of_the_caller_and_of_the_engine_go_through():
    async def body():
        async with serving("local") as engine:
            pool = Pool([engine], CacheRouter())
            with pytest.raises(ValueError, match="max_new"):
                await pool.generate(Request("r", prompt(4), 0))
            running = await begun(pool, long_greedy([6]), 0.0)
            with pytest.raises(ValueError, match="'0'.*in flight"):
                await pool.generate(long_greedy([6])[0])
            assert (await running)[0].finish == "length"
            assert (await pool.generate(Request("r", prompt(100), 200))).finish == "error"
            assert pool.alive == [0] and pool.stats()["pool/requests/0"] == 3

    run(body())

    def broken(request: Request) -> Completion:
        raise InfraError("no luck")

    async def infra():
        pool = Pool([FakeEngine(broken)], RoundRobin())
        with pytest.raises(InfraError, match="no luck"):
            await pool.generate(Request("r", prompt(4), 5))
        assert pool.alive == [0], "an engine that only says no is not lost"

    run(infra())


def test_capabilities_version_and_bad_arguments():
    class Less(FakeEngine):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"abort", "top_k"})

    class More(Less):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"abort", "sleep"})

    one, two = Less(None), More(None)  # type: ignore[arg-type]
    one.version, two.version = 3, 4
    pool = Pool([one, two], RoundRobin())
    assert pool.capabilities() == {"abort"} and pool.version == 4 and pool.alive == [0, 1]
    with pytest.raises(ValueError, match="engines is empty"):
        Pool([], RoundRobin())
    with pytest.raises(ValueError, match="must be alone"):
        Pool([fake(), fake()], RoundRobin())
    for fields in ({"retries": -1}, {"back_s": 0.0}, {"stall_s": 0.0}, {"probe_s": -1.0}, {"dead_s": 0.0}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Pool([one], RoundRobin(), **fields)


def test_an_engine_that_comes_back_must_serve_the_current_weights():
    class Plain(FakeEngine):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"abort"})

    async def body():
        engines = [Plain(fake().policy), Plain(fake().policy)]
        for engine in engines:
            engine.version = 7
        told: list[tuple[int, str]] = []
        pool = Pool(engines, RoundRobin(), on_down=lambda i, reason: told.append((i, reason)))
        with pytest.raises(EngineStateError, match="engine 1 is not down"):
            pool.engine_back(1, engines[1])
        pool.engine_down(1, "burnt")
        pool.engine_down(1, "burnt again")
        assert told == [(1, "burnt")] and pool.alive == [0] and pool.stats()["pool/lost"] == 1
        fresh = Plain(fake().policy)
        for wrong in (6, 8):
            fresh.version = wrong
            with pytest.raises(EngineStateError, match=f"version {wrong}, but 7 is served; publish"):
                pool.engine_back(1, fresh)
        fresh.version = 7
        pool.engine_back(1, fresh)
        assert pool.alive == [0, 1] and pool.stats()["pool/recoveries"] == 1
        pool.engine_down(0, "x")
        pool.engine_down(1, "x")
        old = Plain(fake().policy)
        with pytest.raises(EngineStateError, match="version 0, but 7"):
            pool.engine_back(0, old)
        old.version = 8  # a step was published while nothing served
        pool.engine_back(0, old)
        assert pool.version == 8

    run(body())


def test_new_weights_empty_the_routers_memory():
    class Spy(RoundRobin):
        forgot = 0

        def forget(self, index: int) -> None:
            self.forgot += 1

    async def body():
        engine = fake()
        pool = Pool([engine], spy := Spy())
        for version in (0, 0, 1, 1, 2):
            engine.version = version
            await pool.generate(Request("r", prompt(4), 5))
        assert spy.forgot == 3  # the first weights, and two updates

    run(body())


@pytest.mark.parametrize("waves", [True, False])
def test_an_engine_that_waits_for_a_client_is_not_frozen(waves: bool):
    """One episode asks, the other is in its environment for longer than ``stall_s``: only an engine without waves should get on."""

    class Watched(FakeEngine):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"abort", "waves"} if waves else {"abort"})

    async def body():
        lost: list[str] = []
        pool = Pool([Watched(fake().policy)], RoundRobin(), stall_s=0.3, probe_s=0.02, on_down=lambda _, reason: lost.append(reason))
        both_open = asyncio.Barrier(2)

        async def episode(seconds: float) -> Completion:
            with pool.client():
                await both_open.wait()
                await asyncio.sleep(seconds)
                return await pool.generate(Request(str(seconds), prompt(4), 5))

        async with pool.watching():
            done = asyncio.gather(episode(0.0), episode(1.0))
            if waves:
                assert [c.finish for c in await done] == ["length"] * 2 and not lost
                return
            while not lost:
                await asyncio.sleep(0.01)
            done.cancel()
        assert "no progress" in lost[0]

    run(body())


def test_an_answer_with_columns_that_do_not_fit_takes_the_engine_out():
    """A well-formed message of another length than it says: the client of an engine cannot see it, the pool does."""

    class Plain(FakeEngine):
        def capabilities(self) -> frozenset[str]:
            return frozenset({"abort"})

    def short(r: Request) -> Completion:
        c = completion(r, range(3, 8))
        return Completion(c.tokens, c.logp[:-1], c.version, c.finish)

    async def body():
        lost: list[tuple[int, str]] = []
        pool = Pool([Plain(short), Plain(fake().policy)], RoundRobin(), on_down=lambda i, reason: lost.append((i, reason)))
        done = await pool.generate(Request("r", prompt(4), 5))
        assert done.finish == "length" and len(done.tokens) == len(done.logp) == 5
        assert [i for i, _ in lost] == [0] and "garbage answer to request r: 5 tokens, 4 logp" in lost[0][1]

    run(body())
