"""I2: the rows of one episode share one reward, one vote in a baseline and one loss mass; groups are what their ids say."""

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.batch.plan import plan
from mcore_agent.credit.pipeline import assign
from mcore_agent.loss.aggregate import weights
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.types import Batch
from tests.invariants.evaluate import AGGREGATIONS, ESTIMATORS, LOSSES, OUTPUTS, evaluate, outputs_for
from tests.strategies import SEEDS, cut_rows, moved_tokens, permuted, random_batch, with_columns, with_values

# An aggregation of unit ``row`` weighs rows on purpose; the others must not see them.
ROWLESS = [name for name in AGGREGATIONS if registry.get("aggregation", name).unit != "row"]


def test_every_aggregation_says_what_it_gives_equal_mass():
    assert {registry.get("aggregation", name).unit for name in AGGREGATIONS} <= {"token", "row", "episode"}
    assert ROWLESS


@pytest.mark.parametrize("name", ESTIMATORS)
def test_cutting_rows_changes_no_advantage(name):
    for seed in SEEDS:
        batch = with_values(random_batch(seed), seed)
        cut, source = cut_rows(batch)
        whole = assign(batch, [{"name": name}]).columns
        parts = assign(cut.with_columns(**{k: v[source] for k, v in batch.columns.items()}), [{"name": name}]).columns
        for given in ("advantage", *registry.get("estimator", name).gives):
            assert np.array_equal(parts[given], np.where(cut.channel("pg"), whole[given][source], 0))


@pytest.mark.parametrize("name", ROWLESS)
def test_cutting_rows_changes_no_weight(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        cut, source = cut_rows(batch)
        for channel in ("pg", "sft"):
            whole = weights(name, batch.channel(channel), batch)
            parts = weights(name, cut.channel(channel), cut)
            assert np.array_equal(parts, np.where(cut.channel(channel), whole[source], 0))


@pytest.mark.parametrize("aggregate", ROWLESS)
@pytest.mark.parametrize("name", LOSSES)
def test_cutting_rows_changes_no_loss(name, aggregate):
    """I4, row split: loss and, at every trained token, gradient."""
    term = registry.create("loss", {"name": name, "aggregate": aggregate})
    for seed in SEEDS[:60]:
        batch = with_columns(random_batch(seed), seed)
        cut, source = cut_rows(batch)
        cut = cut.with_columns(**{k: v[source] for k, v in batch.columns.items()})
        outputs = outputs_for(batch, seed)
        whole, parts = evaluate(batch, [term], outputs), evaluate(cut, [term], {k: v[source] for k, v in outputs.items()})
        assert parts.loss == pytest.approx(whole.loss, rel=1e-12, abs=1e-15)
        trained = cut.channel(term.channel)
        for output in OUTPUTS:
            assert np.array_equal(parts.grads[output], np.where(trained, whole.grads[output][source], 0))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_episodes_does_not_matter_to_advantages(name):
    for seed in SEEDS:
        batch = with_values(random_batch(seed), seed)
        moved, order = permuted(batch, seed)
        source = moved_tokens(batch, order)
        first = assign(batch, [{"name": name}]).columns["advantage"]
        second = assign(moved.with_columns(**{k: v[source] for k, v in batch.columns.items()}), [{"name": name}]).columns["advantage"]
        np.testing.assert_allclose(second, first[source], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_order_of_episodes_does_not_matter_to_weights(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        moved, order = permuted(batch, seed)
        first = weights(name, batch.channel("pg"), batch)
        second = weights(name, moved.channel("pg"), moved)
        assert np.array_equal(second, np.concatenate([first[batch.token_episode == i] for i in order]))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.defect("A1")
def test_groups_do_not_see_each_other(name):
    """Each group alone gets what it gets among the others, however uneven they are."""
    for seed in SEEDS:
        batch = with_values(random_batch(seed), seed)
        together = assign(batch, [{"name": name}]).columns["advantage"]
        for group in {e.group for e in batch.episodes}:
            alone = Batch(tuple(e for e in batch.episodes if e.group == group))
            own = np.isin(batch.token_episode, [i for i, e in enumerate(batch.episodes) if e.group == group])
            alone = alone.with_columns(**{k: v[own] for k, v in batch.columns.items()})
            np.testing.assert_allclose(assign(alone, [{"name": name}]).columns["advantage"], together[own], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_teach_nothing(name):
    """Exactly 0 everywhere, so that the surrogate alone has no row to train on. To an estimator that has values instead of
    a group they are equal rewards when the values foretell them."""
    for seed in SEEDS:
        batch = with_columns(random_batch(seed, equal=True, demos=False), seed)
        batch = assign(batch.with_columns(values=batch.rewards[batch.token_episode]), [{"name": name}])
        assert not batch.columns["advantage"].any()
        assert plan(batch, [PpoClip()], token_budget=64, dp=2).empty


@pytest.mark.defect("A2")
@pytest.mark.parametrize("name", ["episode_mean"])
def test_every_rollout_has_one_loss_mass(name):
    for seed in SEEDS:
        batch = random_batch(seed, demos=False)
        weight = weights(name, batch.channel("pg"), batch).astype(np.float64)
        mass = np.bincount(batch.token_episode, weights=weight, minlength=len(batch.episodes))
        active = np.bincount(batch.token_episode, weights=batch.channel("pg"), minlength=len(batch.episodes)) > 0
        np.testing.assert_allclose(mass, active / max(active.sum(), 1), rtol=1e-6)
