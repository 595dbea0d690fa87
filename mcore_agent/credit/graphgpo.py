"""Steps by how much nearer they came to the goal on the graph of a group's states (M124; GraphGPO, 2605.26684 eq. 4)."""

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.gigpo import check_comparison, episode_part
from mcore_agent.credit.groups import scores
from mcore_agent.credit.steps import Steps, relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch

GOAL = -1  # the node behind the last step of an episode that succeeded


@register("estimator", "graphgpo")
@dataclass(frozen=True)
class Graphgpo:
    """``A = A_episode + omega A_graph``: A_graph compares ``d(s) - d(s')`` of a group's steps from the same state.

    d counts the steps of the shortest way to the goal that the group's episodes know together; the goal lies behind the last
    step of an episode whose reward is at least ``success``, and nothing behind the last of another. A state from which it
    is not reached is one step further than the furthest that is. Steps from such a state, all steps of a group
    without a success, and steps whose state was met once have A_graph = 0.

    norm mean, of an episode with reward 1, a → b → goal, and one with 0, a → a → b → nothing: d(b) = 1 and d(a) = 2, nothing
    counts 3. The steps from a gain 1, 0 and 1 (mean .6667), those from b 1 and -2 (mean -.5): A_graph is .3333 and 1.5, then
    -.6667, .3333 and -1.5.
    """

    omega: float = 1.0
    success: float = 0.5
    norm: Literal["mean", "mean_std"] = "mean_std"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("graphgpo", self.omega, 1.0, self.eps)

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps, sigma = steps_of(batch), self.norm == "mean_std"
        state = steps.states()
        gain = progress(steps, state, (scores(batch) >= self.success)[steps.episode])
        return (episode_part(batch, steps, sigma, self.eps) + self.omega * relative(gain, state, sigma, self.eps))[steps.token]


def progress(steps: Steps, state: np.ndarray, won: np.ndarray) -> np.ndarray:
    """[K] ``d(s) - d(s')``; 0 from where the goal is not reached. States of two groups are never the same."""
    nothing = int(state.max(initial=-1)) + 1  # never reached from
    after = np.where(steps.last, np.where(won, GOAL, nothing), np.append(state[1:], nothing)[: len(state)])
    out = np.zeros(len(state))
    for group in np.unique(steps.group):
        own = np.flatnonzero(steps.group == group)
        distance = distances(state[own], after[own])
        far = max(distance.values()) + 1
        near = np.array([distance.get(s, np.inf) for s in state[own].tolist()])
        then = np.array([distance.get(s, far) for s in after[own].tolist()])
        out[own] = np.where(np.isfinite(near), np.where(np.isfinite(near), near, 0.0) - then, 0.0)
    return out


def distances(state: np.ndarray, after: np.ndarray) -> dict[int, int]:
    """Steps to the goal by state, for those from which it is reached, and for the goal itself."""
    before = defaultdict(set)
    for s, t in zip(state.tolist(), after.tolist(), strict=True):
        before[t].add(s)
    found, line = {GOAL: 0}, deque([GOAL])
    while line:
        node = line.popleft()
        for s in sorted(before[node] - found.keys()):
            found[s] = found[node] + 1
            line.append(s)
    return found
