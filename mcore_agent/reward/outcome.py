"""What the environment itself gave."""

import math
from dataclasses import dataclass

from mcore_agent.registry import register
from mcore_agent.types import Episode


@register("reward", "outcome")
@dataclass(frozen=True)
class Outcome:
    """The sum of the environment's rewards over the turns of an episode."""

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"outcome": sum}``."""
        return {"outcome": math.fsum(turn.feedback.reward for turn in episode.turns)}
