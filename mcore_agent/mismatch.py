"""How far engine and learner disagree about the tokens that the engine sampled: measured, watched, and taken to an arbiter.

Both sides' log-probabilities must be of the temperature of sampling: at another one every token differs.
"""

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_agent.state import write_atomic
from mcore_agent.types import Batch

Record = dict[str, Any]  # a row as ``outliers`` writes it, one line of a dump


class MismatchError(RuntimeError):
    """Engine and learner have drifted too far apart to go on, or cannot be compared."""


@dataclass(frozen=True)
class Drift:
    """Sums over sampled tokens, so that those of ranks, rows and versions add up."""

    tokens: int = 0
    abs_sum: float = 0.0  # of |learner's - engine's log-probability|
    abs_max: float = 0.0
    k3_sum: float = 0.0  # of exp(d) - d - 1 with d = learner's - engine's

    def __add__(self, other: "Drift") -> "Drift":
        return Drift(self.tokens + other.tokens, self.abs_sum + other.abs_sum, max(self.abs_max, other.abs_max), self.k3_sum + other.k3_sum)

    @property
    def abs_mean(self) -> float:
        return self.abs_sum / self.tokens if self.tokens else 0.0

    @property
    def k3(self) -> float:
        """Estimate of KL(engine || learner) per token, in nats."""
        return self.k3_sum / self.tokens if self.tokens else 0.0

    def numbers(self, prefix: str = "mismatch") -> dict[str, float]:
        """By metric name; nothing without a token."""
        if not self.tokens:
            return {}
        return {f"{prefix}/logp_abs_mean": self.abs_mean, f"{prefix}/logp_abs_max": self.abs_max, f"{prefix}/k3": self.k3}


def drift(learner: np.ndarray, engine: np.ndarray) -> Drift:
    """Of log-probabilities [n] of sampled tokens. Not a number where one of them is not."""
    delta = np.asarray(learner, dtype=np.float64) - np.asarray(engine, dtype=np.float64)
    if not len(delta):
        return Drift()
    size = np.abs(delta)
    k3 = np.expm1(np.minimum(delta, 50.0)) - delta
    return Drift(len(delta), float(size.sum()), float(size.max()), float(k3.sum()))


def drift_by_age(batch: Batch, version: int, learner: str = "logp_prox", engine: str = "logp_old") -> dict[int, Drift]:
    """For each age (``version`` minus the weight version that sampled) of tokens in the channel ``pg``, youngest first.

    At age 0 both sides had the same weights: what differs is the engines. Above, the weights have moved as well.
    Raises MismatchError when a column is missing.
    """
    mask = batch.channel("pg")
    age = version - batch.tokens("version")
    one, other = (_column(batch, name) for name in (learner, engine))
    return {int(a): drift(one[mask & (age == a)], other[mask & (age == a)]) for a in np.unique(age[mask])}


def numbers_of(ages: Mapping[int, Drift]) -> dict[str, float]:
    """All tokens under ``mismatch/…``, and where there are several ages the mean of each under ``mismatch/age_<a>/…``."""
    numbers = sum(ages.values(), Drift()).numbers()
    if len(ages) > 1:
        numbers |= {f"mismatch/age_{age}/logp_abs_mean": d.abs_mean for age, d in ages.items()}
    return numbers


class DriftAlarm:
    """Says when the mean of the last ``window`` steps rises above ``factor`` times that of the first ``window`` ones, or
    above ``bound``; and when it is back below ``release`` of that. Means below ``floor`` are rounding and never a reason.

    Feed it the mean |difference| of the youngest tokens of each step: older ones differ because the weights have moved.
    """

    def __init__(
        self, *, factor: float = 2.0, bound: float = 0.1, floor: float = 1e-3, window: int = 5, release: float = 0.8, stop: bool = False
    ):
        if not (factor > 1 and 0 < floor <= bound and window >= 1 and 0 < release < 1):
            raise MismatchError(f"drift alarm: factor {factor} must be above 1, floor {floor} above 0 and at most bound {bound}, "
                                f"window {window} at least 1, release {release} between 0 and 1")  # fmt: skip
        self.factor, self.bound, self.floor, self.window, self.release, self.stop = factor, bound, floor, window, release, stop
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=window)
        self.active = False

    @property
    def mean(self) -> float:
        return math.fsum(self.last) / len(self.last) if self.last else 0.0

    @property
    def threshold(self) -> float:
        """Above it the alarm is raised; the bound alone until there is a start to compare with."""
        if len(self.first) < self.window:
            return self.bound
        return min(self.bound, max(self.floor, self.factor * math.fsum(self.first) / self.window))

    def observe(self, value: float) -> str | None:
        """A step's mean |difference|. Returns what to tell a person when the alarm is raised or ends, else None.

        Raises MismatchError with that text where ``stop`` is set, and always for a value that is not finite.
        """
        if not math.isfinite(value):
            raise MismatchError(f"the mean difference of engine's and learner's log-probabilities is {value}")
        if len(self.first) < self.window:
            self.first.append(value)
        self.last.append(value)
        full, limit = len(self.last) == self.window, self.threshold
        if self.active and self.mean < self.release * limit:
            self.active = False
            return f"engine and learner agree again: mean |log-probability difference| {self.mean:.2e}, below {self.release * limit:.2e}"
        if self.active or not full or self.mean <= limit:
            return None
        self.active = True
        start = math.fsum(self.first) / self.window
        text = (f"engine and learner drift apart: mean |log-probability difference| of {self.window} steps is {self.mean:.2e}, "
                f"above {limit:.2e}; it began at {start:.2e}. tools/mismatch.py says which side is off, and a correction "
                "(correction.treatment) bounds what it does to the policy")  # fmt: skip
        if self.stop:
            raise MismatchError(text)
        return text

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self.first), "last": list(self.last), "active": self.active}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.last, self.active = list(state["first"]), deque(state["last"], maxlen=self.window), state["active"]


