"""A bonus for the entropy of the policy at the tokens that it sampled (M23)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_term, keep, mask_of
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "entropy_bonus")
@dataclass(frozen=True)
class EntropyBonus:
    """``-entropy`` in nats: a positive ``coef`` raises the entropy. Metric: ``entropy``."""

    coef: float = 0.01
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("entropy",)
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("entropy_bonus", self.coef, self.aggregate)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        if out.entropy is None:
            raise LossError("loss 'entropy_bonus' needs the model output 'entropy', and the learner gave none")
        entropy = keep(mask_of(columns, self.channel), out.entropy)
        return -entropy, {"entropy": entropy.detach()}
