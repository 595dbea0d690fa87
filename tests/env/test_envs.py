"""What holds for every environment of the registry."""

import asyncio
import json
from dataclasses import replace
from random import Random

import pytest

from mcore_agent.agent.parse import HermesParser
from mcore_agent.protocols import Action, Domain, Env
from mcore_agent.registry import create, variants
from tests.fakes import agent_for

ENVS = list(variants("env"))
TURNS = 200  # no environment here needs as many


def tasks(domain: Domain, n: int = 20):
    return [domain.task(split, i) for split in ("train", "eval") for i in range(min(n, domain.size(split) or n))]


def junk(r: Random, domain: Domain) -> str:
    names = [tool["function"]["name"] for tool in domain.tools] or ["none"]
    keys = ["key", "x", "", "query"]
    value = r.choice(["bl", "", 3, None, [], {}, True, -1e300, "é" * 99, "\x00", "../../etc/passwd", "__import__('os')"])
    call = json.dumps({"name": r.choice(names), "arguments": {r.choice(keys): value}})
    texts = ["", "hello", "<answer>bl</answer>", "<answer></answer>", "7", f"<tool_call>{call[:-1]}</tool_call>"]
    return r.choice([*texts, f"<tool_call>{call}</tool_call>", f"<tool_call>{call}</tool_call>" * 20])


async def drive(domain: Domain, task, texts) -> list:
    """Observations of the actions until the environment ends."""
    env, out = domain.make(task, seed=1), []
    assert isinstance(env, Env)
    try:
        out.append(await env.reset())
        assert not out[0].done
        for text in texts:
            out.append(await env.step(HermesParser(tuple(domain.tools)).parse(text)))
            if out[-1].done:
                break
    finally:
        await env.close()
    return out


@pytest.fixture(params=ENVS)
def domain(request) -> Domain:
    return create("env", {"name": request.param})


def test_tasks_are_pure_functions_of_split_and_index(domain: Domain):
    assert isinstance(domain, Domain)
    again = create("env", {"name": domain.registered_name})
    places = [(split, i) for split in ("train", "eval") for i in range(min(20, domain.size(split) or 20))]
    backwards = [again.task(*place) for place in reversed(places)]
    assert tasks(domain) == backwards[::-1]
    ids = [task.id for task in tasks(domain)]
    assert len(set(ids)) == len(ids)
    assert {task.domain for task in tasks(domain)} == {domain.registered_name}


def test_the_seed_changes_the_tasks():
    for name in ENVS:
        one, two = (create("env", {"name": name, "seed": seed}) for seed in (0, 1))
        assert [t.messages for t in tasks(one)] != [t.messages for t in tasks(two)]


def test_it_ends_whatever_the_policy_says(domain: Domain):
    r = Random(0)
    for task in tasks(domain):
        for always in (None, "", "hello", "<tool_call>{}</tool_call>", junk(r, domain)):
            seen = asyncio.run(drive(domain, task, (junk(r, domain) if always is None else always for _ in range(TURNS))))
            assert seen[-1].done, f"{task.id} goes on after {TURNS} turns of {always!r}"
            assert all(isinstance(m["content"], str) for obs in seen for m in obs.messages)
            assert 0 <= sum(obs.feedback.reward for obs in seen) <= 1


def test_it_repeats_itself(domain: Domain):
    for task in tasks(domain, 5):
        texts = [junk(Random(task.id), domain) for _ in range(TURNS)]
        assert asyncio.run(drive(domain, task, texts)) == asyncio.run(drive(domain, task, texts))


def test_gold_is_for_the_verifier_only(domain: Domain):
    """I7: with a gold answer that stands out, nothing that the policy reads has it."""
    r = Random(1)
    for task in tasks(domain, 8):
        marked = replace(task, gold="GOLDGOLD")
        assert task.gold is not None
        seen = asyncio.run(drive(domain, marked, (junk(r, domain) for _ in range(TURNS))))
        told = [*marked.messages, *(m for obs in seen for m in obs.messages)]
        assert not any("GOLDGOLD" in m["content"] for m in told)


def test_a_demonstration_is_what_the_environment_would_have_said(domain: Domain):
    """Replayed through the environment, a demonstration meets the same observations, and some of them succeed."""
    total, n = 0.0, 60
    for i in range(n):
        task = domain.task("train", i)
        dialog = domain.demo(task, seed=i)
        if dialog is None:
            pytest.skip("no demonstrations")
        assert dialog == domain.demo(task, seed=i)
        assert tuple(dialog[: len(task.messages)]) == task.messages
        played = dialog[len(task.messages) :]
        seen = asyncio.run(drive(domain, task, [m["content"] for m in played if m["role"] == "assistant"]))
        assert [m for obs in seen for m in obs.messages] == [m for m in played if m["role"] != "assistant"]
        assert seen[-1].done
        total += sum(obs.feedback.reward for obs in seen)
        agent_for(domain).renderer.demo(dialog, prompt=len(task.messages))
    assert total > 0.1 * n


def test_an_empty_turn_is_no_crash(domain: Domain):
    async def main():
        env = domain.make(domain.task("train", 0), 0)
        await env.reset()
        await env.step(Action(""))
        await env.close()

    asyncio.run(main())
