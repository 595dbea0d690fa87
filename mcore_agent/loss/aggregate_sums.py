"""Sums over sequences instead of means (M25; Dr. GRPO, 2503.20783 sec. 3.1): a long sequence is not discounted for its length."""

import numpy as np

from mcore_agent.loss.aggregate import aggregation
from mcore_agent.types import Batch


@aggregation("seq_mean_token_sum_norm", unit="row")
def seq_mean_token_sum_norm(mask: np.ndarray, batch: Batch) -> np.ndarray:
    """1 / (rows * L), with L the masked tokens of the longest row of the global batch: one constant for all tokens.

    Rows of 2 and 6 tokens have the weights 1/12 each.
    """
    size = np.bincount(batch.token_row, weights=mask)
    return np.where(mask, 1.0 / max((size > 0).sum() * size.max(initial=0), 1), 0.0).astype(np.float32)


@aggregation("episode_mean_token_sum", unit="episode")
def episode_mean_token_sum(mask: np.ndarray, batch: Batch) -> np.ndarray:
    """1 / episodes: the sum within each episode, whatever its rows, then the mean over episodes.

    Two episodes have the weight 1/2 on every token.
    """
    size = np.bincount(batch.token_episode, weights=mask)
    return np.where(mask, 1.0 / max((size > 0).sum(), 1), 0.0).astype(np.float32)
