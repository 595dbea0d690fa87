"""Many episodes at once: order, siblings, abstentions, means to log, objects that a recipe cannot name."""

import threading
import time
from dataclasses import dataclass, replace

import pytest

from mcore_agent import registry
from mcore_agent.protocols import InfraError, Scored
from mcore_agent.reward.pipeline import RewardError, Scorer, make, score, total
from mcore_agent.types import GREEDY
from tests.reward.episodes import played


@dataclass(frozen=True)
class Meeting:
    """Waits until ``count`` episodes are being scored at the same time."""

    count: int

    def __post_init__(self):
        object.__setattr__(self, "barrier", threading.Barrier(self.count))

    def score(self, episode):
        self.barrier.wait(timeout=20)
        return {"met": float(episode.id)}


@dataclass(frozen=True)
class Siblings:
    """How many siblings there are; logs 2 and 4 for the ids 1 and 2."""

    decode: object = None

    def score_among(self, episode, siblings):
        assert episode in siblings
        return Scored({"siblings": float(len(siblings))}, {"twice": 2.0 * int(episode.id)})


@pytest.fixture(autouse=True)
def variants(fixed):
    registry.register("reward", "meeting")(Meeting)
    registry.register("reward", "siblings")(Siblings)


def test_episodes_wait_at_the_same_time_and_keep_their_order():
    """Seven episodes, each waiting for the six others: one after another they would wait for ever."""
    scored = score([played("a", id=str(i)) for i in range(7)], [{"name": "meeting", "count": 7}])
    assert [e.rewards for e in scored] == [{"met": float(i)} for i in range(7)]


def test_no_more_workers_than_asked_for_and_the_same_result(fixed):
    episodes = [played("a", id=str(i), group=f"g{i % 3}") for i in range(11)]
    specs = [{"name": "siblings"}, fixed({str(i): i / 7 for i in range(11)})]
    assert Scorer(specs, workers=1)(episodes) == Scorer(specs, workers=5)(episodes)
    gauge = Gauge()
    scorer = Scorer([{"name": "outcome"}], workers=3)
    scorer.parts = [replace(scorer.parts[0], reward=gauge)]
    scorer(episodes)
    assert gauge.most == 3


class Gauge:
    """How many threads were in it at once, each for a moment."""

    def __init__(self):
        self.now = self.most = 0
        self.lock = threading.Lock()

    def score(self, episode):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self.lock:
            self.now -= 1
        return {"gauge": 1.0}


def test_the_first_error_in_the_order_of_the_episodes_is_raised(fixed):
    episodes = [played("a", id=str(i)) for i in range(9)]
    wrong = {str(i): float("nan") if i in (3, 6) else 1.0 for i in range(9)}
    for _ in range(5):
        with pytest.raises(RewardError, match="episode '3': reward 'fixed' gave 'fixed' = nan"):
            score(episodes, [fixed(wrong)])


def test_siblings_are_the_group_without_failures_and_greedy_ones_are_apart():
    """Group g: 1 and 2, a failed one, and a greedy one; group h: one alone."""
    a, b = played("x", id="1"), played("x", id="2")
    failed, greedy = replace(played("x", id="3"), status="infra_fail"), played("x", id="4", branch=GREEDY)
    scored, numbers = Scorer([{"name": "siblings"}])([a, played("x", id="5", group="h"), failed, b, greedy])
    assert [e.rewards.get("siblings") for e in scored] == [2.0, 1.0, None, 2.0, 1.0]
    # Means over 1, 5 and 2; the greedy one and the failure are no part of them: (2 + 1 + 2) / 3, (2 + 10 + 4) / 3.
    assert numbers == {"siblings": pytest.approx(5 / 3), "siblings/twice": pytest.approx(16 / 3)}


def test_an_abstention_is_no_zero_but_a_failure(fixed):
    scored, numbers = Scorer([{"name": "outcome"}, fixed({"a": 0.25})])([played("x", id="a", earned=1.0), played("x", id="b")])
    assert [(e.status, e.reason) for e in scored] == [("ok", ""), ("infra_fail", "reward 'fixed' abstains")]
    assert scored[0].reward == 1.25 and scored[1].rewards == {}
    assert numbers == {"outcome": 1.0, "fixed": 0.25}


def test_a_failure_names_the_reward(fixed):
    (scored,) = score([played("x", id="a")], [fixed({"a": InfraError("no sandbox")})])
    assert (scored.status, scored.reason) == ("infra_fail", "reward 'fixed': no sandbox")


def test_two_rewards_of_one_name_are_refused_when_they_are_made(fixed):
    with pytest.raises(RewardError, match="two rewards are called 'outcome'; keep one of them"):
        Scorer([{"name": "outcome"}, {"name": "outcome"}])
    with pytest.raises(RewardError, match="two rewards are called 'style'"):
        Scorer([fixed(1.0, "style"), fixed(2.0, "style")])
    (scored,) = score([played("x")], [fixed(1.0, "style"), fixed(2.0, "tone")])
    assert scored.rewards == {"style": 1.0, "tone": 2.0}


def test_services_go_to_the_rewards_that_have_a_parameter_for_them():
    services = {"decode": str, "complete": len}
    assert make({"name": "siblings"}, services).reward.decode is str
    composite = make({"name": "composite", "outcome": {"name": "siblings"}, "parts": []}, services).reward
    assert composite._outcome.reward.decode is str
    assert make({"name": "outcome"}, services).source == "outcome"


def test_totals_and_a_number_that_is_not_finite():
    assert total(Scored({})) is None
    assert total(Scored({"a": [0.5, 0.25], "b": -1.0})) == -0.25
    part = replace(make({"name": "outcome"}), reward=Odd())
    with pytest.raises(RewardError, match="episode 'e': reward 'outcome' gave the number 'odd' = inf"):
        part.ask(played("x"), ())


class Odd:
    def score(self, episode):
        return Scored({"odd": 1.0}, {"odd": float("inf")})
