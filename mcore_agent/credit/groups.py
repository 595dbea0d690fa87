"""Statistics of groups of episodes, by explicit group id and with one vote per episode."""

import numpy as np

from mcore_agent.types import Batch

# Rewards closer than this (relative, and absolute below 1) are equal: their difference is rounding of sums.
SAME = 1e-9


class CreditError(ValueError):
    """Credit cannot be assigned: a column is missing, an episode counts twice, or a result is not finite."""


def scores(batch: Batch) -> np.ndarray:
    """[E] float64: what each episode earned, with the rewards that a shaping gave to its tokens."""
    shaped = batch.columns.get("token_reward")
    if shaped is None:
        return batch.rewards
    return batch.rewards + np.bincount(batch.token_episode, weights=shaped, minlength=len(batch.episodes))


def informative(batch: Batch) -> np.ndarray:
    """[E] bool: the episode's group has at least two different rewards, so that it can teach something (M10)."""
    return spread(batch.rewards, batch.by("group"))


def spread(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[E] bool: the values of the element's group are not all equal up to rounding."""
    count = int(group.max(initial=-1)) + 1
    high, low = np.full(count, -np.inf), np.full(count, np.inf)
    np.maximum.at(high, group, values)
    np.minimum.at(low, group, values)
    differ = high - low > SAME * np.maximum(1.0, np.maximum(abs(high), abs(low)))
    return differ[group]


def center(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """[E] float64: value minus the mean of its group."""
    return values - _group_sum(values, group)[group] / np.bincount(group)[group]


def deviation(centered: np.ndarray, group: np.ndarray, sample: bool) -> np.ndarray:
    """[E] float64: standard deviation of the element's group, dividing by n (or n - 1 when ``sample``; 0 for n = 1)."""
    size = np.bincount(group)
    return np.sqrt(_group_sum(centered**2, group) / np.maximum(size - sample, 1))[group]


def _group_sum(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    return np.bincount(group, weights=values)
