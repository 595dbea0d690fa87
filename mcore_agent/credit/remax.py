"""The reward's distance from that of the greedy answer (M13; ReMax, 2310.10505 alg. 1)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import SAME, scores, voters
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "remax")
@dataclass(frozen=True)
class Remax:
    """``r - r_greedy``, the greedy episode being the one that its group was given for comparison: nobody trains on it, and it
    counts in no statistic. Sampled rewards 1 0 1 beside a greedy 1 give 0 -1 0.

    A group whose greedy episode failed has no baseline: it gets 0, and is counted as ``no_greedy``.
    """

    needs: ClassVar[tuple[str, ...]] = ("branch:greedy",)
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "group"

    def __call__(self, batch: Batch) -> Credit:
        """[E] float64 advantages; 0 of the greedy ones."""
        group, reward, sampled = batch.by("group"), scores(batch), voters(batch)
        count = int(group.max(initial=-1)) + 1
        greedy = np.bincount(group[~sampled], minlength=count)
        baseline = np.bincount(group[~sampled], weights=reward[~sampled], minlength=count) / np.maximum(greedy, 1)
        gained = reward - baseline[group]
        equal = abs(gained) <= SAME * np.maximum(1.0, abs(reward))
        gained = np.where(sampled & (greedy[group] > 0) & ~equal, gained, 0.0)
        lost = set(group[sampled]) - set(group[~sampled])
        return Credit(gained, numbers={"no_greedy": len(lost)})
