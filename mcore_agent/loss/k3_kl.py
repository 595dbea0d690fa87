"""The K3 estimate of the KL divergence to the reference policy as a loss (M8; GRPO, 2402.03300 eq. 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import check_term, column, keep, mask_of
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "k3_kl")
@dataclass(frozen=True)
class K3Kl:
    """``exp(d) - d - 1`` with ``d = logp_ref - logp``: never negative, 0 where the policies agree.

    Its gradient by logp is ``1 - exp(d)``. Metric: ``k3``.
    """

    coef: float = 0.04
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("logp_ref",)
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("k3_kl", self.coef, self.aggregate)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        delta = keep(mask, column(columns, "logp_ref")) - keep(mask, out.logp)
        kl = delta.exp() - delta - 1  # delta is 0 outside the channel, so kl is 0 there too
        return kl, {"k3": kl.detach()}
