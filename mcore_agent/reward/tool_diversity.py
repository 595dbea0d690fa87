"""A bonus for using tools otherwise than the siblings do (M54; diverse plans)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mcore_agent.protocols import Parser
from mcore_agent.registry import register
from mcore_agent.reward.calls import calls_of, parser_of
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

Shares = dict[str, float]  # tool -> share of an episode's calls


@register("reward", "tool_diversity")
@dataclass(frozen=True)
class ToolDiversity:
    """``min(cap, rate * d)``, where d in [0, 1] says how an episode's shares p of its calls by tool differ from its siblings'.

    ``overlap``: ``1 - mean_j sum_tool min(p, p_j)`` over the other siblings. ``divergence``: ``KL(p || mean) / log n`` for the
    mean of all n siblings, so that the group's average is the entropy of the mixture less that of its members. Equal
    siblings, and an episode without any, get 0; an episode without calls has the share 1 of no tool.

    Two siblings, calls a a b and a c c: overlap min(2/3, 1/3) = 1/3, so that d = 2/3 for both; rate .3 gives .2.
    """

    rate: float = 0.1
    cap: float = 0.1
    how: Literal["overlap", "divergence"] = "overlap"
    parser: str = "hermes"

    def __post_init__(self):
        for name in ("rate", "cap"):
            if not 0 < getattr(self, name) < math.inf:
                raise RewardError(f"reward 'tool_diversity': {name} is {getattr(self, name)}, but must be above 0 and finite")
        _ = self._parser

    @cached_property
    def _parser(self) -> Parser:
        return parser_of(self.parser)

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> dict[str, float | list[float]]:
        """``{"tool_diversity": bonus}``, in [0, cap]."""
        own, others = self._shares(episode), [self._shares(e) for e in siblings if e is not episode]
        if not others:
            return {"tool_diversity": 0.0}
        differs = overlap(own, others) if self.how == "overlap" else divergence(own, others)
        return {"tool_diversity": min(self.cap, self.rate * max(0.0, differs))}

    def _shares(self, episode: Episode) -> Shares:
        names = [call.name for calls in calls_of(episode, self._parser) for call in calls if not call.error] or [""]
        return {name: count / len(names) for name, count in Counter(names).items()}


def overlap(own: Shares, others: Sequence[Shares]) -> float:
    """1 less the mean overlap of two histograms."""
    return 1 - sum(sum(min(p, other.get(name, 0.0)) for name, p in own.items()) for other in others) / len(others)


def divergence(own: Shares, others: Sequence[Shares]) -> float:
    """KL of one histogram to the mean of all, as a share of its greatest value log n: that of tools nobody else uses."""
    n = len(others) + 1
    mean = {name: (p + sum(other.get(name, 0.0) for other in others)) / n for name, p in own.items()}
    return sum(p * math.log(p / mean[name]) for name, p in own.items()) / math.log(n)
