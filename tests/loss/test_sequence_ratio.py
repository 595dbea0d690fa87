"""One ratio for an episode (M20), clipped weights without a gradient (M19), and where the mask stands (M2), by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_agent.loss.cispo import Cispo
from mcore_agent.loss.common import LossError
from mcore_agent.loss.correction import Corrected
from mcore_agent.loss.derived import derive
from mcore_agent.loss.gspo import Gspo
from mcore_agent.loss.ppo_clip import PpoClip, surrogate
from mcore_agent.loss.total import total_loss
from mcore_agent.types import Batch
from tests.invariants.evaluate import evaluate
from tests.loss.columns import columns_of, out_of
from tests.strategies import episode_of

WIDE = Gspo(clip_low=0.2, clip_high=0.2)


def batch_with(episodes, gaps, advantage):
    """A batch in which the learner's log-probs are ``gaps`` over the old ones at the sampled tokens, in order, and those log-probs."""
    batch = Batch(tuple(episodes))
    mask = batch.channel("pg")
    gap, given = np.zeros(len(mask)), np.zeros(len(mask))
    gap[mask], given[mask] = gaps, advantage
    old = batch.tokens("logp")
    return batch.with_columns(logp_old=old, logp_prox=old, advantage=given), old + gap


def two_rows(advantage=2.0):
    """One episode of rows with 2 and 1 sampled tokens, among 4 observed ones: log-ratios .3, -.1 | .1."""
    return batch_with([episode_of("a", "g", 1.0, [0, 1, 0, 1], [0, 0, 1])], [0.3, -0.1, 0.1], advantage)


@pytest.mark.parametrize(("budget", "dp"), [(100, 1), (4, 1), (3, 2)])
def test_rows_of_one_episode_share_the_ratio_wherever_they_are_computed(budget, dp):
    """s = exp((.3 - .1 + .1) / 3) = e^.1 on all three tokens; at A = 2 the loss is -2 e^.1 = -2.21034, a third of it by token.
    The gradient of token t is that of s A by logp_t: -2 e^.1 / 3."""
    batch, logp = two_rows()
    found = evaluate(batch, [WIDE], {"logp": logp}, token_budget=budget, dp=dp)
    assert found.loss == pytest.approx(-2 * math.exp(0.1), rel=1e-6)
    assert round(found.loss, 4) == -2.2103
    assert found.metrics["sequence_ratio"] == pytest.approx(math.exp(0.1), rel=1e-6)
    assert found.metrics["sequence_kl"] == pytest.approx(-0.1, rel=1e-5)
    expected = np.where(batch.channel("pg"), -2 * math.exp(0.1) / 3, 0)
    np.testing.assert_allclose(found.grads["logp"], expected, rtol=1e-6)


@pytest.mark.parametrize(("gap", "advantage", "loss", "slope"), [
    # s = 1.5: at A = 1 the clip holds it at 1.2, at A = -1 it does not; s = .5: the other way round
    (math.log(1.5), 1.0, -1.2, 0.0), (math.log(1.5), -1.0, 1.5, 1.5), (math.log(0.5), 1.0, -0.5, -0.5), (math.log(0.5), -1.0, 0.8, 0.0),
])  # fmt: skip
def test_a_whole_episode_is_clipped_or_not(gap, advantage, loss, slope):
    """Its tokens' own ratios are e^(2 gap), 1 and e^gap; nothing but their mean counts."""
    batch, logp = batch_with([episode_of("a", "g", 1.0, [0, 1, 0, 1, 1])], [2 * gap, 0.0, gap], advantage)
    found = evaluate(batch, [WIDE], {"logp": logp})
    assert found.loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(found.grads["logp"], np.where(batch.channel("pg"), slope / 3, 0), rtol=1e-6)
    assert found.metrics["sequence_clip_fraction"] == pytest.approx(float(slope == 0), rel=1e-6)


def test_dual_clip_bounds_a_bad_episode():
    """s = 5 at A = -1: the loss would be 5, the bound 3 holds it without a gradient."""
    batch, logp = batch_with([episode_of("a", "g", 1.0, [0, 1, 1, 1])], [math.log(5)] * 3, -1.0)
    found = evaluate(batch, [replace(WIDE, dual_clip=3.0)], {"logp": logp})
    assert found.loss == pytest.approx(3.0, rel=1e-6) and not found.grads["logp"].any()


