"""Whether an episode left the environment as its task wants it (M39; graders by state, 2406.12045 sec. 3)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_agent.registry import register
from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.texts import gold_mapping
from mcore_agent.types import Episode

ABSENT = object()


@register("reward", "web_state")
@dataclass(frozen=True)
class WebState:
    """1 when the last known state has every required value, else 0; with ``partial``, the share of those that it has.

    The state is the last turn's ``state_key``, a JSON object that the environment gives: what there was when the policy said its last
    word, so that an environment must not end an episode with the very action that changes the state. The task's gold is
    ``{path: value, …}``; a path leads through objects and lists: ``cart.items.0.name``. Two of three values: 0, or 2/3 with ``partial``.
    """

    partial: bool = False
    key: str = "web_state"

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{key: value in [0, 1]}``; 0 without turns. Raises VerifierError for a gold that is empty, or a state that is no JSON object."""
        wanted = gold_mapping(episode)
        if not wanted:
            raise VerifierError("gold", f"task {episode.task.id!r} requires nothing of the state")
        if not episode.turns:
            return {self.key: 0.0}
        state = state_of(episode)
        share = sum(_at(state, path) == value for path, value in wanted.items()) / len(wanted)
        return {self.key: share if self.partial else float(share == 1)}


def state_of(episode: Episode) -> Mapping[str, Any]:
    """The last turn's state, a JSON object. Raises VerifierError when it is none."""
    said = episode.turns[-1].state_key
    try:
        state = json.loads(said)
    except ValueError as e:
        raise VerifierError("setup", f"episode {episode.id!r}: the state {said[:80]!r} is no JSON: {e}") from e
    if not isinstance(state, dict):
        raise VerifierError("setup", f"episode {episode.id!r}: the state {said[:80]!r} is no JSON object")
    return state


def _at(state: Any, path: str) -> Any:
    """What is at a path; ABSENT when nothing is. A key may itself contain dots."""
    if isinstance(state, dict) and path in state:
        return state[path]
    head, _, rest = path.partition(".")
    if isinstance(state, list) and head.isdecimal() and int(head) < len(state):
        below = state[int(head)]
    elif isinstance(state, dict) and head in state and rest:
        below = state[head]
    else:
        return ABSENT
    return _at(below, rest) if rest else below
