"""What was said in an episode, as data for a model that judges it."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

Decode = Callable[[Sequence[int]], str]


def transcript(episode: Episode, decode: Decode | None, last: int | None = None) -> list[dict[str, str]]:
    """Prompt, actions and observations in their order, up to the action of turn ``last``.

    ``[{"role": "user", "text": …}, {"role": "agent", "text": …}, {"role": "environment", "text": …}, …]``. Observations are
    in the rows, as tokens; one that several rows repeat is told once. Raises RewardError when there are any and no ``decode``.
    """
    seen = observations(episode)
    if seen and decode is None:
        raise RewardError(f"episode {episode.id!r} has observations, which stand in its rows as tokens; make the Scorer with the "
                          "service 'decode' (token ids to text)")  # fmt: skip
    out = [{"role": str(m.get("role", "")), "text": text_of(m.get("content", ""))} for m in episode.task.messages]
    for turn in episode.turns if last is None else episode.turns[: last + 1]:
        out.append({"role": "agent", "text": turn.action})
        if turn.index in seen and turn.index != last and decode is not None:
            out.append({"role": "environment", "text": decode(seen[turn.index])})
    return out


def observations(episode: Episode) -> dict[int, list[int]]:
    """Turn -> token ids of what came back, from the first row that has it."""
    out: dict[int, list[int]] = {}
    for row in episode.rows:
        found: dict[int, list[int]] = {}
        for s in row.segments:
            if s.kind == "obs" and s.end > s.start:
                found.setdefault(s.turn, []).extend(row.tokens[s.start : s.end].tolist())
        out = found | out
    return out


def text_of(content: Any) -> str:
    """A message's content as text: OpenAI's lists of parts as JSON."""
    return content if isinstance(content, str) else json.dumps(content, default=str)


def quoted(entries: Sequence[dict[str, str]], max_chars: int, **more: Any) -> str:
    """One JSON object in ASCII: whatever a text says, it stays a string inside it. Long texts lose their middle."""
    short = [{"role": each["role"], "text": shortened(each["text"], max_chars)} for each in entries]
    return json.dumps({**more, "transcript": short})


def shortened(text: str, max_chars: int) -> str:
    """The two ends of a text of more than ``max_chars`` characters."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} [… {len(text) - 2 * half} characters left out …] {text[len(text) - half :]}"
