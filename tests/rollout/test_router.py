"""Routers: what they remember, what they forget, and what they are worth."""

from random import Random

import numpy as np
import pytest

from mcore_agent.protocols import Completion, Request
from mcore_agent.rollout.router import BLOCK, CacheRouter, RoundRobin, Router
from mcore_agent.rollout.switch import Switch
from tools.simulate_router import PrefixCache, Replay, compare, scripts

ROUTERS = pytest.mark.parametrize("make", [RoundRobin, CacheRouter])


def row(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length)


def asked(name: str, tokens: np.ndarray, session: str = "") -> Request:
    return Request(name, tokens, 10, session=session)


def said(length: int = 10) -> Completion:
    return Completion(np.ones(length, np.int64), np.zeros(length, np.float32), np.zeros(length, np.int32), "stop")


def turn(router: Router, index: int, request: Request) -> None:
    router.started(index, request)
    router.finished(index, request, said())


@ROUTERS
def test_only_engines_that_are_there_are_picked(make):
    router = make()
    assert isinstance(router, Router)
    for i in range(12):
        request = asked(str(i), row(70), f"s{i % 2}")
        assert router.pick(request, [None, i % 3, None, 2]) in (1, 3)
        turn(router, 1, request)
    with pytest.raises(ValueError, match="no engine"):
        router.pick(request, [None, None])


def test_round_robin_goes_round():
    router = RoundRobin()
    assert [router.pick(asked("r", row(5)), [0, None, 0, 0]) for _ in range(7)] == [0, 2, 3, 0, 2, 3, 0]


def test_a_session_stays_where_its_prefix_is_until_another_engine_is_much_idler():
    router = CacheRouter(a=1.0, b=16.0, c=128.0)
    turn(router, 2, asked("1", row(400), "s"))
    longer = asked("2", row(450), "s")
    # held there: 400 + 10 tokens, one turn, so 410 + 16 against 128 for each request more than the idlest engine has
    assert router.pick(longer, [0, 0, 3, 0]) == 2
    assert router.pick(longer, [0, 0, 4, 0]) == 0
    assert router.pick(asked("3", row(450, 1), "other"), [1, 0, 0, 0]) == 1


def test_progress_keeps_an_episode_that_is_far_on():
    router = CacheRouter(a=1.0, b=200.0, c=128.0)
    for i in range(3):
        turn(router, 1, asked(str(i), row(60 + 10 * i), "s"))
    # 80 + 10 tokens and three turns: 90 + 600 is less than 6 * 128, more than 5 * 128
    assert router.pick(asked("4", row(100), "s"), [0, 5]) == 1
    assert router.pick(asked("4", row(100), "s"), [0, 6]) == 0


def test_samples_of_a_group_go_where_their_prompt_is():
    router = CacheRouter(a=1.0, c=8.0)
    prompt = row(5 * BLOCK)
    router.started(1, asked("1", prompt, "a"))  # not answered yet: its prompt is computed first
    assert router.pick(asked("2", prompt, "b"), [0, 1]) == 1
    different = prompt.copy()
    different[0] += 1
    assert router.pick(asked("3", different, "c"), [0, 1]) == 0
    late = prompt.copy()
    late[4 * BLOCK] += 1  # four blocks are alike: 128 tokens against 8 a request
    assert router.pick(asked("4", late, "d"), [0, 15]) == 1
    assert router.pick(asked("4", late, "d"), [0, 17]) == 0


def test_what_is_forgotten():
    router = CacheRouter()
    for index, session in enumerate(("a", "b")):
        turn(router, index, asked(session, row(300, index), session))
    assert router.pick(asked("2", row(320, 1), "b"), [0, 1]) == 1
    router.forget(1)
    assert router.pick(asked("2", row(320, 1), "b"), [0, 1]) == 0
    assert router.pick(asked("2", row(320, 0), "a"), [1, 0]) == 0
    router.forget_all()
    assert router.pick(asked("2", row(320, 0), "a"), [1, 0]) == 1


