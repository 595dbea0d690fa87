"""Collection in the background: bounds, order, what is dropped and what never is, stopping and resuming. Time is simulated."""

import asyncio
import gc
import json
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from mcore_agent.agent.episode import EngineFault
from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.protocols import Completion, InfraError
from mcore_agent.rollout.collect import Collector, Stopped
from mcore_agent.task.source import EpochSource
from mcore_agent.types import Episode
from tests.agent.toy import Toy, told
from tests.fakes import FakeEngine
from tests.rollout.collecting import CALL, collector, same, say
from tools.simulate_async import SlowTools, TimedEngine, agent_for, tokenizer
from tools.virtual_time import run as simulate

TURNS = (1, 4)


class Tools(SlowTools):
    """Calls of episodes whose group's name contains ``slow`` take an hour; with ``flaky`` one call in that many fails."""

    def __init__(self, slow: str = "no such task", flaky: int = 0):
        super().__init__(HopLookup(max_turns=9))
        self.slow, self.flaky, self.made = slow, flaky, list[str]()

    def make(self, task, seed):
        self.made.append(task.id)
        env, r = super().make(task, seed), Random(seed)
        step = env.step

        async def wrapped(action):
            if self.slow in task.id:
                await asyncio.sleep(3600)
            if self.flaky and r.randrange(self.flaky) == 0:
                raise InfraError("no container")
            return await step(action)

        env.step = wrapped  # type: ignore[method-assign]
        return env


class World:
    """An engine, tools and a collector, and a learner that takes ``train_s``."""

    def __init__(self, domain: Tools | None = None, prompts=4, group_size=3, slots=64, turn_s=1.0, **fields: Any):
        self.domain = domain or Tools()
        self.engine = TimedEngine(tokenizer(), turn_s, slots, TURNS)
        self.source = EpochSource(self.domain, seed=3)  # type: ignore[arg-type]
        self.collector = Collector(
            self.engine, self.domain, agent_for(self.domain, 6), self.source, run_seed=7, prompts=prompts, group_size=group_size,  # type: ignore[arg-type]
            **fields,
        )  # fmt: skip

    async def step(self, step: int, train_s: float = 10.0) -> tuple[list[Episode], Any]:
        found = await self.collector.collect(step, self.engine.version)
        await asyncio.sleep(train_s)
        await self.advance(self.engine.version + 1)
        return found

    async def advance(self, version: int) -> None:
        await self.engine.publish(version, 0.5)
        self.collector.advance(version)

    @property
    def groups(self):
        return self.collector.buffer.groups


def versions(episode: Episode) -> np.ndarray:
    return np.concatenate([row.version[row.sampled] for row in episode.rows] or [np.zeros(0, np.int32)])


def others() -> list[asyncio.Task]:
    return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


# ------------------------------------------------------------------------------------------------ bound and order


