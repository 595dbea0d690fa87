"""The critic's losses (M24, M96), by hand."""

import pytest
import torch

from mcore_agent.loss.common import LossError
from mcore_agent.loss.total import total_loss
from mcore_agent.loss.turn_value import TurnValue
from mcore_agent.loss.value_mse import ValueMse
from mcore_agent.protocols import ModelOut
from tests.loss.columns import columns_of


def test_only_the_ends_of_turns_count_and_what_is_known_behind_them():
    """Ends at places 1 and 3: Q = .5 and 2 with returns 1 and 1: (.25 + 1) / 2 / 2 = .3125, and with coef .5 half of it. Slopes
    .5 * (Q - 1) / 2 = -.125 and .25; the values before the tokens have none."""
    before, behind = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([9.0, 9, 9, 9], [7.0, 0.5, 7, 2]))
    columns = columns_of([0, 1, 0, 1], returns=[5, 1, 5, 1], values_behind=[0, 0, 0, 0])
    columns["mask:turn_end"] = columns.pop("mask:pg")
    loss, metrics = total_loss(ModelOut(torch.zeros(4, dtype=torch.float64), value=before, value_behind=behind), columns, [TurnValue()])
    loss.backward()
    assert loss.item() == pytest.approx(0.15625)
    assert behind.grad.tolist() == [0, -0.125, 0, 0.25] and before.grad is None
    assert metrics["turn_value"].item() == pytest.approx(1.25) and metrics["turn_value_error"].item() == pytest.approx(0.75)


def test_clipped_around_the_old_value():
    """Q = 2, before .5, clip .3: near is .8; returns 1: max(1, .04) / 2. With Q = 1 the old one counts: max(0, .04) / 2 = .02."""
    for value, expected in ((2.0, 0.5), (1.0, 0.02)):
        columns = columns_of([1], returns=[1], values_behind=[0.5])
        columns["mask:turn_end"] = columns.pop("mask:pg")
        out = ModelOut(torch.zeros(1, dtype=torch.float64), value_behind=torch.tensor([value], dtype=torch.float64))
        assert total_loss(out, columns, [TurnValue(clip=0.3, coef=1.0)])[0].item() == pytest.approx(expected)


@pytest.mark.parametrize(("term", "said"), [(TurnValue, "turn_value"), (ValueMse, "value_mse")])
def test_settings_and_models_without_a_head_are_refused(term, said):
    with pytest.raises(LossError, match=f"loss '{said}': clip is 0, but must be above 0"):
        term(clip=0)
    with pytest.raises(LossError, match="no value head; set critic.mode"):
        term().per_token(ModelOut(torch.zeros(1)), columns_of([1], returns=[0], values=[0], values_behind=[0]))
