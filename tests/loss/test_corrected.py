"""Corrected losses against hand-derived numbers (M32, M34); off, and for equal policies, not a bit changes (I5)."""

import math

import numpy as np
import pytest
import torch

from mcore_agent import registry
from mcore_agent.batch.correction import weigh
from mcore_agent.loss.common import LossError
from mcore_agent.loss.correction import Corrected, Correction, automatic, correct, uncorrected
from mcore_agent.loss.decoupled_ppo import DecoupledPpo
from mcore_agent.loss.derived import Deriving
from mcore_agent.loss.k3_kl import K3Kl
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.loss.total import total_loss
from tests.invariants.evaluate import AGGREGATIONS, LOSSES, OUTPUTS, alike, evaluate, outputs_for, term_of
from tests.loss.columns import columns_of, out_of
from tests.strategies import SEEDS, cut_rows, random_batch, with_columns

RATIO_TERMS = [name for name in LOSSES if "logp_old" in term_of(name).needs]
CORRECTIONS = [Correction(), Correction("clip", "geometric", 0.9, 1.2), Correction("mask", "token", 0.7, 1.5),
               Correction("mask", "sequence", 0.3, 3.0)]  # fmt: skip


def weighed(seed: int, correction: Correction):
    batch = with_columns(random_batch(seed), seed)
    return batch.with_columns(is_weight=weigh(batch, correction)[0])


def test_a_corrected_surrogate_by_hand():
    """pi / pi_prox = 1.5, .5, 1 with A = 1, 1, -1: min(1.5, 1.2), min(.5, .8), -1, as without a correction; times the
    weights 2, .5, 0 and over 3 tokens: -(2 * 1.2 + .5 * .5 - 0 * 1) / 3. The rejected token stays in the denominator."""
    prox = [-1, -2, -3, -4]
    columns = columns_of([1, 1, 0, 1], advantage=[1, 1, 1, -1], logp_old=[-9, -9, -9, -9], logp_prox=prox, is_weight=[2, 0.5, 7, 0])
    out = out_of([p + math.log(r) for p, r in zip(prox, [1.5, 0.5, 9, 1], strict=True)])
    loss, metrics = total_loss(out, columns, [Corrected(PpoClip())])
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * 1.2 + 0.5 * 0.5) / 3, rel=1e-14)
    assert metrics["ratio"].item() == pytest.approx((1.5 + 0.5 + 1) / 3, rel=1e-14)  # to the proximal policy
    # d/dlogp of -w r A / 3: 0 where clipped, -.5 * .5 / 3, and 0 for the rejected token
    torch.testing.assert_close(out.logp.grad, torch.tensor([0, -0.25 / 3, 0, 0], dtype=torch.float64), rtol=1e-13, atol=0)


def test_decoupled_by_hand():
    """w = pi_prox / pi_behaviour = e^(-1 + 1.5) and e^(-2 + 1), r = 1.5 at A = 1 (1.2 counts) and .5 at A = -1 (.8 counts,
    -.8 is the smaller): -(e^.5 * 1.2 - e^-1 * .8) / 2."""
    columns = columns_of([1, 1], advantage=[1, -1], logp_old=[-1.5, -1], logp_prox=[-1, -2])
    loss, metrics = total_loss(out_of([-1 + math.log(1.5), -2 + math.log(0.5)]), columns, [DecoupledPpo()])
    assert loss.item() == pytest.approx(-(math.exp(0.5) * 1.2 - math.exp(-1) * 0.8) / 2, rel=1e-14)
    assert metrics["behaviour_weight"].item() == pytest.approx((math.exp(0.5) + math.exp(-1)) / 2, rel=1e-14)
    assert metrics["prox_clip_fraction"].item() == 1


