"""Scores finished episodes. An episode that could not be scored is a failure, never a zero."""

import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mcore_agent import registry
from mcore_agent.protocols import Comparing, InfraError, Reward, Scored
from mcore_agent.types import GREEDY, Episode

WORKERS = 32  # episodes that are scored at once: most of a judge's time is waiting


class RewardError(ValueError):
    """A reward gave something that is not a finite number, two rewards gave one name, or a setting is out of range."""


@dataclass(frozen=True)
class Part:
    """A reward, its name for messages, and its label for logs: its ``key`` if it has one, else its name."""

    source: str
    label: str
    reward: Reward | Comparing

    def ask(self, episode: Episode, siblings: Sequence[Episode]) -> Scored:
        """What the reward gives: finite floats and lists of them. Raises RewardError, naming the episode, and InfraError."""
        r = self.reward
        given = r.score_among(episode, siblings) if isinstance(r, Comparing) else r.score(episode)
        scored = given if isinstance(given, Scored) else Scored(given)
        where = f"episode {episode.id!r}: reward {self.source!r} gave"
        rewards = {name: _finite(value, f"{where} {name!r}") for name, value in scored.rewards.items()}
        for name, number in scored.numbers.items():
            _finite(number, f"{where} the number {name!r}")
        return Scored(rewards, scored.numbers)


def make(spec: Mapping[str, Any], services: Mapping[str, Any] | None = None) -> Part:
    """The reward of a spec, with those services that it has a parameter for. A reward of rewards takes ``services`` whole.

    Raises RegistryError for an unknown reward or argument, RewardError for a setting out of range.
    """
    services = services or {}
    registry.check("reward", spec, supplied=services)
    takes = inspect.signature(registry.get("reward", spec["name"])).parameters
    given = {name: value for name, value in {"services": services, **services}.items() if name in takes and name not in spec}
    return Part(str(spec["name"]), str(spec.get("key", spec["name"])), registry.create("reward", spec, **given))


def make_all(specs: Sequence[Mapping[str, Any]], services: Mapping[str, Any] | None = None) -> list[Part]:
    """The rewards of several specs. Raises RewardError when two have one name, and one ``key`` if they take any."""
    parts = [make(spec, services) for spec in specs]
    twice = [pair for pair, count in Counter((part.source, part.label) for part in parts).items() if count > 1]
    if twice:
        raise RewardError(f"two rewards are called {twice[0][1]!r}; keep one of them, or give one a 'key' of its own if it takes one")
    return parts


def total(scored: Scored) -> float | None:
    """The sum of what a reward gave, turns included; None where it abstains."""
    return math.fsum(float(np.sum(value)) for value in scored.rewards.values()) if scored.rewards else None


class Scorer:
    """The rewards of a recipe, made once for a run: a judge remembers what it was asked.

    ``specs`` are ``{"name": …, argument: …}``. ``services`` are objects that a recipe cannot name, for the rewards with a
    parameter of that name: ``decode`` (token ids to text) and ``complete`` (goes on from the middle of an episode).
    """

    def __init__(self, specs: Sequence[Mapping[str, Any]], services: Mapping[str, Any] | None = None, workers: int = WORKERS):
        self.parts = make_all(specs, services)
        self.workers = workers

    def __call__(self, episodes: Iterable[Episode]) -> tuple[list[Episode], dict[str, float]]:
        """The episodes in their order, each with its named rewards added, and means to log of rewards and their numbers.

        A reward that raises InfraError, or gives nothing because it cannot tell, turns its episode into ``infra_fail`` with
        the reason: a sum without it would compare with its siblings' as a zero does. Episodes that failed before are left
        as they are. Up to ``workers`` episodes are scored at once; the result does not depend on it. Raises RewardError
        for a value that is not finite or a name that the episode already has: of the first such episode.
        """
        episodes = list(episodes)
        families: dict[tuple[str, bool], list[Episode]] = {}
        for e in episodes:
            if e.status != "infra_fail":
                families.setdefault((e.group, e.branch == GREEDY), []).append(e)

        def work(e: Episode) -> tuple[Episode, dict[str, float]]:
            return (e, {}) if e.status == "infra_fail" else self._scored(e, families[e.group, e.branch == GREEDY])

        if min(len(episodes), self.workers) < 2:
            done = [work(e) for e in episodes]
        else:
            with ThreadPoolExecutor(min(self.workers, len(episodes)), thread_name_prefix="reward") as pool:
                done = list(pool.map(work, episodes))
        return [e for e, _ in done], _means(done)

    def _scored(self, episode: Episode, siblings: Sequence[Episode]) -> tuple[Episode, dict[str, float]]:
        named, numbers = dict(episode.rewards), dict[str, float]()
        for part in self.parts:
            try:
                scored = part.ask(episode, siblings)
            except InfraError as error:
                return replace(episode, status="infra_fail", reason=f"reward {part.source!r}: {error}"), {}
            if not scored.rewards:
                return replace(episode, status="infra_fail", reason=f"reward {part.source!r} abstains"), {}
            for name, value in scored.rewards.items():
                if name in named:
                    raise RewardError(f"episode {episode.id!r}: reward {part.source!r} gives {name!r}, which it already has")
                named[name] = value
            numbers |= {f"{part.label}/{name}": float(number) for name, number in scored.numbers.items()}
        return replace(episode, rewards=named), numbers


def score(episodes: Iterable[Episode], specs: Sequence[Mapping[str, Any]], services: Mapping[str, Any] | None = None) -> list[Episode]:
    """The episodes in their order, each with its named rewards added: a Scorer used once."""
    return Scorer(specs, services)(episodes)[0]


def _means(done: Sequence[tuple[Episode, Mapping[str, float]]]) -> dict[str, float]:
    """The mean of every reward and number over the episodes that have it; failed and greedy ones aside."""
    seen: dict[str, list[float]] = {}
    for e, numbers in done:
        if e.status != "infra_fail" and e.branch != GREEDY:
            for name, value in {**e.rewards, **numbers}.items():
                seen.setdefault(name, []).append(float(np.sum(value)))
    return {name: math.fsum(values) / len(values) for name, values in seen.items()}


def _finite(value: float | Sequence[float], what: str) -> float | list[float]:
    numbers = [float(v) for v in np.atleast_1d(np.asarray(value, dtype=float))]
    if not all(map(math.isfinite, numbers)):
        raise RewardError(f"{what} = {value!r}, but a reward must be finite; raise InfraError when it cannot be known")
    return numbers if np.ndim(value) else numbers[0]
