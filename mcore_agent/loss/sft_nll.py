"""Negative log-likelihood of demonstrated tokens (M30)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import check_term, keep, mask_of
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "sft_nll")
@dataclass(frozen=True)
class SftNll:
    """``-logp`` on the channel ``sft``. Metric: ``nll``."""

    coef: float = 1.0
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "sft"
    needs: ClassVar[tuple[str, ...]] = ()
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("sft_nll", self.coef, self.aggregate)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        nll = -keep(mask_of(columns, self.channel), out.logp)
        return nll, {"nll": nll.detach()}
