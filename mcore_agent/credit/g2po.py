"""Temporal differences on the graph of a group's states, standardized over all its edges (M123; G2PO, 2606.22995)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.gigpo import check_comparison
from mcore_agent.credit.steps import mean_of, relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "g2po")
@dataclass(frozen=True)
class G2po:
    """``delta = r + gamma V(s') - V(s)`` and ``A = (delta - mean) / (deviation + eps)`` over all steps of the group.

    V(s) is the mean discounted return over the group's visits of s, and 0 behind an episode's last step. A state without a
    key (``state_key``), or that was met once, has the step's own return as its value: its delta is 0, so that a group without
    shared states teaches nothing.

    Two episodes, gamma .95: s0 → s1 → reward 1, and s0 → s0 → s1 → 0. V(s0) = (.95 + 0 + 0) / 3 = .3167, V(s1) = .5. The
    deltas .1583, .5, -.0158, .1583, -.5 have mean .0602 and deviation .3263: A = .3009, 1.3480, -.2329, .3009, -1.7168.
    """

    gamma: float = 0.95
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("g2po", 0.0, self.gamma, self.eps)

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps = steps_of(batch)
        value = mean_of(steps.returns(self.gamma), steps.states())
        delta = steps.reward + self.gamma * steps.following(value) - value
        return relative(delta, steps.group, True, self.eps)[steps.token]
