"""I1: nothing but the channel's own tokens, which for the policy gradient are the sampled ones, has any effect (M1)."""

import numpy as np
import pytest
import torch

from mcore_agent.loss.aggregate import weights
from mcore_agent.loss.derived import NOW, derive
from mcore_agent.loss.total import total_loss
from mcore_agent.protocols import ModelOut
from tests.invariants.evaluate import AGGREGATIONS, LOSSES, OUTPUTS, alike, evaluate, model_out, outputs_for, term_of
from tests.strategies import SEEDS, TOP_K, VOCAB, random_batch, trained_batch


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_tokens_outside_the_mask_get_no_weight_and_those_in_it_do(name):
    for seed in SEEDS:
        batch = random_batch(seed)
        for channel in ("pg", "sft", "dpo"):
            mask = batch.channel(channel)
            weight = weights(name, mask, batch)
            assert weight.dtype == np.float32 and np.isfinite(weight).all()
            assert np.array_equal(weight > 0, mask) and not weight[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_nan_outside_the_channel_changes_no_bit(name):
    """M1 (a), (b): with NaN or infinity in every number outside the mask, loss, metrics and gradients are bit-equal,
    and the gradient there is exactly 0."""
    term = term_of(name)
    for seed in SEEDS:
        batch = trained_batch(seed)
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
    term = term_of(name)
    moved = 0
    for seed in range(28):
        batch = trained_batch(seed)
        torch.manual_seed(seed)
        logits = torch.randn(len(batch.token_row), VOCAB, dtype=torch.float64, requires_grad=True)
        logp = logits.log_softmax(-1)
        taken = logp.gather(-1, torch.tensor(batch.tokens("tokens"))[:, None])[:, 0]
        mask = batch.channel(term.channel)
        columns = columns_for(term, batch, taken.detach().numpy())
        top = logp.topk(TOP_K)
        values = {"value": logits.sin().sum(-1), "value_behind": logits.cos().sum(-1)}
        out = ModelOut(taken, -(logp.exp() * logp).sum(-1), **values, top_logp=top.values, top_ids=top.indices)
        total_loss(out, columns, [term])[0].backward()
        assert not logits.grad[torch.tensor(~mask)].any()
        moved += int(logits.grad.any())
    assert moved > 5  # the test would be empty if nothing ever moved


@pytest.mark.parametrize("name", LOSSES)
def test_no_row_that_contributes_is_left_out(name):
    """The gradient is the same when every row is evaluated, in one piece and without a plan."""
    term = term_of(name)
    for seed in SEEDS[::5]:
        batch = trained_batch(seed)
        outputs = {name: values.astype(np.float32) for name, values in outputs_for(batch, seed).items()}
        mask = batch.channel(term.channel)
        columns = columns_for(term, batch, outputs["logp"])
        leaves = {name: torch.tensor(v, dtype=torch.float64, requires_grad=name in OUTPUTS) for name, v in outputs.items()}
        value, _ = total_loss(model_out(leaves), columns, [term])
        if value.requires_grad:
            value.backward()
        got = evaluate(batch, [term], outputs)
        assert got.loss == pytest.approx(value.item(), rel=1e-12, abs=1e-15)
        for output in OUTPUTS:
            grad = leaves[output].grad
            expected = np.zeros(len(mask)) if grad is None else grad.numpy()
            assert np.array_equal(got.grads[output], expected.astype(np.float32))


def columns_for(term, batch, logp) -> dict[str, torch.Tensor]:
    """What a term gets of a batch in one piece, in the precision of a micro-batch."""
    made = derive(batch.with_columns(**{NOW: logp}), [term])
    mask = batch.channel(term.channel)
    columns = {**made.columns, f"mask:{term.channel}": mask, "w:0": weights(term.aggregate, mask, batch)}
    return {name: torch.tensor(np.asarray(values, dtype=np.float32), dtype=torch.float64) for name, values in columns.items()}
