"""Worlds of a few states, for learning without a model: what a table policy plays in."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class World:
    """``moves[state, action]`` is the next state (None: the episode ends) and the reward of the step."""

    name: str
    states: int
    actions: int
    horizon: int
    moves: Mapping[tuple[int, int], tuple[int | None, float]]
    start: int = 0

    def value(self, policy: np.ndarray) -> float:
        """The expected sum of rewards of a policy [states, actions] within the horizon, exactly."""
        left = np.zeros(self.states)
        for _ in range(self.horizon):
            new = np.zeros(self.states)
            for (s, a), (then, reward) in self.moves.items():
                new[s] += policy[s, a] * (reward + (0.0 if then is None else left[then]))
            left = new
        return float(left[self.start])


def bandit(actions: int = 5, best: int = 3, flip: bool = False) -> World:
    """One state, one turn; ``best`` pays 1 and the others 0 (``flip``: the other way round)."""
    return World("bandit", 1, actions, 1, {(0, a): (None, float((a == best) != flip)) for a in range(actions)})


def chain(length: int = 3, actions: int = 3, slack: int = 2) -> World:
    """In state s the action ``s % actions`` goes on, the others stay; the last step pays 1. ``slack`` turns may be wasted."""
    moves: dict[tuple[int, int], tuple[int | None, float]] = {}
    for s in range(length):
        for a in range(actions):
            right = a == s % actions
            last = s + 1 == length
            moves[s, a] = ((None if last else s + 1), float(last)) if right else (s, 0.0)
    return World("chain", length, actions, length + slack, moves)


def grid(width: int = 3, height: int = 2, horizon: int = 7) -> World:
    """From one corner to the opposite one, which pays 1; actions right, left, down, up; walls stop."""
    moves: dict[tuple[int, int], tuple[int | None, float]] = {}
    for y in range(height):
        for x in range(width):
            for a, (dx, dy) in enumerate(((1, 0), (-1, 0), (0, 1), (0, -1))):
                nx, ny = min(max(x + dx, 0), width - 1), min(max(y + dy, 0), height - 1)
                goal = (nx, ny) == (width - 1, height - 1)
                moves[y * width + x, a] = (None, 1.0) if goal else (ny * width + nx, 0.0)
    return World("grid", width * height, 4, horizon, moves)
