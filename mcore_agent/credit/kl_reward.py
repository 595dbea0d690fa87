"""The KL divergence to the reference policy as a cost in the reward (M7; InstructGPT, 2203.02155 eq. 2)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("shaping", "kl_reward")
@dataclass(frozen=True)
class KlReward:
    """``-beta (logp_prox - logp_ref)`` on each of the policy's own tokens, or their sum over the episode at its last one.

    The policy is the one that the batch finds, scored by the learner like the reference (``logp_prox``): where both have the
    same weights the cost is exactly 0, while the engine's rounding in ``logp_old`` would be taken for a reward. Tokens outside
    the channel ``pg`` cost nothing; ``beta`` 0 looks at no number.

    Log-ratios .5 and -.2 with beta .1: -.05 and +.02 on the tokens, or 0 and -.03 as a ``trajectory``.
    """

    beta: float = 0.01
    per: Literal["token", "trajectory"] = "token"

    needs: ClassVar[tuple[str, ...]] = ("logp_prox", "logp_ref")

    def __post_init__(self):
        if not 0 <= self.beta < np.inf:
            raise CreditError(f"shaping 'kl_reward': beta is {self.beta}, but must be finite and at least 0")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64, 0 outside the channel."""
        out = np.zeros(len(batch.token_row))
        if self.beta == 0:
            return out
        mask = batch.channel("pg")
        now, reference = (batch.columns[name] for name in self.needs)
        np.subtract(reference, now, out=out, where=mask, dtype=np.float64)
        out *= self.beta
        if self.per == "token":
            return out
        steps = np.flatnonzero(mask)
        episode = batch.token_episode[steps]
        last = np.append(episode[1:] != episode[:-1], True)[: len(steps)]
        total = np.bincount(batch.token_episode, weights=out)[episode[last]] if len(steps) else 0.0
        out[:] = 0.0
        out[steps[last]] = total
        return out
