"""The K1 estimate of the KL divergence to the reference as a loss with that divergence's gradient (M7; 2203.02155 eq. 2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import check_term, column, keep, mask_of
from mcore_agent.loss.derived import with_slope
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "k1_kl")
@dataclass(frozen=True)
class K1Kl:
    """``k = logp - logp_ref`` with the gradient ``k`` by logp, which is that of the cost in the reward (``kl_reward``).

    Differentiating k itself would give 1 for every token: the mean of that over what the policy samples is 0, whatever the
    reference. A token of k = .5 gives the loss .5 and the gradient .5; equal policies give 0 and 0. Metric: ``k1``.
    """

    coef: float = 0.01
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("logp_ref",)
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("k1_kl", self.coef, self.aggregate)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        logp = keep(mask, out.logp)
        k1 = logp.detach() - keep(mask, column(columns, "logp_ref"))
        return with_slope(k1, k1, logp), {"k1": k1}
