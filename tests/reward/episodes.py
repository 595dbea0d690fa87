"""Episodes from the texts of their turns."""

import json
from dataclasses import dataclass
from typing import Any

from mcore_agent.types import Episode, Feedback, Segment, Task, Turn
from tests.strategies import row_of


def played(*actions: str, id="e", group="g", states=None, ok=None, gold: Any = None, meta=None, earned=0.0, **fields) -> Episode:
    """A turn per action, its tokens ``[prompt, action, obs, action, obs, …]`` one each; the last turn earns ``earned``."""
    states, ok = states or [""] * len(actions), ok or [True] * len(actions)
    last = len(actions) - 1
    said = [Feedback(reward=earned if i == last else 0.0, ok=ok[i]) for i in range(len(actions))]
    turns = tuple(Turn(i, text, state_key=states[i], feedback=said[i]) for i, text in enumerate(actions))
    segments = [Segment(0, 1, -1, "prompt")]
    for i in range(len(actions)):
        segments.append(Segment(2 * i + 1, 2 * i + 2, i, "action"))
        segments += [Segment(2 * i + 2, 2 * i + 3, i, "obs")] if i < last else []
    size = segments[-1].end
    row = row_of([i % 2 == 1 for i in range(size)], tokens=range(100, 100 + size), segments=tuple(segments))
    task = Task(f"task of {id}", "toy", ({"role": "user", "content": "do it"},), gold=gold, meta=meta or {})
    return Episode(id, task, group, (row,), turns, **fields)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass(frozen=True)
class Fixed:
    """A reward that gives what ``values`` has for the episode's id, and abstains for the others; for tests of combinators."""

    values: Any
    key: str = "fixed"

    def score(self, episode: Episode) -> dict:
        value = self.values.get(episode.id) if isinstance(self.values, dict) else self.values
        if isinstance(value, Exception):
            raise value
        return {} if value is None else {self.key: value}
