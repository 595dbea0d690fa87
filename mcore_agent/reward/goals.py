"""Things to reach in an episode that pay once, some only after others. Subgoals and evidence are made of them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Turn

KEYS = {"name", "weight", "state", "action", "after"}


@dataclass(frozen=True)
class Goal:
    """Reached at a turn whose action matches ``action`` and did not fail, or that leads to a state whose key matches ``state``.

    Both are regular expressions found anywhere in the text. ``after``: goals that must be reached before, or at the same turn.
    """

    name: str
    weight: float = 1.0
    state: str = ""
    action: str = ""
    after: tuple[str, ...] = ()

    def holds(self, turn: Turn, state: str | None) -> bool:
        """Whether the turn fulfils it; ``state`` is the key of the state that the turn led to, if that is known."""
        if self.state and state is not None and re.search(self.state, state):
            return True
        return bool(self.action) and turn.feedback.ok and re.search(self.action, turn.action) is not None


def goals_of(specs: Any, where: str) -> list[Goal]:
    """Goals from mappings, each after those that it needs. Raises RewardError, beginning with ``where``, for what is no goal,
    a name given twice, an unknown or circular ``after``."""
    if not isinstance(specs, Sequence) or isinstance(specs, str):
        raise RewardError(f"{where} is {specs!r}, but must be a list of goals {{name: …, state: …, action: …}}")
    goals = {goal.name: goal for goal in (_goal(spec, f"{where}[{i}]") for i, spec in enumerate(specs))}
    if len(goals) < len(specs):
        raise RewardError(f"{where} has two goals of one name")
    for goal in goals.values():
        for name in goal.after:
            if name not in goals:
                raise RewardError(f"{where}: goal {goal.name!r} comes after {name!r}, which is no goal")
    try:
        return [goals[name] for name in TopologicalSorter({g.name: g.after for g in goals.values()}).static_order()]
    except CycleError as e:
        raise RewardError(f"{where}: these goals wait for one another: {', '.join(e.args[1])}") from e


def _goal(spec: Any, where: str) -> Goal:
    if not isinstance(spec, Mapping) or not spec.keys() <= KEYS or not spec.get("name"):
        raise RewardError(f"{where} is {spec!r}, but must be a mapping with a name and keys among {', '.join(sorted(KEYS))}")
    if not (spec.get("state") or spec.get("action")):
        raise RewardError(f"{where}: goal {spec['name']!r} needs a state or an action")
    weight = spec.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise RewardError(f"{where}: weight of goal {spec['name']!r} is {weight!r}, but must be above 0 and finite")
    for key in ("state", "action"):
        try:
            re.compile(spec.get(key, ""))
        except (re.error, TypeError) as e:
            raise RewardError(f"{where}: {key} of goal {spec['name']!r} is {spec[key]!r}, no regular expression: {e}") from e
    return Goal(spec["name"], float(weight), spec.get("state", ""), spec.get("action", ""), tuple(spec.get("after", ())))


def pay(goals: Sequence[Goal], turns: Sequence[Turn]) -> list[float]:
    """For each turn the weights of the goals first reached there; ``goals`` are in an order that ``goals_of`` gave.

    A state goal that already holds where the episode starts counts as reached and pays nothing: no action led there. What a
    goal needs may be reached at the same turn; a goal met too early must be met again. The state after the last turn is not
    recorded, so that only an action can reach a goal there.
    """
    reached: set[str] = set()
    for goal in goals if turns else ():
        if goal.state and set(goal.after) <= reached and re.search(goal.state, turns[0].state_key):
            reached.add(goal.name)
    out = []
    for i, turn in enumerate(turns):
        state = turns[i + 1].state_key if i + 1 < len(turns) else None
        earned = []
        for goal in goals:
            if goal.name not in reached and set(goal.after) <= reached and goal.holds(turn, state):
                reached.add(goal.name)
                earned.append(goal.weight)
        out.append(math.fsum(earned))
    return out
