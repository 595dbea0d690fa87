"""Hop lookup: its rules, its limits and its lazy demonstrator."""

import asyncio
import json
import math

import pytest

from mcore_agent.agent.parse import HermesParser
from mcore_agent.env.hop_lookup import KEYS, HopLookup
from mcore_agent.protocols import Observation


def call(key: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'key': key}})}</tool_call>"


def play(domain: HopLookup, task, *texts: str) -> list[Observation]:
    async def main():
        env = domain.make(task, 0)
        first = await env.reset()
        return [first, *[await env.step(HermesParser(tuple(domain.tools)).parse(text)) for text in texts]]

    return asyncio.run(main())


def of_hops(domain: HopLookup, hops: int):
    return next(t for t in (domain.task("train", i) for i in range(99)) if t.meta["hops"] == hops)


def contents(obs: Observation) -> list[str]:
    return [m["content"] for m in obs.messages]


def test_keys():
    assert len(set(KEYS)) == 64 and all(len(k) == 2 for k in KEYS)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_following_the_chain_is_rewarded(hops: int):
    domain = HopLookup()
    task = of_hops(domain, hops)
    chain = task.spec["chain"]
    assert task.messages == ({"role": "user", "content": f'"{chain[0]}" {hops}?'},)
    assert task.gold == chain[hops] and len(set(chain)) == 5
    seen = play(domain, task, *[call(key) for key in chain[:hops]], f"<answer>{chain[hops]}</answer>")
    assert [contents(obs) for obs in seen] == [[], *[[key] for key in chain[1 : hops + 1]], []]
    assert [obs.feedback.reward for obs in seen] == [0.0] * (hops + 1) + [1.0]
    assert [obs.done for obs in seen] == [False] * (hops + 1) + [True]
    assert [obs.state_key for obs in seen[:-1]] == list(chain[: hops + 1])


@pytest.mark.parametrize(
    "answer", ["<answer>{0}</answer>", "{1}", "<answer>{1}", "<answer>{1}</answer> I think", "", "<answer>{1} </answer>"]
)
def test_any_other_answer_is_not(answer: str):
    domain = HopLookup()
    task = of_hops(domain, 1)
    last = play(domain, task, answer.format(*task.spec["chain"]))[-1]
    assert (last.done, last.feedback.reward) == (True, 0.0)


def test_space_around_an_answer_does_no_harm():
    domain = HopLookup()
    task = of_hops(domain, 1)
    assert play(domain, task, f"\n<answer>{task.gold}</answer> ")[-1].feedback.reward == 1.0


def test_failed_calls_are_errors_and_the_episode_goes_on():
    domain = HopLookup()
    task = of_hops(domain, 1)
    chain = task.spec["chain"]
    stranger = next(k for k in KEYS if k not in chain)
    broken = call(chain[0])[:-13]
    other = call(chain[0]).replace('"lookup"', '"delete"')
    seen = play(domain, task, call(stranger), call(chain[-1]), broken, other, f"<answer>{task.gold}</answer>")
    assert [contents(obs) for obs in seen[1:5]] == [["error"]] * 4
    assert [obs.feedback.ok for obs in seen[1:5]] == [False] * 4
    assert [obs.feedback.error[:11] for obs in seen[1:5]] == ["no such key", "no such key", "<tool_call>", "no tool 'de"]
    assert seen[-1].feedback.reward == 1.0


def test_several_calls_in_one_turn_are_answered_in_order():
    domain = HopLookup()
    task = of_hops(domain, 2)
    chain = task.spec["chain"]
    obs = play(domain, task, call(chain[1]) + call("??") + call(chain[0]))[-1]
    assert contents(obs) == [chain[2], "error", chain[1]]
    assert obs.state_key == chain[2] and obs.feedback.changed and not obs.feedback.ok


def test_turns_are_bounded():
    domain = HopLookup(max_turns=4)
    task = of_hops(domain, 3)
    seen = play(domain, task, *[call(task.spec["chain"][0])] * 4)
    assert [obs.done for obs in seen] == [False, False, False, False, True]
    assert [obs.feedback.changed for obs in seen[1:]] == [True, False, False, False]
    assert sum(obs.feedback.reward for obs in seen) == 0


def test_hops_are_spread_evenly_and_tasks_differ():
    domain, n = HopLookup(), 900
    counts = [sum(domain.task("train", i).meta["hops"] == h for i in range(n)) for h in (1, 2, 3)]
    assert all(abs(c - n / 3) < 4 * math.sqrt(n * 2 / 9) for c in counts)  # four deviations of a binomial
    assert len({domain.task("train", i).spec["chain"] for i in range(n)}) == n


def test_the_demonstrator_succeeds_in_fewer_than_half_of_its_attempts():
    """Of a call, e = 1 - .95 * .95 fails and is repeated if the demonstrator does not stop in between.

    Between hops it goes on with .35, so it advances with p = .35 (1 - e + e p); at the goal it stops with
    q = .9 + .1 e q; the first call is always repeated. Success is the mean of q p^(h - 1) over h = 1, 2, 3.
    """
    e = 1 - 0.95**2
    p = 0.35 * (1 - e) / (1 - 0.35 * e)
    q = 0.9 / (1 - 0.1 * e)
    expected = q * (1 + p + p * p) / 3
    assert 0.3 < expected < 0.5
    domain, n = HopLookup(), 3000
    ends = [(t := domain.task("train", i)) and domain.demo(t, i)[-1]["content"] == f"<answer>{t.gold}</answer>" for i in range(n)]
    # Four deviations, and .01 for random keys that hit the chain and turns that ran out.
    assert abs(sum(ends) / n - expected) < 4 * math.sqrt(expected * (1 - expected) / n) + 0.01


def test_the_demonstrator_says_only_what_it_has_seen():
    """It answers with the last key that a call gave it: a policy can learn to do the same, but not to guess."""
    domain = HopLookup()
    for i in range(500):
        task = domain.task("train", i)
        *dialog, answer = domain.demo(task, i)
        seen = [task.spec["chain"][0], *(m["content"] for m in dialog if m["role"] == "tool" and m["content"] != "error")]
        assert answer["content"] == f"<answer>{seen[-1]}</answer>"


def test_demonstrations_hold_every_kind_of_error():
    domain = HopLookup()
    dialogs = [domain.demo(domain.task("train", i), i) for i in range(500)]
    calls = [m["content"] for dialog in dialogs for m in dialog if m["content"].startswith("<tool_call>")]
    broken = sum(HermesParser().parse(c).calls[0].error != "" for c in calls) / len(calls)
    assert abs(broken - 0.05) < 4 * math.sqrt(0.05 * 0.95 / len(calls))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hops": 0}, "hops is 0"),
        ({"hops": 63, "max_turns": 99}, "give 1 to 62"),
        ({"hops": 4, "max_turns": 4}, "4 hops and the answer take 5"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        HopLookup(**arguments)
