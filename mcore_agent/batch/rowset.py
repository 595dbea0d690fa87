"""The rows of a batch with their loss columns, before they are dealt to ranks: can be saved and split anew."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np

from mcore_agent.batch.microbatch import PlanError, check_rows
from mcore_agent.loss.aggregate import weights
from mcore_agent.protocols import LossTerm, ModelOut
from mcore_agent.types import Batch

OUTPUTS = frozenset(ModelOut.__dataclass_fields__)  # what the learner computes itself, such as ``entropy``


@dataclass(frozen=True)
class RowSet:
    """Rows one after another, as in a MicroBatch, and how many rows the batch had (``count``)."""

    tokens: np.ndarray  # [T] int64
    lengths: np.ndarray  # [n] int64
    rows: np.ndarray  # [n] int64, index in the global batch, ascending
    count: int
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [T] float32
    routing: np.ndarray | None = None  # [T, layers with experts, k] int32: experts to replay

    def __post_init__(self):
        check_rows(self)
        if np.any(np.diff(self.rows, prepend=-1) <= 0) or (len(self.rows) and self.rows[-1] >= self.count):
            raise PlanError(f"rows {self.rows.tolist()} are not ascending indices below {self.count}")

    def save(self, path: Path | str) -> None:
        """Writes one npz file, at ``path`` exactly."""
        arrays = {f"column/{name}": values for name, values in self.columns.items()}
        if self.routing is not None:
            arrays["routing"] = self.routing
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, tokens=self.tokens, lengths=self.lengths, rows=self.rows,
                     count=np.int64(self.count), **arrays)  # fmt: skip

    @classmethod
    def load(cls, path: Path | str) -> "RowSet":
        """Reads a file written by ``save``. Raises PlanError when it is not one, OSError when it cannot be read."""
        try:
            with open(path, "rb") as stream:
                if not is_zipfile(stream):  # np.load would take it for a pickle, and advise to trust it
                    raise BadZipFile("it is no npz file")
                stream.seek(0)
                file = np.load(stream, allow_pickle=False)
                arrays = {name: file[name] for name in file.files}
            columns = {name.removeprefix("column/"): v for name, v in arrays.items() if name.startswith("column/")}
            return cls(arrays["tokens"], arrays["lengths"], arrays["rows"], int(arrays["count"]), columns, arrays.get("routing"))
        except (BadZipFile, EOFError, KeyError, ValueError) as error:
            raise PlanError(f"{path} is not a saved batch, or was cut off: {error}") from error


def rowset(batch: Batch, terms: Sequence[LossTerm] = (), columns: Sequence[str] = ()) -> RowSet:
    """The rows that contribute to the loss, with the columns that the terms need.

    Adds ``w:<i>`` and ``mask:<channel>`` for every term with a coefficient other than 0 (the aggregation is taken
    over the whole batch, before rows are left out), the batch columns that the terms need, and those named in
    ``columns``. Rows to which every term contributes exactly nothing are left out: no weight, or nothing in the
    column that the term scales with. Without terms all rows are kept, for a pass that only computes log-probs. A batch
    column ``routing`` [N, layers with experts, k] goes along: those experts are replayed.
    Raises PlanError when a needed column is missing or is not one number per token.
    """
    active = [(index, term) for index, term in enumerate(terms) if term.coef != 0]
    names = {name for _, term in active for name in term.needs if name not in OUTPUTS} | set(columns)
    out = {name: _token_column(batch, name) for name in sorted(names)}
    alive = np.full(len(batch.token_row), not terms)
    for index, term in active:
        mask = batch.channel(term.channel)
        weight = weights(term.aggregate, mask, batch)
        out[f"mask:{term.channel}"] = mask
        out[f"w:{index}"] = weight
        alive |= (weight != 0) & (True if term.scales_with is None else out[term.scales_with] != 0)
    kept = np.bincount(batch.token_row, weights=alive, minlength=len(batch.rows)) > 0
    tokens = kept[batch.token_row]
    return RowSet(
        tokens=batch.tokens("tokens")[tokens],
        lengths=batch.row_lengths[kept],
        rows=np.flatnonzero(kept),
        count=len(batch.rows),
        columns={name: values[tokens] for name, values in out.items()},
        routing=batch.columns["routing"][tokens] if "routing" in batch.columns else None,
    )


def _token_column(batch: Batch, name: str) -> np.ndarray:
    if name not in batch.columns:
        known = ", ".join(sorted(batch.columns)) or "none"
        raise PlanError(f"the batch has no column {name!r}, which a loss term needs; it has: {known}")
    values = np.asarray(batch.columns[name])
    if values.shape != batch.token_row.shape:
        raise PlanError(f"batch column {name!r} has shape {values.shape}, expected one number per token {batch.token_row.shape}")
    return values


def experts_of(batch: Batch) -> np.ndarray:
    """[N, layers with experts, k] int32: the experts that the engine sent each token to; 0 in rows in which nothing was sampled.

    Raises PlanError when a row with sampled tokens has none.
    """
    known = [row.routing for row in batch.rows if row.routing is not None]
    parts = []
    for number, row in enumerate(batch.rows):
        if row.routing is None and row.sampled.any():
            raise PlanError(f"row {number} of the batch has sampled tokens but not their experts; the engine must report them")
        parts.append(row.routing if row.routing is not None else np.zeros((len(row), *known[0].shape[1:]), np.int32))
    return np.concatenate(parts)
