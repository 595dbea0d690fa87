"""Generalized advantages over the tokens of an episode, from a critic's values (M4; 1506.02438 eq. 16)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.stretches import stretches
from mcore_agent.credit.sums import lambda_advantages
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "gae")
@dataclass(frozen=True)
class Gae:
    """``delta = r + gamma V' - V`` and ``A = delta + gamma lam A'``, where ' is the next token that the policy sampled.

    Tokens outside the channel ``pg`` are no steps: V' and A' reach over them, and over the end of a row, to the episode's
    next sampled token; behind the last one both are 0. A reward of the whole episode counts at its last sampled token, one
    of a turn at the turn's last. Gives ``returns`` = A + V, what the critic learns (M24).

    One episode with reward 1 and values .2 .6 on its two sampled tokens, gamma 1 and lam .5: delta is .6 - .2 = .4 and
    1 - .6 = .4, so that A is .4 + .5 * .4 = .6 and .4, and the returns are .8 and 1.
    """

    gamma: float = 1.0
    lam: float = 1.0  # 1: A = G - V, with G the discounted sum of the rewards to come; 0: A = delta

    needs: ClassVar[tuple[str, ...]] = ("values",)
    gives: ClassVar[tuple[str, ...]] = ("returns",)
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "values"

    def __post_init__(self):
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise CreditError(f"estimator 'gae': {name} is {value}, but must be in [0, 1]")

    def __call__(self, batch: Batch) -> Credit:
        """[N] float64 advantages and float32 returns, 0 outside the channel."""
        advantage, returns = np.zeros(len(batch.token_row)), np.zeros(len(batch.token_row), dtype=np.float32)
        for steps in stretches(batch):
            value = steps.take(batch.columns["values"])
            gained = lambda_advantages(steps.reward, value, steps.ends, self.gamma, self.lam)
            steps.put(advantage, gained)
            steps.put(returns, gained + value)
        return Credit(advantage, {"returns": returns})
