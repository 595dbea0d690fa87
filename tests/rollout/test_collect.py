"""Collection: order, seeds, retries, counts, cancellation."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from mcore_agent.agent.episode import EngineFault
from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.protocols import Completion, InfraError, Request
from mcore_agent.registry import create, variants
from mcore_agent.rollout.stats import CollectStats
from tests.agent.toy import Toy, told
from tests.fakes import FakeEngine, completion
from tests.rollout.collecting import CALL, TOKENIZER, Listed, collect, collector, random_domain, random_policy, same, say

# ------------------------------------------------------------------------------------------- order and seeds


def test_groups_come_in_order_and_are_complete():
    domain = random_domain()
    episodes, stats = collect(FakeEngine(random_policy), domain)
    assert [e.task.id for e in episodes] == [f"toy/train/{i}" for i in range(4) for _ in range(3)]
    assert [e.group for e in episodes] == [f"train/5/{i}/toy/train/{i}" for i in range(4) for _ in range(3)]
    assert len({e.id for e in episodes}) == len({e.seed for e in episodes}) == 12
    assert all(env.closed == 1 for env in domain.envs)
    assert stats.episodes == 12


def test_the_result_does_not_depend_on_who_ends_first():
    """Answers that arrive in other orders change neither the episodes nor the engine's batches."""
    runs = []
    for shuffle in range(6):
        engine = FakeEngine(random_policy, shuffle)
        runs.append((collect(engine, random_domain())[0], engine.waves))
    first, waves = runs[0]
    assert len({len(e.turns) for e in first}) > 1  # episodes of different lengths
    for episodes, others in runs[1:]:
        assert all(same(a, b) for a, b in zip(first, episodes, strict=True))
        assert others == waves


def test_all_clients_are_open_before_the_first_request_and_close_with_their_episodes():
    domain = Toy(lambda task: lambda turn, action: told("bm", done=turn == task.spec["index"]))
    engine = FakeEngine(lambda request: say(request, CALL))
    collect(engine, domain, n=4, group_size=2)
    # Tasks 0 to 3 play 1 to 4 turns, two episodes each: waves of 8, 6, 4 and 2, sorted by place.
    assert [len(wave) for wave in engine.waves] == [8, 6, 4, 2]
    assert [name.rpartition("/")[0] for name in engine.waves[0]] == [
        f"train/5/{i}/toy/train/{i}#{sample}" for i in range(4) for sample in range(2)
    ]
    assert engine.open == 0


def test_batches_are_sorted_by_place():
    """Not by name: episode 2 comes before episode 10."""
    engine = FakeEngine(lambda request: say(request, "<answer>bl</answer>"))
    collect(engine, HopLookup(), n=12, group_size=1)
    assert [int(name.split("/")[2]) for name in engine.waves[0]] == list(range(12))


def test_seeds_depend_on_run_step_task_and_sample():
    def seeds(**kwargs):
        return [e.seed for e in collect(FakeEngine(random_policy), random_domain(), **kwargs)[0]]

    assert seeds() == seeds()
    assert not set(seeds()) & set(seeds(step=6))
    assert not set(seeds()) & set(seeds(run_seed=12))
    assert seeds(n=2) == seeds()[:6]  # what else is played does not matter


def test_a_greedy_episode_joins_each_group_and_is_not_trained_on():
    """M13: it costs one more rollout of the task, at temperature 0, and none of its tokens is for the policy gradient."""
    asked = []

    def greedy_or_not(request):
        asked.append((request.id, request.temperature))
        return random_policy(request)

    episodes, _ = collect(FakeEngine(greedy_or_not), random_domain(), n=2, group_size=3, branches=("greedy",))
    assert [e.branch for e in episodes] == 2 * ["", "", "", "greedy"] and len({e.group for e in episodes}) == 2
    assert all((temperature == 0) == ("#greedy/" in name) for name, temperature in asked)
    for e in episodes:
        assert sum(int(row.channel("pg").sum()) for row in e.rows) == (0 if e.branch else e.sampled_tokens)
    alone, _ = collect(FakeEngine(random_policy), random_domain(), n=2, group_size=3)
    assert all(same(a, b) for a, b in zip([e for e in episodes if not e.branch], alone, strict=True))


def test_a_task_drawn_twice_gives_two_different_groups():
    domain = random_domain()
    episodes, _ = collect(FakeEngine(random_policy), domain, n=2, step=0, source=Listed(domain, [0, 0]))
    assert len({e.seed for e in episodes}) == 6
    assert Counter(e.group for e in episodes) == {f"train/0/{slot}/toy/train/0": 3 for slot in (0, 1)}


