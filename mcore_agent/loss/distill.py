"""On-policy distillation: the reverse KL divergence to a teacher on sampled tokens (M104; GKD, 2306.13649 sec. 3)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.loss.derived import TEACHER, with_slope
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "distill")
@dataclass(frozen=True)
class Distill:
    """``d = logp - logp_teacher`` with the gradient ``clip(d, -bound, bound)`` by logp: every token has the advantage ``-d``.

    A student of .8 and a teacher of .4 on a sampled token: d = ln 2, so that the token becomes less likely; equal ones give
    exactly 0. Metric: ``teacher_gap`` (d).
    """

    bound: float = math.inf
    coef: float = 1.0
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = (TEACHER,)
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("distill", self.coef, self.aggregate)
        if not self.bound > 0:
            raise LossError(f"loss 'distill': bound is {self.bound}, but must be above 0; leave it out to switch it off")

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        logp = keep(mask, out.logp)
        gap = logp.detach() - keep(mask, column(columns, TEACHER))
        return with_slope(gap, gap.clamp(-self.bound, self.bound), logp), {"teacher_gap": gap}
