"""Advantages with mean 0 and deviation 1 over a batch (M94, M93, M96; SPO++ by token, SPO 2509.13232 by trajectory, SAPO by turn)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mcore_agent.credit.groups import standardize
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("normalizer", "standardize")
@dataclass(frozen=True)
class Standardize:
    """``(A - mean) / deviation`` over the policy's own tokens, which weigh 1 each, or 1 / n in a trajectory or turn of n tokens.

    By ``token`` the gradient of a token-mean loss is centered: long episodes pull the mean. By ``trajectory`` or ``turn`` each
    of these counts alike. Advantages that are all equal become exactly 0.

    Two episodes of 1 and 3 tokens with A = 1 and -1: by token the mean is -.5 and the deviation sqrt(3)/2, so that they get
    1.7321 and -.5774, and the tokens' sum is 0; by trajectory they are 1 and -1 already.
    """

    measure: Literal["token", "turn", "trajectory"] = "token"

    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray:
        """[N] float64, 0 outside the channel ``pg``."""
        turns = TurnSteps.of(batch) if self.measure == "turn" else None
        steps = np.flatnonzero(batch.channel("pg")) if turns is None else turns.steps
        weight = np.ones(len(steps))
        if turns is not None:
            weight = 1 / np.repeat(turns.size, turns.size)
        elif self.measure == "trajectory":
            episode = batch.token_episode[steps]
            weight = 1 / np.bincount(episode, minlength=1)[episode]
        out = np.zeros(len(advantage))
        out[steps] = standardize(np.asarray(advantage, dtype=np.float64)[steps], weight)
        return out
