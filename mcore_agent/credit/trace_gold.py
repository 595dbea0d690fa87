"""Turns by how much likelier they made the right answer, in the eyes of a frozen model (M119; TRACE of turn rewards)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.gigpo import check_comparison
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.steps import Steps, relative, steps_of
from mcore_agent.registry import register
from mcore_agent.types import Batch, Episode, Task, View

FROZEN = "reference"


@register("estimator", "trace_gold")
@dataclass(frozen=True)
class TraceGold:
    """``r_t = coef (l_{t+1} - l_t)``, with l_t the mean log-probability per token of the gold answer in the state before turn t.

    The reference model scores the answer (``Task.gold``, a text or a number, after ``lead``) in views of its own: behind what
    the policy had before it at each turn, and behind the last observation. No row of the policy ever holds it. What the turns
    and the episode earned comes on top: A is the discounted sum of a turn's and all later rewards, relative to all turns of
    the group. An episode whose task has no gold has its other rewards alone.

    l = -4, -2, -2, -1 gives the rewards 2, 0, 1, in all the 3 by which the answer became likelier.
    """

    coef: float = 1.0
    gamma: float = 1.0
    lead: str = ""  # stands before the answer and is not scored
    norm: Literal["mean", "mean_std"] = "mean_std"
    eps: float = 1e-6

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "token"
    compares: ClassVar[str] = "group"
    under: ClassVar[str] = FROZEN

    def __post_init__(self):
        check_comparison("trace_gold", 0.0, self.gamma, self.eps)
        if not self.coef >= 0:
            raise CreditError(f"estimator 'trace_gold': coef is {self.coef}, but must be at least 0")

    def views(self, batch: Batch, encode: Callable[[str], list[int]]) -> list[View]:
        """One for each boundary of the batch, in order."""
        made = []
        lead = encode(self.lead) if self.lead else []
        for at in boundaries(batch):
            episode = batch.episodes[at.episode]
            before = np.concatenate([episode.rows[at.row].tokens[: at.cut], np.array(lead, dtype=np.int64)])
            answer = np.array(encode(str(gold_of(episode.task))), dtype=np.int64)
            scored = np.arange(len(before), len(before) + len(answer))
            made.append(View(f"{episode.id}/{at.row}", f"gold/{at.turn}", np.concatenate([before, answer]), scored, FROZEN))
        return made

    def __call__(self, batch: Batch, scores: Sequence[np.ndarray] = ()) -> np.ndarray:
        """[N] float64 advantages. Raises CreditError when there is not one score for each boundary."""
        steps = steps_of(batch)
        steps = replace(steps, reward=steps.reward + self.coef * self.gained(batch, steps, scores))
        return relative(steps.returns(self.gamma), steps.group, self.norm == "mean_std", self.eps)[steps.token]

    def gained(self, batch: Batch, steps: Steps, scores: Sequence[np.ndarray]) -> np.ndarray:
        """[K] the change of l over each step; over steps between which nothing was scored the last of them has it all."""
        found = list(boundaries(batch))
        if len(found) != len(scores):
            raise CreditError(f"estimator 'trace_gold': {len(scores)} scores for {len(found)} boundaries of turns")
        out = np.zeros(len(steps.episode))
        first = np.searchsorted(steps.episode, np.arange(len(batch.episodes)))
        last: dict[int, float] = {}
        for at, logp in zip(found, scores, strict=True):
            if not len(logp):
                continue
            level = float(np.mean(np.asarray(logp, dtype=np.float64)))
            if at.episode in last:
                out[first[at.episode] + at.turn - 1] += level - last[at.episode]
            last[at.episode] = level
        return out


@dataclass(frozen=True)
class Boundary:
    """The state before a turn (or behind the last): the first ``cut`` tokens of a row of the episode."""

    episode: int
    turn: int
    row: int
    cut: int


def gold_of(task: Task) -> str | int | float | None:
    """The answer where it is a text or a number."""
    return task.gold if isinstance(task.gold, str | int | float) and not isinstance(task.gold, bool) else None


def boundaries(batch: Batch) -> Iterator[Boundary]:
    """Of the episodes with a gold answer, in order; a turn without a sampled token of its own has none before it."""
    for i, episode in enumerate(batch.episodes):
        if gold_of(episode.task) is None:
            continue
        for turn in range(len(episode.turns)):
            yield from (Boundary(i, turn, row, cut) for row, cut in _start(episode, turn) if cut > 0)
        yield from (Boundary(i, len(episode.turns), row, cut) for row, cut in _end(episode))


def _start(episode: Episode, turn: int) -> list[tuple[int, int]]:
    """(row, place) of the first token that the policy sampled in the turn, if any."""
    for r, row in enumerate(episode.rows):
        starts = [s.start for s in row.segments if s.turn == turn and row.sampled[s.start : s.end].any()]
        if starts:
            return [(r, min(starts))]
    return []


def _end(episode: Episode) -> list[tuple[int, int]]:
    """(row, place) behind the observation that ends the episode; none when it ends with what the policy said."""
    ends = [(r, s.end, s.kind) for r, row in enumerate(episode.rows) for s in row.segments if s.turn == len(episode.turns) - 1]
    return [(r, end) for r, end, kind in ends[-1:] if kind == "obs" and end > 0]
