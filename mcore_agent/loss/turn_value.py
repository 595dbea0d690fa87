"""The critic's loss where a value knows the action: at the last token of each turn (M96; SAPO)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_clip, check_term, column
from mcore_agent.loss.derived import BEHIND, TURN_ENDS
from mcore_agent.loss.value_mse import squared
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "turn_value")
@dataclass(frozen=True)
class TurnValue:
    """``value_mse`` of Q, the value of the state with a turn's last token in it, at those tokens alone; each turn counts once.

    V is the output ``value_behind``, V_old the column ``values_behind``. A turn of any length with Q = .5 and a return of 1:
    1/2 * .25 = .125. Metrics: ``turn_value``, ``turn_value_error``, ``turn_value_loss`` (without ``coef``).
    """

    clip: float | None = None
    coef: float = 0.5
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "turn_end"
    rows: ClassVar[str] = TURN_ENDS
    needs: ClassVar[tuple[str, ...]] = ("value_behind", "returns", BEHIND)
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("turn_value", self.coef, self.aggregate)
        check_clip("turn_value", self.clip)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        if out.value_behind is None:
            raise LossError("loss 'turn_value' needs the model output 'value_behind': the model has no value head; set critic.mode")
        return squared("turn_value", out.value_behind, columns, self.channel, column(columns, BEHIND), self.clip)
