"""The control for any scheme that picks turns: the same weights on other turns (M91; matched-concentration control)."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mcore_agent import registry
from mcore_agent.credit.steps import steps_of
from mcore_agent.protocols import Transform
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("transform", "shuffled")
@dataclass(frozen=True)
class Shuffled:
    """Applies the transform ``of`` and deals what its turns carry to other turns of the same episode, at random.

    What a turn carries is the sum of its tokens' advantages; it is spread evenly over the tokens of the turn that gets it. So
    the sums of turns are the same numbers as before in another order, and their sum, their concentration (sum of squared
    shares) and the mass on tokens are too. Only turns with sampled tokens take part. Without ``of`` it deals what an
    estimator, or the transforms before it, gave. The order follows from ``seed`` and the episode's id.

    Turns of 2, 1 and 1 tokens with the advantages .5 .5, 3 and 0 carry 1, 3 and 0. Dealt as 3, 0, 1 they have 1.5 1.5, 0 and 1.
    """

    of: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    needs: ClassVar[tuple[str, ...]] = ()
    preserves: ClassVar[frozenset[str]] = frozenset({"sum"})  # with ``of`` only if that keeps it

    def __post_init__(self):
        inner: Transform | None = registry.create("transform", self.of) if self.of else None
        object.__setattr__(self, "_inner", inner)
        if inner is not None:
            object.__setattr__(self, "needs", inner.needs)
            object.__setattr__(self, "preserves", inner.preserves & {"sum"})

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        inner: Transform | None = self.__dict__["_inner"]
        if inner is not None:
            advantage = inner(advantage, batch)
        steps, mask = steps_of(batch), batch.channel("pg")
        size = np.bincount(steps.token[mask], minlength=len(steps.episode))
        carried = np.bincount(steps.token[mask], weights=advantage[mask], minlength=len(steps.episode))
        dealt = np.zeros(len(carried))
        for i, e in enumerate(batch.episodes):
            own = np.flatnonzero((steps.episode == i) & (size > 0))
            order = np.random.default_rng([self.seed, zlib.crc32(e.id.encode())]).permutation(len(own))
            dealt[own] = carried[own[order]]
        return np.where(mask, (dealt / np.maximum(size, 1))[steps.token], 0.0)
