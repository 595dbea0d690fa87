"""The reward's distance from its group's mean, without a deviation (M11; Dr. GRPO, 2503.20783 eq. 3)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import center, scores, spread, voters
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "dr_grpo")
@dataclass(frozen=True)
class DrGrpo:
    """``r - mean`` within the episode's group: rewards 1 0 0 1 give .5 -.5 -.5 .5. Equal rewards give exactly 0.

    Dividing by the deviation would make the groups in which episodes hardly differ as loud as the others. The paper also
    divides by no length: a loss's ``aggregate`` decides that.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "group"

    def __call__(self, batch: Batch) -> np.ndarray:
        """[E] float64 advantages; 0 of an episode that only serves comparison."""
        out, votes = np.zeros(len(batch.episodes)), voters(batch)
        group, reward = batch.by("group")[votes], scores(batch)[votes]
        out[votes] = np.where(spread(reward, group), center(reward, group), 0.0)
        return out
