"""One request on its way to an answer: the parts it has so far, what is left to ask, and how the parts become one."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_agent.agent.seeds import derive
from mcore_agent.protocols import Completion, EngineDown, InfraError, Request

ENDS = frozenset({"stop", "length", "abort", "error"})


@dataclass(eq=False)
class Flight:
    """A request and the parts of its answer. A part is what one engine said before it was interrupted, or to the end."""

    request: Request
    parts: list[Completion] = field(default_factory=list)  # each with at least one token
    length: int = 0  # tokens of all parts
    asked: int = 0  # times that an engine was asked
    repeats: int = 0  # of these, asked again because the engine was lost
    dropped: bool = False  # to its caller it ends as ``abort``
    kept: bool = False  # aborted at the engine, to go on later
    name: str = ""  # its id at the engine that has it now
    answer: "asyncio.Future[Completion] | None" = None  # of that engine

    def rest(self) -> Request:
        """What an engine is asked: at first the request itself, later the prompt and the tokens so far, for the tokens left.

        A request that goes on draws from a seed of its own: the old one would give the draws of the first part again.
        """
        r = self.request
        self.name = f"{r.id}~{self.asked}" if self.asked else r.id
        self.asked, self.kept = self.asked + 1, False
        if self.length == 0:
            return r if self.name == r.id else replace(r, id=self.name)
        tokens = np.concatenate([r.tokens, *(part.tokens for part in self.parts)])
        return replace(r, id=self.name, tokens=tokens, max_new=r.max_new - self.length, seed=derive(r.seed, "rest", self.length))

    def take(self, ask: Request, answer: Completion) -> Completion | None:
        """Adds what was answered to ``ask``. Returns the whole answer, or None when the request is to go on."""
        n = len(answer.tokens)
        finish = answer.finish
        if finish == "abort" and n and int(answer.tokens[-1]) in ask.stop:
            finish = "stop"  # it was done when the abort came
        elif finish == "abort" and n == ask.max_new:
            finish = "length"
        if n:
            self.parts.append(answer)
            self.length += n
        if finish == "abort" and self.kept and not self.dropped:
            return None
        return self.whole(replace(answer, finish=finish) if finish != answer.finish else answer)

    def whole(self, last: Completion) -> Completion:
        """All parts as one answer that ends as ``last`` does. Columns have one entry per token, whatever was interrupted (C8)."""
        if not self.parts or (len(self.parts) == 1 and self.parts[0] is last):
            return last
        first = self.parts[0]
        return Completion(
            tokens=np.concatenate([part.tokens for part in self.parts]),
            logp=np.concatenate([part.logp for part in self.parts]),
            version=np.concatenate([part.version for part in self.parts]),
            finish=last.finish,
            cached=min(first.cached, len(self.request.tokens)),
            error=last.error,
            routing=merged_routing(len(self.request.tokens), self.parts),
        )

    def abort(self) -> Completion:
        """The answer of a request that ends while no engine has it."""
        none = np.zeros(0, dtype=np.int64)
        return self.whole(Completion(none, none.astype(np.float32), none.astype(np.int32), "abort"))

    def repeat(self, reason: EngineDown, limit: int) -> None:
        """Counts one more loss of its engine. Raises InfraError above ``limit``: it may be the request that kills engines."""
        self.repeats += 1
        if self.repeats > limit:
            raise InfraError(
                f"request {self.request.id}: {self.repeats} engines were lost under it, the last so: {reason}; "
                f"it is not asked again (retries is {limit})"
            ) from reason


def merged_routing(prompt: int, parts: Sequence[Completion]) -> np.ndarray | None:
    """[prompt + tokens - 1, layers, experts]: each row from the part that read its token first (D2).

    A part reads the whole row again, under its own weights; the rows of tokens that were sampled before stay those that
    they were sampled with. Where a part that was cut off has no routing, or not of its own length, the next one's rows
    stand for it. None when the last part has none.
    """
    rows: np.ndarray | None = None
    total = prompt
    for part in parts:
        total += len(part.tokens)
        given = part.routing if part.routing is not None and len(part.routing) == total - 1 else None
        rows = given if rows is None or given is None else np.concatenate([rows, given[len(rows) :]])
    return rows


def flaw(ask: Request, answer: Completion) -> str:
    """What makes an answer garbage; empty when nothing does."""
    n = len(answer.tokens)
    if answer.finish not in ENDS:
        return f"finish is {answer.finish!r}"
    if len(answer.logp) != n or len(answer.version) != n:
        return f"{n} tokens, {len(answer.logp)} logp, {len(answer.version)} versions"
    if n > ask.max_new:
        return f"{n} tokens, {ask.max_new} were asked"
    if n and (int(answer.tokens.min()) < 0 or not np.isfinite(answer.logp).all()):
        return "a token below 0 or a logp that is no number"
    if answer.finish in ("abort", "error"):
        return ""
    if n == 0:
        return f"no token, but finish is {answer.finish!r}"
    if answer.finish == "stop" and int(answer.tokens[-1]) not in ask.stop:
        return f"stopped at token {int(answer.tokens[-1])}, which is no stop token"
    if answer.routing is not None and len(answer.routing) != len(ask.tokens) + n - 1:
        return f"routing of {len(answer.routing)} tokens, {len(ask.tokens) + n - 1} were read"
    return ""
