"""Small rewards for how tools are used (M43; tool-call shaping)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mcore_agent.protocols import Parser, ToolCall
from mcore_agent.registry import register
from mcore_agent.reward.calls import calls_of, parser_of
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

NEEDED = "needed_tools"  # in Task.meta: the tools that this task takes


@register("reward", "tool_shaping")
@dataclass(frozen=True)
class ToolShaping:
    """Per turn ``right`` for the first call of a needed tool, ``-duplicate`` for a call that repeats the one before it with
    the same arguments, ``-unknown`` for a tool that is not in ``tools`` or a call that cannot be read.

    Needed are ``needed``, or where that is empty the task's own ``meta["needed_tools"]``. The running sum stays in
    [-cap, cap]: a turn is paid what the bounded sum grows by.

    ``search`` needed and called three times alike, then a tool that is not there: .1 - .05 - .05 - .3 = -.3.
    """

    tools: Sequence[str]
    needed: Sequence[str] = ()
    right: float = 0.1
    duplicate: float = 0.05
    unknown: float = 0.3
    cap: float = 0.5
    parser: str = "hermes"

    def __post_init__(self):
        if not self.tools:
            raise RewardError("reward 'tool_shaping': tools is empty, but must name the tools that there are")
        if strange := sorted(set(self.needed) - set(self.tools)):
            raise RewardError(f"reward 'tool_shaping': needed has {strange[0]!r}, which is not among tools: {', '.join(self.tools)}")
        for name in ("right", "duplicate", "unknown"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RewardError(f"reward 'tool_shaping': {name} is {getattr(self, name)}, but must be at least 0 and finite")
        if not 0 < self.cap < math.inf:
            raise RewardError(f"reward 'tool_shaping': cap is {self.cap}, but must be above 0 and finite")
        _ = self._parser

    @cached_property
    def _parser(self) -> Parser:
        return parser_of(self.parser)

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"tool_shaping": one number per turn}``."""
        needed = set(self.needed or episode.task.meta.get(NEEDED, ()))
        before: ToolCall | None = None
        earned = []
        for calls in calls_of(episode, self._parser):
            value = 0.0
            for call in calls:
                known = not call.error and call.name in self.tools
                value -= 0.0 if known else self.unknown
                value -= self.duplicate if known and call == before else 0.0
                value += self.right if known and call.name in needed else 0.0
                needed.discard(call.name)
                before = call
            earned.append(value)
        sums = np.clip(np.cumsum(np.array(earned, dtype=np.float64)), -self.cap, self.cap)
        return {"tool_shaping": np.diff(sums, prepend=0.0).tolist()}
