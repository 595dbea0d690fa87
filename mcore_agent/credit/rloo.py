"""The reward's distance from the mean of its siblings (M12; RLOO, 2402.14740 sec. 2.1)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import center, scores, spread, voters
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "rloo")
@dataclass(frozen=True)
class Rloo:
    """``r - (sum of the siblings' r) / (G - 1)``: rewards 1 0 0 1 give 2/3 -2/3 -2/3 2/3. Sums to 0 over a group.

    Equal rewards give exactly 0. An episode without siblings has no baseline and gets its reward as it is.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "group"

    def __call__(self, batch: Batch) -> np.ndarray:
        """[E] float64 advantages; 0 of an episode that only serves comparison."""
        out, votes = np.zeros(len(batch.episodes)), voters(batch)
        group, reward = batch.by("group")[votes], scores(batch)[votes]
        size = np.bincount(group)[group]
        # r - (S - r) / (G - 1) = G / (G - 1) * (r - S / G)
        among = np.where(spread(reward, group), center(reward, group) * size / np.maximum(size - 1, 1), 0.0)
        out[votes] = np.where(size == 1, reward, among)
        return out
