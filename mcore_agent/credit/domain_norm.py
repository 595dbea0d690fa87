"""Every domain's advantages at one scale, of this batch or of the run so far (M79; one policy for many tasks)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.registry import register
from mcore_agent.types import Batch

NOTHING = 1e-12  # advantages with a smaller root mean square are rounding


@register("normalizer", "domain_norm")
@dataclass(frozen=True)
class DomainNorm:
    """``A * s / rms`` with the root mean square of the domain's own tokens, and s the geometric mean of the domains' ones.

    No advantage changes its sign, and a batch of one domain stays as it is. A domain whose advantages are all 0 (up to
    rounding) sets no scale. Domains with rms 1 and 100: s = 10, both end at 10.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    measure: ClassVar[str] = "domain"

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64."""
        return _scaled(advantage, batch, mean_squares(advantage, batch))


@register("normalizer", "domain_ema")
@dataclass
class DomainEma:
    """As ``domain_norm``, with mean squares averaged over the steps of the run: ``m = decay m + (1 - decay) x``, free of the start
    at 0 by dividing through ``1 - decay^k`` after k batches that had the domain. This batch counts too.

    A domain seen in two batches with mean squares 4 and 1 and decay 1/2: m = 2, then 1.5; m / (1 - 1/4) = 2.
    """

    decay: float = 0.9
    seen: dict[str, tuple[float, int]] = field(init=False, default_factory=dict)  # domain -> (m, k)

    needs: ClassVar[tuple[str, ...]] = ()
    measure: ClassVar[str] = "domain"

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise CreditError(f"normalizer 'domain_ema': decay is {self.decay}, but must be at least 0 and below 1")

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64."""
        for domain, square in mean_squares(advantage, batch).items():
            m, k = self.seen.get(domain, (0.0, 0))
            self.seen[domain] = self.decay * m + (1 - self.decay) * square, k + 1
        return _scaled(advantage, batch, {domain: m / (1 - self.decay**k) for domain, (m, k) in self.seen.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {domain: list(known) for domain, known in self.seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = {domain: (float(m), int(k)) for domain, (m, k) in state["seen"].items()}


def mean_squares(advantage: np.ndarray, batch: Batch) -> dict[str, float]:
    """Domain -> mean square of its own tokens' advantages, of the domains where it is not 0."""
    steps = np.flatnonzero(batch.channel("pg"))
    names, domain = np.unique(np.array([e.task.domain for e in batch.episodes]), return_inverse=True)
    of = domain[batch.token_episode[steps]]
    total = np.bincount(of, weights=np.asarray(advantage, dtype=np.float64)[steps] ** 2, minlength=len(names))
    found = total / np.maximum(np.bincount(of, minlength=len(names)), 1)
    return {str(name): float(square) for name, square in zip(names, found, strict=True) if square > NOTHING**2}


def _scaled(advantage: np.ndarray, batch: Batch, squares: Mapping[str, float]) -> np.ndarray:
    """[N] advantages at the domains' common scale; a domain without a mean square is left as it is."""
    log = {domain: np.log(square) / 2 for domain, square in squares.items()}
    common = np.mean(list(log.values())) if log else 0.0
    factor = np.array([np.exp(common - log.get(e.task.domain, common)) for e in batch.episodes])
    return advantage * factor[batch.token_episode]
