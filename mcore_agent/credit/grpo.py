"""Group-relative advantage (M9; GRPO, 2402.03300 sec. 4.1.2), many-turn episodes (M21; StarPO, 2504.20073), degenerate groups (M10)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import CreditError, center, deviation, rivals, scores, spread
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "grpo")
@dataclass(frozen=True)
class Grpo:
    """``(r - mean) / (deviation + eps)`` within the episode's group: rewards 1 0 0 1 give 1 -1 -1 1.

    ``sigma`` divides the variance by G (``population``) or by G - 1 (``sample``). A group of one episode, or of
    rewards that are equal up to rounding, gets exactly 0 in every mode of ``zero_sigma``:
    ``zero`` trains on every other group, ``clamp`` divides by at least ``sigma_min`` (rewards that barely differ are
    not blown up).
    """

    sigma: Literal["population", "sample"] = "population"
    eps: float = 1e-6
    zero_sigma: Literal["zero", "clamp"] = "zero"
    sigma_min: float = 0.1

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        if not self.eps >= 0:
            raise CreditError(f"estimator 'grpo': eps is {self.eps}, but must be at least 0")
        if not self.sigma_min > 0:
            raise CreditError(f"estimator 'grpo': sigma_min is {self.sigma_min}, but must be above 0")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[E] float64 advantages."""
        group, reward = rivals(batch), scores(batch)
        centered = center(reward, group)
        sigma = deviation(centered, group, sample=self.sigma == "sample")
        if self.zero_sigma == "clamp":
            sigma = np.maximum(sigma, self.sigma_min)
        differ = spread(reward, group)
        return np.where(differ, centered / np.where(differ, sigma + self.eps, 1.0), 0.0)
