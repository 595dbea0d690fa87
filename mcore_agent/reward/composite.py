"""An outcome and weighted shaping that cannot outweigh it, components kept by name (M41; reward design of agentic RL)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mcore_agent.protocols import InfraError, Scored
from mcore_agent.registry import register
from mcore_agent.reward.pipeline import Part, RewardError, make, make_all, total
from mcore_agent.types import Episode

HALF = 0.5


@register("reward", "composite")
@dataclass(frozen=True)
class Composite:
    """``weight * outcome + sum_i clip(w_i * part_i, -cap_i, cap_i)``; every component stays in the episode by its name.

    ``parts`` are ``{"reward": {"name": …}, "weight": w, "cap": c}``; ``cap`` is the most that a part adds or takes in one
    episode, |w| unless given. Of per-turn rewards it bounds the running sum: a turn is paid what the bounded sum grows by.
    The outcome's share of what can be earned, weight / (weight + sum of caps) for an outcome of 1, must be at least ``share``.

    An outcome that abstains is an infrastructure failure; a part that abstains is left out. Logged: ``raw/<component>``
    before weight and cap, ``outcome_share`` of the absolute sum, ``abstains/<part>``.

    Outcome 1, format .5 at weight .2 and tool shaping of -30 at weight .1: 1 + .1 - .1 = 1, the last one by its cap.
    """

    outcome: Mapping[str, Any]
    parts: Sequence[Mapping[str, Any]]
    weight: float = 1.0
    share: float = HALF
    services: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise RewardError(f"reward 'composite': weight is {self.weight}, but must be above 0 and finite")
        if not HALF <= self.share <= 1:
            raise RewardError(f"reward 'composite': share is {self.share}, but must be in [0.5, 1]")
        for i, part in enumerate(self.parts):
            _check_part(part, f"parts[{i}]")
        caps = sum(cap for _, cap in self._bounds)
        if (found := self.weight / (self.weight + caps)) < self.share:
            raise RewardError(f"reward 'composite': the outcome can be {found:.3g} of what is earned (weight {self.weight} beside caps "
                              f"of {caps:g}), but must be at least {self.share}; lower weights or caps of the parts")  # fmt: skip
        made = self._outcome
        if any((part.source, part.label) == (made.source, made.label) for part in self._shaping):
            raise RewardError(f"reward 'composite': {made.label!r} is the outcome and a part; keep one of them")

    @cached_property
    def _outcome(self) -> Part:
        return make(self.outcome, self.services)

    @cached_property
    def _shaping(self) -> list[Part]:
        return make_all([part["reward"] for part in self.parts], self.services)

    @cached_property
    def _bounds(self) -> list[tuple[float, float]]:  # weight and cap of each part
        return [(float(part["weight"]), float(part.get("cap", abs(part["weight"])))) for part in self.parts]

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> Scored:
        """The outcome's components and the parts', weighted. Raises InfraError when the outcome abstains."""
        outcome = self._outcome.ask(episode, siblings)
        if not outcome.rewards:
            raise InfraError(f"the outcome {self._outcome.label!r} abstains")
        named = {name: _scaled(value, self.weight) for name, value in outcome.rewards.items()}
        numbers = _logged(self._outcome, outcome)
        for part, (weight, cap) in zip(self._shaping, self._bounds, strict=True):
            scored = part.ask(episode, siblings)
            numbers |= _logged(part, scored) | {f"abstains/{part.label}": float(not scored.rewards)}
            for name, value in bounded(scored.rewards, weight, cap).items():
                if name in named:
                    raise RewardError(f"episode {episode.id!r}: reward {part.source!r} gives {name!r}, which it already has")
                named[name] = value
        size = sum(abs(float(np.sum(value))) for value in named.values())
        won = abs(self.weight * (total(outcome) or 0.0))
        return Scored(named, numbers | ({"outcome_share": won / size} if size else {}))


def _check_part(part: Mapping[str, Any], where: str) -> None:
    if not {"reward", "weight"} <= part.keys() <= {"reward", "weight", "cap"}:
        raise RewardError(f"reward 'composite': {where} is {dict(part)}, but must have the keys reward, weight and, if wanted, cap")
    for key in part.keys() - {"reward"}:
        value = part[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise RewardError(f"reward 'composite': {where}.{key} is {value!r}, but must be a finite number")
    if part["weight"] == 0 or part.get("cap", 1) <= 0:
        raise RewardError(f"reward 'composite': {where} has weight {part['weight']} and cap {part.get('cap', 'none')}, "
                          "but the weight must not be 0, and the cap must be above 0")  # fmt: skip


def bounded(rewards: Mapping[str, float | list[float]], weight: float, cap: float) -> dict[str, float | list[float]]:
    """``weight`` times each reward, so that their sums add up to at most ``cap`` in absolute value, at every turn."""
    out: dict[str, float | list[float]] = {}
    for name, value in rewards.items():
        if isinstance(value, list):
            sums = np.clip(np.cumsum(np.array(value, dtype=np.float64) * weight), -cap, cap)
            out[name] = np.diff(sums, prepend=0.0).tolist()
        else:
            out[name] = float(np.clip(value * weight, -cap, cap))
    whole = sum(float(np.max(np.abs(np.cumsum(value)), initial=0.0)) for value in out.values())
    return {name: _scaled(value, cap / whole) for name, value in out.items()} if whole > cap and len(out) > 1 else out


def _scaled(value: float | list[float], by: float) -> float | list[float]:
    return [v * by for v in value] if isinstance(value, list) else value * by


def _logged(part: Part, scored: Scored) -> dict[str, float]:
    numbers = {f"raw/{name}": float(np.sum(value)) for name, value in scored.rewards.items()}
    return numbers | {f"{part.label}/{name}": float(number) for name, number in scored.numbers.items()}
