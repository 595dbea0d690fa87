"""Episodes that walk through named states, for tests of what turns are credited with."""

from collections.abc import Sequence

import numpy as np

from mcore_agent.credit.pipeline import assign
from mcore_agent.types import Batch, Episode, Feedback, Segment, Task, Turn
from tests.strategies import row_of


def walk(
    id: str,
    keys: Sequence[str],
    reward: float | Sequence[float] = 0.0,
    group: str = "g",
    sizes: Sequence[int] | None = None,
    feedback: Sequence[Feedback] | None = None,
    task: Task | None = None,
    branch: str = "",
) -> Episode:
    """One turn in each state of ``keys``, of ``sizes`` sampled tokens (2 each), an observed token between turns.

    A number as ``reward`` is the episode's, a list has one for each turn. Turn i of states a, b, c has the history of those before.
    """
    sizes = sizes or [2] * len(keys)
    sampled, segments = [False], [Segment(0, 1, -1, "prompt")]
    for i, size in enumerate(sizes):
        segments.append(Segment(len(sampled), len(sampled) + size, i, "action"))
        sampled += [True] * size
        if i + 1 < len(sizes):
            segments.append(Segment(len(sampled), len(sampled) + 1, i, "obs"))
            sampled.append(False)
    said = feedback or [Feedback()] * len(keys)
    turns = tuple(Turn(i, "act", key, tuple(keys[:i]), said[i]) for i, key in enumerate(keys))
    named = {"outcome": reward} if np.ndim(reward) == 0 else {"step": list(reward)}  # type: ignore[call-overload]
    return Episode(id, task or Task(f"task/{group}", "toy", ()), group, (row_of(sampled, segments=tuple(segments)),), turns, named,
                   branch=branch)  # fmt: skip


def turns_of(batch: Batch, column: np.ndarray) -> list[list[float]]:
    """The column at each turn of each episode, which must be the same at all its sampled tokens and 0 at others."""
    assert not column[~batch.channel("pg")].any()
    first, out = 0, []
    for e in batch.episodes:
        own = []
        for m in range(first, first + len(e.turns)):
            values = column[(batch.token_turn == m) & batch.channel("pg")]
            assert len(set(values.tolist())) == 1
            own.append(float(values[0]))
        out.append(own)
        first += len(e.turns)
    return out


def credited(episodes: Sequence[Episode], *parts: dict) -> list[list[float]]:
    """The advantages of the turns, by episode."""
    batch = assign(Batch(tuple(episodes)), parts)
    return turns_of(batch, batch.columns["advantage"])
