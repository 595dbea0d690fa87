"""Statistics of groups of episodes, by explicit group id and with one vote per episode."""

import numpy as np

from mcore_agent.types import GREEDY, Batch

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


def rivals(batch: Batch) -> np.ndarray:
    """[E] small integers, equal for the episodes of a group that are held against each other: the greedy ones stand apart."""
    return np.unique(2 * batch.by("group") + ~voters(batch), return_inverse=True)[1]


def informative(batch: Batch) -> np.ndarray:
    """[E] bool: the episode's group has at least two different rewards, so that it can teach something (M10)."""
    return spread(batch.rewards, rivals(batch))


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


def voters(batch: Batch) -> np.ndarray:
    """[E] bool: not a greedy episode, which is there for comparison and counts in no statistic of its group (M13)."""
    return np.array([e.branch != GREEDY for e in batch.episodes], dtype=bool)


def standardize(values: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    """[n] ``(v - mean) / deviation``, both weighted; exactly 0 everywhere when the values are equal up to rounding."""
    if not spread(values, np.zeros(len(values), dtype=np.int64)).any():
        return np.zeros(len(values))
    weight = np.broadcast_to(weight, values.shape) / np.sum(np.broadcast_to(weight, values.shape))
    centered = values - np.sum(weight * values)
    return centered / np.sqrt(np.sum(weight * centered**2))


def check_unit(what: str, **settings: float) -> None:
    """Raises CreditError unless every setting is in [0, 1]; ``what`` is for example ``estimator 'gae'``."""
    for name, value in settings.items():
        if not 0 <= value <= 1:
            raise CreditError(f"{what}: {name} is {value}, but must be in [0, 1]")
