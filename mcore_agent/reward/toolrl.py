"""Tool calls against the right ones: names, parameters, values (M63; ToolRL, 2504.13958 sec. 3.3)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mcore_agent.protocols import Parser, ToolCall
from mcore_agent.registry import register
from mcore_agent.reward.calls import calls_of, parser_of
from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.form import split_thoughts
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode


@register("reward", "toolrl")
@dataclass(frozen=True)
class ToolRL:
    """``tool_correct + form * tool_form + efficiency * tool_efficiency``, each under its name.

    ``tool_correct = 6 * match / most - 3`` in [-3, 3]: ``match`` adds the overlap of the sets of names (common / all), and for each
    gold call with a partner of its name the overlap of parameter names and the number of equal values; ``most = 1 + calls +
    parameters`` of gold. Each gold call takes the best partner left. Where gold has no calls: 3 for none, -3 for any.
    ``tool_form`` is 1 when no call is malformed and, with ``think``, every turn opens with thoughts. ``tool_efficiency`` is
    min(1, gold calls / calls), 1 without any.

    The task's gold is a list of ``{"name": …, "arguments": {…}}``. Gold ``search(q, k)``, called with the right q alone: name 1,
    parameters 1/2, values 1 of most 1 + 1 + 2: 6 * 2.5 / 4 - 3 = .75.
    """

    form: float = 1.0
    efficiency: float = 0.0
    think: bool = True
    parser: str = "hermes"

    def __post_init__(self):
        for name in ("form", "efficiency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RewardError(f"reward 'toolrl': {name} is {getattr(self, name)}, but must be at least 0 and finite")
        _ = self._parser

    @cached_property
    def _parser(self) -> Parser:
        return parser_of(self.parser)

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """The three rewards, with their weights. Raises VerifierError for a gold that is no list of calls."""
        gold = _gold_calls(episode)
        made = [call for calls in calls_of(episode, self._parser) for call in calls]
        good = [call for call in made if not call.error]
        formed = len(good) == len(made) and (not self.think or all(split_thoughts(t.action)[0] for t in episode.turns))
        spare = min(1.0, len(gold) / len(made)) if made else 1.0
        return {
            "tool_correct": correctness(good, gold) if gold else (-3.0 if made else 3.0),
            "tool_form": self.form * formed,
            "tool_efficiency": self.efficiency * spare,
        }


def correctness(made: Sequence[ToolCall], gold: Sequence[ToolCall]) -> float:
    """``6 * match / most - 3`` for gold calls that there are."""
    names, wanted = {call.name for call in made}, {call.name for call in gold}
    match, left = len(names & wanted) / len(names | wanted), list(made)
    for call in gold:
        partners = [(_likeness(other, call), -i) for i, other in enumerate(left) if other.name == call.name]
        if partners:
            value, at = max(partners)
            match += value
            del left[-at]
    most = 1 + len(gold) + sum(len(call.arguments) for call in gold)
    return 6 * match / most - 3


def _likeness(made: ToolCall, gold: ToolCall) -> float:
    """The overlap of parameter names (1 when neither has any) and the number of equal values."""
    either, both = made.arguments.keys() | gold.arguments.keys(), made.arguments.keys() & gold.arguments.keys()
    return (len(both) / len(either) if either else 1.0) + sum(made.arguments[key] == gold.arguments[key] for key in both)


def _gold_calls(episode: Episode) -> list[ToolCall]:
    gold: Any = episode.task.gold
    many = isinstance(gold, Sequence) and not isinstance(gold, str)
    if not many or not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in gold):
        raise VerifierError("gold", f"task {episode.task.id!r} has the gold {gold!r}, but it must be a list of calls: name, arguments")
    return [ToolCall(call["name"], dict(call.get("arguments", {}))) for call in gold]
