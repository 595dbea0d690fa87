"""What the learner is fed: rows packed one after another without padding, and who computes which."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class PlanError(ValueError):
    """Rows, columns or a plan contradict themselves; the message names what and both values."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows packed without padding.

    Row 4 of the global batch has 3 tokens, row 1 has 2; loss term 0 is a token mean over 5 tokens of the global batch::

        tokens   11  21   2 | 12  22
        lengths   3           2
        rows      4           1
        columns   mask:pg    0   1   1   0   1
                  w:0        0  .2  .2   0  .2
                  advantage  0   1   1   0  -1

    ``w:<i>`` is the weight of loss term i, global denominators included: the loss is the plain sum of
    ``coef_i * w:i * per_token_i`` over all micro-batches and ranks. A filler row has index -1 and weight 0.
    Raises PlanError when lengths do not add up or a weight of a filler row is not 0.
    """

    tokens: np.ndarray  # [T] int64
    lengths: np.ndarray  # [n] int64, each at least 1
    rows: np.ndarray  # [n] int64, index in the global batch, -1: filler
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [T] float32
    routing: np.ndarray | None = None  # [T, layers with experts, k] int32: experts to replay

    def __post_init__(self):
        check_rows(self)
        if len(self.lengths) == 0:
            raise PlanError("a micro-batch without rows; use filler() where a rank has nothing to do")
        filler = np.repeat(self.rows < 0, self.lengths)
        for name, values in self.columns.items():
            if name.startswith("w:") and np.any(values[filler]):
                raise PlanError(f"column {name!r} gives a filler row a weight")

    @property
    def starts(self) -> np.ndarray:
        """[n + 1] int64: where each row begins, and the end (the cumulative lengths that packed attention takes)."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def positions(self) -> np.ndarray:
        """[T] int64: place of each token within its row."""
        return np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)


@dataclass(frozen=True)
class Plan:
    """The micro-batches of every data-parallel rank; all ranks have the same number of slots.

    With 2 ranks and rows of 5, 4, 3 tokens (``count`` 4: row 2 contributed nothing), token budget 7::

        slots[0] = [rows 0]  (5 tokens)
        slots[1] = [rows 1, 3]  (7 tokens)

    A plan without rows (everything contributed nothing) is legal: ``empty`` is True and no rank has a slot.
    Raises PlanError for ranks of unequal slots, columns that differ, or a row that occurs twice.
    """

    slots: list[list[MicroBatch]]  # [dp rank][slot]
    count: int  # rows of the global batch that was planned

    def __post_init__(self):
        if not self.slots or len({len(rank) for rank in self.slots}) != 1:
            raise PlanError(f"ranks have {[len(rank) for rank in self.slots]} slots; all must have the same number")
        names = {frozenset(micro.columns) for rank in self.slots for micro in rank}
        if len(names) > 1:
            raise PlanError(f"micro-batches have different columns: {sorted(map(sorted, names))}")
        rows = self.rows
        if len(np.unique(rows)) != len(rows):
            raise PlanError("a row is in the plan twice")
        if len(rows) and rows.max() >= self.count:
            raise PlanError(f"row {rows.max()} is in the plan, but the batch has {self.count} rows")

    @property
    def rows(self) -> np.ndarray:
        """All row indices of the plan in ascending order, fillers left out."""
        given = [micro.rows for rank in self.slots for micro in rank]
        rows = np.concatenate(given) if given else np.zeros(0, dtype=np.int64)
        return np.sort(rows[rows >= 0])

    @property
    def empty(self) -> bool:
        """True when there is nothing to compute."""
        return len(self.rows) == 0

    @property
    def dropped(self) -> int:
        """Rows of the batch that are not in the plan because no loss term gets anything from them."""
        return self.count - len(self.rows)


def check_rows(record: Any) -> None:
    """Sets the dtypes of tokens, lengths, rows and columns of a frozen record; raises PlanError unless they agree."""
    for name in ("tokens", "lengths", "rows"):
        object.__setattr__(record, name, np.asarray(getattr(record, name), dtype=np.int64))
    object.__setattr__(record, "columns", {k: np.asarray(v, dtype=np.float32) for k, v in record.columns.items()})
    size = len(record.tokens)
    if np.any(record.lengths < 1) or record.lengths.sum() != size:
        raise PlanError(f"lengths {record.lengths.tolist()} do not add up to {size} tokens, each at least 1")
    if record.routing is not None and (record.routing.ndim != 3 or len(record.routing) != size):
        raise PlanError(f"routing has shape {record.routing.shape}, expected ({size}, layers, experts per token)")
    if len(record.rows) != len(record.lengths):
        raise PlanError(f"{len(record.rows)} row indices for {len(record.lengths)} rows")
    for name, values in record.columns.items():
        if values.shape != (size,):
            raise PlanError(f"column {name!r} has shape {values.shape}, expected ({size},)")


def filler(columns: Mapping[str, np.ndarray] | list[str]) -> MicroBatch:
    """A micro-batch of one 2-token row that weighs nothing, for a rank that has no row in a slot."""
    return MicroBatch(
        tokens=np.zeros(2), lengths=np.array([2]), rows=np.array([-1]), columns={name: np.zeros(2) for name in columns}
    )
