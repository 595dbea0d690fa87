"""Tokens that too old weights have sampled are not trained on (I3; M99)."""

from dataclasses import replace

import numpy as np

from mcore_agent.batch.microbatch import PlanError
from mcore_agent.types import Batch, Row


def limit_age(batch: Batch, version: int, max_age: int) -> tuple[Batch, int]:
    """The batch with ``pg`` narrowed to tokens at most ``max_age`` weight versions older than ``version``, and how many left it.

    They leave the channel, so they are in no denominator either, and remain as context. Advantages must be assigned
    after it. A batch of which nothing leaves is returned as it is. Raises PlanError for a token of the future, and for a
    negative age.
    """
    if max_age < 0:
        raise PlanError(f"max_age is {max_age}, but must be at least 0")
    mask, sampled_by = batch.channel("pg"), batch.tokens("version")
    newest = int(sampled_by[mask].max(initial=-1))
    if newest > version:
        raise PlanError(f"a token was sampled by weight version {newest}, but the present one is {version}")
    old = mask & (sampled_by < version - max_age)
    if not old.any():
        return batch, 0
    episodes = tuple(replace(e, rows=tuple(_narrowed(row, version - max_age) for row in e.rows)) for e in batch.episodes)
    return Batch(episodes, batch.columns), int(old.sum())


def _narrowed(row: Row, oldest: int) -> Row:
    fresh = row.channel("pg") & (row.version >= oldest)
    return row if np.array_equal(fresh, row.channel("pg")) else replace(row, channels={**row.channels, "pg": fresh})