@pytest.mark.parametrize("name", variants("env"))
def test_every_environment_is_collected_and_evaluated(name: str):
    domain = create("env", {"name": name})
    engine = FakeEngine(random_policy)
    episodes, stats = collect(engine, domain)
    assert stats.ok + sum(stats.truncated.values()) == 12
    assert sum(e.sampled_tokens for e in episodes) == sum(len(a.tokens) for answers in engine.answers.values() for a in answers)


# -------------------------------------------------------------------------------------------------- failures


def failing(times: int, only: str = "", reason: str = "no container"):
    """A domain whose first ``times`` episodes of each task (or of the task ``only``) fail after one turn."""
    made: Counter[str] = Counter()

    def script(task):
        made[task.id] += 1
        attempt = made[task.id]

        def step(turn, action):
            if turn == 1 and attempt <= times and task.id.startswith(only):
                raise InfraError(reason)
            return told("bm", done=turn == 1, reward=1.0)

        return step

    return Toy(script)


@pytest.mark.defect("C7")
def test_a_failed_episode_starts_again_from_nothing():
    engine = FakeEngine(lambda request: say(request, CALL))
    domain = failing(2)
    [episode], stats = collect(engine, domain, n=1, group_size=1)
    assert episode.status == "ok"
    assert [len(engine.requests[f"{episode.id}/{turn}"]) for turn in (0, 1)] == [3, 3]
    # The row is the last attempt's alone: two turns of tokens, each with its own logp and version.
    last = [engine.answers[f"{episode.id}/{turn}"][-1] for turn in (0, 1)]
    row = episode.rows[0]
    assert np.array_equal(row.tokens[row.sampled], np.concatenate([a.tokens for a in last]))
    assert np.array_equal(row.logp[row.sampled], np.concatenate([a.logp for a in last]))
    assert len({r.seed for r in engine.requests[f"{episode.id}/0"]}) == 3  # each attempt draws anew
    assert len(episode.turns) == 2 and all(env.closed == 1 for env in domain.envs) and len(domain.envs) == 3
    assert (stats.retries, stats.dropped, stats.turns) == ({"env_error": 2}, {}, 2)


@pytest.mark.defect("H4")
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_are_bounded_and_the_rest_is_dropped_with_its_reason(retries: int):
    domain = failing(99, only="toy/train/1")
    episodes, stats = collect(FakeEngine(lambda request: say(request, CALL)), domain, n=3, group_size=2, retries=retries)
    failed = [e for e in episodes if e.status == "infra_fail"]
    assert [e.task.id for e in failed] == ["toy/train/1"] * 2
    assert {e.reason for e in failed} == {"env_error: no container"} and not any(e.rows for e in failed)
    assert stats.retries == ({"env_error": 2 * retries} if retries else {})
    assert stats.dropped == {"env_error": 2}
    assert len(domain.envs) == 4 + 2 * (1 + retries)


def test_a_rerun_with_failures_is_the_same():
    runs = [collect(FakeEngine(random_policy, shuffle), failing(1), n=3)[0] for shuffle in (0, 0)]
    assert all(same(a, b) for a, b in zip(*runs, strict=True))


def test_an_engine_failure_is_counted_apart():
    def policy(request: Request) -> Completion:
        if request.id.startswith("train/5/0/"):
            raise InfraError("gone: 10.0.0.1")
        return say(request, "<answer>bl</answer>")

    _, stats = collect(FakeEngine(policy), HopLookup(), n=2, group_size=2, retries=1)
    assert (stats.retries, stats.dropped, stats.ok) == ({"engine_error": 2}, {"engine_error": 2}, 2)


def test_counts():
    """Three episodes: one answers at once, one is cut in its second turn, one makes a bad call and then ends."""

    def policy(request: Request) -> Completion:
        slot, turn = int(request.id.split("/")[2]), int(request.id.rpartition("/")[2])
        if slot == 0:
            return say(request, "<answer>bl</answer>")
        if slot == 1 and turn == 1:
            return completion(request, [9] * 99)
        return say(request, CALL[:-13] if turn == 0 else "<answer>bl</answer>")

    episodes, stats = collect(FakeEngine(policy), HopLookup(), n=3, group_size=1, max_new=30)
    call, answer = (len(TOKENIZER(text)["input_ids"]) + 1 for text in (CALL[:-13], "<answer>bl</answer>"))
    assert (stats.episodes, stats.ok, stats.truncated) == (3, 2, {"max_new": 1})
    assert (stats.turns, stats.failed_turns) == (1 + 2 + 2, 2)
    assert stats.sampled_tokens == 2 * answer + 2 * call + 30
    assert stats.tokens == sum(len(e.rows[0]) for e in episodes)
    metrics = stats.metrics()
    assert metrics["rollout/truncated/max_new"] == 1 and metrics["rollout/turns"] == 5
    assert CollectStats(0, 0).metrics("eval")["eval/ok"] == 0


