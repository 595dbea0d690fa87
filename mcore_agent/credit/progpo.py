"""Steps against those with the same past, and by what they add to a state's potential (M122; ProGPO)."""

import difflib
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.gigpo import check_comparison
from mcore_agent.credit.groups import SAME, CreditError, center, deviation
from mcore_agent.credit.hgpo import pasts
from mcore_agent.credit.steps import Steps, mean_of, relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "progpo")
@dataclass(frozen=True)
class Progpo:
    """``A = A_prefix + omega (r + gamma Phi(s') - Phi(s))``.

    A_prefix compares the discounted returns of steps of one group with exactly the same states before them. The potential Phi
    of a step's state is the mean of what steps returned that share the state and the last d states before it, fused over d from
    0 to ``depth``: ``Phi = sum_d mu_d / v_d / sum_d 1 / v_d`` with ``v_d = s_d^2 / n_d + prior``; behind the last step it
    is 0. A group of one has no variance of its own and takes that of all steps of the task's group. A step without a peer has
    A_prefix = 0, which leaves the potential; states without a key have neither. With ``similarity`` below 1 the potential
    takes states of a group for the same whose keys, which then must be texts, are that similar.

    With n = 8, 2, means .2, .6, variances .16, .04 and no prior, v is .02 and .02: Phi = (.2 + .6) / 2 = .4.
    """

    depth: int = 2
    omega: float = 1.0
    gamma: float = 0.95
    prior: float = 0.01
    similarity: float = 1.0  # 1: only equal keys; .95 is usual
    norm: Literal["mean", "mean_std"] = "mean"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"

    def __post_init__(self):
        check_comparison("progpo", self.omega, self.gamma, self.eps)
        if self.depth < 0:
            raise CreditError(f"estimator 'progpo': depth is {self.depth}, but must be at least 0")
        if not self.prior > 0:
            raise CreditError(f"estimator 'progpo': prior is {self.prior}, but must be above 0: equal returns have no variance")
        if not 0 < self.similarity <= 1:
            raise CreditError(f"estimator 'progpo': similarity is {self.similarity}, but must be in (0, 1]")

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        steps = steps_of(batch)
        value = steps.returns(self.gamma)
        whole = [(*past, key) if key and all(past) else None for past, key in zip(steps.history, steps.key, strict=True)]
        prefix = relative(value, steps.states(whole), self.norm == "mean_std", self.eps)
        phi = self.potential(steps, value)
        gain = steps.reward + self.gamma * steps.following(phi) - phi
        gain = np.where(abs(gain) > SAME * np.maximum(1.0, abs(phi)), gain, 0.0)  # less is the rounding of sums
        return (prefix + self.omega * gain)[steps.token]

    def potential(self, steps: Steps, value: np.ndarray) -> np.ndarray:
        """[K] Phi of the state that each step was taken in."""
        rename = merged(steps, self.similarity) if self.similarity < 1 else None
        pooled = deviation(center(value, steps.group), steps.group, sample=False) ** 2
        means, variances = [], []
        for d in range(self.depth + 1):
            names = pasts(steps, d, rename)
            peers = steps.states(names)
            size = np.bincount(peers)[peers]
            own = np.where(size > 1, deviation(center(value, peers), peers, sample=False) ** 2, pooled)
            there = np.array([d == 0 or name is not None for name in names])
            means.append(mean_of(value, peers))
            variances.append(np.where(there, own / size + self.prior, np.inf))
        return fuse(np.array(means), np.array(variances))


def fuse(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """[K] means [D, K] weighed by the inverses of their variances [D, K]; an infinite variance is no vote."""
    weight = 1.0 / variance
    return np.sum(weight / weight.sum(axis=0) * mean, axis=0)


def merged(steps: Steps, similarity: float) -> dict[tuple[int, str], str]:
    """A name for each state of a group: the first, in the order of the alphabet, of those it is similar to."""
    out: dict[tuple[int, str], str] = {}
    heads: dict[int, list[str]] = {}
    for group, name in sorted({(int(g), key) for g, key in zip(steps.group, steps.key, strict=True) if key}):
        near = (h for h in heads.setdefault(group, []) if difflib.SequenceMatcher(None, h, name, autojunk=False).ratio() >= similarity)
        head = next(near, name)
        if head == name:
            heads[group].append(name)
        out[group, name] = head
    return out
