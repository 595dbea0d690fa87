"""The same sampled tokens under another context: what a Rescorer is asked to score."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_agent.batch.microbatch import Plan, PlanError
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet


@dataclass(frozen=True)
class View:
    """A row's tokens to score, placed in a context of their own.

    The policy sampled ``7 8 2`` after the prompt ``1 5``; the view ``hint`` puts a hint before it::

        row     "t4/0/2"    name  "hint"
        tokens  1 9 9 5 7 8 2
        scored          4 5 6       places in ``tokens``, in the order of the row's sampled tokens

    Raises PlanError when a scored place is the first token, which nothing predicts, or is not there.
    """

    row: str
    name: str
    tokens: np.ndarray  # [T] int64
    scored: np.ndarray  # [n] int64

    def __post_init__(self):
        for field in ("tokens", "scored"):
            object.__setattr__(self, field, np.asarray(getattr(self, field), dtype=np.int64))
        if len(self.scored) and not (self.scored.min() > 0 and self.scored.max() < len(self.tokens)):
            raise PlanError(
                f"view {self.name!r} of row {self.row!r} scores places {self.scored.min()} to {self.scored.max()} of {len(self.tokens)} "
                "tokens; they must be from 1 on, because nothing predicts the first token"
            )


def plan_views(views: Sequence[View], token_budget: int, dp: int) -> Plan:
    """The views packed into micro-batches; row i of the plan is view i."""
    empty = np.zeros(0, dtype=np.int64)
    rows = RowSet(
        tokens=np.concatenate([empty, *(v.tokens for v in views)]),
        lengths=np.array([len(v.tokens) for v in views], dtype=np.int64),
        rows=np.arange(len(views)),
        count=len(views),
    )
    return split(rows, token_budget, dp)
