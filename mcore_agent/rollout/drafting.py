"""Drafts of the next tokens from what was said before: no second model, only an index of token sequences.

Episodes of one task family repeat themselves: calls, names, results that are read back. A draft is what followed the
longest earlier occurrence of the newest tokens (SuffixDecoding, arXiv 2411.04975); the policy then checks all of it in
one forward pass. A draft is a proposal and never changes what is sampled, so the index may live through weight updates:
new episodes displace old ones, and drafts follow the policy.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]  # (sequence, end): an n-gram ends before token ``end`` of the sequence


class SuffixIndex:
    """Sequences of at most ``budget`` tokens in all; those that were not extended for longest leave first.

    Every n-gram of ``gram`` tokens maps to its ``places`` newest occurrences. Same calls in the same order, same drafts.
    """

    def __init__(self, budget: int, gram: int = 3, places: int = 16, longest: int = 32, share: float = 0.1):
        if min(budget, gram, places) < 1 or longest < gram:
            raise ValueError(f"budget {budget}, gram {gram} and places {places} must be at least 1, longest {longest} at least gram")
        self.budget, self.gram, self.places, self.longest, self.share = budget, gram, places, longest, share
        self.size = 0  # tokens held
        self._next = 0
        self._sequences: dict[int, list[int]] = {}  # by time of the last extension
        self._grams: dict[tuple[int, ...], list[Place]] = {}

    def open(self, tokens: Sequence[int], after: int | None = None) -> int:
        """A name for a sequence that starts with ``tokens``: that of ``after``, if what it holds is a prefix of them."""
        held = self._sequences.get(after) if after is not None else None
        if after is not None and held is not None and held == list(tokens[: len(held)]):
            self.append(after, tokens[len(held) :])
            return after
        name, self._next = self._next, self._next + 1
        self._sequences[name] = []
        self.append(name, tokens)
        return name

    def append(self, name: int, tokens: Sequence[int]) -> None:
        """Extends a sequence; one that has left the index stays away."""
        held = self._sequences.pop(name, None)
        if held is None:
            return
        self._sequences[name] = held
        begin = len(held)
        held.extend(tokens)
        self.size += len(tokens)
        for end in range(max(begin + 1, self.gram), len(held) + 1):
            found = self._grams.setdefault(tuple(held[end - self.gram : end]), [])
            found.append((name, end))
            if len(found) > self.places:
                del found[0]
        while self.size > self.budget:
            self._evict(next(iter(self._sequences)))

    def _evict(self, name: int) -> None:
        held = self._sequences.pop(name)
        self.size -= len(held)
        for gram in {tuple(held[end - self.gram : end]) for end in range(self.gram, len(held) + 1)}:
            left = [place for place in self._grams.get(gram, ()) if place[0] != name]
            if left:
                self._grams[gram] = left
            else:
                self._grams.pop(gram, None)

    def draft(self, name: int, limit: int) -> list[int]:
        """At most ``limit`` tokens that may follow the sequence, and no more than the tokens that matched.

        Of the occurrences of the longest match, each next token is the most frequent one (the newest, if even) and keeps
        the occurrences that agree; the draft ends where fewer than ``share`` of the first ones are left.
        """
        held = self._sequences.get(name)
        if held is None or limit < 1 or len(held) < self.gram:
            return []
        matches = [(self._sequences[n], end) for n, end in self._grams.get(tuple(held[-self.gram :]), ())]
        matches = [(tokens, end) for tokens, end in matches if end < len(tokens)]
        length = self.gram
        while matches and length < min(self.longest, len(held)):
            token = held[-length - 1]
            longer = [(tokens, end) for tokens, end in matches if end > length and tokens[end - length - 1] == token]
            if not longer:
                break
            matches, length = longer, length + 1
        drafted: list[int] = []
        least = self.share * len(matches)
        for step in range(min(limit, length)):
            matches = [(tokens, end) for tokens, end in matches if end + step < len(tokens)]
            if not matches:
                break
            nexts = [tokens[end + step] for tokens, end in reversed(matches)]
            token, count = Counter(nexts).most_common(1)[0]  # of equal counts the first that was seen: the newest
            if count < least:
                break
            drafted.append(token)
            matches = [(tokens, end) for tokens, end in matches if tokens[end + step] == token]
        return drafted


@dataclass(eq=False)
class Drafting:
    """When to draft, from what, and what came of it. ``on`` may be switched between two steps by any thread."""

    index: SuffixIndex
    below: int  # rows; a batch of more is busy enough
    longest: int  # tokens of one draft
    on: bool = True
    proposed: int = 0
    accepted: int = 0
