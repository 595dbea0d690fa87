"""The critic's loss (M24): squared distance of values from returns, clipped as in PPO's implementation (1707.06347)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "value_mse")
@dataclass(frozen=True)
class ValueMse:
    """``1/2 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)``; ``clip`` None: the first alone.

    V is the value of the state in which a token was drawn, R the column ``returns``, V_old the column ``values``.
    Metrics: ``value``, ``value_error`` (|V - R|), ``value_loss`` (without ``coef``).
    """

    clip: float | None = None
    coef: float = 0.5
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("value", "returns", "values")
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("value_mse", self.coef, self.aggregate)
        if self.clip is not None and not self.clip > 0:
            raise LossError(f"loss 'value_mse': clip is {self.clip}, but must be above 0; leave it out to switch it off")

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        if out.value is None:
            raise LossError("loss 'value_mse' needs the model output 'value': the model has no value head; set critic.mode")
        mask = mask_of(columns, self.channel)
        value = keep(mask, out.value)
        target = keep(mask, column(columns, "returns"))
        loss = (value - target).square()
        if self.clip is not None:
            old = keep(mask, column(columns, "values"))
            near = old + (value - old).clamp(-self.clip, self.clip)
            loss = torch.maximum(loss, (near - target).square())
        loss = keep(mask, loss / 2)
        error = (value - target).detach().abs()
        return loss, {"value": value.detach(), "value_error": error, "value_loss": loss.detach()}
