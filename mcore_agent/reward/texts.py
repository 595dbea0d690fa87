"""What an episode answered at its end, and what its task's gold says: shared by verifiers."""

import re
from collections.abc import Mapping
from typing import Any

from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.form import BOXED, CLOSE
from mcore_agent.types import Episode

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
FENCED = re.compile(r"^```[ \t]*([\w+-]*)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


def final_text(episode: Episode) -> str:
    """The last turn's text after its thoughts; empty without turns."""
    return episode.turns[-1].action.rpartition(CLOSE)[2] if episode.turns else ""


def boxed(text: str) -> str | None:
    """What is in the last box of a text; None when there is none, or it is not closed. ``\\boxed{\\frac{1}{2}}`` has ``\\frac{1}{2}``."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth, first = 1, start + len(BOXED)
    for at in range(first, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[first:at].strip()
    return None


def tagged(text: str) -> str | None:
    """What is in the last ``<answer>`` of a text."""
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def whole(text: str) -> str | None:
    """All of a text."""
    return text.strip()


def program(text: str) -> str | None:
    """The last fenced block of a text that is Python or says nothing of its language."""
    found = [body for language, body in FENCED.findall(text) if language.lower() in ("", "py", "python", "python3")]
    return found[-1] if found else None


def gold_texts(episode: Episode) -> list[str]:
    """The gold answer as a list of texts, each of them right. Raises VerifierError when it is none."""
    gold = episode.task.gold
    many = list(gold) if isinstance(gold, (list, tuple)) else [gold]
    if not many or not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) and str(each).strip() for each in many):
        raise VerifierError("gold", f"task {episode.task.id!r} has the gold {gold!r}, but an answer is a text, a number or a list of them")
    return [str(each) for each in many]


def gold_mapping(episode: Episode, *needed: str) -> Mapping[str, Any]:
    """The gold as a mapping with these keys. Raises VerifierError when it is not."""
    gold = episode.task.gold
    if not isinstance(gold, Mapping):
        raise VerifierError("gold", f"task {episode.task.id!r} has the gold {gold!r}, but it must be a mapping")
    if missing := [key for key in needed if key not in gold]:
        raise VerifierError("gold", f"task {episode.task.id!r}: its gold lacks {', '.join(missing)}")
    return gold
