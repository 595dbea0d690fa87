"""Episodes against their group, and steps against those taken in the same state (M120; GiGPO, 2505.10978 eq. 8)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import CreditError, rivals, scores
from mcore_agent.credit.steps import Steps, relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "gigpo")
@dataclass(frozen=True)
class Gigpo:
    """``A = A_episode + omega A_step``: both are value minus mean, over the deviation too with ``norm: mean_std``.

    A_episode compares the reward of episodes of one group, A_step the discounted return of steps of one group that were taken
    in the same state (``state_key``). A state that was met once, or that has no key, has A_step = 0, so that without repeated
    states and with ``norm: mean_std`` this is ``grpo``.
    ``votes: step`` lets an episode count in the baseline once per turn, as some implementations do.

    Two episodes, gamma .95, norm mean: s0 → s1 → reward 1, and s0 → s0 → s1 → 0. A_episode is ±.5. The returns in s0 are .95, 0
    and 0 with mean .3167, those in s1 are 1 and 0: A is .5 + .6333 = 1.1333 and 1, then -.8167, -.8167 and -1.
    """

    omega: float = 1.0
    gamma: float = 0.95
    norm: Literal["mean", "mean_std"] = "mean_std"
    votes: Literal["episode", "step"] = "episode"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("gigpo", self.omega, self.gamma, self.eps)

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps, sigma = steps_of(batch), self.norm == "mean_std"
        whole = episode_part(batch, steps, sigma, self.eps, by_step=self.votes == "step")
        return (whole + self.omega * relative(steps.returns(self.gamma), steps.states(), sigma, self.eps))[steps.token]


def episode_part(batch: Batch, steps: Steps, sigma: bool, eps: float, by_step: bool = False) -> np.ndarray:
    """[K] each step's share in how its episode compares with its group; ``by_step``: an episode votes once per step."""
    reward, group = scores(batch), rivals(batch)
    return relative(reward[steps.episode], steps.group, sigma, eps) if by_step else relative(reward, group, sigma, eps)[steps.episode]


def check_comparison(name: str, omega: float, gamma: float, eps: float) -> None:
    """Raises CreditError for a setting out of range."""
    if not omega >= 0:
        raise CreditError(f"estimator {name!r}: omega is {omega}, but must be at least 0")
    if not 0 <= gamma <= 1:
        raise CreditError(f"estimator {name!r}: gamma is {gamma}, but must be in [0, 1]")
    if not eps >= 0:
        raise CreditError(f"estimator {name!r}: eps is {eps}, but must be at least 0")
