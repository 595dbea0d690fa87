"""Steps against those taken in the same state after the same last states, over growing pasts (M121; HGPO, 2602.22817 sec. 4)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.gigpo import check_comparison, episode_part
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.steps import Steps, relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "hgpo")
@dataclass(frozen=True)
class Hgpo:
    """``A = A_episode + omega sum_d w_d A_d`` with ``w_d`` in proportion to ``(d + 1) ** alpha``.

    A_d compares the discounted returns of steps of one group whose state and last d states before it are the same, for d from 0
    to ``depth``; only the depths at which a step has a peer share its weight. With ``depth: 0`` this is ``gigpo``.

    A step has peers at depths 0 and 1 with A_0 = .4 and A_1 = -.2; alpha 1 weighs them 1/3 and 2/3: .1333 - .1333 = 0.
    """

    depth: int = 2
    alpha: float = 1.0
    omega: float = 1.0
    gamma: float = 0.95
    norm: Literal["mean", "mean_std"] = "mean_std"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("hgpo", self.omega, self.gamma, self.eps)
        if self.depth < 0 or not self.alpha >= 0:
            raise CreditError(f"estimator 'hgpo': depth is {self.depth} and alpha {self.alpha}, but both must be at least 0")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps, sigma = steps_of(batch), self.norm == "mean_std"
        value = steps.returns(self.gamma)
        found, weight = np.zeros(len(value)), np.zeros(len(value))
        for d in range(self.depth + 1):
            peers = steps.states(pasts(steps, d))
            has = np.bincount(peers)[peers] > 1
            share = np.where(has, (d + 1.0) ** self.alpha, 0.0)
            weight += share
            found += share * relative(value, peers, sigma, self.eps)
        step = found / np.where(weight > 0, weight, 1.0)
        return (episode_part(batch, steps, sigma, self.eps) + self.omega * step)[steps.token]


def pasts(steps: Steps, depth: int, rename: dict[tuple[int, str], str] | None = None) -> list[tuple[str, ...] | None]:
    """[K] the state and the last ``depth`` before it, oldest first; None where one of them is unknown or there are fewer.

    ``rename`` gives states of a group, ``(group, name)``, another name.
    """
    out: list[tuple[str, ...] | None] = []
    for group, key, history in zip(steps.group.tolist(), steps.key, steps.history, strict=True):
        names = (*(history[-depth:] if depth else ()), key)
        whole = len(names) == depth + 1 and all(names)
        out.append(tuple((rename or {}).get((group, name), name) for name in names) if whole else None)
    return out