def test_progress_counts_every_episode():
    calls: list[tuple[int, int]] = []
    collect(FakeEngine(random_policy), random_domain(), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i, 12) for i in range(1, 13)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "prompts is 0; give at least 1"),
        ({"group_size": 0}, "group_size is 0; give at least 1"),
        ({"retries": -1}, "max_retries is -1; give at least 0"),
        ({"max_lag": -1}, "max_lag is -1; give at least 0"),
        ({"over_sample": -0.5}, "over_sample is -0.5; give at least 0"),
        ({"over_sample": float("nan")}, "over_sample is nan"),
        ({"max_lag": 1, "over_sample": 1.5}, "over_sample is 1.5, but with max_lag 1 only 2 batches may be in flight; give at most 1"),
    ],
)
def test_bad_arguments_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        collector(FakeEngine(random_policy), random_domain(), **fields)


def test_a_prompt_that_the_model_cannot_hold_is_counted_and_not_played_again():
    def policy(request: Request) -> Completion:
        if request.id.startswith("train/5/1/"):
            none = np.array([])
            return Completion(none, none, none, "error", error="prompt of 9999 and max_new 60 exceed the context of 4096")
        return say(request, "<answer>bl</answer>")

    episodes, stats = collect(FakeEngine(policy), HopLookup(), n=2, group_size=2)
    assert (stats.ok, stats.truncated, stats.retries, stats.dropped) == (2, {"context_overflow": 2}, {}, {})
    assert [e.sampled_tokens > 0 for e in episodes] == [True, True, False, False]


def test_the_source_is_told_of_what_is_handed_out():
    source = Listed(random_domain())
    episodes, _ = collect(FakeEngine(random_policy), source.domain, source=source)
    assert source.observed == episodes


# ------------------------------------------------------------------------------------- faults and cancellation


def test_a_fault_stops_everything_and_closes_every_environment():
    def policy(request: Request) -> Completion:
        if request.id.endswith("/1") and "/2/" in request.id:
            return Completion(np.array([1]), np.array([]), np.array([0]), "stop")
        return say(request, CALL)

    domain = Toy(lambda task: lambda turn, action: told("bm"))
    engine = FakeEngine(policy)

    async def main():
        with pytest.raises(EngineFault):
            await collector(engine, domain).collect(5, 0)
        return [env.closed for env in domain.envs], engine.open  # now, and not when the event loop ends

    assert asyncio.run(main()) == ([1] * 12, 0)


@pytest.mark.defect("H2")
def test_cancellation_closes_every_environment():
    domain = Toy(lambda task: lambda turn, action: told("bm"))
    engine = FakeEngine(lambda request: say(request, CALL))

    async def main():
        await engine.pause()
        running = asyncio.create_task(collector(engine, domain).collect(0, 0))
        await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    assert asyncio.run(main()) == []
    assert len(domain.envs) == 12 and all(env.closed == 1 for env in domain.envs)
    assert engine.open == 0


# ------------------------------------------------------------------------------------------------ evaluation


def test_evaluation_plays_every_task_once_and_greedily():
    domain, engine = random_domain(), FakeEngine(random_policy)
    tasks = [domain.task("eval", i) for i in range(9)]
    evaluator = collector(engine, domain, group_size=4)
    episodes, stats = asyncio.run(evaluator.evaluate(tasks, run_seed=0, step=3))
    assert [e.task.id for e in episodes] == [t.id for t in tasks]
    assert stats.episodes == 9
    assert {r.temperature for requests in engine.requests.values() for r in requests} == {0.0}
    later, _ = asyncio.run(evaluator.evaluate(tasks, run_seed=0, step=8))
    assert [e.seed for e in later] == [e.seed for e in episodes]
    with pytest.raises(ValueError, match="'toy/eval/0' is given more than once"):
        asyncio.run(evaluator.evaluate([*tasks, tasks[0]], run_seed=0))


@pytest.mark.defect("H4")
def test_evaluation_reports_failures_apart_from_zeros():
    domain = failing(99, only="toy/eval/1")
    evaluator = collector(FakeEngine(lambda request: say(request, CALL)), domain)
    episodes, stats = asyncio.run(evaluator.evaluate([domain.task("eval", i) for i in range(3)], run_seed=0))
    assert [e.status for e in episodes] == ["ok", "infra_fail", "ok"]
    assert stats.dropped == {"env_error": 1}
