"""Deals rows to data-parallel ranks and micro-batches. The loss does not depend on how; the time does."""

from collections.abc import Sequence

import numpy as np

from mcore_agent.batch.microbatch import MicroBatch, Plan, PlanError, filler
from mcore_agent.batch.rowset import RowSet, rowset
from mcore_agent.protocols import LossTerm
from mcore_agent.types import Batch

# Length of a row at which attention costs as much as everything else: about 6 hidden sizes.
EVEN_LENGTH = 8192


def plan(batch: Batch, terms: Sequence[LossTerm], token_budget: int, dp: int = 1, columns: Sequence[str] = ()) -> Plan:
    """``split(rowset(batch, terms, columns), token_budget, dp)``."""
    return split(rowset(batch, terms, columns), token_budget, dp)


def split(rows: RowSet, token_budget: int, dp: int = 1, even_length: int = EVEN_LENGTH) -> Plan:
    """Packs rows into micro-batches of at most ``token_budget`` tokens and deals them to ``dp`` ranks.

    A row longer than the budget gets a micro-batch of its own. Micro-batches have about equal cost
    (``length + length**2 / even_length`` summed over rows), ranks differ by at most one micro-batch's cost, and the
    dearest come first. The same rows always give the same plan. Raises PlanError for a budget or dp below 1.
    """
    if token_budget < 1 or dp < 1:
        raise PlanError(f"token_budget is {token_budget} and dp is {dp}; both must be at least 1")
    cost = rows.lengths + rows.lengths.astype(np.float64) ** 2 / even_length
    bins = _pack(rows.lengths, cost, token_budget, dp)
    dealt = _deal(bins, cost, dp)
    starts = np.concatenate([[0], np.cumsum(rows.lengths)])
    return Plan(slots=[[_micro(rows, starts, chosen) for chosen in rank] for rank in dealt], count=rows.count)


def _pack(lengths: np.ndarray, cost: np.ndarray, budget: int, dp: int) -> list[list[int]]:
    """Places of rows by bin; the number of bins is a multiple of dp, bins may be empty."""
    order = np.lexsort((np.arange(len(lengths)), -lengths))
    tight = _fill(order, lengths, cost, budget, [])
    wanted = -(-len(tight) // dp) * dp
    even = _fill(order, lengths, cost, budget, [[] for _ in range(wanted)])
    bins = even if len(even) == wanted else tight
    return bins + [[] for _ in range(wanted - len(bins))]


def _fill(order: np.ndarray, lengths: np.ndarray, cost: np.ndarray, budget: int, bins: list[list[int]]) -> list[list[int]]:
    """Puts each row into the bin of least cost that has room. Without bins to begin with: the first that has room."""
    first = not bins
    bins = [list(b) for b in bins]
    tokens = [0] * len(bins)
    load = [0.0] * len(bins)
    for i in order.tolist():
        room = [b for b in range(len(bins)) if tokens[b] == 0 or tokens[b] + lengths[i] <= budget]
        if room:
            chosen = room[0] if first else min(room, key=lambda b: (load[b], b))
        else:
            chosen = len(bins)
            bins.append([])
            tokens.append(0)
            load.append(0.0)
        bins[chosen].append(i)
        tokens[chosen] += int(lengths[i])
        load[chosen] += float(cost[i])
    return bins


def _deal(bins: list[list[int]], cost: np.ndarray, dp: int) -> list[list[list[int]]]:
    """[dp][slot] bins: each slot takes the next dp dearest, the dearest to the rank that has least so far.

    Ranks then never differ by more than the bins of one slot do.
    """
    price = [float(cost[b].sum()) for b in bins]
    order = sorted(range(len(bins)), key=lambda b: (-price[b], min(bins[b], default=len(cost))))
    ranks: list[list[list[int]]] = [[] for _ in range(dp)]
    load = [0.0] * dp
    for slot in range(0, len(order), dp):
        by_load = sorted(range(dp), key=lambda r: (load[r], r))
        for rank, b in zip(by_load, order[slot : slot + dp], strict=True):
            ranks[rank].append(sorted(bins[b]))
            load[rank] += price[b]
    return ranks


def _micro(rows: RowSet, starts: np.ndarray, chosen: list[int]) -> MicroBatch:
    if not chosen:
        return filler(list(rows.columns))
    at = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
    return MicroBatch(
        tokens=rows.tokens[at],
        lengths=rows.lengths[chosen],
        rows=rows.rows[chosen],
        columns={name: values[at] for name, values in rows.columns.items()},
        routing=None if rows.routing is None else rows.routing[at],
    )


def gather(plan: Plan, outputs: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray | None]:
    """Undoes the deal: ``outputs[dp rank][slot]`` [T, …] per micro-batch become one array per row of the batch.

    Rows that are not in the plan are None, fillers are left out. Raises PlanError when a shape does not fit.
    """
    found: list[np.ndarray | None] = [None] * plan.count
    for micros, values in zip(plan.slots, outputs, strict=True):
        for micro, value in zip(micros, values, strict=True):
            if np.shape(value)[:1] != micro.tokens.shape:
                raise PlanError(f"an output has shape {np.shape(value)}, its micro-batch {micro.tokens.shape}")
            for row, part in zip(micro.rows, np.split(value, micro.starts[1:-1]), strict=True):
                if row >= 0:
                    found[row] = part
    return found


def to_column(batch: Batch, rows: Sequence[np.ndarray | None]) -> np.ndarray:
    """[N] float32 column from one array per row (of ``gather``); 0 for rows that are None."""
    parts = [np.zeros(n) if part is None else part for n, part in zip(batch.row_lengths, rows, strict=True)]
    column = np.concatenate(parts) if parts else np.zeros(0)
    if len(column) != len(batch.token_row):
        raise PlanError(f"the rows have {len(column)} entries together, the batch has {len(batch.token_row)} tokens")
    return column.astype(np.float32)
