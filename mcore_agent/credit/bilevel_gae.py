"""Generalized advantages on two levels: over turns, and within each turn towards the turn's return (M6; RAGEN, 2504.20073)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import check_unit
from mcore_agent.credit.stretches import step_rewards
from mcore_agent.credit.sums import following, lambda_advantages
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "bilevel_gae")
@dataclass(frozen=True)
class BilevelGae:
    """Turns first: ``A = r + turn_gamma V' - V + turn_gamma turn_lam A'``, as ``turn_gae``. What a turn's end is worth beyond its
    own rewards, ``turn_gamma (V' + turn_lam A')``, is then a reward of its last token, and tokens get ``gae``'s advantages with
    each turn an episode of its own. Turns end where their records say: one without a reward ends like any other.

    Gives ``returns`` = A + V of the tokens. An episode of one turn gets the same as from ``gae``; turns of one token each as
    from ``turn_gae``.

    Two turns of two tokens, values .1 .2 and .4 .7, reward 1 at the end, turn_gamma 1/2, turn_lam, gamma and lam 1: turn 1 has
    A = 1 - .4 = .6, so that turn 0 ends with .5 * (.4 + .6) = .5. Tokens get .5 - .1 = .4, .5 - .2 = .3 and 1 - .4 = .6, 1 - .7 = .3.
    """

    turn_gamma: float = 0.95
    turn_lam: float = 1.0
    gamma: float = 1.0
    lam: float = 1.0

    needs: ClassVar[tuple[str, ...]] = ("values",)
    gives: ClassVar[tuple[str, ...]] = ("returns",)
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "values"

    def __post_init__(self):
        check_unit("estimator 'bilevel_gae'", turn_gamma=self.turn_gamma, turn_lam=self.turn_lam, gamma=self.gamma, lam=self.lam)

    def __call__(self, batch: Batch) -> Credit:
        """[N] float64 advantages and float32 returns, 0 outside the channel."""
        earned, values = step_rewards(batch), batch.columns["values"]
        advantage, returns = np.zeros(len(earned)), np.zeros(len(earned), dtype=np.float32)
        for turns in TurnSteps.in_parts(batch):
            value = np.asarray(values[turns.steps], dtype=np.float64)
            worth = value[turns.first]  # [m]
            gained = lambda_advantages(turns.sums(earned), worth, turns.ends, self.turn_gamma, self.turn_lam)
            reward = earned[turns.steps]
            reward[turns.last] += self.turn_gamma * following(worth + self.turn_lam * gained, turns.ends)
            inner = lambda_advantages(reward, value, turns.last + 1, self.gamma, self.lam)
            advantage[turns.steps], returns[turns.steps] = inner, inner + value
        return Credit(advantage, {"returns": returns})
