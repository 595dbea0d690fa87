"""How much of a task's causal chain the verifier shows: the density V_d = k / C (M90; verifier information density)."""

from dataclasses import dataclass

import numpy as np

from mcore_agent.types import Batch


@dataclass(frozen=True)
class Density:
    """``exposed`` of ``chain`` decisions are shown by a reward of their own.

    With 1 of 6 the density is .1667: rewards for single turns can then be expected to mislead credit that is aimed at turns.
    """

    exposed: int
    chain: int

    @property
    def value(self) -> float:
        return self.exposed / self.chain


def densities(batch: Batch, success: float = 0.5) -> dict[str, Density]:
    """By group, for the groups with an episode whose reward is at least ``success``; of the others the chain is not known.

    The chain is as long as the group's shortest success. A decision of it is shown when in some episode of the group a reward of
    single turns, whichever, is not 0 at its place. Rewards of whole episodes show none.

    Of an episode with outcome 1 and the turn rewards 0, .5, 0, and a failure with 0, 0, 0, -1: k = 1 of C = 3; the -1 lies
    behind the chain.
    """
    out = {}
    for group in dict.fromkeys(e.group for e in batch.episodes):
        own = [e for e in batch.episodes if e.group == group]
        lengths = [len(e.turns) for e in own if e.turns and e.reward >= success]
        if not lengths:
            continue
        shown = {t for e in own for v in e.rewards.values() if np.ndim(v) == 1 for t in np.flatnonzero(v).tolist() if t < min(lengths)}
        out[group] = Density(len(shown), min(lengths))
    return out
