"""Advantages corrected by the role that each turn played (M126; TRIAGE, 2606.32017)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.registry import register
from mcore_agent.types import Batch, Episode

ROLES = ("abstain", "decisive", "exploration", "no_progress", "regression")


@register("transform", "triage")
@dataclass(frozen=True)
class Triage:
    """``A' = A + lam c(role)``: a constant for each role, and 0 where the judge abstains. With lam = 0 nothing changes.

    ``judge: feedback`` judges by rule: a turn that took the episode back to an earlier state, or earned a negative reward from
    the environment, is a regression; one that failed, or changed nothing, no progress; one that earned a reward is decisive; one
    that reached a new state is exploration; of others (states without a key) it abstains. ``judge: column`` takes the batch
    column ``role`` [N], numbers of ``ROLES``: 0 abstain, 1 decisive, 2 exploration, 3 no progress, 4 regression.

    A = 1 and lam .5: a decisive turn has 1.25, a regression .75. A = -1: an exploration has -.9.
    """

    lam: float = 0.5
    decisive: float = 0.5
    exploration: float = 0.2
    no_progress: float = -0.1
    regression: float = -0.5
    judge: Literal["feedback", "column"] = "feedback"

    needs: ClassVar[tuple[str, ...]] = ()
    preserves: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self):
        if not self.lam >= 0:
            raise CreditError(f"transform 'triage': lam is {self.lam}, but must be at least 0")
        for name in ROLES[1:]:
            value = getattr(self, name)
            if not -1 <= value <= 1:
                raise CreditError(f"transform 'triage': {name} is {value}, but must be in [-1, 1]")
        if self.judge == "column":
            object.__setattr__(self, "needs", ("role",))

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64 advantages. Raises CreditError when the column holds something else than numbers of roles."""
        if not self.lam:
            return advantage
        constant = np.array([0.0, *(getattr(self, name) for name in ROLES[1:])])
        return advantage + self.lam * constant[self._roles(batch)]

    def _roles(self, batch: Batch) -> np.ndarray:
        if self.judge == "feedback":
            found = np.array([role for e in batch.episodes for role in roles_of(e)] + [0])
            return batch.to_tokens(found, "turn").astype(np.int64)
        given = np.asarray(batch.columns["role"])
        if not np.isin(given, np.arange(len(ROLES))).all():
            raise CreditError(f"transform 'triage': the column 'role' holds {given[~np.isin(given, np.arange(len(ROLES)))][0]}, "
                              f"but must hold numbers from 0 to {len(ROLES) - 1}")  # fmt: skip
        return given.astype(np.int64)


def roles_of(episode: Episode) -> list[int]:
    """The role of each turn by rule."""
    out, seen = [], set()
    for i, turn in enumerate(episode.turns):
        said = turn.feedback
        then = episode.turns[i + 1].state_key if i + 1 < len(episode.turns) else ""
        if said.reward < 0 or (then and then != turn.state_key and then in seen):
            role = "regression"
        elif not said.ok or said.error or not said.changed or (then and then == turn.state_key):
            role = "no_progress"
        elif said.reward > 0:
            role = "decisive"
        else:
            role = "exploration" if then else "abstain"
        out.append(ROLES.index(role))
        seen.add(turn.state_key)
    return out


def role_means(role: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """[roles] the constants that are nearest to a residual advantage [n] in the mean square: its mean in each role, 0 to abstain.

    Roles 1 1 2 with residuals .4 .6 -.1 give 0, .5, -.1, 0, 0.
    """
    count = np.bincount(role, minlength=len(ROLES))
    mean = np.bincount(role, weights=residual, minlength=len(ROLES)) / np.maximum(count, 1)
    return np.where(np.arange(len(ROLES)) > 0, mean, 0.0)
