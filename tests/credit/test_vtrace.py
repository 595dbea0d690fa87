"""V-trace against numbers worked out by hand (M33)."""

import math

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import assign
from mcore_agent.types import Batch
from tests.credit.test_gae import two_turns
from tests.strategies import SEEDS, episode_of, random_batch, with_values


def credited(batch: Batch, values, ratios, **settings) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, returns) [N]"""
    prox = np.log(np.array(ratios, dtype=np.float64))
    columns = {"values": np.array(values, dtype=np.float64), "logp_prox": prox, "logp_old": np.zeros(len(prox))}
    found = assign(batch.with_columns(**columns), [{"name": "vtrace", **settings}]).columns
    return found["advantage"], found["returns"]


TWO = Batch((episode_of("a", "g", 1.0, [0, 1, 1]),))


def test_two_steps_with_clipped_ratios():
    """w = 2, .5; V = .5, .5; reward 1 at the end. rho = c = 1, .5. From the end: delta = .5 * (1 - .5) = .25, v = .75;
    delta = 1 * (0 + .5 - .5) = 0, v = .5 + 0 + 1 * (.75 - .5) = .75. A = 0 + .75 - .5 and 1 - .5; times rho .25 and .25."""
    advantage, returns = credited(TWO, [9, 0.5, 0.5], [1, 2, 0.5])
    np.testing.assert_allclose(returns, [0, 0.75, 0.75], rtol=1e-6)
    np.testing.assert_allclose(advantage, [0, 0.25, 0.5], rtol=1e-6)
    weighted, _ = credited(TWO, [9, 0.5, 0.5], [1, 2, 0.5], weighted=True)
    np.testing.assert_allclose(weighted, [0, 0.25, 0.25], rtol=1e-6)


def test_wider_bars_by_hand():
    """w = 2, .5; V = .5, .2; rho_bar 2, c_bar 1.5, gamma .5. rho = 2, .5; c = 1.5 for the first.
    delta = .5 * (1 - .2) = .4, v = .6; delta = 2 * (0 + .5 * .2 - .5) = -.8, v = .5 - .8 + .5 * 1.5 * (.6 - .2) = 0.
    A = .5 * .6 - .5 = -.2 and 1 - .2 = .8."""
    advantage, returns = credited(TWO, [9, 0.5, 0.2], [1, 2, 0.5], rho_bar=2.0, c_bar=1.5, gamma=0.5)
    np.testing.assert_allclose(returns, [0, 0, 0.6], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(advantage, [0, -0.2, 0.8], rtol=1e-6)


def test_lam_shortens_the_trace():
    """lam 0: v = V + delta alone: .5 + 0 and .5 + .25."""
    _, returns = credited(TWO, [9, 0.5, 0.5], [1, 2, 0.5], lam=0.0)
    np.testing.assert_allclose(returns, [0, 0.5, 0.75], rtol=1e-6)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_equal_policies_have_the_returns_of_gae_at_lam_1(gamma):
    """w = 1: v is the discounted sum of rewards to come, and A = G - V."""
    for seed in SEEDS:
        batch = with_values(random_batch(seed), seed)
        batch = batch.with_columns(logp_prox=batch.columns["logp_old"])
        ours, gae = (assign(batch, [{"name": name, "gamma": gamma}]).columns for name in ("vtrace", "gae"))
        assert np.array_equal(ours["returns"], gae["returns"])
        np.testing.assert_allclose(ours["advantage"], gae["advantage"], rtol=1e-5, atol=1e-6)


def test_a_token_that_the_policy_would_never_say_teaches_and_carries_nothing():
    """w = 0 at the second of three tokens: its v is V, and what follows does not reach the first."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1, 1]),))
    _, returns = credited(batch, [0, 0.1, 0.2, 0.3], [1, 1, 1e-30, 1])
    np.testing.assert_allclose(returns, [0, 0.2, 0.2, 1.0], rtol=1e-6)


def test_observations_are_transparent():
    found = []
    for count in (0, 7, 500):
        batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1, *[0] * count, 1, 1]),))
        junk = [np.nan] * count
        advantage, returns = credited(batch, [np.nan, 0.3, -0.2, *junk, 0.7, 0.15], [np.nan, 1.5, 0.5, *junk, 0.8, 3])
        mask = batch.channel("pg")
        assert not advantage[~mask].any() and not returns[~mask].any()
        found.append((advantage[mask].tolist(), returns[mask].tolist()))
    assert found[0] == found[1] == found[2] and len(set(found[0][0])) == 4


def test_rewards_of_turns_count_where_the_turn_ends():
    """.25 after turn 0 and 2 at the end, V = 0, w = 1: v is what is to come."""
    advantage, returns = credited(Batch((two_turns({"step": [0.25, -1.0], "outcome": 3.0}),)), np.zeros(8), np.ones(8))
    assert advantage.tolist() == returns.tolist() == [0, 2.25, 2.25, 0, 0, 2, 2, 0]


def test_absurd_ratios_stay_finite():
    columns = {"values": np.zeros(3), "logp_prox": np.array([0, 900.0, -900.0]), "logp_old": np.zeros(3)}
    found = assign(TWO.with_columns(**columns), [{"name": "vtrace", "rho_bar": math.inf, "c_bar": math.inf}]).columns
    assert np.isfinite(found["returns"]).all()


@pytest.mark.defect("C19")
@pytest.mark.parametrize("name", ["values", "logp_prox", "logp_old"])
def test_a_missing_column_is_an_error(name):
    columns = {k: np.zeros(3) for k in ("values", "logp_prox", "logp_old") if k != name}
    with pytest.raises(CreditError, match=f"'vtrace' needs the batch column '{name}'"):
        assign(TWO.with_columns(**columns), [{"name": "vtrace"}])


@pytest.mark.parametrize(("settings", "says"), [
    ({"gamma": 1.1}, "gamma is 1.1"), ({"lam": -0.1}, "lam is -0.1"),
    ({"c_bar": 2.0}, "c_bar is 2.0 and rho_bar 1.0, but 0 < c_bar <= rho_bar"), ({"c_bar": 0.0}, "c_bar is 0.0"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(settings, says):
    with pytest.raises(CreditError, match=says):
        registry.create("estimator", {"name": "vtrace", **settings})
