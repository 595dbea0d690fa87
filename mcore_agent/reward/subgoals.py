"""Steps on the way that pay once (M47; subgoal decomposition)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from mcore_agent.registry import register
from mcore_agent.reward.goals import Goal, goals_of, pay
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

META = "subgoals"  # in Task.meta: goals of this task, by hand or by a planner


@register("reward", "subgoals")
@dataclass(frozen=True)
class Subgoals:
    """Each goal pays ``total * weight / sum of weights`` at the turn that first reaches it, and never again.

    ``goals`` are ``{"name": …, "state": regex, "action": regex, "weight": w, "after": [names]}`` (see Goal); where there are
    none, those in the task's ``meta["subgoals"]``; a task without any earns 0. ``order: given``: each only after the one
    before it in the list.

    Five goals and total 100: 20 each. Goals reached at turns 0, 2, 2, by turns 0 to 3 of which the last repeats the first:
    [20, 0, 40, 0], 60 for the episode.
    """

    goals: Sequence[Mapping[str, Any]] = ()
    total: float = 1.0
    order: Literal["any", "given"] = "any"

    def __post_init__(self):
        if not (math.isfinite(self.total) and self.total > 0):
            raise RewardError(f"reward 'subgoals': total is {self.total}, but must be above 0 and finite")
        _ = self._own

    @cached_property
    def _own(self) -> list[Goal]:
        return self._shared_out(self.goals, "reward 'subgoals': goals")

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"subgoals": one number per turn}``. Raises RewardError for a task whose goals are none."""
        where = f"task {episode.task.id!r}: meta[{META!r}]"
        goals = self._own or self._shared_out(episode.task.meta.get(META, ()), where)
        return {"subgoals": pay(goals, episode.turns)}

    def _shared_out(self, specs: Any, where: str) -> list[Goal]:
        goals = goals_of(specs, where)
        if self.order == "given":
            goals = goals_of([{**spec, "after": [specs[i - 1]["name"]] if i else []} for i, spec in enumerate(specs)], where)
        whole = math.fsum(goal.weight for goal in goals)
        return [replace(goal, weight=self.total * goal.weight / whole) for goal in goals]
