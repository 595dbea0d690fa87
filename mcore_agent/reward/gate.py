"""A reward that counts only where another one holds (M41; a combinator)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mcore_agent.protocols import Scored
from mcore_agent.registry import register
from mcore_agent.reward.pipeline import Part, make, total
from mcore_agent.types import Episode


@register("reward", "gate")
@dataclass(frozen=True)
class Gate:
    """The components of ``of`` where the sum of ``by`` is at least ``least``, and 0 in their place elsewhere.

    ``by`` earns nothing itself; it is logged as ``open`` (0 or 1). Where either abstains, the gate abstains.
    Outcome by format with least 1: format 1 and outcome 1 give 1; format .3 and outcome 1 give 0.
    """

    of: Mapping[str, Any]
    by: Mapping[str, Any]
    least: float = 1.0
    services: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _ = self._pair  # made now, so that a wrong spec is refused now

    @cached_property
    def _pair(self) -> tuple[Part, Part]:
        return make(self.of, self.services), make(self.by, self.services)

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> Scored:
        """The components of ``of``, or zeros of their shapes."""
        of, by = (part.ask(episode, siblings) for part in self._pair)
        passed = total(by)
        if passed is None or not of.rewards:
            return Scored({})
        shut = {name: [0.0] * len(value) if isinstance(value, list) else 0.0 for name, value in of.rewards.items()}
        opened = passed >= self.least
        return Scored(of.rewards if opened else shut, {**of.numbers, "open": float(opened)})
