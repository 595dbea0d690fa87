"""The KL divergence as a cost on tokens (M7)."""

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError, scores
from mcore_agent.credit.kl_reward import KlReward
from mcore_agent.credit.pipeline import Pipeline, assign
from mcore_agent.types import Batch
from tests.strategies import SEEDS, episode_of, random_batch, with_values

OWN = [0, 1, 1, 0, 1]


def scored(ratio, batch=None) -> Batch:
    """Log-ratios ``logp_prox - logp_ref`` [N]; what is NaN there is so in both."""
    batch = batch or Batch((episode_of("a", "g", 1.0, OWN),))
    ratio = np.array(ratio, dtype=np.float64)
    return batch.with_columns(logp_prox=ratio - 3.0, logp_ref=np.where(np.isnan(ratio), np.nan, -3.0))


@pytest.mark.defect("A7")
@pytest.mark.parametrize(("per", "expected"), [("token", [0, -0.05, 0.02, 0, -0.03]), ("trajectory", [0, 0, 0, 0, -0.06])])
def test_cost_by_hand(per, expected):
    """Log-ratios .5 -.2 .3 with beta .1; the prompt and the observation, whose numbers are junk, cost nothing. Sum: -.1 * .6."""
    batch = scored([np.nan, 0.5, -0.2, np.nan, 0.3])
    np.testing.assert_allclose(KlReward(beta=0.1, per=per)(batch), expected, rtol=1e-12, atol=1e-15)


def test_two_episodes_of_several_rows_sum_apart():
    """Episode a: .5 in row 0 and 1 in row 1; b has nothing sampled; c: -2. With beta 1: -1.5 at a's last token, 2 at c's."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1], [0, 1, 0]), episode_of("b", "g", 0.0, [0, 0]), episode_of("c", "g", 0.0, [0, 1])))
    found = KlReward(beta=1.0, per="trajectory")(scored([9, 0.5, 9, 1, 9, 9, 9, 9, -2], batch))
    assert found.tolist() == [0, 0, 0, -1.5, 0, 0, 0, 0, 2]


@pytest.mark.parametrize("name", ["grpo", "gae", "rloo", "turn_gae"])
def test_beta_0_is_the_same_to_the_bit_and_reads_nothing(name):
    for seed in SEEDS[:40]:
        batch = with_values(random_batch(seed), seed)
        junk = np.full(len(batch.token_row), np.nan)
        without = assign(batch, [{"name": name}]).columns["advantage"]
        off = assign(batch.with_columns(logp_ref=junk, logp_prox=junk), [{"name": "kl_reward", "beta": 0.0}, {"name": name}])
        assert np.array_equal(off.columns["advantage"], without)


def test_an_episodes_score_loses_the_same_in_both_modes():
    """r - beta * sum of the log-ratios, for every estimator that looks at whole episodes."""
    for seed in SEEDS[:40]:
        batch = with_values(random_batch(seed), seed)
        ratio = np.random.default_rng(seed).normal(size=len(batch.token_row))
        batch = scored(ratio, batch)
        expected = batch.rewards - 0.1 * np.bincount(batch.token_episode, weights=np.where(batch.channel("pg"), ratio, 0))
        for per in ("token", "trajectory"):
            found = scores(batch.with_columns(token_reward=KlReward(beta=0.1, per=per)(batch)))
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_through_the_pipeline():
    """Reward 1, costs .05 -.02 .03 and V = 0: what is still to come is 1 - .06, 1 - .01 and 1 - .03."""
    batch = scored([0, 0.5, -0.2, 0, 0.3]).with_columns(values=np.zeros(5))
    pipeline = Pipeline([{"name": "kl_reward", "beta": 0.1}, {"name": "gae"}])
    assert set(pipeline.needs) == {"logp_prox", "logp_ref", "values"}
    advantage = pipeline(batch)[0].columns["advantage"]
    np.testing.assert_allclose(advantage, [0, 0.94, 0.99, 0, 0.97], rtol=1e-6)


def test_bad_settings_and_missing_columns_are_refused():
    with pytest.raises(CreditError, match="'kl_reward': beta is -0.1, but must be finite and at least 0"):
        registry.create("shaping", {"name": "kl_reward", "beta": -0.1})
    with pytest.raises(CreditError, match="shaping 'kl_reward' needs the batch column 'logp_prox'"):
        assign(Batch((episode_of("a", "g", 1.0, OWN),)), [{"name": "kl_reward"}, {"name": "grpo"}])
