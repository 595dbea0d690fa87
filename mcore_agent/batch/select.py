"""Parts of a batch, always by whole episodes: usable ones, chosen ones, mini-batches of whole groups."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from mcore_agent.batch.microbatch import PlanError
from mcore_agent.types import Batch, Episode


def usable(episodes: Iterable[Episode]) -> tuple[list[Episode], Counter[str]]:
    """Episodes that did not fail for a reason of infrastructure, and how often each reason took one away."""
    kept, lost = [], Counter[str]()
    for episode in episodes:
        if episode.status == "infra_fail":
            lost[episode.reason] += 1
        else:
            kept.append(episode)
    return kept, lost


def select(batch: Batch, chosen: Sequence[int] | np.ndarray) -> Batch:
    """The batch of the chosen episodes, in that order, with their part of every column.

    Raises PlanError when the length of a column fits two axes that would give different parts, or none.
    """
    chosen = np.asarray(chosen, dtype=np.int64)
    axes = {"token": batch.token_episode, "turn": batch.turn_episode, "episode": np.arange(len(batch.episodes))}
    parts = {axis: _places(owner, chosen) for axis, owner in axes.items()}
    columns = {}
    for name, values in batch.columns.items():
        fits = [axis for axis, owner in axes.items() if len(owner) == len(values)]
        if not fits:
            raise PlanError(f"column {name!r} has {len(values)} entries; axes: { {a: len(o) for a, o in axes.items()} }")
        if any(not np.array_equal(parts[axis], parts[fits[0]]) for axis in fits):
            raise PlanError(f"column {name!r} with {len(values)} entries could be of axis {' or '.join(fits)}")
        columns[name] = values[parts[fits[0]]]
    return Batch(tuple(batch.episodes[i] for i in chosen), columns)


def minibatches(batch: Batch, n: int) -> list[Batch]:
    """``n`` parts of whole groups, with about equally many tokens; groups keep their order within a part.

    Raises PlanError when there are fewer groups than parts.
    """
    group = batch.by("group")
    count = int(group.max(initial=-1)) + 1
    if not 1 <= n <= count:
        raise PlanError(f"{n} mini-batches asked of a batch of {count} groups; a group is never split")
    if n == 1:
        return [batch]
    tokens = np.bincount(group[batch.token_episode], minlength=count)
    part_of = np.zeros(count, dtype=np.int64)
    load = np.zeros(n)
    members = np.zeros(n, dtype=np.int64)
    for place, g in enumerate(np.lexsort((np.arange(count), -tokens))):
        empty = np.flatnonzero(members == 0)
        needed = len(empty) >= count - place  # the last groups go where a part would stay empty
        part = int(empty[0]) if needed else int(np.argmin(load))
        part_of[g] = part
        load[part] += tokens[g]
        members[part] += 1
    return [select(batch, np.flatnonzero(part_of[group] == part)) for part in range(n)]


def _places(owner: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Places of the chosen episodes' elements; ``owner`` ascends."""
    first, end = np.searchsorted(owner, chosen, "left"), np.searchsorted(owner, chosen, "right")
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(a, b) for a, b in zip(first, end, strict=True))])
