"""Values and advantages from what another policy has sampled (M33; IMPALA, 1802.01561 eq. 1)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.stretches import Stretch, stretches
from mcore_agent.credit.sums import decayed_sum, following
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch

MAX_LOG_RATIO = 20.0  # of a ratio without a finite bar


@register("estimator", "vtrace")
@dataclass(frozen=True)
class Vtrace:
    """``v = V + delta + gamma c (v' - V')`` with ``delta = rho (r + gamma V' - V)`` and ``A = r + gamma v' - V``.

    ``rho = min(rho_bar, w)`` and ``c = lam min(c_bar, w)`` bound the ratio ``w = pi / pi_behaviour`` of a token, where pi is
    the policy that the batch finds (``logp_prox``). Steps are the tokens of the channel ``pg``, as in ``gae``: ' is the
    episode's next sampled token, in whatever row. Gives ``returns`` = v, what the critic learns.

    Two tokens with w = 2, .5, values .5, .5, rewards 0, 1 and no discount: rho = 1, .5, so that v[1] = .5 + .5 * (1 - .5)
    = .75, and v[0] = .5 + (0 + .5 - .5) + 1 * (.75 - .5) = .75.
    """

    gamma: float = 1.0
    lam: float = 1.0
    rho_bar: float = 1.0  # decides which policy is valued: infinite: pi; towards 0: the one that sampled
    c_bar: float = 1.0  # how far a difference is carried back; at most rho_bar
    weighted: bool = False  # A times rho, as in the paper: for a loss that has no ratio to the policy that sampled

    needs: ClassVar[tuple[str, ...]] = ("values", "logp_prox", "logp_old")
    gives: ClassVar[tuple[str, ...]] = ("returns",)
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "values"

    def __post_init__(self):
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise CreditError(f"estimator 'vtrace': {name} is {value}, but must be in [0, 1]")
        if not 0 < self.c_bar <= self.rho_bar:
            raise CreditError(f"estimator 'vtrace': c_bar is {self.c_bar} and rho_bar {self.rho_bar}, but 0 < c_bar <= rho_bar must hold")

    def __call__(self, batch: Batch) -> Credit:
        """[N] float64 advantages and float32 returns, 0 outside the channel."""
        advantage, returns = np.zeros(len(batch.token_row)), np.zeros(len(batch.token_row), dtype=np.float32)
        for steps in stretches(batch):
            gained, target = self._of(steps, batch)
            steps.put(advantage, gained)
            steps.put(returns, target)
        return Credit(advantage, {"returns": returns})

    def _of(self, steps: Stretch, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """A and v [n] of some episodes' tokens."""
        value, now, old = (steps.take(batch.columns[name]) for name in self.needs)
        rho, c = (np.exp(np.minimum(now - old, min(math.log(bar), MAX_LOG_RATIO))) for bar in (self.rho_bar, self.c_bar))
        delta = rho * (steps.reward + self.gamma * following(value, steps.ends) - value)
        target = value + decayed_sum(delta, steps.ends, self.gamma * self.lam * c)
        gained = steps.reward + self.gamma * following(target, steps.ends) - value
        return rho * gained if self.weighted else gained, target
