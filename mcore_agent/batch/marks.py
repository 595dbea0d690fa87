"""Channels that a stage marks for loss terms, because no episode has them when it is played."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mcore_agent.batch.pairs import preferences
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.loss.derived import PAIRS, TURN_ENDS, Marking
from mcore_agent.protocols import LossTerm
from mcore_agent.types import Batch


def turn_ends(batch: Batch, channel: str) -> Batch:
    """The channel holds the last token of ``pg`` of each turn, behind which all that the turn did is known::

        turn      -1 0 0 0 1 1
        pg         0 1 1 0 1 1
        channel    0 0 1 0 0 1
    """
    turns = TurnSteps.of(batch)
    mask = np.zeros(len(batch.token_row), dtype=bool)
    mask[turns.steps[turns.last]] = True
    parts = np.split(mask, np.cumsum(batch.row_lengths)[:-1])
    rows = iter([replace(row, channels={**row.channels, channel: part}) for row, part in zip(batch.rows, parts, strict=False)])
    return Batch(tuple(replace(e, rows=tuple(next(rows) for _ in e.rows)) for e in batch.episodes), batch.columns)


MAKERS: dict[str, Callable[[Batch, str], Batch]] = {PAIRS: preferences, TURN_ENDS: turn_ends}


def marked(batch: Batch, terms: Sequence[LossTerm]) -> Batch:
    """The batch with the channels that its active terms want marked; the batch itself when there are none."""
    for rows, channel in sorted({(term.rows, term.channel) for term in terms if term.coef != 0 and isinstance(term, Marking)}):
        batch = MAKERS[rows](batch, channel)
    return batch
