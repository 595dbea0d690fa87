"""I4, the pure part: loss, metrics and gradients do not depend on micro-batches or on the data-parallel split."""

import numpy as np
import pytest

from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet, rowset
from mcore_agent.loss.derived import NOW, derive
from tests.invariants.evaluate import AGGREGATIONS, LOSSES, OUTPUTS, alike, evaluate, outputs_for, term_of
from tests.strategies import SEEDS, trained_batch

LAYOUTS = ((7, 1), (40, 2), (1, 3), (10**6, 5))  # token budget, ranks


@pytest.mark.defect("B5")
@pytest.mark.parametrize("aggregate", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_do_not_depend_on_the_split(name, aggregate):
    """The loss to 1e-12 (the order of a float64 sum), the gradient of every token to the bit."""
    term = term_of(name, aggregate=aggregate)
    for seed in SEEDS[AGGREGATIONS.index(aggregate) :: len(AGGREGATIONS)]:
        batch = trained_batch(seed)
        outputs = outputs_for(batch, seed)
        one = evaluate(batch, [term], outputs)
        budget, dp = LAYOUTS[seed // len(AGGREGATIONS) % len(LAYOUTS)]
        many = evaluate(batch, [term], outputs, token_budget=budget, dp=dp)
        assert many.loss == pytest.approx(one.loss, rel=1e-12, abs=1e-14)
        assert many.metrics == pytest.approx(one.metrics, rel=1e-12, abs=1e-14)
        assert alike(many, one)


def test_all_terms_together_do_not_depend_on_the_split():
    terms = [term_of(name, aggregate=AGGREGATIONS[i % len(AGGREGATIONS)]) for i, name in enumerate(LOSSES)]
    for seed in SEEDS[:40]:
        batch = trained_batch(seed)
        outputs = outputs_for(batch, seed)
        one = evaluate(batch, terms, outputs)
        many = evaluate(batch, terms, outputs, token_budget=13, dp=3)
        assert many.loss == pytest.approx(one.loss, rel=1e-12, abs=1e-14)
        for name in OUTPUTS:
            np.testing.assert_allclose(many.grads[name], one.grads[name], rtol=1e-6, atol=0)


def test_a_saved_batch_gives_the_same_micro_batches_under_any_layout(tmp_path):
    terms, batch = [term_of(name) for name in LOSSES], trained_batch(8)
    rows = rowset(derive(batch.with_columns(**{NOW: batch.columns["logp_old"]}), terms), terms)
    rows.save(tmp_path / "batch.npz")
    for budget, dp in LAYOUTS:
        plans = (split(rows, budget, dp), split(RowSet.load(tmp_path / "batch.npz"), budget, dp))
        for first, second in zip(*([m for rank in p.slots for m in rank] for p in plans), strict=True):
            assert np.array_equal(first.tokens, second.tokens) and np.array_equal(first.rows, second.rows)
            assert all(np.array_equal(first.columns[k], second.columns[k]) for k in first.columns)
