"""Demonstrations as episodes: rows that train by imitation only (M30)."""

from collections.abc import Sequence

import numpy as np

from mcore_agent.types import Episode, RecordError, Row, Task


def demonstration(task: Task, tokens: Sequence[int] | np.ndarray, trained: Sequence[bool] | np.ndarray, id: str) -> Episode:
    """One demonstration as an episode of one row: nothing sampled, the channel ``sft`` on the ``trained`` tokens.

    The prompt 11 12 and the demonstrated answer 21 2::

        tokens   11  12  21   2
        sampled   0   0   0   0
        sft       0   0   1   1

    It is a group of its own, so that it takes part in no other episode's baseline. Raises RecordError when no
    token is trained or the first one is (nothing comes before it, so that it has no probability).
    """
    size = len(tokens)
    mask = np.asarray(trained, dtype=bool)
    if mask.shape != (size,):
        raise RecordError(f"demonstration {id!r}: {size} tokens, but a mask of shape {mask.shape}")
    if not mask.any() or mask[0]:
        raise RecordError(f"demonstration {id!r}: {'the first token' if mask.any() else 'no token'} is trained")
    row = Row(
        tokens=np.asarray(tokens),
        sampled=np.zeros(size),
        logp=np.zeros(size),
        version=np.full(size, -1),
        channels={"sft": mask},
    )
    return Episode(id=id, task=task, group=f"sft/{id}", rows=(row,))
