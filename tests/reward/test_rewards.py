"""Each reward against numbers derived from its definition."""

import math

import pytest

from mcore_agent.reward.outcome import Outcome
from mcore_agent.reward.overlong import Overlong
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Feedback, Turn
from tests.strategies import episode_of


def turns(*rewards):
    return tuple(Turn(i, "act", feedback=Feedback(reward=r)) for i, r in enumerate(rewards))


def test_the_outcome_is_the_sum_over_turns():
    assert Outcome().score(episode_of("e", "g", 0.0, turns=turns(0.25, -0.5, 1.0))) == {"outcome": 0.75}
    assert Outcome().score(episode_of("e", "g", 0.0)) == {"outcome": 0.0}


def test_f4_linear_penalty():
    """M17: limit 20, cache 4. 16 = limit - cache is free; 18 is half way: (16 - 18) / 4; from 20 on it is -1."""
    penalty = Overlong(limit=20, cache=4).penalty
    assert [penalty(n) for n in (0, 16, 17, 18, 20, 21, 500)] == [0, 0, -1 / 4, -2 / 4, -1, -1, -1]


def test_exponential_penalty():
    """M17: -(1 - exp(-over / tau)), here over = n - 16: 1 - 1/e of it is reached when over = tau; it never passes -1."""
    penalty = Overlong(limit=20, cache=4, shape="exponential", tau=2.0).penalty
    assert penalty(16) == 0
    assert penalty(18) == pytest.approx(-(1 - 1 / math.e), rel=1e-12)
    assert -1 <= penalty(10_000) < penalty(20) < penalty(18)
    # tau 0 is cache / 3 = 4/3, so that over = 4 gives 1 - exp(-3).
    assert Overlong(20, 4, shape="exponential").penalty(20) == pytest.approx(-(1 - math.exp(-3)), rel=1e-12)


def test_the_unit_is_sampled_tokens_of_all_rows_or_turns():
    """Two rows with 3 + 2 sampled tokens among 9, and 3 turns: limit 6 and cache 4 are passed by 3 tokens, by 1 turn."""
    episode = episode_of("e", "g", 0.0, [0, 0, 1, 1, 1], [0, 1, 0, 1], turns=turns(0, 0, 0))
    assert Overlong(limit=6, cache=4).score(episode) == {"overlong": -3 / 4}
    assert Overlong(limit=6, cache=4, unit="turns").score(episode) == {"overlong": -1 / 4}


@pytest.mark.parametrize(("fields", "says"), [
    ({"limit": 20, "cache": 0}, "cache is 0"),
    ({"limit": 20, "cache": 21}, r"cache is 21, but must be in 1..limit = 20"),
    ({"limit": 20, "cache": 4, "tau": -1.0}, "tau is -1.0"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(fields, says):
    with pytest.raises(RewardError, match=says):
        Overlong(**fields)
