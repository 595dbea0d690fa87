"""Imitation of one's own right answers, beside the policy gradient (M18; VAPO, 2504.05118 sec. 4.3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from mcore_agent.loss.aggregate import weights
from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register
from mcore_agent.types import Batch

SHARE = "positive_share"


@register("loss", "positive_nll")
@dataclass(frozen=True)
class PositiveNll:
    """``-logp`` on the tokens of episodes whose reward is at least ``threshold``; the aggregation counts those alone.

    Episodes of 3 and 5 tokens with rewards 1 and 0: the token mean is over the 3, so that each has weight 1/3, and the
    column ``positive_share`` is (1/3) / (1/8) = 8/3 on them and 0 on the others. Metric: ``positive_nll``.
    """

    threshold: float = 1.0
    coef: float = 0.1
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = (SHARE,)
    scales_with: ClassVar[str | None] = SHARE

    def __post_init__(self):
        check_term("positive_nll", self.coef, self.aggregate)
        if not np.isfinite(self.threshold):
            raise LossError(f"loss 'positive_nll': threshold is {self.threshold}, but must be finite")

    def derive(self, batch: Batch) -> dict[str, np.ndarray]:
        """[N] how much more a token weighs when the right answers alone are counted; 0 on the others."""
        mask = batch.channel(self.channel)
        right = mask & (batch.rewards >= self.threshold)[batch.token_episode]
        whole = weights(self.aggregate, mask, batch).astype(np.float64)
        own = weights(self.aggregate, right, batch).astype(np.float64)
        return {SHARE: np.divide(own, whole, out=np.zeros(len(mask)), where=right)}

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        loss = -keep(mask, out.logp) * keep(mask, column(columns, SHARE))
        return loss, {"positive_nll": loss.detach()}
