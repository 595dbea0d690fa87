"""Columns that a loss term makes of the whole batch, because a micro-batch shows it only some rows of an episode or pair.

A row is never cut, so a term can sum over its own rows in the micro-batch, under the weights that it differentiates. What it
takes from the *other* rows comes from a column: ``sums`` prepares it before the batch is split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from mcore_agent.loss.common import LossError
from mcore_agent.loss.correction import BEHAVIOUR, PROXIMAL, Corrected
from mcore_agent.protocols import LossTerm
from mcore_agent.types import Batch

NOW = "logp_now"  # the learner's log-probabilities under the weights that an optimizer step finds
TEACHER = "logp_teacher"  # a teacher's log-probabilities of the same tokens at the same temperature
BEHIND = "values_behind"  # a critic's values that know the token that they are at; the others are called ``values``
PAIRS = "pairs"  # the best and the worst episode of each group
TURN_ENDS = "turn_ends"  # the last token of each turn
ROW = "row"  # the number of a token's row in the batch; exact in float32 below 16.7 million rows


@runtime_checkable
class Deriving(Protocol):
    """A loss term that makes columns of the whole batch before it is split; its ``needs`` names them like all others."""

    def derive(self, batch: Batch) -> Mapping[str, np.ndarray]: ...


@runtime_checkable
class Marking(Protocol):
    """A loss term whose channel no episode has when it is played: ``rows`` says how a stage marks it (``batch.marks.MAKERS``)."""

    channel: str
    rows: str


def derive(batch: Batch, terms: Sequence[LossTerm]) -> Batch:
    """The batch with the columns that its active terms derive; the batch itself when none does.

    A corrected term takes the proximal policy for the one that sampled, here too. Raises LossError when a term misses a
    column, or when two terms give different values to one name.
    """
    made: dict[str, np.ndarray] = {}
    for term in terms:
        inner, seen = (term.term, batch) if isinstance(term, Corrected) else (term, batch)
        if term.coef == 0 or not isinstance(inner, Deriving):
            continue
        if isinstance(term, Corrected):
            seen = batch.with_columns(**{BEHAVIOUR: batch_column(batch, batch.channel(term.channel), PROXIMAL)})
        for name, values in inner.derive(seen).items():
            if name in made and not np.array_equal(made[name], values):
                raise LossError(f"two loss terms derive different columns {name!r}; give them the same settings, or leave one out")
            made[name] = values
    return batch.with_columns(**made) if made else batch


def batch_column(batch: Batch, mask: np.ndarray, *names: str) -> np.ndarray:
    """[N] float64: the first of the named columns that the batch has, 0 outside ``mask``. Raises LossError when it has none."""
    for name in names:
        if name in batch.columns:
            return np.where(mask, np.asarray(batch.columns[name], dtype=np.float64), 0.0)
    raise LossError(f"the batch has no column {' or '.join(map(repr, names))}, of which a loss term makes its own; it has: "
                    f"{', '.join(sorted(batch.columns)) or 'none'}")  # fmt: skip


@dataclass(frozen=True)
class Sums:
    """Sums of one column over the tokens of a mask, for every token of the batch.

    Rows of 2 and 1 masked tokens in one episode, with the values 1 2 | 4::

        row      3  3 | 4
        episode  7  7 | 7
        rest     4  4 | 3      the episode's sum without the token's own row
        size     3  3 | 3      masked tokens of the episode
    """

    row: np.ndarray  # [N] float64
    episode: np.ndarray  # [N] float64
    rest: np.ndarray  # [N] float64
    size: np.ndarray  # [N] int64


def sums(values: np.ndarray, mask: np.ndarray, batch: Batch) -> Sums:
    """``values`` [N] must be 0 outside the mask."""
    row = np.bincount(batch.token_row, weights=values, minlength=len(batch.rows))
    episode = np.bincount(batch.row_episode, weights=row, minlength=len(batch.episodes))
    rest = episode[batch.row_episode] - row
    several = np.bincount(batch.row_episode, minlength=len(batch.episodes))[batch.row_episode] > 1
    rest = np.where(several, rest, 0.0)  # exactly nothing beside an only row
    size = np.bincount(batch.token_episode, weights=mask, minlength=len(batch.episodes)).astype(np.int64)
    return Sums(row[batch.token_row], episode[batch.token_episode], rest[batch.token_row], size[batch.token_episode])


def own_rows(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """[T] float64: the sum of ``values`` [T], which are 0 where they do not count, over the tokens of each token's row."""
    _, length = torch.unique_consecutive(row, return_counts=True)  # a pack holds each row in one piece
    return torch.segment_reduce(values.double(), "sum", lengths=length).repeat_interleave(length)


def with_slope(value: torch.Tensor, slope: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """[T] with the values of ``value`` and the gradient ``slope`` by ``logp``; neither is differentiated itself."""
    return value.detach() + slope.detach() * (logp - logp.detach())


def fresh(terms: Sequence[LossTerm]) -> bool:
    """Whether an active term needs a pass of the learner under the weights that its optimizer step finds."""
    return any(term.coef != 0 and NOW in term.needs for term in terms)


def of_teacher(name: str) -> bool:
    """Whether a column is a teacher's: ``logp_teacher``, or one of ``likeliest``."""
    return name == TEACHER or name.startswith("teacher_")


def likeliest(k: int) -> tuple[list[str], list[str]]:
    """Names of the columns of a teacher's k likeliest tokens, falling: their ids, exact in float32, and their log-probabilities."""
    return [f"teacher_id:{i}" for i in range(k)], [f"teacher_logp:{i}" for i in range(k)]


def taught(terms: Sequence[LossTerm]) -> bool:
    """Whether an active term needs a teacher."""
    return any(term.coef != 0 and of_teacher(name) for term in terms for name in term.needs)


def top_k_needed(terms: Sequence[LossTerm]) -> int:
    """How many of the highest log-probabilities the active terms need of the learner; 0: none."""
    wanted = [term.top_k for term in terms if term.coef != 0 and isinstance(term, TopK)]
    return max(wanted, default=0)


@runtime_checkable
class TopK(Protocol):
    """A loss term that needs ``top_logp`` and ``top_ids``, of this many tokens."""

    top_k: int