def test_decoupled_is_the_surrogate_with_an_unbounded_token_correction():
    for seed in SEEDS[:30]:
        batch = weighed(seed, Correction(high=math.inf))
        outputs = outputs_for(batch, seed)
        one, other = (evaluate(batch, [term], outputs) for term in (DecoupledPpo(), Corrected(PpoClip())))
        assert one.loss == pytest.approx(other.loss, rel=1e-6, abs=1e-7)  # weights of size 1 in float32, and terms that cancel
        np.testing.assert_allclose(one.grads["logp"], other.grads["logp"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("settings", [{}, {"clip_high": 0.28, "dual_clip": 3.0}, {"clip_low": 0.05}])
def test_decoupled_has_the_bits_of_ppo_where_proximal_and_behaviour_agree(settings):
    for seed in SEEDS[:40]:
        batch = with_columns(random_batch(seed), seed)
        batch = batch.with_columns(logp_prox=batch.columns["logp_old"])
        outputs = outputs_for(batch, seed)
        plain, decoupled = (evaluate(batch, [kind(**settings)], outputs) for kind in (PpoClip, DecoupledPpo))
        assert decoupled.loss == plain.loss and alike(decoupled, plain)
        named = {"prox_ratio": "ratio", "prox_clip_fraction": "clip_fraction", "prox_kl": "kl"}
        assert all(decoupled.metrics.get(ours) == plain.metrics.get(theirs) for ours, theirs in named.items())


def test_off_gives_the_very_terms():
    terms = [term_of(name) for name in LOSSES]
    assert all(a is b for a, b in zip(correct(terms, None), terms, strict=True))


def test_only_terms_with_a_ratio_are_corrected():
    ppo, kl = correct([PpoClip(coef=0.7, aggregate="episode_mean"), K3Kl()], Correction())
    assert isinstance(ppo, Corrected) and isinstance(kl, K3Kl) and len(RATIO_TERMS) >= 2
    assert ppo.needs == ("advantage", "logp_old", "logp_prox", "is_weight")
    assert (ppo.channel, ppo.scales_with, ppo.coef, ppo.aggregate) == ("pg", "advantage", 0.7, "episode_mean")


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("name", RATIO_TERMS)
def test_equal_policies_give_the_bits_of_no_correction(name, correction):
    """I5: loss, metrics and gradient, for every loss with a ratio."""
    term = registry.create("loss", {"name": name})
    for seed in SEEDS[:20]:
        batch = with_columns(random_batch(seed), seed)
        batch = batch.with_columns(logp_prox=batch.columns["logp_old"])
        batch = batch.with_columns(is_weight=weigh(batch, correction)[0])
        outputs = outputs_for(batch, seed)
        off, on = (evaluate(batch, correct([term], how), outputs) for how in (None, correction))
        assert on.loss == off.loss and on.metrics == off.metrics and alike(on, off)


@pytest.mark.parametrize("name", RATIO_TERMS)
def test_a_weight_scales_a_token_and_rejects_it_without_touching_the_others(name):
    """Every denominator stays: with half of the tokens rejected the gradient of the others has the same bits."""
    for aggregate in AGGREGATIONS:
        term = registry.create("loss", {"name": name, "aggregate": aggregate})
        for seed in SEEDS[:8]:
            batch = with_columns(random_batch(seed), seed)
            mask = batch.channel("pg")
            outputs = outputs_for(batch, seed)
            kept = mask & (np.arange(len(mask)) % 2 == 0)
            full, half = (
                evaluate(batch.with_columns(is_weight=chosen.astype(np.float32)), [Corrected(term)], outputs) for chosen in (mask, kept)
            )
            assert np.array_equal(half.grads["logp"], np.where(kept, full.grads["logp"], 0))


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("name", RATIO_TERMS)
def test_corrected_losses_keep_the_invariants(name, correction):
    """I1: junk outside the channel changes no bit; I4: neither the split nor the cut of rows changes the loss."""
    terms = correct([registry.create("loss", {"name": name, "aggregate": "episode_mean"})], correction)
    moved = 0
    for seed in SEEDS[:20]:
        batch = weighed(seed, correction)
        outputs = outputs_for(batch, seed)
        one = evaluate(batch, terms, outputs)
        moved += bool(one.grads["logp"].any())
        many = evaluate(batch, terms, outputs, token_budget=9, dp=3)
        assert many.loss == pytest.approx(one.loss, rel=1e-12, abs=1e-14) and alike(many, one)
        outside = ~batch.channel("pg")
        junk = np.where(np.arange(len(outside)) % 3 == 0, np.inf, np.nan)
        planted = batch.with_columns(**{k: np.where(outside, junk, v) for k, v in batch.columns.items()})
        planted = planted.with_columns(is_weight=weigh(planted, correction)[0])
        dirty = evaluate(planted, terms, {k: np.where(outside, -junk, v) for k, v in outputs.items()})
        assert dirty.loss == one.loss and alike(dirty, one) and not any(dirty.grads[k][outside].any() for k in OUTPUTS)
        cut, source = cut_rows(batch)
        cut = cut.with_columns(**{k: v[source] for k, v in batch.columns.items()})
        cut = cut.with_columns(is_weight=weigh(cut, correction)[0])
        parts = evaluate(cut, terms, {k: v[source] for k, v in outputs.items()})
        exact = not any(isinstance(term.term, Deriving) for term in terms)  # columns have float32
        assert parts.loss == pytest.approx(one.loss, rel=1e-12 if exact else 1e-5, abs=1e-15 if exact else 1e-8)
    assert moved > 5


@pytest.mark.defect("B11")
@pytest.mark.parametrize("name", ["advantage", "logp_old", "logp_prox", "is_weight"])
@pytest.mark.parametrize("term", [DecoupledPpo(), Corrected(PpoClip()), Corrected(DecoupledPpo())], ids=str)
def test_no_gradient_flows_into_stored_columns(term, name):
    columns = columns_of([0, 1, 1], advantage=[0, 1, -1], logp_old=[0, -1, -1], logp_prox=[0, -1.1, -0.9], is_weight=[0, 0.9, 1.2])
    columns[name] = columns[name].clone().requires_grad_()
    out = out_of([0, -1.1, -0.9])
    total_loss(out, columns, [term])[0].backward()
    assert columns[name].grad is None and (out.logp.grad[1:] != 0).all()


@pytest.mark.defect("C19")
@pytest.mark.parametrize("name", ["logp_prox", "is_weight"])
def test_a_missing_column_is_named(name):
    columns = columns_of([0, 1], advantage=[0, 1], logp_old=[0, -1], logp_prox=[0, -1], is_weight=[0, 1])
    with pytest.raises(LossError, match=f"no column '{name}'"):
        Corrected(PpoClip()).per_token(out_of([0, -1]), {k: v for k, v in columns.items() if k != name})


@pytest.mark.parametrize("gap", [1e3, -1e3])
@pytest.mark.parametrize("term", [DecoupledPpo(), Corrected(DecoupledPpo())], ids=str)
def test_absurd_ratios_give_finite_numbers(term, gap):
    columns = columns_of([0, 1], advantage=[0, -1], logp_old=[0, gap], logp_prox=[0, -gap], is_weight=[0, 2])
    out = out_of([0.0, gap])
    loss, metrics = total_loss(out, columns, [term])
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(out.logp.grad).all() and all(torch.isfinite(v) for v in metrics.values())


def test_settings_of_decoupled_ppo_are_checked_under_its_own_name():
    with pytest.raises(LossError, match="'decoupled_ppo': clip_low is 0"):
        DecoupledPpo(clip_low=0)


# ------------------------------------------------------------------------------------------------------ rules


@pytest.mark.defect("I2")
def test_automatic_is_on_where_the_policies_differ_by_nature():
    assert automatic(moe=True, max_lag=0, quantized=False) == Correction("truncate", "token", 0.0, 2.0)
    assert automatic(moe=False, max_lag=1, quantized=False) == automatic(moe=False, max_lag=0, quantized=True) == Correction()
    assert automatic(moe=False, max_lag=0, quantized=False) is None


@pytest.mark.defect("G17")
def test_training_on_another_policys_tokens_needs_a_correction():
    def needs(terms, correction=None):
        return [term.needs for term in correct(terms, correction)]

    assert uncorrected(needs([PpoClip(), K3Kl()]), max_lag=0) is None
    reason, way_out = uncorrected(needs([PpoClip(), K3Kl()]), max_lag=2)
    assert "up to 2 weight versions old" in reason and "correction.treatment" in way_out
    assert uncorrected(needs([PpoClip(), K3Kl()], Correction()), max_lag=2) is None
    assert uncorrected(needs([DecoupledPpo()]), max_lag=2) is None  # weighs by itself


@pytest.mark.defect("G17")
@pytest.mark.parametrize("max_lag", [0, 1])
def test_recomputed_log_probabilities_are_not_those_that_sampled(max_lag):
    reason, way_out = uncorrected([("entropy",), ("advantage", "logp_prox")], max_lag)
    assert reason.startswith("loss[1] takes log-probabilities that the learner computed again") and "'logp_old'" in way_out
