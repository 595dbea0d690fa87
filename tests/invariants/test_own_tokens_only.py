"""I1: nothing but the channel's own tokens, which for the policy gradient are the sampled ones, has any effect (M1)."""

import numpy as np
import pytest
import torch

from mcore_agent import registry
from mcore_agent.credit.pipeline import assign
from mcore_agent.loss.aggregate import weights
from mcore_agent.loss.total import total_loss
from mcore_agent.protocols import ModelOut
from tests.invariants.evaluate import AGGREGATIONS, ESTIMATORS, LOSSES, OUTPUTS, alike, evaluate, outputs_for
from tests.strategies import SEEDS, VOCAB, random_batch, with_columns, with_values


@pytest.mark.parametrize("name", ESTIMATORS)
def test_unsampled_tokens_get_no_advantage(name):
    for seed in SEEDS:
        batch = with_values(random_batch(seed), seed)
        credited = assign(batch, [{"name": name}])
        for given in ("advantage", *registry.get("estimator", name).gives):
            column = credited.columns[given]
            assert column.shape == batch.token_row.shape and np.isfinite(column).all()
            assert not column[~batch.tokens("sampled")].any()


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_tokens_outside_the_mask_get_no_weight_and_those_in_it_do(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        for channel in ("pg", "sft"):
            mask = batch.channel(channel)
            weight = weights(name, mask, batch)
            assert weight.dtype == np.float32 and np.isfinite(weight).all()
            assert np.array_equal(weight > 0, mask) and not weight[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_nan_outside_the_channel_changes_no_bit(name):
    """M1 (a), (b): with NaN or infinity in every number outside the mask, loss, metrics and gradients are bit-equal,
    and the gradient there is exactly 0."""
    term = registry.create("loss", {"name": name})
    for seed in SEEDS:
        batch = with_columns(random_batch(seed), seed)
        outside = ~batch.channel(term.channel)
        outputs = outputs_for(batch, seed)
        clean = evaluate(batch, [term], outputs)
        junk = np.where(np.arange(len(outside)) % 3 == 0, np.inf, np.nan)
        planted = batch.with_columns(**{k: np.where(outside, junk, v) for k, v in batch.columns.items()})
        dirty = evaluate(planted, [term], {name: np.where(outside, -junk, values) for name, values in outputs.items()})
        assert dirty.loss == clean.loss and dirty.metrics == clean.metrics and np.isfinite(clean.loss)
        assert alike(dirty, clean) and not any(dirty.grads[name][outside].any() for name in OUTPUTS)


@pytest.mark.parametrize("name", LOSSES)
def test_logits_of_other_tokens_have_gradient_exactly_zero(name):
    """M1 (a) through a softmax: logits [T, V], log-prob, entropy and value of each token from its own row of logits."""
    term = registry.create("loss", {"name": name})
    moved = 0
    for seed in range(20):
        batch = with_columns(random_batch(seed), seed)
        torch.manual_seed(seed)
        logits = torch.randn(len(batch.token_row), VOCAB, dtype=torch.float64, requires_grad=True)
        logp = logits.log_softmax(-1)
        taken = logp.gather(-1, torch.tensor(batch.tokens("tokens"))[:, None])[:, 0]
        mask = batch.channel(term.channel)
        columns = {k: torch.tensor(v) for k, v in batch.columns.items()}
        columns[f"mask:{term.channel}"] = torch.tensor(mask).float()
        columns["w:0"] = torch.tensor(weights(term.aggregate, mask, batch))
        out = ModelOut(taken, entropy=-(logp.exp() * logp).sum(-1), value=logits.sin().sum(-1))
        total_loss(out, columns, [term])[0].backward()
        assert not logits.grad[torch.tensor(~mask)].any()
        moved += int(logits.grad.any())
    assert moved > 5  # the test would be empty if nothing ever moved


@pytest.mark.parametrize("name", LOSSES)
def test_no_row_that_contributes_is_left_out(name):
    """The gradient is the same when every row is evaluated, in one piece and without a plan."""
    term = registry.create("loss", {"name": name})
    for seed in SEEDS[:60]:
        batch = with_columns(random_batch(seed), seed)
        outputs = {name: values.astype(np.float32) for name, values in outputs_for(batch, seed).items()}
        mask = batch.channel(term.channel)
        columns = {k: torch.tensor(v, dtype=torch.float64) for k, v in batch.columns.items()}
        columns[f"mask:{term.channel}"] = torch.tensor(mask, dtype=torch.float64)
        columns["w:0"] = torch.tensor(weights(term.aggregate, mask, batch), dtype=torch.float64)
        leaves = {name: torch.tensor(v, dtype=torch.float64, requires_grad=True) for name, v in outputs.items()}
        value, _ = total_loss(ModelOut(**leaves), columns, [term])
        value.backward()
        got = evaluate(batch, [term], outputs)
        assert got.loss == pytest.approx(value.item(), rel=1e-12, abs=1e-15)
        for output, leaf in leaves.items():
            expected = np.zeros(len(mask)) if leaf.grad is None else leaf.grad.numpy()
            assert np.array_equal(got.grads[output], expected.astype(np.float32))
