"""Episodes with several rewards (M80)."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pareto import fronts
from mcore_agent.credit.pipeline import assign
from mcore_agent.types import Batch
from tests.credit.walks import walk
from tests.strategies import episode_of


def judged(table, group: str = "g"):
    """One episode per row of numbers, the rewards b, c, … in that order."""
    return [replace(episode_of(f"{group}{i}", group, 0.0), rewards=dict(zip("bcdefgh", map(float, row), strict=False)))
            for i, row in enumerate(table)]  # fmt: skip


def advantages(episodes, **settings) -> np.ndarray:
    return registry.create("estimator", {"name": "pareto", **settings})(Batch(tuple(episodes)))


def test_fronts_by_hand():
    """1 0 and 0 1 and .5 .5 stand beside each other; 0 .5 is behind 0 1 and .5 .5; 0 0 behind all; two equal ones share a front."""
    table = np.array([[1, 0], [0, 1], [0.5, 0.5], [0, 0.5], [0, 0], [0, 0]])
    assert fronts(table).tolist() == [0, 0, 0, 1, 2, 2]
    assert fronts(np.zeros((3, 0))).tolist() == [0, 0, 0]  # no component at all


def test_ranks_by_hand():
    """Fronts 0 0 1 0: scores 0 0 -1 0, mean -.25, variance (3 * .0625 + .5625) / 4 = .1875."""
    found = advantages(judged([[1, 0], [0, 1], [0, 0], [1, 0]]), eps=0)
    np.testing.assert_allclose(found, np.array([0.25, 0.25, -0.75, 0.25]) / math.sqrt(0.1875), rtol=1e-12)


@pytest.mark.parametrize("score", ["rank", "simplex"])
def test_a_dominated_episode_never_has_the_larger_advantage(score):
    compared = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        table = np.round(rng.normal(size=(int(rng.integers(1, 7)), 3)) * [1, 100, 0.01], 1)
        found = advantages(judged(table), score=score, seed=seed)
        for i in range(len(table)):
            for j in range(len(table)):
                if (table[i] >= table[j]).all():
                    assert found[i] >= found[j] - 1e-9
                    compared += i != j
    assert compared > 300


def test_weights_differ_between_groups_and_seeds_and_not_between_runs():
    """Right and short contradict each other: which of the two is better is the weights' choice, in each group its own."""
    episodes = [e for g in "abcdefgh" for e in judged([[1, 0], [0, 1]], g)]
    found = advantages(episodes, score="simplex", eps=0)
    np.testing.assert_allclose(abs(found), 1, rtol=1e-9)
    np.testing.assert_allclose(found[::2], -found[1::2], rtol=1e-9)
    assert 0 < (found[::2] > 0).sum() < 8
    assert np.array_equal(found, advantages(episodes, score="simplex", eps=0))
    assert not np.array_equal(found, advantages(episodes, score="simplex", eps=0, seed=1))
    assert np.array_equal(found[:4], advantages(episodes[:4], score="simplex", eps=0))  # whoever else is in the batch


def test_components_can_be_chosen_and_turns_are_summed():
    """By b alone 1 > 0; by c alone the other way round; rewards of turns count as their sum: 2 > 1."""
    episodes = judged([[1, 0], [0, 1]])
    assert advantages(episodes, components=["b"], eps=0).tolist() == [1, -1]
    assert advantages(episodes, components=["c"], eps=0).tolist() == [-1, 1]
    assert advantages([walk("x", [""] * 2, [1.0, 1.0]), walk("y", [""], [1.0])], eps=0).tolist() == [1, -1]
    with pytest.raises(CreditError, match="components has 'speed', but the rewards are: b, c"):
        advantages(episodes, components=["speed"])


def test_one_component_is_the_order_of_its_rewards():
    """Rewards 3 1 2 1 have fronts 0 2 1 2: scores with mean -1.25 and variance (1.5625 + 2 * .5625 + .0625) / 4 = .6875."""
    found = advantages(judged([[3], [1], [2], [1]]), eps=0)
    np.testing.assert_allclose(found, np.array([1.25, -0.75, 0.25, -0.75]) / math.sqrt(0.6875), rtol=1e-12)


def test_rounding_dominates_nobody():
    assert advantages(judged([[0.1 + 0.2, 1], [0.3, 1]])).tolist() == [0, 0]
    thousand = 1e3 * (0.1 + 0.2)
    assert advantages(judged([[thousand, 1], [300, 1]]), score="simplex").tolist() == [0, 0]
    circle = 1e-9 * np.array([[0, 0, 0], [1.5, -0.75, -0.75], [0.75, 0.75, -1.5]])  # each seems a little better than the last
    assert np.isfinite(fronts(circle)).all()


def test_what_a_shaping_gave_is_a_component():
    """Equal rewards, but the tokens of the first earned .5 more."""
    batch = Batch(tuple(judged([[1], [1]]))).with_columns(token_reward=np.array([0, 0.5, 0, 0, 0, 0]))
    assert registry.create("estimator", {"name": "pareto", "eps": 0})(batch).tolist() == [1, -1]


def test_a_greedy_sibling_is_not_ranked_among_the_others():
    """Its front would be 0 alone and both others behind it: without it they are 0 and 1."""
    episodes = [*judged([[1], [0]]), replace(judged([[2]])[0], id="best", branch="greedy")]
    assert advantages(episodes, eps=0).tolist() == [1, -1, 0]
    batch = assign(Batch((walk("a", ["s"], 1.0), walk("b", ["s"], 0.0), walk("c", ["s"], 5.0, branch="greedy"))),
                   [{"name": "gigpo", "norm": "mean"}])  # fmt: skip
    assert batch.columns["advantage"].tolist() == [0, 1, 1, 0, -1, -1, 0, 0, 0]


def test_settings_out_of_range_are_refused():
    with pytest.raises(CreditError, match="eps is -1"):
        registry.create("estimator", {"name": "pareto", "eps": -1.0})
