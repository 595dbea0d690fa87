"""Generalized advantages over the mean returns of a group's states, without a critic (M124; GAGPO, 2605.13217)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.gigpo import check_comparison
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.steps import mean_of, relative, steps_of
from mcore_agent.credit.sums import decayed_sum, run_ends
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "gagpo")
@dataclass(frozen=True)
class Gagpo:
    """``delta = r + gamma V(s') - V(s)``, ``A = delta + gamma lam A'``, then relative to all steps of the group.

    V(s) is the mean discounted return over the group's visits of s, as in ``g2po``; ``lam: 0`` is that method. ``norm: none``
    leaves A as it is. States without a key, or met once, differ from no other: their delta is 0.

    Two episodes, gamma 1, lam .5, norm none: a → b → reward 1, and a → b → 0. V is .5 everywhere, the deltas are 0, .5 and
    0, -.5: A is .25, .5, -.25 and -.5.
    """

    gamma: float = 0.95
    lam: float = 0.95
    norm: Literal["none", "mean", "mean_std"] = "mean_std"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("gagpo", 0.0, self.gamma, self.eps)
        if not 0 <= self.lam <= 1:
            raise CreditError(f"estimator 'gagpo': lam is {self.lam}, but must be in [0, 1]")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps = steps_of(batch)
        value = mean_of(steps.returns(self.gamma), steps.states())
        delta = steps.reward + self.gamma * steps.following(value) - value
        gained = decayed_sum(delta, run_ends(steps.episode), self.gamma * self.lam)
        if self.norm != "none":
            gained = relative(gained, steps.group, self.norm == "mean_std", self.eps)
        return gained[steps.token]