# --------------------------------------------------------------------------------------------------- outliers


def outliers(batch: Batch, count: int, learner: str = "logp_prox", engine: str = "logp_old") -> list[Record]:
    """The ``count`` rows with the largest |difference| at one of their tokens in the channel ``pg``, largest first.

    A record has ``episode``, ``row`` (index in it), ``gap`` and ``at`` (the place of the largest difference), ``tokens`` of the whole
    row, and for the tokens in the channel ``places``, ``engine`` and ``learner`` log-probabilities and ``version``.
    Raises MismatchError when a column is missing.
    """
    mask, sampled_by = batch.channel("pg"), batch.tokens("version")
    one, other = (_column(batch, name) for name in (learner, engine))
    delta = np.where(mask, np.abs(np.where(mask, one, 0) - np.where(mask, other, 0)), -1.0)
    starts = np.concatenate([[0], np.cumsum(batch.row_lengths)])
    worst = np.array([delta[a:b].max() for a, b in zip(starts[:-1], starts[1:], strict=True)])
    first_row = np.searchsorted(batch.row_episode, np.arange(len(batch.episodes)))
    records = []
    for r in np.argsort(-np.where(np.isnan(worst), np.inf, worst), kind="stable")[:count].tolist():
        if worst[r] < 0:
            break
        own = slice(starts[r], starts[r + 1])
        places = np.flatnonzero(mask[own])
        records.append({
            "episode": batch.episodes[batch.row_episode[r]].id, "row": r - int(first_row[batch.row_episode[r]]),
            "gap": float(worst[r]), "at": int(np.argmax(delta[own])), "tokens": batch.rows[r].tokens.tolist(), "places": places.tolist(),
            "engine": other[own][places].tolist(), "learner": one[own][places].tolist(), "version": sampled_by[own][places].tolist(),
        })  # fmt: skip
    return records


def dump(path: Path, records: Sequence[Record]) -> None:
    """Writes one JSON record per line. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def read_dump(path: Path) -> list[Record]:
    """Raises MismatchError when the file is damaged, OSError when it cannot be read."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError as e:
        raise MismatchError(f"{path} is no dump of outliers, or was cut off: {e}") from e


# ---------------------------------------------------------------------------------------------------- arbiter


@dataclass(frozen=True)
class Verdict:
    """How far each side is from a third one. ``side`` is ``engine``, ``learner``, ``both`` or ``neither``."""

    episode: str
    row: int
    tokens: int  # compared
    engine: float  # largest |difference| to the arbiter
    learner: float
    side: str


def arbitrate(
    model: Any, records: Sequence[Record], temperature: float, version: int | None = None, tolerance: float = 1e-3, margin: float = 3.0
) -> list[Verdict]:
    """Which side deviates from ``model``, a Hugging Face causal model of the weights in question, row by row.

    A side is off when its largest difference is above ``tolerance`` and the other's is not, or is ``margin`` times smaller.
    With ``version`` only tokens that those weights sampled are compared: for others the engine had different weights. ``both`` can
    also mean that the model has other weights, or that ``temperature`` is not the one of sampling.
    """
    verdicts = []
    for record in records:
        places = np.array(record["places"], dtype=np.int64)
        chosen = np.full(len(places), True) if version is None else np.array(record["version"]) == version
        if not chosen.any():
            continue
        truth = forward_logp(model, np.array(record["tokens"]), temperature)[places[chosen]]
        engine, learner = (float(np.abs(np.array(record[side])[chosen] - truth).max()) for side in ("engine", "learner"))
        side = _side(engine, learner, tolerance, margin)
        verdicts.append(Verdict(record["episode"], record["row"], int(chosen.sum()), engine, learner, side))
    return verdicts


def _side(engine: float, learner: float, tolerance: float, margin: float) -> str:
    if max(engine, learner) <= tolerance:
        return "neither"
    if engine > tolerance and (learner <= tolerance or engine >= margin * learner):
        return "engine"
    if learner > tolerance and (engine <= tolerance or learner >= margin * engine):
        return "learner"
    return "both"


def forward_logp(model: Any, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """[T] float64 log-probability of each token given those before it, 0 for the first, by one plain forward pass."""
    import torch

    row = torch.as_tensor(tokens, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        logits = model(input_ids=row[None]).logits[0, :-1].float() / temperature
    logp = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
    return np.concatenate([[0.0], logp.double().cpu().numpy()])


def _column(batch: Batch, name: str) -> np.ndarray:
    if name not in batch.columns:
        raise MismatchError(f"the batch has no column {name!r} to compare; it has: {', '.join(sorted(batch.columns)) or 'none'}")
    return np.asarray(batch.columns[name], dtype=np.float64)
