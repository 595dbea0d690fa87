"""Discounted returns standardized over the whole batch (M11; REINFORCE++, 2501.03262)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import center, check_unit, scores, standardize, voters
from mcore_agent.credit.stretches import step_rewards
from mcore_agent.credit.sums import decayed_sum, run_ends
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "reinforce_pp")
@dataclass(frozen=True)
class ReinforcePp:
    """``G = r + gamma G'`` over an episode's sampled tokens, then ``(G - mean) / deviation`` over all those of the batch.

    Observations are no steps: a reward reaches every turn before it. With ``baseline`` ``group`` the mean of the episode's
    group is first taken off its reward, which suits several answers to one task.

    Episodes of 1 and 3 tokens with rewards 1 and 0: the mean is 1/4 and the deviation sqrt(3)/4, so that the first token
    gets sqrt(3) and the others -1/sqrt(3).
    """

    gamma: float = 1.0
    baseline: Literal["none", "group"] = "none"

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "batch"

    def __post_init__(self):
        check_unit("estimator 'reinforce_pp'", gamma=self.gamma)

    def __call__(self, batch: Batch) -> np.ndarray:
        """[N] float64 advantages, 0 outside the channel."""
        steps = np.flatnonzero(batch.channel("pg"))
        episode = batch.token_episode[steps]
        reward = step_rewards(batch)[steps]
        if self.baseline == "group":
            last = np.append(episode[1:] != episode[:-1], True)[: len(steps)]
            reward[last] -= _group_mean(batch)[episode[last]]
        out = np.zeros(len(batch.token_row))
        out[steps] = standardize(decayed_sum(reward, run_ends(episode), self.gamma))
        return out


def _group_mean(batch: Batch) -> np.ndarray:
    """[E] mean score of the episode's group; 0 of an episode that only serves comparison."""
    out, votes = np.zeros(len(batch.episodes)), voters(batch)
    reward = scores(batch)[votes]
    out[votes] = reward - center(reward, batch.by("group")[votes])
    return out
