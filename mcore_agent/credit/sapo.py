"""Returns of turns by a value of what the turn did (M96; SAPO: SARSA targets, lambda-returns, batch normalization)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import check_unit, standardize
from mcore_agent.credit.stretches import step_rewards
from mcore_agent.credit.sums import decayed_sum, following
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "sapo")
@dataclass(frozen=True)
class Sapo:
    """``G = r + gamma ((1 - lam) Q' + lam G')``, where ' is the episode's next turn; 0 behind the last. A is G, standardized over
    the turns of the batch, each of which counts once.

    Q is the value of the state with a turn's last token in it (column ``values_behind``): it knows the action, and nothing that
    the environment answered. Because Q knows the
    action it is no baseline of its own turn: G - Q is 0 on average, whatever was done. ``returns`` = G at every token of the
    turn, of which the critic learns the last (loss ``turn_value``); with lam 0 it is SARSA's target.

    Two turns that earn 0 and 1 with Q = .3 .6, gamma .5 and lam .5: G = 1, then .5 * (.5 * .6 + .5 * 1) = .4. The mean is .7,
    the deviation .3, and A = -1, 1.
    """

    gamma: float = 1.0
    lam: float = 0.95

    needs: ClassVar[tuple[str, ...]] = ("values_behind",)
    gives: ClassVar[tuple[str, ...]] = ("returns",)
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "batch"

    def __post_init__(self):
        check_unit("estimator 'sapo'", gamma=self.gamma, lam=self.lam)

    def __call__(self, batch: Batch) -> Credit:
        """[N] float64 advantages and float32 returns, 0 outside the channel."""
        reward, values, gained = step_rewards(batch), batch.columns["values_behind"], [np.zeros(0)]
        advantage, returns = np.zeros(len(reward)), np.zeros(len(reward), dtype=np.float32)
        pieces = list(TurnSteps.in_parts(batch))
        for turns in pieces:
            worth = np.asarray(values[turns.steps[turns.last]], dtype=np.float64)
            target = turns.sums(reward) + self.gamma * (1 - self.lam) * following(worth, turns.ends)
            gained.append(decayed_sum(target, turns.ends, self.gamma * self.lam))
            turns.spread(returns, gained[-1])
        scaled, at = standardize(np.concatenate(gained)), 0
        for turns in pieces:
            turns.spread(advantage, scaled[at : at + len(turns.first)])
            at += len(turns.first)
        return Credit(advantage, {"returns": returns})