def test_equal_log_ratios_within_an_episode_are_the_surrogate_of_tokens():
    """Then the mean is every token's own ratio: loss and gradient are those of PPO with a mean per episode."""
    episodes = [episode_of("a", "g", 1.0, [0, 1, 1], [0, 1, 0, 1, 1]), episode_of("b", "g", 0.0, [0, 1]),
                episode_of("c", "g", 0.0, [0, 1, 1, 1])]  # fmt: skip
    gaps, advantage = [0.12] * 5 + [0.4] + [-0.35] * 3, [1.0] * 5 + [-0.5] + [-2.0] * 3
    batch, logp = batch_with(episodes, gaps, advantage)
    ours, tokens = (evaluate(batch, [term], {"logp": logp}) for term in (WIDE, PpoClip(aggregate="episode_mean")))
    assert ours.loss == pytest.approx(tokens.loss, rel=1e-6)
    np.testing.assert_allclose(ours.grads["logp"], tokens.grads["logp"], rtol=1e-6)
    assert tokens.grads["logp"].any()


def test_the_gradient_is_that_of_the_ratio_of_sequences():
    """By finite differences of -mean over episodes of s A, written down from the definition, in two episodes of 2 and 3 tokens."""
    episodes = [episode_of("a", "g", 1.0, [0, 1, 1]), episode_of("b", "g", 0.0, [0, 1, 0, 1, 1])]
    batch, logp = batch_with(episodes, [0.1, -0.05, 0.02, 0.08, -0.1], [1.5] * 2 + [-0.7] * 3)
    mask, old = batch.channel("pg"), batch.columns["logp_old"].astype(np.float64)

    def loss(values):
        gap = np.where(mask, values - old, 0)
        first, second = (gap[batch.token_episode == i].sum() for i in (0, 1))
        return -(math.exp(first / 2) * 1.5 + math.exp(second / 3) * -0.7) / 2

    found = evaluate(batch, [WIDE], {"logp": logp})
    assert found.loss == pytest.approx(loss(logp), rel=1e-6)
    for t in range(len(mask)):
        step = np.eye(len(mask))[t] * 1e-6
        assert found.grads["logp"][t] == pytest.approx((loss(logp + step) - loss(logp - step)) / 2e-6, rel=1e-5, abs=1e-9)


def test_other_rows_come_from_the_latest_pass():
    """The row with .3 and -.1 is under the present weights. The other row's token has .1 or .4 in ``logp_now``, whatever it had when
    the batch was found: s = exp(.3 / 3) or exp(.6 / 3)."""
    batch, logp = two_rows()
    mask = batch.channel("pg")
    for now, total in ((logp, 0.3), (np.where(batch.token_row == 1, batch.columns["logp_old"] + 0.4, 0), 0.6)):
        made = derive(batch.with_columns(logp_now=now), [WIDE])
        held = {name: torch.tensor(values[:4], dtype=torch.float64) for name, values in made.columns.items()}
        held |= {"mask:pg": torch.tensor(mask[:4], dtype=torch.float64)}
        _, metrics = WIDE.per_token(out_of(logp[:4]), held)
        torch.testing.assert_close(metrics["sequence_ratio"][[1, 3]], torch.full((2,), math.exp(total / 3), dtype=torch.float64))


def test_a_correction_takes_the_proximal_policy_for_the_one_that_sampled():
    """Each row has .2 over the proximal policy, which has 1 over the one that sampled: s = e^.2 is of the former, times the weight."""
    batch, logp = batch_with([episode_of("a", "g", 1.0, [0, 1], [0, 1])], [1.2, 1.2], 1.0)
    weight = np.where(batch.channel("pg"), 0.5, 0)
    batch = batch.with_columns(logp_prox=batch.columns["logp_old"] + 1.0, is_weight=weight)
    found = evaluate(batch, [Corrected(replace(WIDE, clip_high=0.3))], {"logp": logp}, token_budget=2)
    assert found.loss == pytest.approx(-0.5 * math.exp(0.2), rel=1e-6)


def test_gspo_names_what_it_lacks():
    batch, _ = two_rows()
    with pytest.raises(LossError, match="no column 'logp_now', of which a loss term makes its own; it has: advantage, "):
        derive(batch, [WIDE])
    with pytest.raises(LossError, match="no column 'row'"):
        WIDE.per_token(out_of([0, -1]), columns_of([0, 1], advantage=[0, 1], logp_old=[0, -1]))
    with pytest.raises(LossError, match="'gspo': clip_high is 0"):
        Gspo(clip_high=0.0)


