"""Advantages from rewards and a baseline, by hand (M11, M12, M13), and the length-adaptive ones of a critic (M18)."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.batch.plan import plan
from mcore_agent.batch.select import usable
from mcore_agent.credit.dr_grpo import DrGrpo
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import Pipeline, assign
from mcore_agent.credit.rloo import Rloo
from mcore_agent.credit.vapo import Vapo
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.types import GREEDY, Batch
from tests.credit.test_turn_gae import turns_of
from tests.strategies import SEEDS, batch_of, episode_of, random_batch


def greedy_of(group: str, reward: float):
    """An episode for comparison only, as the rollout gives it."""
    made = episode_of(f"greedy {group}", group, reward, [0, 1, 1, 1], branch=GREEDY)
    return replace(made, rows=tuple(replace(row, channels={"pg": np.zeros(len(row), dtype=bool)}) for row in made.rows))


# ----------------------------------------------------------------------------------------------- group baselines


@pytest.mark.defect("A1")
def test_dr_grpo_takes_off_the_mean_alone():
    """1 0 0 1: the mean is .5. Beside it 5 and 2 in a group of their own: 3.5, +-1.5; and one alone: 0."""
    assert DrGrpo()(batch_of([1, 0, 0, 1])).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert DrGrpo()(batch_of([1, 5, 0, 0, 2, 1, 7], groups="xyxxyxz")).tolist() == [0.5, 1.5, -0.5, -0.5, -1.5, 0.5, 0]


def test_rloo_by_hand():
    """M12: the siblings of a 1 have mean 1/3, those of a 0 have 2/3: 1 - 1/3 and 0 - 2/3. An only one gets its reward."""
    found = Rloo()(batch_of([1, 0, 0, 1]))
    np.testing.assert_allclose(found, [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-15)
    assert Rloo()(batch_of([0.7])).tolist() == [0.7]


def test_rloo_is_the_definition_and_sums_to_zero():
    for seed in SEEDS[:50]:
        batch = Batch(tuple(e for e in random_batch(seed, demos=False).episodes if e.branch != GREEDY))
        found, reward, group = Rloo()(batch), batch.rewards, batch.by("group")
        for g in range(group.max() + 1):
            own = np.flatnonzero(group == g)
            expected = [reward[i] - (np.mean([reward[k] for k in own if k != i]) if len(own) > 1 else 0.0) for i in own]
            np.testing.assert_allclose(found[own], expected, rtol=1e-9, atol=1e-9 * max(1.0, abs(reward).max()))
            assert len(own) == 1 or abs(found[own].sum()) < 1e-9 * max(1.0, abs(reward).max())


@pytest.mark.defect("A3")
@pytest.mark.parametrize("estimator", [DrGrpo(), Rloo()])
def test_equal_rewards_give_exactly_nothing(estimator):
    for rewards in ([0.0, 0.0, 0.0], [0.1 + 0.2, 0.3, 0.3], [1e6 * (0.1 + 0.2), 3e5, 3e5]):
        assert estimator(batch_of(rewards)).tolist() == [0, 0, 0]


@pytest.mark.defect("A2")
@pytest.mark.parametrize(("name", "expected"), [("dr_grpo", 0.5), ("rloo", 1.0)])
def test_an_episode_votes_once_however_many_rows_it_has(name, expected):
    """Rewards 1 (in three rows) and 0: the mean is 1/2, and the sibling's reward 0 or 1."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1], [0, 0, 1], [0, 1]), episode_of("b", "g", 0.0, [0, 1])))
    assert assign(batch, [{"name": name}]).columns["advantage"].tolist() == [0, expected, 0, 0, expected, 0, expected, 0, -expected]


@pytest.mark.defect("A13")
@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp"])
def test_a_prompt_that_holds_assistant_turns_is_still_one_prompt(name):
    """Groups and own tokens are what the records say: the roles in a prompt split nothing."""
    dialog = tuple({"role": role, "content": "x"} for role in ("user", "assistant", "user"))
    plain = batch_of([1, 0, 0.5])
    batch = Batch(tuple(replace(e, task=replace(e.task, messages=dialog[: 1 + 2 * (i % 2)])) for i, e in enumerate(plain.episodes)))
    found = assign(batch, [{"name": name}]).columns["advantage"]
    assert found.any() and np.array_equal(found, assign(plain, [{"name": name}]).columns["advantage"])


