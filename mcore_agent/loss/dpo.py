"""Preference between two answers, on their own tokens only (M26; DPO, 2305.18290 eq. 7)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.loss.derived import NOW, PAIRS, ROW, batch_column, own_rows, sums, with_slope
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register
from mcore_agent.types import Batch

CHOSEN, REJECTED = "chosen", "rejected"  # branches of the two episodes of a pair, which share a group
REST, SIZE, SIDE = "pair_rest", "pair_size", "pair_side"


@register("loss", "dpo")
@dataclass(frozen=True)
class Dpo:
    """``-log sigmoid(beta m)`` of a pair, where ``m`` is the sum of ``logp - logp_ref`` over the chosen episode's tokens in the
    channel ``dpo`` minus that over the rejected one's. Each side carries half: with one loss per episode, averaged
    (``episode_mean_token_sum``), the whole is the mean over pairs.

    A side's half is spread evenly over its tokens; the gradient of the pair's loss by logp of a chosen token is
    ``-beta (1 - sigmoid(beta m))``, of a rejected one the opposite. A token's own row is taken under the weights that are
    differentiated; all other rows of the pair come from ``logp_now``, a pass of the learner before the step. In an rl stage
    the best and the worst episode of every group whose rewards differ are its pair; the reference has the stage's first weights.

    beta = 1 and m = ln 3: the loss is -ln(3/4) = .28768, and the gradient by a chosen token -1/4.
    Metrics, each the mean over pairs: ``dpo_loss``, ``dpo_margin`` (beta m), ``dpo_accuracy`` (m > 0).
    """

    beta: float = 0.1
    coef: float = 1.0
    aggregate: str = "episode_mean_token_sum"

    channel: ClassVar[str] = "dpo"
    rows: ClassVar[str] = PAIRS
    needs: ClassVar[tuple[str, ...]] = ("logp_ref", NOW, ROW, REST, SIZE, SIDE)
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("dpo", self.coef, self.aggregate)
        if not 0 < self.beta < np.inf:
            raise LossError(f"loss 'dpo': beta is {self.beta}, but must be finite and above 0")

    def derive(self, batch: Batch) -> dict[str, np.ndarray]:
        """[N] m without the token's own row, the tokens of its side, 1 (chosen) or -1 (rejected), and the row's number.

        Raises LossError for a group with tokens in the channel that is not one chosen and one rejected episode.
        """
        mask = batch.channel(self.channel)
        found = sums(batch_column(batch, mask, NOW) - batch_column(batch, mask, "logp_ref"), mask, batch)
        side, other = np.zeros(len(batch.episodes)), np.zeros(len(batch.episodes), dtype=np.int64)
        for chosen, rejected in pairs(batch, mask):
            side[chosen], side[rejected] = 1.0, -1.0
            other[chosen], other[rejected] = rejected, chosen
        of = side[batch.token_episode]
        total = np.zeros(len(batch.episodes))
        total[batch.token_episode] = found.episode
        rest = of * found.rest - of * total[other][batch.token_episode]
        return {REST: rest, SIZE: found.size.astype(np.float64), SIDE: of, ROW: batch.token_row.astype(np.float64)}

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape."""
        mask = mask_of(columns, self.channel)
        logp = keep(mask, out.logp)
        side = keep(mask, column(columns, SIDE))
        own = own_rows(logp.detach() - keep(mask, column(columns, "logp_ref")), column(columns, ROW))
        margin = self.beta * (side * own + keep(mask, column(columns, REST)))
        spread = torch.where(mask, column(columns, SIZE), 1.0).clamp(min=1)
        pair = -logsigmoid(margin)
        loss = with_slope(pair / spread, -2 * self.beta * torch.sigmoid(-margin) * side, logp)  # both sides of a pair count
        metrics = {"dpo_loss": pair, "dpo_margin": margin, "dpo_accuracy": (margin > 0).to(pair.dtype)}
        return keep(mask, loss), {name: keep(mask, value / spread) for name, value in metrics.items()}


def pairs(batch: Batch, mask: np.ndarray) -> list[tuple[int, int]]:
    """(chosen, rejected) places of the episodes of each group that has tokens in the mask."""
    found: dict[str, dict[str, list[int]]] = {}
    active = np.bincount(batch.token_episode, weights=mask, minlength=len(batch.episodes)) > 0
    for i in np.flatnonzero(active):
        episode = batch.episodes[i]
        found.setdefault(episode.group, {}).setdefault(episode.branch, []).append(int(i))
    for group, sides in found.items():
        if {name: len(places) for name, places in sides.items()} != {CHOSEN: 1, REJECTED: 1}:
            said = ", ".join(f"{len(places)} {name or 'without a branch'}" for name, places in sorted(sides.items()))
            raise LossError(f"loss 'dpo': the group {group!r} has {said}, but a pair is one {CHOSEN!r} and one {REJECTED!r} episode")
    return [(sides[CHOSEN][0], sides[REJECTED][0]) for sides in found.values()]
