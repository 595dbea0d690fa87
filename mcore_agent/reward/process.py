"""The value of each step, from playing on (M46; Math-Shepherd, 2312.08935 eq. 3 and 4)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mcore_agent.protocols import InfraError
from mcore_agent.registry import register
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode, Task, Turn

Reduce = Literal["turns", "min", "mean", "last"]


@dataclass(frozen=True)
class Prefix:
    """An episode up to and including a turn: its decisions, and the tokens up to what came back from the last of them.

    ``turns[-1].snapshot`` names the environment's state there, if it was kept; else the actions are played again.
    """

    task: Task
    turns: tuple[Turn, ...]
    tokens: np.ndarray  # [P] int64; empty when the rows do not say where turns end


@register("reward", "process_mc")
@dataclass(frozen=True)
class ProcessMonteCarlo:
    """For each turn the share of ``n`` continuations from it that succeed (``soft``), or 1 if any does (``hard``).

    ``complete(prefix, n)``, which the Scorer is given as a service, plays on and returns n outcomes; one of at least .5
    is a success. ``reduce``: one number per turn, or their ``min``, ``mean`` or ``last`` for the whole episode.

    n = 4 and outcomes 1 0 0 1 after the first turn, 0 0 0 0 after the second: soft [.5, 0], hard [1, 0], soft min 0.
    """

    n: int = 8
    label: Literal["soft", "hard"] = "soft"
    reduce: Reduce = "turns"
    key: str = "process"
    complete: Callable[[Prefix, int], Sequence[float]] | None = None

    def __post_init__(self):
        if self.n < 1:
            raise RewardError(f"reward 'process_mc': n is {self.n}, but must be at least 1")

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{key: …}``. Raises InfraError when there are not n outcomes."""
        if self.complete is None:
            raise RewardError("reward 'process_mc' plays on from the middle of an episode; make the Scorer with the service 'complete'")
        values = []
        for i in range(len(episode.turns)):
            outcomes = self.complete(prefix_of(episode, i), self.n)
            if len(outcomes) != self.n:
                raise InfraError(f"{len(outcomes)} continuations of turn {i} came back, {self.n} were asked for")
            won = sum(outcome >= 0.5 for outcome in outcomes)
            values.append(float(won > 0) if self.label == "hard" else won / self.n)
        return {self.key: reduced(values, self.reduce)}


def reduced(values: list[float], how: Reduce) -> float | list[float]:
    """One number per turn as they are, or one in all: 0 without turns."""
    if how == "turns":
        return values
    if not values:
        return 0.0
    return {"min": min(values), "mean": sum(values) / len(values), "last": values[-1]}[how]


def prefix_of(episode: Episode, last: int) -> Prefix:
    """An episode up to and including turn ``last``."""
    tokens = np.zeros(0, dtype=np.int64)
    for row in episode.rows:
        ends = [s.end for s in row.segments if s.turn == last]
        if ends:
            tokens = row.tokens[: max(ends)]
            break
    return Prefix(episode.task, episode.turns[: last + 1], tokens)
