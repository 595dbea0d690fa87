"""Generalized advantages over the tokens of an episode, from a critic's values (M4; 1506.02438 eq. 16)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
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
        """[N] float64 advantages and returns, 0 outside the channel."""
        steps = np.flatnonzero(batch.channel("pg"))
        episode = batch.token_episode[steps]  # ascending
        values = np.asarray(batch.columns["values"], dtype=np.float64)[steps]
        last = np.append(episode[1:] != episode[:-1], True)[: len(steps)]
        following = np.where(last, 0.0, np.append(values[1:], 0.0)[: len(steps)])
        delta = step_rewards(batch)[steps] + self.gamma * following - values
        gained = decayed_sum(delta, episode, self.gamma * self.lam)
        advantage, returns = np.zeros(len(batch.token_row)), np.zeros(len(batch.token_row))
        advantage[steps], returns[steps] = gained, gained + values
        return Credit(advantage, {"returns": returns})


def step_rewards(batch: Batch) -> np.ndarray:
    """[N] the rewards of each episode at the sampled tokens that they follow, with those that a shaping gave to tokens.

    They add up to the episode's score (``groups.scores``).
    The reward of a turn without a sampled token of its own counts at the last one before it, or else at the episode's
    first. An episode without any sampled token has nowhere to put a reward.
    """
    out = np.array(batch.columns.get("token_reward", np.zeros(len(batch.token_row))), dtype=np.float64)
    mask = batch.channel("pg")
    ends = np.searchsorted(batch.token_episode, np.arange(len(batch.episodes) + 1))
    first_turn = np.searchsorted(batch.turn_episode, np.arange(len(batch.episodes)))
    for i, episode in enumerate(batch.episodes):
        steps = ends[i] + np.flatnonzero(mask[ends[i] : ends[i + 1]])
        if not len(steps):
            continue
        for value in episode.rewards.values():
            if np.ndim(value) == 0:
                out[steps[-1]] += value  # type: ignore[operator]
                continue
            turn = batch.token_turn[steps] - first_turn[i]
            for number, reward in enumerate(value):  # type: ignore[arg-type]
                before = np.flatnonzero(turn <= number)
                out[steps[before[-1] if len(before) else 0]] += reward
    return out


def decayed_sum(delta: np.ndarray, episode: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """[n] ``A[t] = delta[t] + decay[t] * A[t + 1]`` within runs of equal ``episode`` (ascending); ``decay`` is one number or [n]."""
    out = delta.copy()
    decay = np.broadcast_to(decay, delta.shape)
    if not len(out):
        return out
    starts = np.flatnonzero(np.diff(episode, prepend=episode[0] - 1))
    size = np.diff(np.append(starts, len(out)))
    order = np.argsort(-size, kind="stable")
    ends, size = (starts + size)[order], size[order]
    for back in range(2, int(size[0]) + 1):  # all episodes at once, from their ends
        at = ends[: np.searchsorted(-size, -back, side="right")] - back
        out[at] += decay[at] * out[at + 1]
    return out
