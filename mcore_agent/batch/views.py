"""The same sampled tokens under another context, packed for a pass that scores them."""

from collections.abc import Sequence

import numpy as np

from mcore_agent.batch.microbatch import Plan
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet
from mcore_agent.types import View


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
