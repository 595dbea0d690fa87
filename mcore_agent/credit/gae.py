"""Generalized advantages over the tokens of an episode, from a critic's values (M4; 1506.02438 eq. 16)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch

PART = 2**18  # tokens that are worked on at a time: they fit in the cache
NOTHING = 1e-30  # a share this small of what follows is dropped


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
        mask, reward, values = batch.channel("pg"), step_rewards(batch), batch.columns["values"]
        advantage, returns = np.zeros(len(mask)), np.zeros(len(mask))
        for part in parts(batch):
            steps = part.start + np.flatnonzero(mask[part])
            value = np.asarray(values[steps], dtype=np.float64)
            gained = lambda_advantages(reward[steps], value, batch.token_episode[steps], self.gamma, self.lam)
            advantage[steps], returns[steps] = gained, gained + value
        return Credit(advantage, {"returns": returns})


def parts(batch: Batch) -> Iterator[slice]:
    """The token axis in pieces of whole episodes, of at least ``PART`` tokens but for the last."""
    start = 0
    for end in np.searchsorted(batch.token_episode, np.arange(1, len(batch.episodes) + 1)).tolist():
        if end - start >= PART or end == len(batch.token_episode):
            if end > start:
                yield slice(start, end)
            start = end


def lambda_advantages(reward: np.ndarray, values: np.ndarray, episode: np.ndarray, gamma: float, lam: float | np.ndarray) -> np.ndarray:
    """[n] ``A = r + gamma V' - V + gamma lam A'`` of steps, within runs of equal ``episode``; ``lam`` is one number or [n]."""
    return decayed_sum(reward + gamma * following(values, episode) - values, episode, gamma * lam)


def following(values: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """[n] the next step's value, 0 at the last one of each run of equal ``episode``."""
    out = np.zeros(len(values))
    np.copyto(out[:-1], values[1:], where=episode[1:] == episode[:-1])
    return out


def step_rewards(batch: Batch) -> np.ndarray:
    """[N] the rewards of each episode at the sampled tokens that they follow, with those that a shaping gave to tokens.

    They add up to the episode's score (``groups.scores``).
    The reward of a turn without a sampled token of its own counts at the last one before it, or else at the episode's
    first. An episode without any sampled token has nowhere to put a reward.
    """
    shaped = batch.columns.get("token_reward")
    out = np.zeros(len(batch.token_row)) if shaped is None else np.array(shaped, dtype=np.float64)
    mask = batch.channel("pg")
    ends = np.searchsorted(batch.token_episode, np.arange(len(batch.episodes) + 1))
    first_turn = np.searchsorted(batch.turn_episode, np.arange(len(batch.episodes)))
    for i, episode in enumerate(batch.episodes):
        own = mask[ends[i] : ends[i + 1]]
        if not own.any():
            continue
        for value in episode.rewards.values():
            if np.ndim(value) == 0:
                out[ends[i + 1] - 1 - own[::-1].argmax()] += value  # type: ignore[operator]
                continue
            steps = ends[i] + np.flatnonzero(own)
            turn = batch.token_turn[steps] - first_turn[i]
            for number, reward in enumerate(value):  # type: ignore[arg-type]
                before = np.flatnonzero(turn <= number)
                out[steps[before[-1] if len(before) else 0]] += reward
    return out


def decayed_sum(delta: np.ndarray, episode: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """[n] ``A[t] = delta[t] + decay[t] * A[t + 1]`` within runs of equal ``episode`` (ascending); ``decay`` is one number or [n]."""
    out = delta.copy()
    if not len(out):
        return out
    if isinstance(decay, np.ndarray) and np.all(decay == decay.flat[0]):
        decay = float(decay.flat[0])  # an array of one number gives the bits of that number
    starts = np.flatnonzero(np.append(True, episode[1:] != episode[:-1]))
    for a, b in zip(starts.tolist(), [*starts[1:].tolist(), len(out)], strict=True):
        if isinstance(decay, np.ndarray):
            _sum_back(out[a:b], decay[a:b].copy())
        elif decay == 1:
            np.add.accumulate(out[a:b][::-1], out=out[a:b][::-1])
        else:
            _sum_back(out[a:b], np.array(decay))
    return out


def _sum_back(out: np.ndarray, decay: np.ndarray) -> None:
    """``decayed_sum`` of one run, in place: after k rounds each sum reaches over 2^k steps."""
    reach = 1
    while reach < len(out) and np.any(abs(decay) > NOTHING):
        near = decay[:-reach] if decay.ndim else decay
        out[:-reach] += near * out[reach:]
        near *= decay[reach:] if decay.ndim else decay
        reach *= 2
