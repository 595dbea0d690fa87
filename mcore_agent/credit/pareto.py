"""Episodes by several rewards at once: ranks of the Pareto order, or random weights (M80; multi-objective RL)."""

import zlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import SAME, CreditError, rivals, scores
from mcore_agent.credit.steps import relative
from mcore_agent.registry import register
from mcore_agent.types import Batch, Episode


@register("estimator", "pareto")
@dataclass(frozen=True)
class Pareto:
    """Each named reward is a component. ``(score - mean) / (deviation + eps)`` within the group, where the score is

    ``rank``: minus the number of the episode's front: front 0 holds the episodes that no other dominates (is at least as good in
    every component and better in one), front 1 those that only front 0 dominates, and so on;
    ``simplex``: a weighted sum of components that were scaled to [0, 1] within the group; each group draws its weights anew,
    evenly from the simplex, by ``seed`` and its name.
    Either way a dominated episode never has the larger advantage. ``components`` names the rewards (all, if none are named);
    one that an episode does not have is 0, one of turns is summed.

    Rewards (right, short) of 1 0, 0 1, 0 0 and 1 0: fronts 0, 0, 1, 0, so that scores 0, 0, -1, 0 with mean -.25 and deviation
    .433 give A = .577, .577, -1.732, .577.
    """

    components: list[str] = field(default_factory=list)
    score: Literal["rank", "simplex"] = "rank"
    seed: int = 0
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        if not self.eps >= 0:
            raise CreditError(f"estimator 'pareto': eps is {self.eps}, but must be at least 0")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[E] float64 advantages."""
        group = rivals(batch)
        shaped = scores(batch) - batch.rewards
        out = np.zeros(len(batch.episodes))
        for g in range(int(group.max(initial=-1)) + 1):
            own = np.flatnonzero(group == g)
            table = components([batch.episodes[i] for i in own], self.components)
            if "token_reward" in batch.columns:  # what a shaping gave is one component more
                table = np.column_stack([table, shaped[own]])
            out[own] = -fronts(table) if self.score == "rank" else self._weighted(table, batch.episodes[own[0]].group)
        return relative(out, group, True, self.eps)

    def _weighted(self, table: np.ndarray, name: str) -> np.ndarray:
        low, high = table.min(axis=0), table.max(axis=0)
        wide = high - low > SAME * np.maximum(1.0, np.maximum(abs(high), abs(low)))
        scaled = np.where(wide, (table - low) / np.where(wide, high - low, 1.0), 0.0)
        weight = np.random.default_rng([self.seed, zlib.crc32(name.encode())]).dirichlet(np.ones(table.shape[1]))
        return scaled @ weight


def components(episodes: list[Episode], names: list[str]) -> np.ndarray:
    """[G, C] summed rewards by name, in the order of their names. Raises CreditError for a name that no episode of the group has."""
    known = {name for e in episodes for name in e.rewards}
    missing = [name for name in names if known and name not in known]
    if missing:
        raise CreditError(f"estimator 'pareto': components has {missing[0]!r}, but the rewards are: {', '.join(sorted(known))}")
    wanted = sorted(names or known)
    return np.array([[float(np.sum(e.rewards.get(name, 0.0))) for name in wanted] for e in episodes]).reshape(len(episodes), -1)


def fronts(table: np.ndarray) -> np.ndarray:
    """[G] int64: the number of each element's front; components [G, C] that differ by rounding are equal."""
    tolerance = SAME * np.maximum(1.0, abs(table).max(axis=0, initial=0.0))
    gap = table[:, None, :] - table[None, :, :]
    dominates = (gap >= -tolerance).all(axis=-1) & (gap > tolerance).any(axis=-1)
    front, left, number = np.zeros(len(table), dtype=np.int64), np.ones(len(table), dtype=bool), 0
    while left.any():
        free = left & ~dominates[left].any(axis=0)
        free = free if free.any() else left  # each a little better than the next, by rounding, in a circle
        front[free] = number
        left, number = left & ~free, number + 1
    return front
