"""Only the groups whose rewards differ most (M22; StarPO-S, RAGEN 2504.20073 sec. 4)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError, center, deviation, voters
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("filter", "top_spread")
@dataclass(frozen=True)
class TopSpread:
    """Keeps the ``int(share * groups)`` groups, at least one, with the largest deviation of rewards; equal ones in their order.

    ``reward`` names the reward that is looked at, for example the task's own; empty: the sum of all. A penalty on length would
    make a group look informative in which every answer is right. Demonstrations are no group and stay.

    Deviations 0 .1 .5 .3 of four groups with share .25: the third alone stays.
    """

    share: float = 0.25
    reward: str = ""

    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise CreditError(f"filter 'top_spread': share is {self.share}, but must be above 0 and at most 1")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[E] bool."""
        group, votes = batch.by("group"), voters(batch)
        speaks = np.bincount(batch.row_episode, weights=[row.sampled.any() for row in batch.rows], minlength=len(group)) > 0
        rolled = np.isin(group, group[votes & speaks])  # [E] of a group that the policy played
        votes &= rolled
        if not votes.any():
            return ~rolled
        sigma = np.zeros(int(group.max()) + 1)
        sigma[group[votes]] = deviation(center(self._rewards(batch)[votes], group[votes]), group[votes], sample=False)
        names, at = np.unique(group[votes], return_index=True)
        order = names[np.lexsort((at, -sigma[names]))]
        return np.isin(group, order[: max(1, int(self.share * len(names)))]) | ~rolled

    def _rewards(self, batch: Batch) -> np.ndarray:
        if not self.reward:
            return batch.rewards
        missing = [e for e in batch.episodes if self.reward not in e.rewards and e.rewards]
        if missing:
            raise CreditError(f"filter 'top_spread': reward is {self.reward!r}, but episode {missing[0].id!r} has only "
                              f"{', '.join(sorted(missing[0].rewards))}")  # fmt: skip
        return np.array([np.sum(e.rewards.get(self.reward, 0.0)) for e in batch.episodes])
