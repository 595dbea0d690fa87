"""Shares of domains (M103)."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.domain_cap import factors
from mcore_agent.credit.groups import CreditError
from mcore_agent.types import Batch
from tests.strategies import SEEDS, episode_of, random_batch


def shares(advantage: np.ndarray, batch: Batch) -> dict[str, float]:
    domains = np.array([e.task.domain for e in batch.episodes])[batch.token_episode]
    return {d: float(abs(advantage[domains == d]).sum() / abs(advantage).sum()) for d in sorted(set(domains))}


def batch_in(domains: str) -> Batch:
    """One episode of 2 sampled tokens in each domain named by a letter."""
    episodes = [episode_of(f"e{i}", f"g{i}", 0.0) for i in range(len(domains))]
    return Batch(tuple(replace(e, task=replace(e.task, domain=d)) for e, d in zip(episodes, domains, strict=True)))


def test_factors_by_hand():
    """100 1 1 at most half: 100 becomes 2 of 4. 6 3 1 at most .4: both large ones become .4 of a sum of which 1 is .2, so 2 and 2.
    Two domains at most .4 each cannot be: they become equal. One domain stays, as does one with nothing."""
    np.testing.assert_allclose(factors(np.array([100.0, 1, 1]), 0.5), [0.02, 1, 1], rtol=1e-12)
    np.testing.assert_allclose(factors(np.array([3.0, 1, 6]), 0.4), [2 / 3, 1, 1 / 3], rtol=1e-12)
    np.testing.assert_allclose(factors(np.array([5.0, 2]), 0.4), [0.4, 1], rtol=1e-12)
    assert factors(np.array([5.0]), 0.1).tolist() == [1] and factors(np.array([5.0, 0, 0]), 0.1).tolist() == [1, 1, 1]
    assert factors(np.array([3.0, 2, 4]), 0.5).tolist() == [1, 1, 1]  # 4 of 9 is below the cap


@pytest.mark.parametrize("cap", [0.4, 0.5, 0.75])
def test_a_domain_with_a_hundred_times_the_advantages_has_its_cap_and_no_more(cap):
    batch = batch_in("aabbc")
    advantage = np.where(batch.channel("pg"), np.tile([0, 1.0, -1.0], 5), 0.0)
    advantage[batch.token_episode < 2] *= 100
    after = registry.create("normalizer", {"name": "domain_cap", "cap": cap})(advantage, batch)
    found = shares(after, batch)
    assert found["a"] == pytest.approx(cap) and max(found.values()) <= cap + 1e-9
    assert np.array_equal(np.sign(after), np.sign(advantage))
    if cap >= 0.5:  # b and c share the rest and need no cut
        assert np.array_equal(after[batch.token_episode >= 2], advantage[batch.token_episode >= 2])


def test_no_share_is_ever_above_the_cap():
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        mass = np.where(rng.random(6) < 0.3, 0.0, rng.exponential(size=6) ** 3)
        cap = float(rng.uniform(0.1, 1))
        cut = mass * factors(mass, cap)
        live = int((mass > 0).sum())
        if live > 1:
            assert cut.max() <= max(cap, 1 / live) * cut.sum() * (1 + 1e-9) and (cut <= mass).all() and (cut > 0).sum() == live


def test_weights_of_domains_come_first():
    """b counts three times, then has .75 of all; a cap of .6 leaves it 1.5 of 1."""
    batch = batch_in("ab")
    advantage = np.where(batch.channel("pg"), 0.5, 0.0)
    after = registry.create("normalizer", {"name": "domain_cap", "cap": 1.0, "weights": {"b": 3.0}})(advantage, batch)
    assert after.tolist() == [0, 0.5, 0.5, 0, 1.5, 1.5]
    capped = registry.create("normalizer", {"name": "domain_cap", "cap": 0.6, "weights": {"b": 3.0}})(advantage, batch)
    np.testing.assert_allclose(capped, [0, 0.5, 0.5, 0, 0.75, 0.75], rtol=1e-12)


def test_one_domain_stays_as_it_is():
    for seed in SEEDS[:40]:
        batch = random_batch(seed)
        batch = Batch(tuple(replace(e, task=replace(e.task, domain="one")) for e in batch.episodes))
        advantage = np.where(batch.channel("pg"), np.random.default_rng(seed).normal(size=len(batch.token_row)), 0.0)
        assert np.array_equal(registry.create("normalizer", {"name": "domain_cap", "cap": 0.2})(advantage, batch), advantage)


def test_settings_out_of_range_are_refused():
    with pytest.raises(CreditError, match=r"cap is 0, but must be in \(0, 1\]"):
        registry.create("normalizer", {"name": "domain_cap", "cap": 0})
    with pytest.raises(CreditError, match="weights has -1 for 'x'"):
        registry.create("normalizer", {"name": "domain_cap", "weights": {"x": -1}})
