"""Scores finished episodes. An episode that could not be scored is a failure, never a zero."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mcore_agent import registry
from mcore_agent.protocols import InfraError, Reward
from mcore_agent.types import Episode


class RewardError(ValueError):
    """A reward gave something that is not a finite number, or two rewards gave one name."""


def score(episodes: Iterable[Episode], specs: Sequence[Mapping[str, Any]]) -> list[Episode]:
    """The episodes in their order, each with its named rewards added.

    ``specs`` are ``{"name": …, argument: …}``. A reward that raises InfraError turns its episode into
    ``infra_fail`` with the reason; episodes that failed before are left as they are. Raises RegistryError for an
    unknown reward, RewardError for a value that is not finite or a name that the episode already has.
    """
    rewards = [(str(spec["name"]), registry.create("reward", spec)) for spec in specs]
    return [e if e.status == "infra_fail" else _scored(e, rewards) for e in episodes]


def _scored(episode: Episode, rewards: Sequence[tuple[str, Reward]]) -> Episode:
    named = dict(episode.rewards)
    for source, reward in rewards:
        try:
            given = reward.score(episode)
        except InfraError as error:
            return replace(episode, status="infra_fail", reason=f"reward {source!r}: {error}")
        for name, value in given.items():
            if name in named:
                raise RewardError(f"episode {episode.id!r}: reward {source!r} gives {name!r}, which it already has")
            named[name] = _finite(value, f"episode {episode.id!r}: reward {source!r} gave {name!r}")
    return replace(episode, rewards=named)


def _finite(value: float | Sequence[float], what: str) -> float | list[float]:
    numbers = [float(v) for v in np.atleast_1d(np.asarray(value, dtype=float))]
    if not all(map(math.isfinite, numbers)):
        raise RewardError(f"{what} = {value!r}, but a reward must be finite; raise InfraError when it cannot be known")
    return numbers if np.ndim(value) else numbers[0]
