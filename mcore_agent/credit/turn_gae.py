"""Generalized advantages over the turns of an episode, from a critic's values (M5; GAE, 1506.02438 eq. 16)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import check_unit
from mcore_agent.credit.stretches import step_rewards
from mcore_agent.credit.sums import lambda_advantages
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "turn_gae")
@dataclass(frozen=True)
class TurnGae:
    """``delta = r + gamma V' - V`` and ``A = delta + gamma lam A'``, where ' is the episode's next turn; 0 behind the last.

    A turn's V is that of the state in which its first token was drawn; r is all that its tokens earned. Every token of the
    turn gets its A, and ``returns`` = A + V: rewards count where the turn ends, so that from anywhere in it the same is to come.

    Three turns that earn 0 0 1 with V = .5 .5 .5, gamma .99 and lam .95: from the end delta = .5, -.005, -.005 and
    A = .5, -.005 + .9405 * .5 = .46525, -.005 + .9405 * .46525 = .43257.
    """

    gamma: float = 1.0
    lam: float = 1.0

    needs: ClassVar[tuple[str, ...]] = ("values",)
    gives: ClassVar[tuple[str, ...]] = ("returns",)
    axis: ClassVar[str] = "token"  # an episode without records of its turns is one turn
    compares: ClassVar[str] = "values"

    def __post_init__(self):
        check_unit("estimator 'turn_gae'", gamma=self.gamma, lam=self.lam)

    def __call__(self, batch: Batch) -> Credit:
        """[N] float64 advantages and float32 returns, 0 outside the channel."""
        reward, values = step_rewards(batch), batch.columns["values"]
        advantage, returns = np.zeros(len(reward)), np.zeros(len(reward), dtype=np.float32)
        for turns in TurnSteps.in_parts(batch):
            value = np.asarray(values[turns.steps[turns.first]], dtype=np.float64)
            gained = lambda_advantages(turns.sums(reward), value, turns.ends, self.gamma, self.lam)
            turns.spread(advantage, gained)
            turns.spread(returns, gained + value)
        return Credit(advantage, {"returns": returns})
