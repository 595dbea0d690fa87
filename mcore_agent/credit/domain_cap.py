"""No domain may have more than its share of the advantages (M103; robust multi-task optimization)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("normalizer", "domain_cap")
@dataclass(frozen=True)
class DomainCap:
    """Scales down the domains whose part of ``sum |A|`` over all tokens is above ``cap``, so that it is exactly ``cap``.

    ``weights`` multiplies the advantages of a domain beforehand (1 where it names none). With so few domains that they
    cannot all stay below the cap it is one over their number; a single domain stays as it is.

    Domains with sums 100, 1 and 1 and cap .5: the first is scaled by .02 to 2, half of 2 + 1 + 1.
    """

    cap: float = 0.5
    weights: Mapping[str, float] = field(default_factory=dict)

    needs: ClassVar[tuple[str, ...]] = ()
    measure: ClassVar[str] = "domain"

    def __post_init__(self):
        if not 0 < self.cap <= 1:
            raise CreditError(f"normalizer 'domain_cap': cap is {self.cap}, but must be in (0, 1]")
        for name, value in self.weights.items():
            if not value >= 0:
                raise CreditError(f"normalizer 'domain_cap': weights has {value} for {name!r}, but must be at least 0")

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        domain = batch.by("domain")
        weight = np.array([self.weights.get(e.task.domain, 1.0) for e in batch.episodes])
        advantage = advantage * weight[batch.token_episode]
        mass = np.bincount(domain[batch.token_episode], weights=abs(advantage), minlength=int(domain.max(initial=-1)) + 1)
        return advantage * factors(mass, self.cap)[domain][batch.token_episode]


def factors(mass: np.ndarray, cap: float) -> np.ndarray:
    """[D] at most 1: what brings every share of the summed ``mass`` [D] to at most ``cap``, or to equal shares if that is not possible."""
    out, live = np.ones(len(mass)), np.flatnonzero(mass > 0)
    if len(live) < 2:
        return out
    cap = max(cap, 1 / len(live))
    order = live[np.argsort(-mass[live], kind="stable")]
    for count in range(len(order)):  # the largest ``count`` domains are cut to the cap, the others stay
        rest = mass[order[count:]].sum()
        whole = rest / (1 - cap * count) if cap * count < 1 else 0.0
        if mass[order[count]] <= cap * whole * (1 + 1e-12):
            out[order[:count]] = cap * whole / mass[order[:count]]
            return out
    out[order] = mass[order].min() / mass[order]
    return out
