"""PPO with the policy that sampled apart from the one that the clip holds on to (M34; AReaL, 2505.24298; 2110.00641)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import check_term, column, keep, mask_of
from mcore_agent.loss.ppo_clip import MAX_LOG_RATIO, check_clips, surrogate
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register


@register("loss", "decoupled_ppo")
@dataclass(frozen=True)
class DecoupledPpo:
    """``-w * min(r A, clip(r) A)`` with ``w = pi_prox / pi_behaviour`` (no gradient) and ``r = pi / pi_prox``.

    The weight is not bounded here. With a correction on, ``logp_prox`` stands for both policies and the bounded weight
    of the correction takes its place. Where the two agree, loss and gradient have the bits of ``ppo_clip``.
    Metrics: ``prox_ratio``, ``prox_clip_fraction``, ``prox_kl`` (k1 of proximal to current), ``behaviour_weight``.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    coef: float = 1.0
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("advantage", "logp_old", "logp_prox")
    scales_with: ClassVar[str | None] = "advantage"

    def __post_init__(self):
        check_term("decoupled_ppo", self.coef, self.aggregate)
        check_clips("decoupled_ppo", self.clip_low, self.clip_high, self.dual_clip)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        advantage = keep(mask, column(columns, "advantage"))
        proximal = keep(mask, column(columns, "logp_prox"))
        gap = proximal - keep(mask, column(columns, "logp_old"))
        weight = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        log_ratio = keep(mask, out.logp) - proximal
        ratio, gain, active = surrogate(log_ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)
        metrics = {"prox_ratio": ratio, "prox_clip_fraction": active.to(ratio.dtype), "prox_kl": -log_ratio, "behaviour_weight": weight}
        return keep(mask, -gain * weight), {name: keep(mask, value.detach()) for name, value in metrics.items()}
