"""I2: the rows of one episode share one loss mass, whatever they are cut into; of votes see ``test_credit_variants.py``."""

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.loss.aggregate import weights
from mcore_agent.loss.derived import Deriving
from tests.invariants.evaluate import AGGREGATIONS, LOSSES, OUTPUTS, evaluate, outputs_for, term_of
from tests.strategies import SEEDS, cut_rows, permuted, random_batch, trained_batch

# An aggregation of unit ``row`` weighs rows on purpose; the others must not see them.
ROWLESS = [name for name in AGGREGATIONS if registry.get("aggregation", name).unit != "row"]


def test_every_aggregation_says_what_it_gives_equal_mass():
    assert {registry.get("aggregation", name).unit for name in AGGREGATIONS} <= {"token", "row", "episode"}
    assert ROWLESS


@pytest.mark.parametrize("name", ROWLESS)
def test_cutting_rows_changes_no_weight(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        cut, source = cut_rows(batch)
        for channel in ("pg", "sft", "dpo"):
            whole = weights(name, batch.channel(channel), batch)
            parts = weights(name, cut.channel(channel), cut)
            assert np.array_equal(parts, np.where(cut.channel(channel), whole[source], 0))


@pytest.mark.parametrize("aggregate", ROWLESS)
@pytest.mark.parametrize("name", LOSSES)
def test_cutting_rows_changes_no_loss(name, aggregate):
    """I4, row split: loss and, at every trained token, gradient. What other rows give a term goes through columns in float32."""
    term = term_of(name, aggregate=aggregate)
    exact = not isinstance(term, Deriving)
    for seed in SEEDS[ROWLESS.index(aggregate) : 120 : 2 * len(ROWLESS)]:
        batch = trained_batch(seed)
        cut, source = cut_rows(batch)
        cut = cut.with_columns(**{k: v[source] for k, v in batch.columns.items()})
        outputs = outputs_for(batch, seed)
        whole, parts = evaluate(batch, [term], outputs), evaluate(cut, [term], {k: v[source] for k, v in outputs.items()})
        assert parts.loss == pytest.approx(whole.loss, rel=1e-12 if exact else 1e-5, abs=1e-15 if exact else 1e-8)
        trained = cut.channel(term.channel)
        for output in OUTPUTS:
            expected = np.where(trained, whole.grads[output][source], 0)
            if exact:
                assert np.array_equal(parts.grads[output], expected)
            else:
                np.testing.assert_allclose(parts.grads[output], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_the_order_of_episodes_does_not_matter_to_weights(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        moved, order = permuted(batch, seed)
        first = weights(name, batch.channel("pg"), batch)
        second = weights(name, moved.channel("pg"), moved)
        assert np.array_equal(second, np.concatenate([first[batch.token_episode == i] for i in order]))


@pytest.mark.defect("A2")
@pytest.mark.parametrize("name", ["episode_mean"])
def test_every_rollout_has_one_loss_mass(name):
    for seed in SEEDS:
        batch = random_batch(seed, demos=False)
        weight = weights(name, batch.channel("pg"), batch).astype(np.float64)
        mass = np.bincount(batch.token_episode, weights=weight, minlength=len(batch.episodes))
        active = np.bincount(batch.token_episode, weights=batch.channel("pg"), minlength=len(batch.episodes)) > 0
        np.testing.assert_allclose(mass, active / max(active.sum(), 1), rtol=1e-6)
