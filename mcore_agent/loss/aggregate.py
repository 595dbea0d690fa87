"""How a loss per token becomes one number (M25, M16): a weight for every token of the global batch.

An aggregation is a function ``(mask [N] bool, batch) -> weights [N] float32``. The weights already hold the global
denominators, so that the loss is the plain sum of ``weight * per_token`` over all micro-batches and ranks. They are 0
outside the mask; a batch without a single masked token gives zeros. Units (rows, episodes) without a token in the
mask are not counted. ``unit`` says what shares one loss mass: with ``token`` and ``episode`` the weights do not
depend on how an episode is cut into rows.
"""

from collections.abc import Callable

import numpy as np

from mcore_agent import registry
from mcore_agent.types import Batch

Aggregation = Callable[[np.ndarray, Batch], np.ndarray]


def aggregation(name: str, unit: str) -> Callable[[Aggregation], Aggregation]:
    """Decorator: registers an aggregation and notes the unit that it gives equal mass to."""

    def add(function):
        function.unit = unit
        return registry.register("aggregation", name)(function)

    return add


def weights(name: str, mask: np.ndarray, batch: Batch) -> np.ndarray:
    """[N] float32 weights by the aggregation's name. Raises RegistryError for an unknown one."""
    return registry.get("aggregation", name)(mask, batch)


@aggregation("token_mean", unit="token")
def token_mean(mask: np.ndarray, batch: Batch) -> np.ndarray:
    """1 / (tokens in the mask): the mean over all tokens of the global batch (M16, DAPO)."""
    return _to_weights(mask, np.full(len(mask), max(int(mask.sum()), 1)))


@aggregation("seq_mean_token_mean", unit="row")
def seq_mean_token_mean(mask: np.ndarray, batch: Batch) -> np.ndarray:
    """1 / (rows * tokens of the row): the mean within each row, then over rows (GRPO)."""
    size, count = _sizes(mask, batch.token_row)
    return _to_weights(mask, count * size)


@aggregation("seq_mean_token_sum", unit="row")
def seq_mean_token_sum(mask: np.ndarray, batch: Batch) -> np.ndarray:
    """1 / rows: the sum within each row, then the mean over rows (Dr.GRPO up to its constant)."""
    size, count = _sizes(mask, batch.token_row)
    return _to_weights(mask, np.full(len(size), count))


@aggregation("episode_mean", unit="episode")
def episode_mean(mask: np.ndarray, batch: Batch) -> np.ndarray:
    """1 / (episodes * tokens of the episode): each rollout weighs the same, whatever its rows."""
    size, count = _sizes(mask, batch.token_episode)
    return _to_weights(mask, count * size)


def _sizes(mask: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, int]:
    """[N] masked tokens of the unit that each token belongs to, and the number of units that have any."""
    per_unit = np.bincount(unit, weights=mask)
    return per_unit[unit], max(int((per_unit > 0).sum()), 1)


def _to_weights(mask: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(mask, 1.0 / np.maximum(denominator, 1), 0.0).astype(np.float32)
