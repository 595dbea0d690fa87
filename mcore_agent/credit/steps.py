"""Decisions as steps: the state that each was taken in, what it earned, and statistics over groups of steps."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_agent.credit.groups import center, deviation, rivals, spread
from mcore_agent.credit.sums import decayed_sum, run_ends
from mcore_agent.types import Batch


@dataclass(frozen=True)
class Steps:
    """One step per turn, episode after episode; an episode without turns is one step in a state that nobody knows.

    An episode of two turns in the states ``a`` and ``b`` with the reward 1, and one without turns with the reward 0::

        episode  0 0 1      place  0 1 0      key  a b ""      reward  0 1 0

    The reward of a whole episode belongs to its last step, one of a turn to the turn, one that a shaping gave to a token to
    the token's step. A token belongs to the step of its turn; one that no segment names to the step before it in its episode.
    """

    episode: np.ndarray  # [K] ascending
    place: np.ndarray  # [K] 0, 1, … within the episode
    group: np.ndarray  # [K] the episode's group, as ``rivals`` has it
    key: tuple[str, ...]  # [K] the state's name, "" for unknown
    history: tuple[tuple[str, ...], ...]  # [K] names of the states before it, oldest first
    reward: np.ndarray  # [K] float64
    token: np.ndarray  # [N] the step that each token belongs to
    last: np.ndarray  # [K] bool: the episode's last step

    def returns(self, gamma: float) -> np.ndarray:
        """[K] the discounted sum of rewards from the step on."""
        return decayed_sum(self.reward, run_ends(self.episode), gamma)

    def following(self, values: np.ndarray) -> np.ndarray:
        """[K] the value of the episode's next step, 0 after its last."""
        return np.where(self.last, 0.0, np.append(values[1:], 0.0)[: len(values)])

    def states(self, names: Sequence[Hashable] | None = None) -> np.ndarray:
        """[K] small integers, equal for steps of one group with equal names (of their states, unless given); None is no name.

        A step without a name, or in a state without one, shares its number with no other.
        """
        known: dict[Hashable, int] = {}
        names = [key or None for key in self.key] if names is None else names
        labels = [("step", k) if name is None else (int(g), name) for k, (g, name) in enumerate(zip(self.group, names, strict=True))]
        return np.array([known.setdefault(label, len(known)) for label in labels], dtype=np.int64)


def steps_of(batch: Batch) -> Steps:
    """The steps of a batch's episodes."""
    count = np.array([max(1, len(e.turns)) for e in batch.episodes], dtype=np.int64)
    first = np.cumsum([0, *count])
    episode = np.repeat(np.arange(len(count)), count)
    reward = np.zeros(int(first[-1]))
    for i, e in enumerate(batch.episodes):
        for value in e.rewards.values():
            if np.ndim(value) == 0:
                reward[first[i + 1] - 1] += value  # type: ignore[operator]
            else:
                reward[first[i] : first[i] + len(e.turns)] += np.asarray(value, dtype=np.float64)
    token = _token_step(batch, first)
    if "token_reward" in batch.columns:
        reward += np.bincount(token, weights=batch.columns["token_reward"], minlength=len(reward))
    return Steps(
        episode=episode,
        place=np.arange(len(episode)) - first[episode],
        group=rivals(batch)[episode],
        key=tuple(key for e in batch.episodes for key in ([turn.state_key for turn in e.turns] or [""])),
        history=tuple(past for e in batch.episodes for past in ([turn.history for turn in e.turns] or [()])),
        reward=reward,
        token=token,
        last=np.append(episode[1:] != episode[:-1], True)[: len(episode)],
    )


def _token_step(batch: Batch, first: np.ndarray) -> np.ndarray:
    """[N] the step of each token; before the first named one the episode's first step."""
    own, turn = batch.token_episode, batch.token_turn
    first_turn = np.cumsum([0, *(len(e.turns) for e in batch.episodes)])
    step = np.where(turn >= 0, first[own] + turn - first_turn[own], first[own])
    known = (turn >= 0) | np.append(True, own[1:] != own[:-1])[: len(own)]
    return step[np.maximum.accumulate(np.where(known, np.arange(len(own)), 0))] if len(own) else step


def mean_of(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[K] the mean of the element's group; exactly the value itself in a group of one."""
    return (np.bincount(group, weights=values) / np.maximum(np.bincount(group), 1))[group]


def relative(values: np.ndarray, group: np.ndarray, sigma: bool, eps: float) -> np.ndarray:
    """[K] value minus the mean of its group, over deviation + eps if ``sigma``; exactly 0 where a group's values are all equal."""
    if not len(values):
        return values
    centered, differ = center(values, group), spread(values, group)
    scale = deviation(centered, group, sample=False) + eps if sigma else np.ones(len(values))
    return np.where(differ, centered / np.where(differ, scale, 1.0), 0.0)
