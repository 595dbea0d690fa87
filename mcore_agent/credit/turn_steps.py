"""The policy's own tokens of a batch, cut into turns by the segments that record them (never by where a reward is)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcore_agent.credit.stretches import parts
from mcore_agent.credit.sums import run_ends
from mcore_agent.types import Batch


@dataclass(frozen=True)
class TurnSteps:
    """n tokens of the channel ``pg`` in m turns, both in the order of time.

    Tokens without a turn make one turn of their episode, before the others. Rows with masks 0 1 1 0 1 and turns -1 0 0 0 1::

        steps  1 2 4        first 0 2        last 1 2        episode 0 0
    """

    steps: np.ndarray  # [n] places on the token axis
    first: np.ndarray  # [m] each turn's first and last place in ``steps``
    last: np.ndarray  # [m]
    episode: np.ndarray  # [m] ascending

    @classmethod
    def of(cls, batch: Batch) -> "TurnSteps":
        return cls.among(batch, np.flatnonzero(batch.channel("pg")))

    @classmethod
    def in_parts(cls, batch: Batch) -> Iterator["TurnSteps"]:
        """Those of some whole episodes at a time."""
        mask = batch.channel("pg")
        for part in parts(batch):
            yield cls.among(batch, part.start + np.flatnonzero(mask[part]))

    @classmethod
    def among(cls, batch: Batch, steps: np.ndarray) -> "TurnSteps":
        """Of the tokens ``steps``, ascending."""
        episode, turn = batch.token_episode[steps], batch.token_turn[steps]
        new = episode[1:] != episode[:-1]
        if np.any((turn[1:] < turn[:-1]) & ~new):  # rows of several agents may interleave their turns
            order = np.lexsort((turn, episode))
            steps, episode, turn = steps[order], episode[order], turn[order]
        first = np.flatnonzero(np.append(True, new | (turn[1:] != turn[:-1]))[: len(steps)])
        return cls(steps, first, np.append(first[1:], len(steps))[: len(first)] - 1, episode[first])

    @property
    def ends(self) -> np.ndarray:
        """[runs] the places behind the turns of each episode."""
        return run_ends(self.episode)

    @property
    def size(self) -> np.ndarray:
        """[m] tokens of each turn."""
        return self.last - self.first + 1

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[m] sum of the tokens' values [N] over each turn."""
        return np.add.reduceat(values[self.steps], self.first) if len(self.first) else np.zeros(0)

    def spread(self, out: np.ndarray, values: np.ndarray) -> None:
        """The turns' values [m] go to each of their tokens in ``out`` [N]."""
        out[self.steps] = np.repeat(values, self.size)
