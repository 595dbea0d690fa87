"""A short answer against the right one, as words (M39, M64; SQuAD's measures, 1606.05250 sec. 6.1)."""

import re
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mcore_agent.registry import register
from mcore_agent.reward.texts import boxed, final_text, gold_texts, tagged, whole
from mcore_agent.types import Episode

Place = Literal["answer", "boxed", "whole"]
Measure = Literal["exact", "f1"]

FIND: dict[str, Callable[[str], str | None]] = {"answer": tagged, "boxed": boxed, "whole": whole}
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@register("reward", "answer")
@dataclass(frozen=True)
class Answer:
    """How well the answer in the last turn agrees with the task's gold, the best of them if it is a list.

    ``exact``: 1 when they are equal after normalization (small letters, no punctuation, no articles, single spaces), else 0;
    ``f1``: of their words. ``place`` is where the answer stands: in ``<answer>``, in a box, or the whole text without thoughts.
    An answer that is not there gives 0. Gold ``The Red Fort``: ``red fort.`` gives 1 and 1; ``fort red hill`` gives 0 and
    2 * (2/3) * 1 / (2/3 + 1) = .8.
    """

    measure: Measure = "exact"
    place: Place = "answer"
    key: str = "answer"

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{key: value in [0, 1]}``. Raises VerifierError for a task without gold."""
        gold, found = gold_texts(episode), FIND[self.place](final_text(episode))
        return {self.key: 0.0 if found is None else max(MEASURES[self.measure](found, each) for each in gold)}


def exact(found: str, gold: str) -> float:
    """1 when two texts have the same words in the same order."""
    return float(words(found) == words(gold))


def f1(found: str, gold: str) -> float:
    """The harmonic mean of the shares of common words: 2 * common / (words of one + words of the other). Two without words: 1."""
    a, b = Counter(words(found)), Counter(words(gold))
    return 2 * (a & b).total() / (a.total() + b.total()) if a or b else 1.0


def words(text: str) -> list[str]:
    """The words of a text after normalization."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


MEASURES: dict[str, Callable[[str, str], float]] = {"exact": exact, "f1": f1}
