"""K3, imitation and entropy against their definitions, and the sum of terms."""

import math
from dataclasses import replace

import pytest
import torch

from mcore_agent.loss.common import LossError
from mcore_agent.loss.entropy_bonus import EntropyBonus
from mcore_agent.loss.k3_kl import K3Kl
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.loss.total import outputs_needed, total_loss
from tests.loss.columns import columns_of, out_of


def test_f3_k3_values():
    """M8: exp(d) - d - 1 at d = ln 2 is 2 - ln 2 - 1 = .30685; at d = -ln 2 it is 1/2 + ln 2 - 1 = .19315."""
    columns = columns_of([0, 1, 1], logp_ref=[0, math.log(2) - 1, -math.log(2) - 1])
    per_token, metrics = K3Kl().per_token(out_of([0, -1, -1]), columns)
    expected = torch.tensor([0, 1 - math.log(2), math.log(2) - 0.5], dtype=torch.float64)
    torch.testing.assert_close(per_token.detach(), expected, rtol=1e-14, atol=0)
    assert torch.equal(metrics["k3"], per_token.detach()) and not metrics["k3"].requires_grad
    assert [round(v, 5) for v in expected.tolist()] == [0, 0.30685, 0.19315]


def test_k3_is_never_negative():
    torch.manual_seed(3)
    size = 10_000
    columns = columns_of([1] * size, logp_ref=3 * torch.randn(size, dtype=torch.float64))
    per_token, _ = K3Kl().per_token(out_of(torch.randn(size)), columns)
    assert (per_token >= 0).all()


@pytest.mark.defect("B9")
def test_k3_has_the_gradient_of_a_finite_difference():
    """And the one of the formula, 1 - exp(d). A term computed without gradients would pass every test of its value."""
    torch.manual_seed(5)
    logp, reference = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    columns = columns_of([0, 1, 1, 0, 1, 1, 1], logp_ref=reference)
    terms = [K3Kl(coef=0.3)]
    out = out_of(logp)
    total_loss(out, columns, terms)[0].backward()
    step = 1e-6
    for t in range(7):
        moved = [logp.clone(), logp.clone()]
        moved[0][t] += step
        moved[1][t] -= step
        high, low = (total_loss(out_of(m), columns, terms)[0].item() for m in moved)
        assert out.logp.grad[t].item() == pytest.approx((high - low) / (2 * step), rel=1e-7, abs=1e-9)
    expected = 0.3 / 5 * columns["mask:pg"] * (1 - (reference - logp).exp())
    torch.testing.assert_close(out.logp.grad, expected, rtol=1e-13, atol=0)


def test_imitation_is_the_mean_negative_log_likelihood():
    """M30: tokens of log-prob -1 and -3 are trained, -7 is not: (1 + 3) / 2; each has gradient -1/2."""
    out = out_of([0, -7, -1, -3])
    loss, metrics = total_loss(out, columns_of([0, 0, 1, 1]), [SftNll()])
    loss.backward()
    assert loss.item() == metrics["nll"].item() == 2.0
    assert out.logp.grad.tolist() == [0, 0, -0.5, -0.5]


def test_entropy_of_uniform_logits():
    """M23: 8 equal logits have entropy ln 8; the observation's entropy 99 is left out; the bonus lowers the loss."""
    out = out_of([0, -1, -1], entropy=[99, math.log(8), math.log(8)])
    loss, metrics = total_loss(out, columns_of([0, 1, 1]), [EntropyBonus(coef=0.01)])
    loss.backward()
    assert loss.item() == pytest.approx(-0.01 * math.log(8), rel=1e-14)
    assert metrics["entropy"].item() == pytest.approx(math.log(8), rel=1e-14)
    assert out.entropy.grad.tolist() == [0, -0.005, -0.005]


def test_entropy_is_asked_for_only_when_a_term_uses_it():
    assert outputs_needed([PpoClip(), EntropyBonus()]) == {"entropy"}
    assert outputs_needed([PpoClip(), EntropyBonus(coef=0.0), K3Kl()]) == frozenset()
    with pytest.raises(LossError, match="needs the model output 'entropy'"):
        EntropyBonus().per_token(out_of([0, -1]), columns_of([0, 1]))


@pytest.mark.parametrize("name", ["advantage", "logp_old", "logp_ref"])
@pytest.mark.defect("B11")
def test_no_gradient_flows_into_stored_columns(name):
    columns = columns_of([0, 1, 1], advantage=[0, 1, -1], logp_old=[0, -1, -1], logp_ref=[0, -2, -1])
    columns |= {"w:1": columns["w:0"]}
    columns[name] = columns[name].clone().requires_grad_()
    out = out_of([0, -1.1, -0.9])
    total_loss(out, columns, [PpoClip(), K3Kl()])[0].backward()
    assert columns[name].grad is None
    assert (out.logp.grad[1:] != 0).all()


def test_terms_are_summed_with_their_coefficients_and_own_weights():
    """Imitation with weights (0, 1/2, 1/2) and coefficient 2 on -1, -3 gives 4; K3 of equal policies adds 0."""
    columns = columns_of([0, 1, 1], logp_ref=[0, -1, -3]) | {"w:1": torch.tensor([0.0, 0.25, 0.25], dtype=torch.float64)}
    loss, metrics = total_loss(out_of([0, -1, -3]), columns, [SftNll(coef=2.0), K3Kl()])
    assert loss.item() == 4.0
    assert metrics.keys() == {"nll", "k3"} and metrics["k3"].item() == 0.0
    with pytest.raises(ValueError, match="two loss terms give the metric 'nll'"):
        total_loss(out_of([0, -1, -3]), columns, [SftNll(), replace(SftNll(), coef=2.0)])
