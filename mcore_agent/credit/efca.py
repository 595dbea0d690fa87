"""Advantages re-weighted by what the environment answered and by going round in circles (M106; EFCA)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.credit.groups import CreditError
from mcore_agent.registry import register
from mcore_agent.types import Batch, Feedback


@register("transform", "efca")
@dataclass(frozen=True)
class Efca:
    """``A' = A max(0, 1 + sign(A) (alpha f + beta h))`` with f and h of the token's turn.

    f is 1 when the turn changed the environment's state, -1 when the call failed or changed nothing. h is 0 in a new state, -.5 in
    one of the last ``window`` of the episode, and -1 where the last states repeat those before them, with a period of at most
    ``cycle``. With sign(A) a turn that did nothing gets less of a success and more of the blame; no sign is ever turned.
    With alpha = beta = 0 nothing changes.

    A = 1, alpha .3, beta .4: a turn that changed something in a new state has 1.3, a failed call there .7, and a failed
    call in the fourth of the states a b a b has 1 - .3 - .4 = .3.
    """

    alpha: float = 0.3
    beta: float = 0.3
    window: int = 4
    cycle: int = 2

    needs: ClassVar[tuple[str, ...]] = ()
    preserves: ClassVar[frozenset[str]] = frozenset({"sign"})

    def __post_init__(self):
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not value >= 0:
                raise CreditError(f"transform 'efca': {name} is {value}, but must be at least 0")
        for name, value in (("window", self.window), ("cycle", self.cycle)):
            if value < 1:
                raise CreditError(f"transform 'efca': {name} is {value}, but must be at least 1")

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64 advantages."""
        signals = []
        for e in batch.episodes:
            states = [turn.state_key for turn in e.turns]
            circling = [circle(states[: i + 1], self.window, self.cycle) for i in range(len(states))]
            signals += [self.alpha * answer(t.feedback) + self.beta * h for t, h in zip(e.turns, circling, strict=True)]
        signal = batch.to_tokens(np.array([*signals, 0.0]), "turn")  # a batch without turns has no signal
        return advantage * np.maximum(0.0, 1.0 + np.sign(advantage) * signal)


def answer(feedback: Feedback) -> float:
    """f of one turn."""
    return 1.0 if feedback.ok and not feedback.error and feedback.changed else -1.0


def circle(states: Sequence[str], window: int, cycle: int) -> float:
    """h in the last of ``states``; a state without a name is always new."""
    now, past = states[-1], states[-window - 1 : -1]
    if not now or now not in past:
        return 0.0
    for period in range(1, cycle + 1):
        recent, before = states[-period:], states[-2 * period : -period]
        if len(before) == period and list(recent) == list(before) and all(recent):
            return -1.0
    return -0.5