@pytest.mark.defect("A5")
@pytest.mark.parametrize(("name", "expected"), [("dr_grpo", [1.0, -1.0]), ("rloo", [2.0, -2.0]), ("reinforce_pp", [1.0, -1.0])])
def test_a_failed_episode_stays_out_of_the_baseline(name, expected):
    """2 and 0 with a failure between them that would be a zero."""
    a, b, c = batch_of([2, 0, 0]).episodes
    batch = Batch(tuple(usable([a, replace(b, status="infra_fail", reason="sandbox died"), c])[0]))
    np.testing.assert_allclose(assign(batch, [{"name": name}]).columns["advantage"][[1, 4]], expected, rtol=1e-6)


# ------------------------------------------------------------------------------------------------- greedy baseline


def test_remax_by_hand():
    """Rewards 1 0 1 beside a greedy 1: 0 -1 0. In group h the greedy one earned .25: 1 - .25 and 0 - .25."""
    batch = Batch((*batch_of([1, 0, 1]).episodes, greedy_of("g", 1.0), episode_of("x", "h", 1.0), greedy_of("h", 0.25),
                   episode_of("y", "h", 0.0)))  # fmt: skip
    pipeline = Pipeline([{"name": "remax"}])
    credited, numbers = pipeline(batch)
    advantage = credited.columns["advantage"]
    each = [advantage[batch.token_episode == i].tolist() for i in range(7)]
    assert each == [[0, 0, 0], [0, -1, -1], [0, 0, 0], [0] * 4, [0, 0.75, 0.75], [0] * 4, [0, -0.25, -0.25]]
    assert pipeline.branches == ("greedy",) and numbers == {"no_greedy": 0}


def test_the_greedy_episode_is_not_trained_on():
    """M13: it has no advantage, and no row of it is in the learner's plan: 2 rows of 3 tokens, and not the one of 4."""
    batch = Batch((*batch_of([1, 0]).episodes, greedy_of("g", 0.5)))
    batch = assign(batch, [{"name": "remax"}]).with_columns(logp_old=batch.tokens("logp"))
    micro = [m for rank in plan(batch, [PpoClip()], token_budget=64).slots for m in rank]
    assert sum(len(m.tokens) for m in micro) == 6


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_pp"])
def test_the_greedy_episode_counts_in_no_statistic(name):
    """M13: with or without one, what the others get is the same to the bit."""
    alone = batch_of([1, 0, 0.5])
    spec = [{"name": name, "baseline": "group"} if name == "reinforce_pp" else {"name": name}]
    beside = Batch((*alone.episodes, greedy_of("g", 9.0)))
    found = assign(beside, spec).columns["advantage"]
    assert found[:9].tolist() == assign(alone, spec).columns["advantage"].tolist() and found[:9].any() and not found[9:].any()


def test_a_group_without_its_greedy_episode_teaches_nothing_and_is_counted():
    batch = Batch((episode_of("a", "g", 1.0), episode_of("b", "g", 0.0), episode_of("c", "h", 1.0), greedy_of("h", 0.0)))
    credited, numbers = Pipeline([{"name": "remax"}])(batch)
    assert credited.columns["advantage"].tolist() == [0] * 6 + [0, 1, 1] + [0] * 4
    assert numbers == {"no_greedy": 1}


# ------------------------------------------------------------------------------------------------ batch baselines


