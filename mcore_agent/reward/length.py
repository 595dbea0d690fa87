"""A price on every turn or token over a target (M42; length penalties)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from mcore_agent.protocols import Scored
from mcore_agent.registry import register
from mcore_agent.reward.pipeline import Part, RewardError, make, total
from mcore_agent.types import Episode

Unit = Literal["turns", "tokens"]


def used(episode: Episode, unit: Unit) -> int:
    """Turns or sampled tokens of an episode."""
    return episode.sampled_tokens if unit == "tokens" else len(episode.turns)


@register("reward", "length_linear")
@dataclass(frozen=True)
class LengthLinear:
    """``-rate * max(0, T - target)``, beside whatever else is earned. A reward of 1, target 5, rate .1, T = 8: 1 - .3 = .7."""

    target: int
    rate: float = 0.1
    unit: Unit = "turns"

    def __post_init__(self):
        if self.target < 0:
            raise RewardError(f"reward 'length_linear': target is {self.target}, but must be at least 0")
        if not 0 < self.rate < math.inf:
            raise RewardError(f"reward 'length_linear': rate is {self.rate}, but must be above 0 and finite")

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"length": penalty}``, at most 0."""
        return {"length": -self.rate * max(0, used(episode, self.unit) - self.target)}


@register("reward", "length_sigmoid")
@dataclass(frozen=True)
class LengthSigmoid:
    """``r * sigmoid(-(T - target) / tau)`` for the sum r of what ``of`` gives.

    The components of ``of`` stay as they are, so that a filter can look at them; ``length`` is what is taken from their sum:
    ``r * (sigmoid - 1)``. r = 1, target 5, tau 2, T = 8: sigmoid(-1.5) = .18243, so that ``length`` is -.81757.
    """

    of: Mapping[str, Any]
    target: float
    tau: float
    unit: Unit = "turns"
    services: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not 0 < self.tau < math.inf:
            raise RewardError(f"reward 'length_sigmoid': tau is {self.tau}, but must be above 0 and finite")
        if not math.isfinite(self.target):
            raise RewardError(f"reward 'length_sigmoid': target is {self.target}, but must be finite")
        _ = self._of  # made now, so that a wrong spec is refused now

    @cached_property
    def _of(self) -> Part:
        return make(self.of, self.services)

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> Scored:
        """What ``of`` gives and ``length``; nothing where ``of`` abstains."""
        scored = self._of.ask(episode, siblings)
        whole = total(scored)
        if whole is None:
            return scored
        if "length" in scored.rewards:
            raise RewardError(f"episode {episode.id!r}: reward {self._of.source!r} gives 'length', which length_sigmoid gives itself")
        over = (used(episode, self.unit) - self.target) / self.tau
        kept = 1 / (1 + math.exp(min(over, 700.0)))  # exp of more overflows
        return Scored({**scored.rewards, "length": whole * (kept - 1)}, scored.numbers)
