"""A verdict is paid as far as the evidence that it cites bears it (M111; VulAgentRL)."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from mcore_agent.protocols import Parser, Scored
from mcore_agent.registry import register
from mcore_agent.reward.calls import calls_of, parser_of
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

VERDICT = re.compile(r"<verdict>([^<]{0,200})</verdict>")
CITED = re.compile(r"<evidence>([^<]{0,20000})</evidence>")


@register("reward", "cited_evidence")
@dataclass(frozen=True)
class CitedEvidence:
    """``1[verdict right] * F1(cited ids, evidence ids) - min(query_cap, per_query * queries)``.

    The last turn says ``<verdict>vulnerable</verdict>`` and ``<evidence>3, 17</evidence>``, each exactly once; the task's gold is
    ``{"verdict": "vulnerable", "evidence": [3, 17]}``. Ids are compared as whole numbers; whatever else is cited, also an id
    that the graph does not have, is a wrong citation. Queries are tool calls. No evidence and none cited is an F1 of 1.

    Right, cited 3 and 8 of 3 and 17, 4 queries at .01: precision and recall 1/2, so .5 - .04 = .46.
    """

    per_query: float = 0.01
    query_cap: float = 0.1
    parser: str = "hermes"

    def __post_init__(self):
        for name in ("per_query", "query_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RewardError(f"reward 'cited_evidence': {name} is {getattr(self, name)}, but must be at least 0 and finite")
        _ = self._parser

    @cached_property
    def _parser(self) -> Parser:
        return parser_of(self.parser)

    def score(self, episode: Episode) -> Scored:
        """``{"cited": value in [0, 1], "queries": at most 0}``; logged: ``right``, ``support``. Raises RewardError for other gold."""
        gold = episode.task.gold
        if not isinstance(gold, Mapping) or not gold.keys() >= {"verdict", "evidence"}:
            raise RewardError(f"reward 'cited_evidence': task {episode.task.id!r}: gold is {gold!r}, but must have verdict and evidence")
        text = episode.turns[-1].action if episode.turns else ""
        verdicts, cited = VERDICT.findall(text), CITED.findall(text)
        right = len(verdicts) == 1 and verdicts[0].strip() == gold["verdict"]
        ids: set[int | str] = ids_of(cited[0]) if len(cited) == 1 else {"two lists"} if cited else set()
        support = f1(ids, set(gold["evidence"]))
        queries = sum(len(calls) for calls in calls_of(episode, self._parser))
        price = min(self.query_cap, self.per_query * queries)
        return Scored({"cited": support if right else 0.0, "queries": -price}, {"right": float(right), "support": support})


def ids_of(text: str) -> set[int | str]:
    """The ids in a list with commas or spaces; a word that is no id stays what it is, and equals none."""
    words = text.replace(",", " ").split()
    return {int(word) if word.isascii() and word.isdigit() and len(word) < 19 else word for word in words}


def f1(found: Collection[int | str], wanted: Collection[int]) -> float:
    """``2 * hits / (found + wanted)``; 1 when both are empty."""
    hits = len(set(found) & set(wanted))
    return 2 * hits / (len(found) + len(wanted)) if found or wanted else 1.0