def test_reinforce_pp_by_hand():
    """Episodes of 1 and 3 tokens, rewards 1 and 0: mean 1/4, variance (9/16 + 3/16) / 4 = 3/16; .75 / (sqrt(3) / 4) = sqrt(3)."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1]), episode_of("b", "h", 0.0, [0, 1, 1, 0, 1])))
    advantage = assign(batch, [{"name": "reinforce_pp"}]).columns["advantage"]
    low = -1 / np.sqrt(3)
    np.testing.assert_allclose(advantage, [0, np.sqrt(3), 0, low, low, 0, low], rtol=1e-6)


def test_reinforce_pp_has_mean_0_and_variance_1_over_tokens():
    """M11."""
    active = 0
    for seed in SEEDS[:60]:
        batch = random_batch(seed)
        for settings in ({}, {"gamma": 0.9}, {"baseline": "group"}):
            own = assign(batch, [{"name": "reinforce_pp", **settings}]).columns["advantage"][batch.channel("pg")]
            if own.any():
                active += 1
                assert abs(own.mean()) < 1e-6 and own.var() == pytest.approx(1, rel=1e-5)
    assert active > 90


@pytest.mark.defect("A6")
def test_a_reward_reaches_every_turn_before_it():
    """Turns of 2 and 1 tokens with 3 observed ones after each: gamma 1/2 gives G = .25 .5 1, whatever lies between."""
    batch = Batch((turns_of([2, 1], [0, 1], observed=3),))
    own = assign(batch, [{"name": "reinforce_pp", "gamma": 0.5}]).columns["advantage"][batch.channel("pg")]
    goal = np.array([0.25, 0.5, 1])
    np.testing.assert_allclose(own, (goal - goal.mean()) / goal.std(), rtol=1e-6)


def test_reinforce_pp_with_a_group_mean():
    """Groups (1, 0) and (8, 8), one token each: .5 -.5 0 0, with mean 0 and variance 1/8: +-.5 * sqrt(8) = +-sqrt(2)."""
    batch = Batch(tuple(episode_of(f"e{i}", "xxyy"[i], r, [0, 1]) for i, r in enumerate([1.0, 0.0, 8.0, 8.0])))
    own = assign(batch, [{"name": "reinforce_pp", "baseline": "group"}]).columns["advantage"][batch.channel("pg")]
    np.testing.assert_allclose(own, [np.sqrt(2), -np.sqrt(2), 0, 0], rtol=1e-6, atol=1e-9)


@pytest.mark.defect("A3")
def test_reinforce_pp_of_equal_returns_is_exactly_zero():
    assert not assign(batch_of([0.1 + 0.2, 0.3, 0.3]), [{"name": "reinforce_pp"}]).columns["advantage"].any()


# ----------------------------------------------------------------------------------------------------------- VAPO


def test_lambda_by_length():
    """M18, alpha .05: 1 - 1 / 5 = .8, 1 - 1 / 50 = .98; 1 - 1 / (.05 * 20) = 0, below which it stays 0."""
    np.testing.assert_allclose([Vapo().lam(100), Vapo().lam(1000)], [0.8, 0.98], rtol=1e-12)
    assert [Vapo().lam(n) for n in (1, 7, 19, 20)] == [0] * 4
    assert Vapo().lam(25) == pytest.approx(0.2)


def test_vapo_by_hand():
    """alpha .5: an episode of 4 tokens has lam 1 - 1 / 2 = .5, one of 1 has 0. V = .5 and reward 1 at the end: delta = 0 0 0 .5 and
    A = .0625 .125 .25 .5; the other one -2 - .5. The critic's lam is 1: returns 1, and -2."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1, 1, 1]), episode_of("b", "h", -2.0, [0, 1])))
    found = assign(batch.with_columns(values=np.full(7, 0.5)), [{"name": "vapo", "alpha": 0.5}]).columns
    assert found["advantage"].tolist() == [0, 0.0625, 0.125, 0.25, 0.5, 0, -2.5]
    assert found["returns"].tolist() == [0, 1, 1, 1, 1, 0, -2]


def test_the_length_is_that_of_the_episodes_own_tokens():
    """Two rows and an observation of 50 tokens: 4 own tokens as above; and a critic's lam 0 learns V' or the reward."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1, *[0] * 50], [0, 1, 1]),))
    found = assign(batch.with_columns(values=np.full(56, 0.5)), [{"name": "vapo", "alpha": 0.5, "critic_lam": 0.0}]).columns
    own = batch.channel("pg")
    assert found["advantage"][own].tolist() == [0.0625, 0.125, 0.25, 0.5] and found["returns"][own].tolist() == [0.5, 0.5, 0.5, 1]


@pytest.mark.parametrize(("spec", "says"), [
    ({"name": "vapo", "alpha": 0.0}, "alpha is 0.0"), ({"name": "vapo", "critic_lam": 1.5}, "critic_lam is 1.5"),
    ({"name": "vapo", "gamma": -1.0}, "gamma is -1.0"), ({"name": "reinforce_pp", "gamma": 2.0}, "gamma is 2.0"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(spec, says):
    with pytest.raises(CreditError, match=f"'{spec['name']}': {says}, but must be"):
        registry.create("estimator", spec)
