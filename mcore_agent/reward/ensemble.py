"""One number from several scorers, on the safe side where they differ (M77; UWO, 2310.02743 sec. 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from mcore_agent.protocols import InfraError, Scored
from mcore_agent.registry import register
from mcore_agent.reward.pipeline import Part, RewardError, make, total
from mcore_agent.types import Episode


@register("reward", "ensemble")
@dataclass(frozen=True)
class Ensemble:
    """``min``, ``mean``, ``mean_std`` = mean - k * std or ``mean_var`` = mean - k * var of the members' sums, over n of them.

    A member that abstains or fails is left out; when none is left, the ensemble abstains. Logged: ``absent`` (how many),
    ``std``. Scores .9, .5 and .7: min .5, mean .7, and with k = 1 mean_std .7 - sqrt(.08 / 3) = .5367.
    """

    of: Sequence[Mapping[str, Any]]
    how: Literal["min", "mean", "mean_std", "mean_var"] = "mean_std"
    k: float = 1.0
    key: str = "ensemble"
    services: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if len(self.of) < 2:
            raise RewardError(f"reward 'ensemble': of has {len(self.of)} members, but needs at least 2")
        if not 0 <= self.k < float("inf"):
            raise RewardError(f"reward 'ensemble': k is {self.k}, but must be at least 0 and finite")
        _ = self._members  # made now, so that a wrong spec is refused now

    @cached_property
    def _members(self) -> list[Part]:
        return [make(spec, self.services) for spec in self.of]

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> Scored:
        """``{key: value}``."""
        given = opinions(self._members, episode, siblings)
        found = np.array([value for value in given if value is not None])
        absent = {"absent": float(len(given) - len(found))}
        if not len(found):
            return Scored({}, absent)
        mean, std = float(found.mean()), float(found.std())
        value = {"min": float(found.min()), "mean": mean, "mean_std": mean - self.k * std, "mean_var": mean - self.k * std**2}
        return Scored({self.key: value[self.how]}, absent | {"std": std})


def opinions(members: Sequence[Part], episode: Episode, siblings: Sequence[Episode]) -> list[float | None]:
    """What each member gives in all; None where it abstains or cannot be reached: the others stand in for it."""
    out: list[float | None] = []
    for member in members:
        try:
            out.append(total(member.ask(episode, siblings)))
        except InfraError:
            out.append(None)
    return out
