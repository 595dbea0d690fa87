"""The clipped surrogate (M3; PPO, 1707.06347 eq. 7) with clip-higher (M14; DAPO, 2503.14476 eq. 10) and dual clip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register

# exp overflows fp32 at 88, and the gradient of the branch that min() did not choose would be 0 * inf.
MAX_LOG_RATIO = 20.0


@register("loss", "ppo_clip")
@dataclass(frozen=True)
class PpoClip:
    """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)`` with ``ratio = exp(logp - logp_old)``.

    ``dual_clip`` c > 1 bounds the loss of a negative advantage: it is at most ``-c * A`` (1912.09729 eq. 5).
    Metrics: ``ratio``, ``clip_fraction`` (1 where the clipped branch or the bound holds), ``kl`` (k1: logp_old - logp).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    coef: float = 1.0
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("advantage", "logp_old")
    scales_with: ClassVar[str | None] = "advantage"

    def __post_init__(self):
        check_term("ppo_clip", self.coef, self.aggregate)
        check_clips("ppo_clip", self.clip_low, self.clip_high, self.dual_clip)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        advantage = keep(mask, column(columns, "advantage"))
        log_ratio = keep(mask, out.logp) - keep(mask, column(columns, "logp_old"))
        ratio, gain, active = surrogate(log_ratio, advantage, self.clip_low, self.clip_high, self.dual_clip)
        metrics = {"ratio": ratio, "clip_fraction": active.to(ratio.dtype), "kl": -log_ratio}
        return keep(mask, -gain), {name: keep(mask, value.detach()) for name, value in metrics.items()}


def check_clips(name: str, clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raises LossError, naming the term, for bounds that are none."""
    if not 0 < clip_low <= 1:
        raise LossError(f"loss {name!r}: clip_low is {clip_low}, but must be in (0, 1]: 1 - clip_low bounds a ratio")
    if not clip_high > 0:
        raise LossError(f"loss {name!r}: clip_high is {clip_high}, but must be above 0")
    if dual_clip is not None and not dual_clip > 1:
        raise LossError(f"loss {name!r}: dual_clip is {dual_clip}, but must be above 1; leave it out to switch it off")


def surrogate(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T] the ratio, the clipped gain (higher is better), and where (bool) a bound holds it."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    gain = torch.minimum(free, clipped)
    active = clipped < free
    if dual_clip is not None:
        floor = dual_clip * advantage
        bounded = (advantage < 0) & (gain < floor)
        gain = torch.where(bounded, floor, gain)
        active = active | bounded
    return ratio, gain, active
