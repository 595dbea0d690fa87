"""The critic's loss (M24): squared distance of values from returns, clipped as in PPO's implementation (1707.06347)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_clip, check_term, column, keep, mask_of
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
        check_clip("value_mse", self.clip)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        if out.value is None:
            raise LossError("loss 'value_mse' needs the model output 'value': the model has no value head; set critic.mode")
        return squared("value", out.value, columns, self.channel, column(columns, "values"), self.clip)


def squared(
    name: str, value: torch.Tensor, columns: Mapping[str, torch.Tensor], channel: str, old: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """[T] half the squared distance of ``value`` from the column ``returns``, clipped around ``old``; 0 outside the channel.

    Metrics: ``<name>``, ``<name>_error``, ``<name>_loss``.
    """
    mask = mask_of(columns, channel)
    value, target = keep(mask, value), keep(mask, column(columns, "returns"))
    loss = (value - target).square()
    if clip is not None:
        old = keep(mask, old)
        near = old + (value - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - target).square())
    loss = keep(mask, loss / 2)
    error = (value - target).detach().abs()
    return loss, {name: value.detach(), f"{name}_error": error, f"{name}_loss": loss.detach()}
