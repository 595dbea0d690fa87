"""Turns by what was earned from them on, against all turns of the group (M110; SciDisco, DiscoPO)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.gigpo import check_comparison
from mcore_agent.credit.steps import relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "discopo")
@dataclass(frozen=True)
class Discopo:
    """``A = (G - mean) / (deviation + eps)`` with G the discounted sum of a turn's and all later rewards of its episode.

    Mean and deviation are those of all turns of the group. For rewards of single turns, for example evidence that a turn was the
    first to verify; the reward of a whole episode, for example its final claim, comes with the last turn.

    Episodes with the rewards 1, 0, 1 and 0, 0 of their turns, norm mean: G is 2, 1, 1 and 0, 0 with mean .8, so A is 1.2, .2,
    .2 and -.8, -.8.
    """

    gamma: float = 1.0
    norm: Literal["mean", "mean_std"] = "mean_std"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("discopo", 0.0, self.gamma, self.eps)

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps = steps_of(batch)
        return relative(steps.returns(self.gamma), steps.group, self.norm == "mean_std", self.eps)[steps.token]