def test_memory_is_bounded_and_the_least_used_goes_first():
    router = CacheRouter(cache_tokens=40 * BLOCK)
    for i in range(300):
        turn(router, 0, asked(str(i), row(2 * BLOCK, i), f"s{i}"))
        turn(router, 0, asked(str(i), row(4 * BLOCK, 1000), "used"))
    held = router._held[0]
    assert len(held.blocks) <= 40 and held.tokens <= 40 * BLOCK
    assert held.tokens == sum(tokens for tokens, _ in held.sessions.values())
    assert "used" in held.sessions and "s299" in held.sessions and "s0" not in held.sessions


@pytest.mark.parametrize("fields", [{"a": -1.0}, {"c": -0.1}, {"cache_tokens": 3}])
def test_bad_arguments(fields):
    with pytest.raises(ValueError, match="at least"):
        CacheRouter(**fields)


def test_the_simulated_cache_forgets_from_the_end_of_the_oldest():
    cache = PrefixCache(100)
    cache.store("g", 30, "a", 40)
    cache.store("g", 30, "b", 20)
    assert (cache.match("g", 30, "a"), cache.match("g", 30, "b")) == (70, 50)
    cache.store("h", 15, "c", 10)  # 115 tokens: 15 of the row that was not used for longest go
    assert (cache.match("g", 30, "a"), cache.match("g", 30, "b"), cache.match("h", 15, "c")) == (55, 50, 25)
    cache.store("g", 30, "a", 60)
    assert cache.match("g", 30, "a") == 90 and cache.used == 100 and cache.match("g", 30, "b") == 30


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cache_tokens", [25_000, 60_000])
def test_cached_prefixes_are_used_and_load_is_even(seed: int, cache_tokens: int):
    """200 episodes on 4 engines, against round-robin: also when what no engine could have cached counts."""
    found = compare(200, 4, seed, cache_tokens=cache_tokens)
    base, routed = found["round robin"], found["cache"]
    assert routed.recomputed <= 0.6 * base.recomputed
    assert routed.uncached <= 0.6 * base.uncached
    assert routed.spread("tokens") <= 1.3 and routed.spread("busy") <= 1.3


def test_the_same_history_gives_the_same_choices():
    def picks() -> list[float]:
        result = Replay(CacheRouter(), scripts(40, 8, 3), 4, 20_000, 24).run()
        return [*result.tokens, *result.busy, result.uncached]

    assert picks() == picks()


# -------------------------------------------------------------------------------------------------- the switch


def changes(states: list[bool]) -> int:
    return sum(a != b for a, b in zip(states, states[1:], strict=False))


def test_the_switch_follows_the_load_but_not_the_noise():
    """Load falls from 40 to 0 and rises again, with noise as wide as the band: two changes, and none in the middle of it."""
    noise = Random(5)
    trend = [*range(40, 0, -1), *range(41)]
    series = [max(0, round(base + noise.uniform(-4, 4))) for base in trend for _ in range(5)]
    switch = Switch(low=8, high=16)
    states = [switch.step(running) for running in series]
    assert changes(states) == 2 and not states[0] and not states[-1]
    naive = [running <= 12 for running in series]
    assert changes(naive) > 4, "the series must be one that flaps without hysteresis"
    assert states[len(states) // 2] is True


def test_the_switch_holds_between_its_limits_and_for_single_steps():
    switch = Switch(low=4, high=9, patience=3)
    assert [switch.step(n) for n in (3, 3, 5, 3, 3, 3)] == [False] * 5 + [True]
    assert all(switch.step(n) for n in (5, 8, 8, 8, 9, 9, 8, 30, 30, 4))
    assert [switch.step(9) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("values", [(5, 5), (9, 4), (-1, 3), (1, 2, 0)])
def test_a_switch_that_could_flap_is_refused(values):
    with pytest.raises(ValueError, match="low < high"):
        Switch(*values)
