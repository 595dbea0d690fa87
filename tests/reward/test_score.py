"""Scoring: exactly one set of numbers per episode, failures apart from zeros."""

from dataclasses import dataclass

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.protocols import InfraError
from mcore_agent.registry import register
from mcore_agent.reward.pipeline import RewardError, score
from mcore_agent.types import Episode, Feedback, RecordError, Task, Turn
from tests.strategies import episode_of


@dataclass(frozen=True)
class Given:
    """A reward that gives what it is told, or fails as an environment does for the episodes in ``broken``."""

    value: object = 1.0
    key: str = "given"
    broken: tuple = ()

    def score(self, episode):
        if episode.id in self.broken:
            raise InfraError("judge unreachable")
        return {self.key: self.value}


@pytest.fixture(autouse=True)
def given():
    before = dict(registry.variants("reward"))
    register("reward", "given")(Given)
    yield
    registry._found["reward"].clear()
    registry._found["reward"].update(before)


def unscored(id: str, *rewards: float) -> Episode:
    turns = tuple(Turn(i, "act", feedback=Feedback(reward=r)) for i, r in enumerate(rewards))
    made = episode_of(id, "g", 0.0, turns=turns)
    return Episode(id, made.task, "g", made.rows, turns)


@pytest.mark.defect("A19")
def test_every_episode_gets_exactly_one_score_in_its_place():
    """Also one without a turn, whose answer gave nothing to score: it gets 0 and shifts nobody's."""
    scored = score([unscored("a", 1.0), unscored("b"), unscored("c", 0.5, 0.25)], [{"name": "outcome"}])
    assert [(e.id, e.rewards) for e in scored] == [("a", {"outcome": 1.0}), ("b", {"outcome": 0.0}), ("c", {"outcome": 0.75})]


def test_named_rewards_are_kept_apart_and_summed():
    specs = [{"name": "outcome"}, {"name": "overlong", "limit": 3, "cache": 2}, {"name": "given", "value": [0.5, 0.25]}]
    (scored,) = score([unscored("a", 1.0, 1.0)], specs)
    # Two sampled tokens, limit 3, cache 2: one over 3 - 2, so -1/2.
    assert scored.rewards == {"outcome": 2.0, "overlong": -0.5, "given": [0.5, 0.25]}
    assert scored.reward == 2.0 - 0.5 + 0.75


def test_an_environment_that_fails_while_scoring_makes_no_zero():
    scored = score([unscored("a", 1.0), unscored("b", 1.0)], [{"name": "outcome"}, {"name": "given", "broken": ("b",)}])
    assert [(e.status, e.reason) for e in scored] == [("ok", ""), ("infra_fail", "reward 'given': judge unreachable")]
    assert scored[1].rewards == {}


def test_an_episode_that_failed_before_is_left_untouched():
    failed = Episode("f", Task("f", "toy", ()), "g", status="infra_fail", reason="sandbox died")
    assert score([failed], [{"name": "given"}])[0] is failed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("nan")]])
def test_a_reward_that_is_not_finite_is_refused_with_the_episode(value):
    with pytest.raises(RewardError, match=r"episode 'a': reward 'given' gave 'given' = .* must be finite"):
        score([unscored("a", 1.0, 1.0)], [{"name": "given", "value": value}])


def test_a_name_given_twice_is_refused():
    with pytest.raises(RewardError, match="'given' gives 'outcome', which it already has"):
        score([unscored("a", 1.0)], [{"name": "outcome"}, {"name": "given", "key": "outcome"}])
    with pytest.raises(RewardError, match="which it already has"):
        score(score([unscored("a", 1.0)], [{"name": "outcome"}]), [{"name": "outcome"}])


def test_rewards_per_turn_must_match_the_turns_and_numbers_become_floats():
    with pytest.raises(RecordError, match="reward 'given' has 3 entries, 2 turns"):
        score([unscored("a", 1.0, 1.0)], [{"name": "given", "value": [1.0, 2.0, 3.0]}])
    (scored,) = score([unscored("a", 1.0)], [{"name": "given", "value": np.float32(0.5)}])
    assert type(scored.rewards["given"]) is float
    (scored,) = score([unscored("a", 1.0)], [{"name": "given", "value": True}])
    assert scored.rewards["given"] == 1.0
