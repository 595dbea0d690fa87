"""The clipped surrogate with one ratio for a whole episode (M20; GSPO, 2507.18071 eq. 5 and 13)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from mcore_agent.loss.common import check_term, column, keep, mask_of
from mcore_agent.loss.correction import BEHAVIOUR
from mcore_agent.loss.derived import NOW, ROW, batch_column, own_rows, sums
from mcore_agent.loss.ppo_clip import MAX_LOG_RATIO, check_clips, surrogate
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register
from mcore_agent.types import Batch

REST, SIZE = "sequence_rest", "sequence_size"


@register("loss", "gspo")
@dataclass(frozen=True)
class Gspo:
    """``-min(s A, clip(s) A)`` with ``s = exp(mean of logp - logp_old)`` over all the episode's own tokens, in whatever rows.

    Token t's gradient is the one of ``sg(s) exp(logp_t - sg(logp_t))``: each token may have an advantage of its own, and
    with one advantage per episode and ``episode_mean`` it is the gradient of s itself. The tokens of t's own row are taken
    under the weights that are differentiated. Those of the episode's other rows may be in another micro-batch, and come
    from ``logp_now``, a pass of the learner over the mini-batch before this very step.

    Log-ratios .3 and -.1 in one row and .1 in another: s = exp(.3 / 3) = 1.10517 for all three; at A = 2 and clip_high .2
    the loss is -2.21034. Metrics: ``sequence_ratio``, ``sequence_clip_fraction``, ``sequence_kl`` (-log s).
    """

    clip_low: float = 3e-4  # the mean of many log-ratios hardly moves: these are the paper's bounds
    clip_high: float = 4e-4
    dual_clip: float | None = None
    coef: float = 1.0
    aggregate: str = "episode_mean"

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("advantage", BEHAVIOUR, NOW, ROW, REST, SIZE)
    scales_with: ClassVar[str | None] = "advantage"

    def __post_init__(self):
        check_term("gspo", self.coef, self.aggregate)
        check_clips("gspo", self.clip_low, self.clip_high, self.dual_clip)

    def derive(self, batch: Batch) -> dict[str, np.ndarray]:
        """[N] the log-ratios' sum over the episode's other rows, the episode's number of tokens, and the row's number."""
        mask = batch.channel(self.channel)
        found = sums(batch_column(batch, mask, NOW) - batch_column(batch, mask, BEHAVIOUR), mask, batch)
        return {REST: found.rest, SIZE: found.size.astype(np.float64), ROW: batch.token_row.astype(np.float64)}

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        advantage = keep(mask, column(columns, "advantage"))
        logp = keep(mask, out.logp)
        gap = logp.detach() - keep(mask, column(columns, BEHAVIOUR))
        whole = own_rows(gap, column(columns, ROW)) + keep(mask, column(columns, REST))
        log_ratio = keep(mask, whole / column(columns, SIZE).clamp(min=1))
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(logp.dtype)
        ratio, gain, active = surrogate(log_ratio + logp - logp.detach(), advantage, self.clip_low, self.clip_high, self.dual_clip)
        metrics = {"sequence_ratio": ratio, "sequence_clip_fraction": active.to(ratio.dtype), "sequence_kl": -log_ratio}
        return keep(mask, -gain), {name: keep(mask, value.detach()) for name, value in metrics.items()}
