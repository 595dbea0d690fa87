"""Generalized advantages that reach back as far as the episode is long (M18; VAPO, 2504.05118 sec. 4.2)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError, check_unit
from mcore_agent.credit.stretches import stretches
from mcore_agent.credit.sums import lambda_advantages
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "vapo")
@dataclass(frozen=True)
class Vapo:
    """``gae`` with ``lam = 1 - 1 / (alpha l)`` for an episode of l sampled tokens (at least 0), and for the critic another one.

    A short answer trusts the critic, a long one the reward: the sum of the weights lam^t is alpha l. ``returns`` take
    ``critic_lam``; with 1 the critic learns what was really earned, free of its own bias.

    With alpha .05 an episode of 100 tokens has lam = 1 - 1 / 5 = .8, one of 1000 has .98, and one of at most 20 has 0.
    """

    alpha: float = 0.05
    critic_lam: float = 1.0
    gamma: float = 1.0

    needs: ClassVar[tuple[str, ...]] = ("values",)
    gives: ClassVar[tuple[str, ...]] = ("returns",)
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "values"

    def __post_init__(self):
        if not 0 < self.alpha < np.inf:
            raise CreditError(f"estimator 'vapo': alpha is {self.alpha}, but must be finite and above 0")
        check_unit("estimator 'vapo'", critic_lam=self.critic_lam, gamma=self.gamma)

    def lam(self, length: int) -> float:
        """For an episode of so many sampled tokens."""
        return max(0.0, 1 - 1 / (self.alpha * length))

    def __call__(self, batch: Batch) -> Credit:
        """[N] float64 advantages and float32 returns, 0 outside the channel."""
        advantage, returns = np.zeros(len(batch.token_row)), np.zeros(len(batch.token_row), dtype=np.float32)
        for steps in stretches(batch):
            value, gained = steps.take(batch.columns["values"]), np.zeros(len(steps.reward))
            for a, b in zip([0, *steps.ends.tolist()], steps.ends.tolist(), strict=False):
                own, lam = slice(a, b), self.lam(b - a)
                gained[own] = lambda_advantages(steps.reward[own], value[own], np.array([b - a]), self.gamma, lam)
            steps.put(advantage, gained)
            steps.put(returns, lambda_advantages(steps.reward, value, steps.ends, self.gamma, self.critic_lam) + value)
        return Credit(advantage, {"returns": returns})
