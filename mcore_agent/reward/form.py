"""How far an episode keeps to the form that was asked for (M40; format rewards, 2501.12948 sec. 2.2.2)."""

import math
from dataclasses import dataclass
from functools import cached_property

from mcore_agent.protocols import Parser
from mcore_agent.registry import register
from mcore_agent.reward.calls import parser_of
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

OPEN, CLOSE, BOXED = "<think>", "</think>", "\\boxed{"


@register("reward", "form")
@dataclass(frozen=True)
class Format:
    """``clip(think + call * valid - bad_call * malformed + boxed, 0, 1)``, each term where it applies.

    ``think``: every turn opens with one block of thoughts that is not empty; ``valid`` and ``malformed`` count tool calls
    outside thoughts, as the parser sees them; ``boxed``: the last turn has a boxed answer outside its thoughts.

    Thoughts, a good call and a boxed answer: .3 + .1 + .2 = .6; thoughts and a broken call: .3 - .2 = .1.
    """

    think: float = 0.3
    call: float = 0.1
    bad_call: float = 0.2
    boxed: float = 0.2
    parser: str = "hermes"

    def __post_init__(self):
        for name in ("think", "call", "bad_call", "boxed"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise RewardError(f"reward 'form': {name} is {getattr(self, name)}, but must be at least 0 and finite")
        _ = self._parser

    @cached_property
    def _parser(self) -> Parser:
        return parser_of(self.parser)

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"form": value in [0, 1]}``; 0 without turns."""
        parts = [split_thoughts(turn.action) for turn in episode.turns]
        if not parts:
            return {"form": 0.0}
        calls = [call for _, rest in parts for call in self._parser.parse(rest).calls]
        malformed = sum(bool(call.error) for call in calls)
        value = self.think * all(thought for thought, _ in parts) + self.boxed * has_boxed(parts[-1][1])
        return {"form": min(1.0, max(0.0, value + self.call * (len(calls) - malformed) - self.bad_call * malformed))}


def split_thoughts(text: str) -> tuple[bool, str]:
    """Whether a turn opens with one block of thoughts that is not empty, and what is left without it."""
    head, close, rest = text.lstrip().partition(CLOSE)
    if not (head.startswith(OPEN) and close):
        return False, text
    thoughts = head.removeprefix(OPEN)
    return bool(thoughts.strip()) and OPEN not in thoughts + rest and CLOSE not in rest, rest


def has_boxed(text: str) -> bool:
    """Whether the last box in a text is closed and not empty."""
    start = text.rfind(BOXED)
    if start < 0:
        return False
    depth = 1
    for at in range(start + len(BOXED), len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return bool(text[start + len(BOXED) : at].strip())
    return False