@pytest.mark.defect("G2")
@pytest.mark.parametrize("max_lag", [0, 1, 2, 3])
def test_groups_are_handed_out_as_drawn_and_never_more_are_started_than_the_version_allows(max_lag: int):
    """I3, M35: started groups are at most (version + max_lag + 1) * prompts at any time, and reach it."""

    async def main():
        world, most = World(max_lag=max_lag), Counter[int]()

        async def watch():
            while True:
                started = len({(task, i // 3) for task, n in Counter(world.domain.made).items() for i in range(n)})
                most[world.collector.buffer.version] = started
                await asyncio.sleep(0.25)

        watching, found = asyncio.create_task(watch()), []
        for step in range(8):
            episodes, stats = await world.step(step)
            found.append(episodes)
            assert all(versions(e).max() <= step for e in episodes)
            assert max(step - versions(e).min() for e in episodes) == stats.lag_max <= max_lag
            assert stats.lag_mean == pytest.approx(np.mean(np.concatenate([step - versions(e) for e in episodes])))
            assert not stats.dropped and not stats.dropped_tokens
            assert stats.playing + stats.buffered <= max_lag * 4
        watching.cancel()
        await world.collector.stop()
        return found, most

    found, most = simulate(main())
    ids = [world_task.id for world_task in EpochSource(HopLookup(max_turns=9), seed=3).next(32)]
    assert [e.group for batch in found for e in batch] == [f"train/{i // 4}/{i % 4}/{ids[i]}" for i in range(32) for _ in range(3)]
    assert all(started <= (version + max_lag + 1) * 4 for version, started in most.items())
    if max_lag:
        assert most[7] == (7 + max_lag + 1) * 4


def test_nothing_is_drawn_before_a_first_batch_is_wanted():
    """Weights are published for other reasons too: before the first step, or by a stage that plays nothing."""

    async def main():
        world = World(max_lag=1)
        for version in (1, 2):
            await world.advance(version)
        assert world.groups == [] and world.source.position == 0
        episodes, _ = await world.collector.collect(5, 2)
        assert [e.group.split("/")[1] for e in episodes] == ["5"] * 12
        await world.collector.stop()

    simulate(main())


def test_seeds_of_a_step_do_not_depend_on_the_bound():
    def seeds(max_lag: int) -> list[int]:
        async def main():
            world = World(max_lag=max_lag)
            found = [e.seed for step in range(4) for e in (await world.step(step))[0]]
            await world.collector.stop()
            return found

        return simulate(main())

    assert seeds(0) == seeds(1) == seeds(2)


@pytest.mark.defect("G1")
def test_groups_that_complete_while_nobody_collects_are_kept_and_the_loop_goes_on():
    async def main():
        world, clock, beats = World(max_lag=2, prompts=3), asyncio.get_running_loop().time, []

        async def beat():
            while True:
                beats.append(clock())
                await asyncio.sleep(1)

        beating = asyncio.create_task(beat())
        first, _ = await world.collector.collect(0, 0)
        await asyncio.sleep(1000)  # everything that may be played has been
        assert [g.episodes is not None for g in world.groups] == [True] * 6
        asked = len(world.domain.made)
        await world.advance(1)
        second, stats = await asyncio.wait_for(world.collector.collect(1, 1), 0.001)
        assert stats.buffered == 3 and stats.lag_max == 1
        await world.advance(2)
        third, _ = await asyncio.wait_for(world.collector.collect(2, 2), 0.001)
        assert asked == 27 and [len(first), len(second), len(third)] == [9, 9, 9]
        assert [int(e.group.split("/")[1]) for e in [*first, *second, *third]] == [0] * 9 + [1] * 9 + [2] * 9
        beating.cancel()
        await world.collector.stop()
        assert np.allclose(np.diff(beats), 1)

    simulate(main())


def test_stale_groups_are_dropped_and_counted_and_never_handed_out():
    """Complete ones and one that still plays, when versions advance faster than batches."""

    async def main():
        world = World(Tools(), max_lag=1)
        world.domain.slow = world.domain.task("train", 5).id
        await world.collector.collect(0, 0)
        await asyncio.sleep(200)
        assert [g.episodes is None for g in world.groups] == [False, True, False, False]
        held = sum(g.sampled for g in world.groups)
        await world.advance(1)  # four more are drawn, and four are of version 0
        await asyncio.sleep(200)
        await world.advance(2)
        episodes, stats = await world.collector.collect(1, 2)
        assert stats.dropped == {"stale": 12} and stats.dropped_tokens == {"stale": held}
        assert {int(v) for e in episodes for v in versions(e)} == {1}
        assert [e.task.id for e in episodes] == [f"hop_lookup/train/{i}" for i in range(8, 12) for _ in range(3)]
        assert len(world.groups) == 4  # their places were free again
        await world.collector.stop()

    simulate(main())


@pytest.mark.defect("E30")
def test_an_engine_that_still_serves_older_weights_is_a_fault():
    async def main():
        world = World()
        await world.step(0)
        world.engine.version = 0  # the second publish did not reach it
        with pytest.raises(EngineFault, match=r"answered by weights of version 0, but the engine was said to serve 1"):
            await world.collector.collect(1, 1)
        assert world.domain.open == 0
        with pytest.raises(ValueError, match="version 0 after those of version 1"):
            world.collector.advance(0)

    simulate(main())


def test_tokens_newer_than_the_learner_are_a_fault():
    async def main():
        world = World(max_lag=1)
        world.engine.version = 3
        with pytest.raises(EngineFault, match="sampled by weights of version 3, but the newest are said to be 2"):
            await world.collector.collect(0, 2)

    simulate(main())


@pytest.mark.defect("C8")
def test_an_episode_that_spans_updates_keeps_every_columns_length_and_every_tokens_version():
    """M99: in flight across publishes, also in the middle of an answer."""

    async def main():
        said: dict[str, list[np.ndarray]] = {}
        world = World(max_lag=3, prompts=2, turn_s=6.0, on_turn=lambda request, c: said.setdefault(request.session, []).append(c.version))
        mixed = 0
        for step in range(8):
            episodes, _ = await world.step(step, train_s=2.25)
            for e in episodes:
                [row] = e.rows
                assert len(row.tokens) == len(row.sampled) == len(row.logp) == len(row.version)
                assert (row.version[~row.sampled] == -1).all()
                assert np.array_equal(row.version[row.sampled], np.concatenate(said[f"{e.id}@{e.seed}"]))
                mixed += any(len(set(v.tolist())) > 1 for v in said[f"{e.id}@{e.seed}"])
        await world.collector.stop()
        assert mixed > 5  # answers with two versions

    simulate(main())


# ---------------------------------------------------------------------------------------------------------- tail


def test_the_tail_is_aborted_and_counted_at_max_lag_0():
    async def main():
        world = World(Tools(slow="train/1"), over_sample=0.5)
        clock = asyncio.get_running_loop().time
        first, stats = await world.step(0)
        assert clock() < 200 and len(world.domain.made) == 6 * 3 and world.domain.open == 0 and not others()
        assert len({e.group for e in first}) == 4 and "hop_lookup/train/1" not in {e.task.id for e in first}
        assert stats.dropped == {"tail": 6}
        assert stats.sampled_tokens + stats.dropped_tokens["tail"] == world.engine.answered
        assert [e.group for e in first] == sorted((e.group for e in first), key=lambda g: int(g.split("/")[2]))
        second, _ = await world.step(1)  # the next step draws new tasks
        assert {int(e.task.id.rpartition("/")[2]) for e in second} <= set(range(6, 12))
        return [(e.id, e.seed) for e in first + second]

    assert simulate(main()) == simulate(main())


def test_requests_of_the_tail_end_at_once_and_their_tokens_are_counted():
    async def main():
        world, at, cut = World(over_sample=1.0, group_size=1, turn_s=60.0, slots=5), [0.0], []
        clock, generate = asyncio.get_running_loop().time, world.engine.generate

        async def watched(request):
            answer = await generate(request)
            cut.append(len(answer.tokens) * (answer.finish == "abort"))
            return answer

        world.engine.generate = watched  # type: ignore[method-assign]
        _, stats = await world.collector.collect(0, 0, lambda done, total: at.append(clock()))
        assert at.count(0.0) == 1 and clock() == max(at) and max(cut) > 0 and not others()
        assert stats.sampled_tokens + stats.dropped_tokens["tail"] == world.engine.answered

    simulate(main())


def test_groups_that_are_complete_at_once_are_taken_in_the_order_of_their_tasks():
    domain = Toy(lambda task: lambda turn, action: told("bm", done=True))
    for shuffle in range(4):
        engine = FakeEngine(lambda request: say(request, CALL), shuffle)
        episodes, stats = asyncio.run(collector(engine, domain, n=2, group_size=2, over_sample=1.0).collect(0, 0))
        done = [int(e.group.split("/")[2]) for e in episodes]
        assert done == sorted(done) and len(set(done)) == 2 and stats.dropped == {"tail": 4}


@pytest.mark.parametrize("over_sample", [0.0, 0.5])
def test_the_tail_is_kept_above_max_lag_0(over_sample: float):
    """Without over-sampling the batch waits for its slowest; with it the slow group is overtaken, and comes when it is done."""

    async def main():
        world = World(Tools(), max_lag=2, over_sample=over_sample)
        world.domain.slow = "train/1"
        clock = asyncio.get_running_loop().time
        first, stats = await world.collector.collect(0, 0)
        tasks = [int(e.task.id.rpartition("/")[2]) for e in first[::3]]
        if not over_sample:
            assert clock() > 3600 and tasks == [0, 1, 2, 3]
        else:
            assert clock() < 200 and tasks[0] == 0 and 1 not in tasks and max(tasks) < 6 and not stats.dropped
            await asyncio.sleep(20_000)
            await world.advance(1)
            second, stats = await world.collector.collect(1, 1)
            assert [e.group for e in second[:3]] == ["train/0/1/hop_lookup/train/1"] * 3 and stats.lag_max == 1
        await world.collector.stop()

    simulate(main())


@pytest.mark.parametrize(("max_lag", "over_sample"), [(0, 0.0), (0, 0.75), (1, 0.0), (2, 0.5)])
def test_the_token_budget_is_exact(max_lag: int, over_sample: float):
    """Every token that the engine answered with is handed out, dropped with a reason, or held."""

    async def main():
        world, learned, dropped, r = World(Tools(flaky=6), max_lag=max_lag, over_sample=over_sample, max_retries=1), 0, Counter(), Random(5)
        for step in range(8):
            episodes, stats = await world.collector.collect(step, world.engine.version)
            learned += stats.sampled_tokens
            dropped.update(stats.dropped_tokens)
            assert stats.sampled_tokens == sum(len(versions(e)) for e in episodes)
            assert len(episodes) == 12 and all(n == 3 for n in Counter(e.group for e in episodes).values())
            assert stats.ok + sum(stats.truncated.values()) + stats.dropped.get("env_error", 0) == 12
            await asyncio.sleep(r.choice([0.3, 20, 70]))
            await world.advance(world.engine.version + r.choice([1, 1, 3]))
        await asyncio.sleep(500)
        held = sum(g.sampled for g in world.groups)
        late = world.collector._ledger.dropped_tokens
        assert learned + sum(dropped.values()) + held + sum(late.values()) == world.engine.answered
        assert dropped["env_error"] and dropped["retry"] and bool(dropped["tail"]) == (max_lag == 0 and over_sample > 0)
        await world.collector.stop()

    simulate(main())


# ------------------------------------------------------------------------------------------------- faults and stops


@pytest.mark.defect("C11")
@pytest.mark.parametrize("fails_at", [-1, 0, 1])
def test_an_attempt_that_failed_before_or_in_its_first_turn_is_played_again(fails_at: int):
    made = Counter[str]()

    def script(task):
        made[task.id] += 1
        attempt = made[task.id]

        def step(turn, action):
            if attempt == 1 and turn == fails_at:
                raise InfraError("no container")
            return told("bm", done=turn == 2)

        return step

    domain = Toy(script)
    if fails_at == -1:
        make = domain.make

        def broken(task, seed):
            if not made[task.id]:
                made[task.id] += 1
                raise InfraError("no image")
            return make(task, seed)

        domain.make = broken  # type: ignore[method-assign]
    engine = FakeEngine(lambda request: say(request, CALL))
    episodes, stats = asyncio.run(collector(engine, domain, n=2, group_size=1).collect(0, 0))
    assert [e.status for e in episodes] == ["ok", "ok"] and [len(e.turns) for e in episodes] == [3, 3]
    assert stats.retries == {"env_error": 2}


@pytest.mark.defect("C19")
def test_a_fault_in_the_background_is_raised_by_the_next_collection():
    async def main():
        world = World(max_lag=1)
        await world.collector.collect(0, 0)
        answer = world.engine.generate

        async def broken(request):
            c = await answer(request)
            return Completion(c.tokens, c.logp[1:], c.version, c.finish)

        world.engine.generate = broken  # type: ignore[method-assign]
        await world.advance(1)
        await asyncio.sleep(500)
        with pytest.raises(EngineFault, match="logp"):
            await world.collector.collect(1, 1)
        assert world.domain.open == 0 and not others()

    simulate(main())


@pytest.mark.defect("G4")
@pytest.mark.parametrize("held", [False, True])
def test_stop_leaves_nothing_behind_and_loses_no_group(held: bool):
    async def main():
        world = World(max_lag=1)
        await world.collector.collect(0, 0)
        if held:
            world.engine._serving.clear()  # in the middle of a publish that will never end
        await asyncio.sleep(15)
        drawn, complete = [g.name for g in world.groups], [g.name for g in world.groups if g.episodes is not None]
        await world.collector.stop()
        await world.collector.stop()
        assert not others() and world.domain.open == 0
        assert [g.name for g in world.groups] == drawn and [g.name for g in world.groups if g.episodes is not None] == complete
        world.engine._serving.set()
        second, _ = await world.collector.collect(1, 0)
        assert [e.group for e in second[::3]] == drawn
        await world.collector.stop()

    simulate(main())


@pytest.mark.defect("G4")
def test_stop_ends_a_collection_that_waits():
    async def main():
        world = World(Tools(slow="train"), max_lag=1)
        collecting = asyncio.create_task(world.collector.collect(0, 0))
        await asyncio.sleep(30)
        with pytest.raises(RuntimeError, match="one at a time"):
            await world.collector.collect(0, 0)
        await world.collector.stop()
        with pytest.raises(Stopped):
            await collecting
        assert not others() and world.domain.open == 0

    simulate(main())


def test_cancelling_a_collection_stops_the_background_too():
    async def main():
        world = World(Tools(slow="train/6"), max_lag=1)
        await world.collector.collect(0, 0)
        collecting = asyncio.create_task(world.collector.collect(1, 0))
        await asyncio.sleep(0.1)
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert not others() and world.domain.open == 0 and len(world.groups) == 8

    simulate(main())


# --------------------------------------------------------------------------------------------------------- resume


def checkpoint(world: World, folder: Path) -> dict[str, Any]:
    world.collector.save(folder / "buffer.npz")
    return json.loads(json.dumps({"collector": world.collector.state_dict(), "source": world.source.state_dict()}))


def resumed(state: dict[str, Any], folder: Path | None, version: int, **fields: Any) -> World:
    world = World(**fields)
    world.engine.version = version
    world.source.load_state_dict(state["source"])
    world.collector.load_state_dict(state["collector"])
    if folder is not None:
        world.collector.load(folder / "buffer.npz")
    return world


@pytest.mark.defect("G2")
@pytest.mark.defect("G3")
@pytest.mark.defect("G5")
@pytest.mark.parametrize("train_s", [0.5, 25.0, 500.0])
@pytest.mark.parametrize("buffer", [True, False])
def test_a_resumed_run_goes_on_with_the_groups_that_were_drawn(tmp_path, train_s: float, buffer: bool):
    """None is lost or played twice, no more are started than the version allows, and neither side waits for the other."""

    async def before():
        world, names = World(max_lag=1), []
        for step in range(3):
            names += [e.group for e in (await world.step(step, train_s))[0]]
        await asyncio.sleep(3.0)
        state = checkpoint(world, tmp_path)
        complete = {g.name: g.episodes for g in world.groups if g.episodes is not None}
        await world.collector.stop()
        return state, names, complete

    async def after(state, names, complete):
        world = resumed(state, tmp_path if buffer else None, 3, max_lag=1)
        assert world.collector.buffer.room == 0
        assert [g.name for g in world.groups if g.episodes is not None] == (list(complete) if buffer else [])
        first = True
        for step in range(3, 6):
            episodes, stats = await world.step(step)
            names += [e.group for e in episodes]
            assert stats.lag_max <= 1 and not stats.dropped
            for group, played in complete.items() if first and buffer else ():
                again = [e for e in episodes if e.group == group]
                assert not again or all(same(a, b) for a, b in zip(again, played, strict=True))
            first = False
        assert len(world.domain.made) <= 3 * ((2 + 3) * 4 - (len(complete) if buffer else 0))
        await world.collector.stop()
        return names

    state, names, complete = simulate(before())
    names = simulate(after(state, names, complete))
    ids = [task.id for task in EpochSource(HopLookup(), seed=3).next(24)]
    assert names == [f"train/{i // 4}/{i % 4}/{ids[i]}" for i in range(24) for _ in range(3)]


def test_a_strict_run_that_is_resumed_plays_the_same_episodes(tmp_path):
    """I10, saved between two steps and in the middle of a collection."""

    async def run(steps, world):
        found = []
        for step in steps:
            found += (await world.step(step))[0]
        return found

    async def interrupted():
        world = World()
        found = await run(range(2), world)
        between = checkpoint(world, tmp_path)
        collecting = asyncio.create_task(world.collector.collect(2, 2))
        await asyncio.sleep(9)
        during = checkpoint(world, tmp_path)
        collecting.cancel()
        await asyncio.wait([collecting])
        return found, between, during

    whole = simulate(run(range(4), World()))
    found, between, during = simulate(interrupted())
    for state in (between, during):
        rest = simulate(run(range(2, 4), resumed(state, tmp_path, 2)))
        assert all(same(a, b) for a, b in zip(whole, found + rest, strict=True))


def test_a_group_that_was_handed_out_after_saving_is_not_brought_back(tmp_path):
    async def main():
        world = World(max_lag=1)
        await world.collector.collect(0, 0)
        await asyncio.sleep(500)
        world.collector.save(tmp_path / "buffer.npz")
        await world.collector.collect(1, 0)
        state = world.collector.state_dict()
        await world.collector.stop()
        other = World(max_lag=1)
        other.collector.load_state_dict(state)
        other.collector.load(tmp_path / "buffer.npz")
        assert [g.name for g in other.groups] == [g.name for g in world.groups] and all(g.waits for g in other.groups)
        with pytest.raises(ValueError, match="group_size was 3 when saved and is 2"):
            World(group_size=2).collector.load_state_dict(state)

    simulate(main())


# ----------------------------------------------------------------------------------------------------------- engine


class AwayEngine(FakeEngine):
    """As the local engine: it does not wait for a client that is away."""

    @contextmanager
    def away(self):
        self.open -= 1
        self._look()
        try:
            yield
        finally:
            self.open += 1


@pytest.mark.parametrize("knows_away", [True, False])
def test_in_the_background_an_engine_never_waits_for_a_slow_tool(knows_away: bool):
    """Where the engine waits for open clients, a client is away while its tool works, or there is none."""

    async def main():
        engine, opened = AwayEngine(lambda request: say(request, CALL)), []
        domain = Toy(lambda task: lambda turn, action: told("bm", done=turn == 2))
        make, release = domain.make, asyncio.Event()

        def slow(task, seed):
            env = make(task, seed)
            step = env.step

            async def wait(action):
                opened.append(engine.open)
                if task.id == "toy/train/0":
                    await release.wait()
                return await step(action)

            env.step = wait
            return env

        domain.make = slow
        playing = collector(engine, domain, n=1, group_size=2, max_lag=3)
        if knows_away:
            playing._player.away = engine.away
        collecting = asyncio.create_task(playing.collect(0, 0))
        await asyncio.sleep(0.5)
        assert [g.episodes is not None for g in playing.buffer.groups] == [False, True, True, True]
        assert (max(opened) > 0) == knows_away
        release.set()
        await collecting
        await playing.stop()
        assert engine.open == 0

    simulate(main())


def test_a_session_is_one_attempt_and_every_turn_is_reported():
    engine, turns = FakeEngine(lambda request: say(request, CALL)), []
    failed = iter([True])

    def script(task):
        broken = next(failed, False)

        def step(turn, action):
            if broken and turn == 1:
                raise InfraError("no container")
            return told("bm", done=turn == 1)

        return step

    playing = collector(engine, Toy(script), n=1, group_size=1, on_turn=lambda request, answer: turns.append((request.session, answer)))
    asyncio.run(playing.collect(0, 0))
    assert [len(list(filter(lambda t: t[0] == s, turns))) for s in dict.fromkeys(s for s, _ in turns)] == [2, 2]
    assert {session for session, _ in turns} == {r.session for rs in engine.requests.values() for r in rs}


def test_evaluation_beside_groups_in_flight_changes_neither():
    async def main(evaluate: bool):
        world, scored = World(max_lag=1, slots=10_000), []
        names = []
        for step in range(3):
            names += [(e.id, e.seed) for e in (await world.step(step))[0]]
            if evaluate:
                tasks = [world.domain.task("eval", i) for i in range(5)]
                episodes, stats = await world.collector.evaluate(tasks, run_seed=7)
                assert len(episodes) == stats.episodes == 5 and not stats.lag_max
                scored.append([e.seed for e in episodes])
        await world.collector.stop()
        assert all(seeds == scored[0] for seeds in scored)
        return names

    assert simulate(main(False)) == simulate(main(True))


@pytest.mark.defect("F10")
def test_memory_does_not_grow_over_50_steps():
    """Less than a tenth of one step's episodes is left behind in 40 steps."""

    async def main():
        world = World(max_lag=1, prompts=2, group_size=2)
        sizes = []
        for step in range(50):
            episodes, _ = await world.step(step)
            if step in (9, 49):
                del episodes
                world.domain.made.clear()
                await world.collector.stop()
                world.collector.buffer.groups.clear()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            elif step == 5:
                kept = tracemalloc.get_traced_memory()[0]
                copies = [(e.rows[0].tokens.copy(), e.rows[0].logp.copy(), e.rows[0].version.copy(), list(e.turns)) for e in episodes]
                size = tracemalloc.get_traced_memory()[0] - kept
                del copies
        return sizes, size

    tracemalloc.start()
    try:
        (early, late), step = simulate(main())
    finally:
        tracemalloc.stop()
    assert late - early < 40 * step / 10, (early, late, step)
