"""Turns credited by a value of what they did (M96)."""

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import assign
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.types import Batch
from tests.credit.test_turn_gae import credited, turns_of
from tests.strategies import SEEDS, random_batch, with_values


def test_two_turns_by_hand():
    """Q = .3 .6 at the last tokens of turns of 2 and 3: G = 1, and .5 * (.5 * .6 + .5 * 1) = .4. Mean .7, deviation .3."""
    batch = Batch((turns_of([2, 3], [0, 1]),))
    advantage, returns = credited(batch, [9, 0.3, 9, -9, 0.6], "sapo", gamma=0.5, lam=0.5)
    np.testing.assert_allclose(advantage, [-1, -1, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(returns, [0.4, 0.4, 1, 1, 1], rtol=1e-6)


def test_lam_0_is_the_target_of_sarsa_and_lam_1_what_was_earned():
    """Rewards .25 0 1, Q = .1 .2 .4, gamma .5. lam 0: .25 + .5 * .2, .5 * .4, 1; lam 1: .25 + .25, .5, 1."""
    batch = Batch((turns_of([1, 1, 1], [0.25, 0, 1]),))
    np.testing.assert_allclose(credited(batch, [0.1, 0.2, 0.4], "sapo", gamma=0.5, lam=0)[1], [0.35, 0.2, 1], rtol=1e-6)
    np.testing.assert_allclose(credited(batch, [0.1, 0.2, 0.4], "sapo", gamma=0.5, lam=1)[1], [0.5, 0.5, 1], rtol=1e-6)


def test_the_batch_has_mean_0_and_variance_1_over_turns():
    """M96: each turn once, however long."""
    moved = 0
    for seed in SEEDS[:60]:
        batch = with_values(random_batch(seed), seed)
        turns = TurnSteps.of(batch)
        each = assign(batch, [{"name": "sapo"}]).columns["advantage"][turns.steps[turns.first]].astype(np.float64)
        if each.any():
            moved += 1
            assert abs(each.mean()) < 1e-6 and each.var() == pytest.approx(1, rel=1e-5)
    assert moved > 50


def test_a_turn_does_not_see_what_was_answered():
    """M96: values at observations, and at the last turn's end, change nothing before or in it: its Q has no part in its own G."""
    batch = Batch((turns_of([2, 2], [0.5, 1], observed=3),))
    values = np.where(batch.channel("pg"), 0.3, np.nan)
    found = [assign(batch.with_columns(values_behind=v), [{"name": "sapo", "lam": 0.5}]).columns["returns"].tolist()
             for v in (values, np.where(batch.channel("pg"), values, 7.0))]  # fmt: skip
    own_end = values.copy()
    own_end[TurnSteps.of(batch).steps[1]] = 99.0  # turn 0's Q
    found.append(assign(batch.with_columns(values_behind=own_end), [{"name": "sapo", "lam": 0.5}]).columns["returns"].tolist())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("lam", [0.0, 0.95])
def test_a_table_of_q_learns_the_truth(lam):
    """M96. A chain of three states: action 1 moves on, action 0 stays and costs .1; leaving the last state earns 1. The policy
    takes 1 with chance .8, gamma is .9. With V = .8 Q1 + .2 Q0, Q1 = .9 V' (1 in the last) and Q0 = -.1 + .9 V:
    V = (.8 Q1 - .02) / .82. Targets of batches of
    episodes are averaged in a table, the early ones, which were made with a wrong one, the least."""
    rng, chance, gamma = np.random.default_rng(3), 0.8, 0.9
    truth, following = np.zeros((3, 2)), 0.0
    for state in (2, 1, 0):
        truth[state, 1] = 1.0 if state == 2 else gamma * following
        following = (chance * truth[state, 1] - (1 - chance) * 0.1) / (1 - (1 - chance) * gamma)
        truth[state, 0] = -0.1 + gamma * following
    table = np.zeros((3, 2))
    for step in range(100):
        episodes, taken = [], []
        for i in range(100):
            state, rewards = 0, []
            while state < 3:
                action = int(rng.random() < chance)
                taken.append((state, action))
                rewards.append(-0.1 if action == 0 else float(state == 2))
                state += action
            episodes.append(turns_of([1] * len(rewards), rewards, id=f"e{i}"))
        at = tuple(np.array(taken).T)
        _, returns = credited(Batch(tuple(episodes)), table[at], "sapo", gamma=gamma, lam=lam)
        visits, total = np.zeros((3, 2)), np.zeros((3, 2))
        np.add.at(visits, at, 1)
        np.add.at(total, at, returns)
        table += 3 / (3 + step) * (total / np.maximum(visits, 1) - table)
    np.testing.assert_allclose(table, truth, atol=0.02)


def test_settings_out_of_range_are_refused():
    for key in ("gamma", "lam"):
        with pytest.raises(CreditError, match=rf"'sapo': {key} is 1.5, but must be in \[0, 1\]"):
            registry.create("estimator", {"name": "sapo", key: 1.5})
    with pytest.raises(CreditError, match="'sapo' needs the batch column 'values_behind'"):
        assign(Batch((turns_of([1], [0]),)), [{"name": "sapo"}])
