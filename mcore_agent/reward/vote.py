"""Several judges vote, a rule overrides them, and people look at a sample (M45; judge ensembles)."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from mcore_agent.protocols import Scored
from mcore_agent.registry import register
from mcore_agent.reward.ensemble import opinions
from mcore_agent.reward.pipeline import Part, RewardError, make, total
from mcore_agent.types import Episode


@register("reward", "vote")
@dataclass(frozen=True)
class Vote:
    """1 or 0 as most judges say (a value of at least .5 is a 1), unless ``rule``, where it does not abstain, says otherwise.

    A judge that abstains or fails has no vote. A tie, and no vote at all, abstains unless the rule decides. Logged:
    ``agreement`` (share of the votes that are with the majority), ``rule_agrees`` (the majority said what the rule says),
    ``absent`` (judges without a vote). A share ``rate`` of the episodes, chosen by their ids, goes to the JSON lines of the
    file ``review`` for people to check, in no particular order.

    Votes 1, 1, 0 give 1, agreement 2/3; 1, 0 and an abstention abstain; 1, 1, 1 beside a rule of 0 give 0.
    """

    of: Sequence[Mapping[str, Any]]
    rule: Mapping[str, Any] = field(default_factory=dict)
    review: str = ""
    rate: float = 0.02
    key: str = "vote"
    services: Mapping[str, Any] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def __post_init__(self):
        if not self.of:
            raise RewardError("reward 'vote': of is empty, but needs at least one judge")
        if not 0 <= self.rate <= 1:
            raise RewardError(f"reward 'vote': rate is {self.rate}, but must be in [0, 1]")
        _ = self._judges, self._rule  # made now, so that a wrong spec is refused now

    @cached_property
    def _judges(self) -> list[Part]:
        return [make(spec, self.services) for spec in self.of]

    @cached_property
    def _rule(self) -> Part | None:
        return make(self.rule, self.services) if self.rule else None

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> Scored:
        """``{key: 0.0 or 1.0}``, or nothing."""
        given = opinions(self._judges, episode, siblings)
        votes = [value >= 0.5 for value in given if value is not None]
        yes, no = sum(votes), len(votes) - sum(votes)
        majority = None if yes == no else yes > no
        ruled = total(self._rule.ask(episode, siblings)) if self._rule else None
        verdict = ruled >= 0.5 if ruled is not None else majority
        numbers = {"absent": float(len(given) - len(votes))}
        if majority is not None:
            numbers["agreement"] = max(yes, no) / len(votes)
            if ruled is not None:
                numbers["rule_agrees"] = float(majority == (ruled >= 0.5))
        if self.review and drawn(episode.id, self.rate):
            self._file(episode, given, ruled, verdict)
        return Scored({} if verdict is None else {self.key: float(verdict)}, numbers)

    def _file(self, episode: Episode, votes: list[float | None], ruled: float | None, verdict: bool | None) -> None:
        line = json.dumps({
            "episode": episode.id, "task": episode.task.id, "prompt": list(episode.task.messages),
            "actions": [turn.action for turn in episode.turns], "votes": votes, "rule": ruled, "verdict": verdict,
        })  # fmt: skip
        with self._lock:
            path = Path(self.review)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as f:
                f.write(line + "\n")


def drawn(name: str, rate: float) -> bool:
    """Whether a name is among a share ``rate`` of all names: the same answer in every run."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < rate * 2**64
