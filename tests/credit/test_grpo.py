"""GRPO's advantages against numbers derived from the definition (M9, M10)."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError, informative
from mcore_agent.credit.grpo import Grpo
from mcore_agent.credit.pipeline import assign
from mcore_agent.types import GREEDY, Batch
from tests.strategies import batch_of, episode_of, row_of


def test_population_deviation():
    """M9: rewards 1 0 0 1 have mean 1/2 and every deviation 1/2, so sigma (1/G) = 1/2 and A = +-(1/2) / (1/2) = +-1."""
    assert Grpo(eps=0)(batch_of([1, 0, 0, 1])).tolist() == [1, -1, -1, 1]
    with_eps = 0.5 / (0.5 + 1e-8)
    np.testing.assert_allclose(Grpo(eps=1e-8)(batch_of([1, 0, 0, 1])), np.array([1, -1, -1, 1]) * with_eps, rtol=1e-15)


def test_sample_deviation():
    """M9: the same with 1/(G-1): variance 4 * (1/4) / 3 = 1/3, so A = (1/2) / (sqrt(1/3) + 1e-6) = .8660."""
    expected = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    assert abs(expected - 0.8660) < 5e-5
    np.testing.assert_allclose(Grpo(sigma="sample", eps=1e-6)(batch_of([1, 0, 0, 1])), np.array([1, -1, -1, 1]) * expected, rtol=1e-14)


@pytest.mark.parametrize("mode", ["zero", "clamp"])
def test_m10_equal_rewards_teach_nothing(mode):
    """M10: [1,1,1,1] gives A = 0 in both modes, and is not informative."""
    batch = batch_of([1, 1, 1, 1])
    assert Grpo(zero_sigma=mode)(batch).tolist() == [0, 0, 0, 0]
    assert informative(batch).tolist() == [False] * 4


def test_m10_clamp_keeps_a_small_difference_small():
    """M10: [1,1,1,.9] has mean .975; with sigma_min .1 > sigma, A = (.025, .025, .025, -.075) / .1."""
    batch = batch_of([1, 1, 1, 0.9])
    np.testing.assert_allclose(Grpo(zero_sigma="clamp", sigma_min=0.1, eps=0)(batch), [0.25, 0.25, 0.25, -0.75], rtol=1e-12)
    # Without the clamp: sigma = sqrt((3 * .025**2 + .075**2) / 4) = sqrt(.001875) = .0433, A = .577 and -1.732.
    np.testing.assert_allclose(Grpo(eps=0)(batch), np.array([0.025, 0.025, 0.025, -0.075]) / np.sqrt(0.001875), rtol=1e-12)
    assert informative(batch).all()


def test_a_large_deviation_is_not_clamped():
    assert Grpo(zero_sigma="clamp", sigma_min=0.1, eps=0)(batch_of([1, 0, 0, 1])).tolist() == [1, -1, -1, 1]


@pytest.mark.defect("A1")
def test_groups_of_unequal_size_are_normalised_by_their_id():
    """Groups x = (5, 5, 5), y = (1, 0), z = (2): x and z learn nothing, y gets +-1. Taken over the whole batch, with
    mean 3 and deviation 2.08, the fives would get .96 instead. The order of episodes is mixed."""
    batch = batch_of([5, 1, 5, 2, 0, 5], groups="xyxzyx")
    assert Grpo(eps=0)(batch).tolist() == [0, 1, 0, 0, -1, 0]
    assert informative(batch).tolist() == [False, True, False, False, True, False]


@pytest.mark.defect("A2")
def test_an_episode_votes_once_however_many_rows_it_has():
    """[1, 0] has mean 1/2 and gives +-1. If the first episode's three rows voted, the mean would be 3/4."""
    split = episode_of("a", "g", 1.0, [0, 1, 1], [0, 0, 1], [0, 1])
    batch = Batch((split, episode_of("b", "g", 0.0, [0, 1])))
    assert Grpo(eps=0)(batch).tolist() == [1, -1]


@pytest.mark.defect("A3")
@pytest.mark.parametrize("sigma", ["population", "sample"])
@pytest.mark.parametrize("eps", [0, 1e-8])
@pytest.mark.parametrize(
    "rewards",
    [
        [0.7],  # a group of one
        [0.0, 0.0, 0.0],
        [0.1 + 0.2, 0.3, 0.3],  # .30000000000000004: equal but for rounding
        [1e6 * (0.1 + 0.2), 3e5, 3e5],
        [0.1 + 0.2 - 0.3, 0.0, 0.0],  # 5.6e-17 left over from cancelled components
    ],
)
def test_rounding_is_not_blown_up_to_an_advantage(rewards, eps, sigma):
    assert Grpo(eps=eps, sigma=sigma)(batch_of(rewards)).tolist() == [0.0] * len(rewards)


def test_a_real_difference_just_above_rounding_counts():
    """1 and 1 + 1e-6 differ by a thousand times the tolerance: A = -1, +1 by the definition with eps 0."""
    np.testing.assert_allclose(Grpo(eps=0)(batch_of([1.0, 1.000001])), [-1, 1], rtol=1e-9)


def test_settings_out_of_range_are_refused():
    with pytest.raises(CreditError, match=r"eps is -1.*at least 0"):
        Grpo(eps=-1)
    with pytest.raises(CreditError, match=r"sigma_min is 0.*above 0"):
        registry.create("estimator", {"name": "grpo", "sigma_min": 0})


def test_a_greedy_sibling_has_no_vote():
    """M13: rewards 1 and 0 give 1 and -1, whatever the greedy episode of the group earned; with its vote they would be .71 and -1.41."""
    silent = replace(row_of([0, 1, 1]), channels={"pg": np.zeros(3, dtype=bool)})
    greedy = replace(episode_of("c", "g", 1.0), branch=GREEDY, rows=(silent,))
    batch = Batch((episode_of("a", "g", 1.0), episode_of("b", "g", 0.0), greedy))
    assert assign(batch, [{"name": "grpo", "eps": 0}]).columns["advantage"].tolist() == [0, 1, 1, 0, -1, -1, 0, 0, 0]
