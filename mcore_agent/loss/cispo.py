"""The policy gradient weighed by a clipped ratio that has no gradient itself (M19; CISPO, 2506.13585 eq. 4 and 5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.loss.ppo_clip import MAX_LOG_RATIO
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "cispo")
@dataclass(frozen=True)
class Cispo:
    """``-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A logp`` with ``ratio = exp(logp - logp_old)``.

    Every token keeps a gradient, however far its ratio has gone. ``clip_low`` 1 bounds from above only, as in the paper.
    At ratio 3, A = 1 and clip_high .28 the gradient by logp is -1.28 (PPO: 0), at A = -1 it is 1.28 (PPO: 3).
    Metrics: ``is_ratio`` (unclipped), ``is_clip_fraction``.
    """

    clip_low: float = 1.0
    clip_high: float = 0.28
    coef: float = 1.0
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("advantage", "logp_old")
    scales_with: ClassVar[str | None] = "advantage"

    def __post_init__(self):
        check_term("cispo", self.coef, self.aggregate)
        if not 0 < self.clip_low <= 1:
            raise LossError(f"loss 'cispo': clip_low is {self.clip_low}, but must be in (0, 1]; 1 bounds from above only")
        if not self.clip_high > 0:
            raise LossError(f"loss 'cispo': clip_high is {self.clip_high}, but must be above 0")

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        logp = keep(mask, out.logp)
        gap = logp.detach() - keep(mask, column(columns, "logp_old"))
        ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * keep(mask, column(columns, "advantage")) * logp
        metrics = {"is_ratio": ratio, "is_clip_fraction": (weight != ratio).to(ratio.dtype)}
        return loss, {name: keep(mask, value) for name, value in metrics.items()}