# ------------------------------------------------------------------------------------------------- CISPO


@pytest.mark.parametrize(("advantage", "ours", "ppo"), [(1.0, -1.28, 0.0), (-1.0, 1.28, 3.0)])
def test_a_clipped_weight_keeps_the_gradient(advantage, ours, ppo):
    """At ratio 3 and bound 1.28: d/dlogp of -1.28 A logp is -1.28 A; PPO has 0 at A = 1 and 3 at A = -1."""
    columns = columns_of([0, 1], advantage=[0, advantage], logp_old=[0, -2])
    for term, expected in ((Cispo(clip_high=0.28), ours), (PpoClip(clip_high=0.28), ppo)):
        out = out_of([0, -2 + math.log(3)])
        loss, metrics = total_loss(out, columns, [term])
        loss.backward()
        torch.testing.assert_close(out.logp.grad, torch.tensor([0, expected], dtype=torch.float64), rtol=1e-13, atol=0)
    loss, metrics = total_loss(out_of([0, -2 + math.log(3)]), columns, [Cispo(clip_high=0.28)])
    assert loss.item() == pytest.approx(-1.28 * advantage * (-2 + math.log(3)), rel=1e-14)
    assert metrics["is_ratio"].item() == pytest.approx(3, rel=1e-14) and metrics["is_clip_fraction"].item() == 1


def test_cispo_on_four_tokens():
    """Ratios 1.5, .5, 9 (observed), 1 at A = 1, 1, 1, -1 and logp -1, -2, -3, -4 with bounds [.8, 1.28]: weights 1.28, .8, 1, so
    that the loss is -(1.28 * -1 + .8 * -2 - 1 * -4) / 3 = -1.12 / 3. The weights have no gradient, within the bounds neither:
    -1.28 / 3, -.8 / 3 and 1 / 3."""
    logp = [-1.0, -2.0, -3.0, -4.0]
    old = [p - math.log(r) for p, r in zip(logp, [1.5, 0.5, 9.0, 1.0], strict=True)]
    columns = columns_of([1, 1, 0, 1], advantage=[1, 1, 1, -1], logp_old=old)
    out = out_of(logp)
    loss, _ = total_loss(out, columns, [Cispo(clip_low=0.2)])
    loss.backward()
    assert loss.item() == pytest.approx(-1.12 / 3, rel=1e-13)
    torch.testing.assert_close(out.logp.grad, torch.tensor([-1.28, -0.8, 0, 1], dtype=torch.float64) / 3, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("fields", "says"), [({"clip_low": 1.5}, "clip_low is 1.5"), ({"clip_high": 0.0}, "clip_high is 0.0")])
def test_bounds_of_cispo_are_checked(fields, says):
    with pytest.raises(LossError, match=f"loss 'cispo': {says}"):
        Cispo(**fields)


# ----------------------------------------------------------------------------------- where the mask stands


def test_a_mask_before_the_ratio_or_only_in_the_sum_gives_one_gradient():
    """M2. With the observed token's ratio 9 left in and masked in the sum alone, loss and gradient are the same to the bit; the mean
    ratio over all places is (1.5 + .5 + 9 + 1) / 4 = 3 then, and (1.5 + .5 + 1 + 1) / 4 = 1 with the mask before it."""
    old, ratio = torch.tensor([-1.0, -2, -3, -4]).double(), torch.tensor([1.5, 0.5, 9.0, 1.0]).double()
    mask, advantage = torch.tensor([1, 1, 0, 1]).double(), torch.tensor([1.0, 1, 1, -1]).double()
    inside = out_of(old + ratio.log())
    columns = columns_of(mask.tolist(), advantage=advantage, logp_old=old)
    loss, _ = total_loss(inside, columns, [PpoClip()])
    loss.backward()
    outside = out_of(old + ratio.log())
    free, gain, _ = surrogate(outside.logp - old, advantage, 0.2, 0.2, None)
    summed = -(gain * mask * columns["w:0"]).sum()
    summed.backward()
    assert summed.item() == pytest.approx(loss.item(), rel=1e-15)
    torch.testing.assert_close(outside.logp.grad, inside.logp.grad, rtol=0, atol=0)
    before, _, _ = surrogate((outside.logp - old) * mask, advantage, 0.2, 0.2, None)
    assert free.mean().item() == pytest.approx(3.0) and before.mean().item() == pytest.approx((1.5 + 0.5 + 1 + 1) / 4)
