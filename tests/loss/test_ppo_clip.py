"""The clipped surrogate against numbers derived from the definition (M3, M14)."""

import math

import pytest
import torch

from mcore_agent.loss.common import LossError
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.loss.total import total_loss
from mcore_agent.registry import RegistryError
from tests.loss.columns import columns_of, out_of

RATIO = [1.5, 0.5, 9.0, 1.0]
COLUMNS = columns_of([1, 1, 0, 1], advantage=[1, 1, 1, -1], logp_old=[-1, -2, -3, -4])


def model_out():
    return out_of([old + math.log(r) for old, r in zip([-1, -2, -3, -4], RATIO, strict=True)])


def test_masked_surrogate():
    """M3: tokens 0, 1, 3 count. min(1.5, 1.2) = 1.2; min(.5, .8) = .5; min(-1, -1) = -1: -(1.2 + .5 - 1) / 3."""
    loss, metrics = total_loss(model_out(), COLUMNS, [PpoClip(clip_low=0.2, clip_high=0.2)])
    assert loss.item() == pytest.approx(-0.7 / 3, rel=1e-14)
    assert metrics["ratio"].item() == pytest.approx((1.5 + 0.5 + 1.0) / 3, rel=1e-14)
    assert metrics["clip_fraction"].item() == pytest.approx(1 / 3, rel=1e-14)  # only 1.5 at A > 0
    assert metrics["kl"].item() == pytest.approx(-(math.log(1.5) + math.log(0.5)) / 3, rel=1e-14)


def test_clip_higher():
    """M14: with the upper bound 1.28 the first token gives 1.28: -(1.28 + .5 - 1) / 3 = -.26."""
    loss, _ = total_loss(model_out(), COLUMNS, [PpoClip(clip_low=0.2, clip_high=0.28)])
    assert loss.item() == pytest.approx(-0.26, rel=1e-14)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        # inside the clip range d(-ratio * A)/dlogp = -ratio * A; beyond it 0 where the clip holds the gain back
        (1.1, 2.0, -2.2), (1.1, -2.0, 2.2), (1.3, 2.0, 0.0), (1.3, -2.0, 2.6), (0.7, 2.0, -1.4), (0.7, -2.0, 0.0),
    ],
)  # fmt: skip
def test_the_gradient_stops_only_where_the_clip_holds_back(ratio, advantage, expected):
    out = out_of([0.0, math.log(ratio)])
    loss, _ = total_loss(out, columns_of([0, 1], advantage=[0, advantage], logp_old=[0, 0]), [PpoClip()])
    loss.backward()
    torch.testing.assert_close(out.logp.grad, torch.tensor([0, expected], dtype=torch.float64), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("advantage", "loss", "gradient"), [(-1.0, 3.0, 0.0), (1.0, -1.2, 0.0)])
def test_dual_clip_bounds_the_loss_of_a_bad_token(advantage, loss, gradient):
    """Ratio 5: at A = -1 the loss would be 5, the bound c = 3 holds it at 3 with no gradient; at A = +1 nothing changes."""
    out = out_of([0.0, math.log(5)])
    columns = columns_of([0, 1], advantage=[0, advantage], logp_old=[0, 0])
    got, metrics = total_loss(out, columns, [PpoClip(dual_clip=3.0)])
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-14)
    assert out.logp.grad[1].item() == gradient
    assert metrics["clip_fraction"].item() == 1
    plain, _ = total_loss(out_of([0.0, math.log(5)]), columns, [PpoClip()])
    assert plain.item() == pytest.approx(5.0 if advantage < 0 else -1.2, rel=1e-14)


@pytest.mark.parametrize("gap", [1e3, -1e3, 1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_gives_finite_numbers(gap, advantage):
    out = out_of([0.0, gap])
    loss, metrics = total_loss(out, columns_of([0, 1], advantage=[0, advantage], logp_old=[0, 0]), [PpoClip()])
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(out.logp.grad).all()
    assert all(torch.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize(("fields", "says"), [
    ({"clip_low": 0.0}, "clip_low is 0.0"),
    ({"clip_low": 1.5}, r"clip_low is 1.5, but must be in \(0, 1\]"),
    ({"clip_high": -0.1}, "clip_high is -0.1"),
    ({"dual_clip": 1.0}, "dual_clip is 1.0, but must be above 1"),
    ({"coef": math.nan}, "coef is nan"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(fields, says):
    with pytest.raises(LossError, match=says):
        PpoClip(**fields)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(RegistryError, match="no aggregation 'token_maen'; did you mean 'token_mean'"):
        PpoClip(aggregate="token_maen")


def test_a_missing_column_is_named():
    columns = {k: v for k, v in COLUMNS.items() if k != "logp_old"}
    with pytest.raises(LossError, match="no column 'logp_old'; it has: advantage, mask:pg"):
        PpoClip().per_token(model_out(), columns)
