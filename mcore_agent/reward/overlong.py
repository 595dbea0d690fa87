"""A soft penalty for episodes near the length limit (M17; DAPO, 2503.14476 eq. 13)."""

import math
from dataclasses import dataclass
from typing import Literal

from mcore_agent.registry import register
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode


@register("reward", "overlong")
@dataclass(frozen=True)
class Overlong:
    """0 up to ``limit - cache``, then falling to -1 at ``limit``; limit 20 and cache 4: 16 -> 0, 18 -> -0.5, 21 -> -1.

    ``unit`` counts sampled tokens or turns. ``shape`` ``exponential`` is ``-(1 - exp(-(n - limit + cache) / tau))``,
    which stays above -1; ``tau`` is in units, 0 means ``cache / 3`` (-0.95 at the limit).
    """

    limit: int
    cache: int
    unit: Literal["tokens", "turns"] = "tokens"
    shape: Literal["linear", "exponential"] = "linear"
    tau: float = 0.0

    def __post_init__(self):
        if not 0 < self.cache <= self.limit:
            raise RewardError(f"reward 'overlong': cache is {self.cache}, but must be in 1..limit = {self.limit}")
        if self.tau < 0:
            raise RewardError(f"reward 'overlong': tau is {self.tau}, but must be above 0, or 0 for cache / 3")

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"overlong": penalty}``, in [-1, 0]."""
        used = episode.sampled_tokens if self.unit == "tokens" else len(episode.turns)
        return {"overlong": self.penalty(used)}

    def penalty(self, used: int) -> float:
        """The penalty of an episode of ``used`` tokens or turns."""
        over = used - (self.limit - self.cache)
        if over <= 0:
            return 0.0
        if self.shape == "exponential":
            return -(1 - math.exp(-over / (self.tau or self.cache / 3)))
        return max(-1.0, -over / self.cache)
