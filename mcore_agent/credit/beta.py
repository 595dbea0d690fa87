"""What a prompt's past episodes say of its next one: a Beta distribution of success that forgets."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_agent.credit.groups import CreditError, voters
from mcore_agent.types import Batch

PRIOR = 0.5  # success that a prompt without a past is given


@dataclass(frozen=True)
class Beta:
    """``a`` successes and ``b`` failures, fractions allowed."""

    a: float
    b: float

    @classmethod
    def prior(cls, least: float) -> "Beta":
        """As much evidence as stays when only the share ``least`` of it is kept at each new episode: ``n = least n + 1``."""
        n = 1 / (1 - least)
        return cls(PRIOR * n, (1 - PRIOR) * n)

    @property
    def value(self) -> float:
        return self.a / (self.a + self.b)

    def after(self, kept: float, evidence: Collection[float]) -> "Beta":
        """The share ``kept`` of it, and new evidence in [0, 1]; the order of the evidence leaves every bit as it is."""
        return Beta(kept * self.a + math.fsum(evidence), kept * self.b + math.fsum(1 - x for x in evidence))


@dataclass(frozen=True)
class Scale:
    """The scores of total failure and full success, for what must be told in [0, 1]."""

    worst: float
    best: float

    def evidence(self, score: float) -> float:
        return min(1.0, max(0.0, (score - self.worst) / (self.best - self.worst)))

    def score(self, value: float) -> float:
        return self.worst + (self.best - self.worst) * value


def tasks_of(batch: Batch) -> dict[str, np.ndarray]:
    """Task id -> places of its episodes in the batch: those that were sampled, and not for comparison only."""
    speaks = np.bincount(batch.token_episode, weights=batch.channel("pg"), minlength=len(batch.episodes)) > 0
    found: dict[str, list[int]] = {}
    for i in np.flatnonzero(speaks & voters(batch)):
        found.setdefault(batch.episodes[i].task.id, []).append(int(i))
    return {task: np.array(places) for task, places in sorted(found.items())}


def check_memory(what: str, least: float, scale: Scale) -> None:
    """Raises CreditError for settings that make no memory; ``what`` is for example ``estimator 'spo'``."""
    if not 0 <= least < 1:
        raise CreditError(f"{what}: rho_low is {least}, but must be at least 0 and below 1")
    if not -math.inf < scale.worst < scale.best < math.inf:
        raise CreditError(f"{what}: worst is {scale.worst} and best {scale.best}, but worst < best must hold")


@dataclass
class EventLog:
    """The evidence of one prompt by the weight version that earned it, whenever it arrived.

    ``posterior`` goes through the versions in their order and keeps ``rho^(versions between)`` of the evidence before, at least
    ``rho_low``; evidence of one version is forgotten together. Any order of arrival gives the same bits. What lies more than
    ``window`` versions behind the newest is settled; evidence for settled versions comes too late and is refused.

    From the prior 4, 4 (rho_low 7/8): success at version 3 gives 7/8 * 4 + 1 = 4.5 and 3.5; failure at version 4 with rho .96
    gives .96 * 4.5 = 4.32 and .96 * 3.5 + 1 = 4.36.
    """

    settled: Beta
    until: int | None = None  # version of the last settled event
    events: dict[int, list[float]] = field(default_factory=dict)

    def add(self, version: int, evidence: float, window: int, rho: float, rho_low: float) -> bool:
        """Whether it came in time."""
        newest = max(self.events, default=self.until)
        if (self.until is not None and version <= self.until) or (newest is not None and version < newest - window):
            return False
        self.events.setdefault(version, []).append(evidence)
        old = {v: self.events.pop(v) for v in [v for v in self.events if v < max(self.events) - window]}
        if old:
            self.settled, self.until = _fold(self.settled, self.until, old, rho, rho_low)
        return True

    def posterior(self, rho: float, rho_low: float) -> Beta:
        return _fold(self.settled, self.until, self.events, rho, rho_low)[0]

    def to_json(self) -> list[Any]:
        return [self.settled.a, self.settled.b, self.until, [[v, sorted(x)] for v, x in sorted(self.events.items())]]

    @classmethod
    def from_json(cls, state: Iterable[Any]) -> "EventLog":
        a, b, until, events = state
        return cls(Beta(a, b), until, {int(v): list(x) for v, x in events})


def _fold(known: Beta, at: int | None, events: Mapping[int, list[float]], rho: float, rho_low: float) -> tuple[Beta, int | None]:
    for version in sorted(events):
        kept = rho_low if at is None else max(rho_low, rho ** (version - at))
        known, at = known.after(kept, events[version]), version
    return known, at
