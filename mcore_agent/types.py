"""The records that cross from one stage to the next. Nothing else does.

Token columns are numpy arrays. Index ``t`` of every column speaks of ``tokens[t]`` itself: ``logp[t]`` is
the log-probability of ``tokens[t]`` given ``tokens[:t]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Message = dict[str, Any]

SEGMENT_KINDS = frozenset({"prompt", "obs", "think", "action", "select", "memory", "answer", "reflect", "forced"})
GREEDY = "greedy"  # branch of an episode played for comparison, which nobody trains on
STATUSES = frozenset({"ok", "truncated", "infra_fail"})
TOKEN_COLUMNS = {"tokens": np.int64, "sampled": np.bool_, "logp": np.float32, "version": np.int32}


class RecordError(ValueError):
    """A record contradicts itself: the message names the record, the field and both values."""


@dataclass(frozen=True)
class Task:
    """One problem. ``gold`` is for verifiers only and never reaches a prompt.

    >>> Task(id="hop/train/7", domain="hop_lookup", messages=({"role": "user", "content": "bl 2"},), spec={"seed": 7})
    ... # doctest: +ELLIPSIS
    Task(id='hop/train/7', ...)
    """

    id: str
    domain: str
    messages: tuple[Message, ...]
    spec: Mapping[str, Any] = field(default_factory=dict)  # what the environment needs to start this task
    gold: Any = None
    relabelable: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A span ``[start, end)`` of a row; ``turn`` is the index of the decision it belongs to (-1: the prompt)."""

    start: int
    end: int
    turn: int
    kind: str

    def __post_init__(self):
        if self.kind not in SEGMENT_KINDS:
            raise RecordError(f"Segment.kind is {self.kind!r}; known kinds: {', '.join(sorted(SEGMENT_KINDS))}")
        if not 0 <= self.start <= self.end:
            raise RecordError(f"Segment [{self.start}, {self.end}) is not a span")


@dataclass(frozen=True)
class Row:
    """Exactly the token sequence that an engine saw.

    Two turns, with the prompt 11 12, an action 21 2 (2 ends a turn), an observation 31, and an answer 22 2::

        tokens    11  12  21   2  31  22   2
        sampled    0   0   1   1   0   1   1
        logp       0   0 -.5 -.1   0 -.7 -.2
        version   -1  -1   3   3  -1   3   3
        segments  (0,2,-1,prompt) (2,4,0,action) (4,5,0,obs) (5,7,1,answer)

    ``channels`` names further token masks for losses other than the policy gradient (for example ``sft``).
    The channel ``pg`` is ``sampled`` unless it is given, and must be a subset of it.
    Raises RecordError when lengths differ, a mask leaves its bound, or a sampled token has no version.
    """

    tokens: np.ndarray  # [T] int64
    sampled: np.ndarray  # [T] bool: the policy chose this token
    logp: np.ndarray  # [T] float32: behaviour log-probability, 0 where not sampled
    version: np.ndarray  # [T] int32: weight version that sampled it, -1 where not sampled
    segments: tuple[Segment, ...] = ()
    parent: int | None = None  # index of the row of the same episode whose first `prefix` tokens these are
    prefix: int = 0
    view: str = ""  # the context view that produced it; "" is the plain one
    channels: Mapping[str, np.ndarray] = field(default_factory=dict)  # name -> [T] bool
    routing: np.ndarray | None = None  # [T, moe layers, top-k] int32

    def __post_init__(self):
        for name, dtype in TOKEN_COLUMNS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        n = len(self.tokens)
        if n == 0:
            raise RecordError("Row.tokens is empty")
        columns = {"sampled": self.sampled, "logp": self.logp, "version": self.version, **self.channels}
        for name, column in columns.items():
            if len(column) != n:
                raise RecordError(f"Row.{name} has {len(column)} entries, tokens has {n}")
        if self.routing is not None and len(self.routing) != n:
            raise RecordError(f"Row.routing has {len(self.routing)} entries, tokens has {n}")
        if "pg" in self.channels and np.any(self.channels["pg"] & ~self.sampled):
            raise RecordError("Row.channels['pg'] holds a token that was not sampled")
        if np.any(self.version[self.sampled] < 0):
            raise RecordError("a sampled token of Row has no weight version")
        if not np.all(np.isfinite(self.logp[self.sampled])) or np.any(self.logp[~self.sampled] != 0):
            raise RecordError("Row.logp must be finite where sampled and 0 elsewhere")
        for s in self.segments:
            if s.end > n:
                raise RecordError(f"Segment [{s.start}, {s.end}) ends after the row's {n} tokens")

    def __len__(self) -> int:
        return len(self.tokens)

    def channel(self, name: str) -> np.ndarray:
        """Token mask ``[T]`` of a channel; all False when the row has no such channel."""
        if name in self.channels:
            return np.asarray(self.channels[name], dtype=bool)
        return self.sampled if name == "pg" else np.zeros(len(self), dtype=bool)


@dataclass(frozen=True)
class Feedback:
    """What the environment said of one action. ``ok`` False is a failed call, ``error`` its reason."""

    reward: float = 0.0
    ok: bool = True
    changed: bool = True
    error: str = ""


@dataclass(frozen=True)
class Turn:
    """One decision: the state it was taken in, the action's text, and what came back."""

    index: int
    action: str
    state_key: str = ""
    history: tuple[str, ...] = ()
    feedback: Feedback = Feedback()
    sources: tuple[int, ...] = ()
    snapshot: str | None = None


@dataclass(frozen=True)
class Episode:
    """One rollout of one task.

    A rollout in which the agent rewrote its context has several rows; they share ``rewards``. ``status`` is
    ``ok``, ``truncated`` (a budget ran out) or ``infra_fail`` (the environment or the engine failed: the episode
    counts in no statistic, and ``reason`` says why).
    """

    id: str
    task: Task
    group: str
    rows: tuple[Row, ...] = ()
    turns: tuple[Turn, ...] = ()
    rewards: Mapping[str, float | Sequence[float]] = field(default_factory=dict)  # name -> scalar, or one per turn
    status: str = "ok"
    reason: str = ""
    branch: str = ""
    seed: int = 0

    def __post_init__(self):
        if self.status not in STATUSES:
            raise RecordError(f"Episode {self.id}: status is {self.status!r}; known: {', '.join(sorted(STATUSES))}")
        if self.status != "infra_fail" and not self.rows:
            raise RecordError(f"Episode {self.id} has no rows")
        for name, value in self.rewards.items():
            if not np.all(np.isfinite(np.asarray(value, dtype=float))):
                raise RecordError(f"Episode {self.id}: reward {name!r} is {value!r}, not finite")
            if np.ndim(value) == 1 and len(value) != len(self.turns):  # type: ignore[arg-type]
                raise RecordError(f"Episode {self.id}: reward {name!r} has {len(value)} entries, {len(self.turns)} turns")  # type: ignore[arg-type]

    @property
    def reward(self) -> float:
        """Sum of all named rewards, turns included."""
        return float(sum(np.sum(value) for value in self.rewards.values()))

    @property
    def sampled_tokens(self) -> int:
        return int(sum(row.sampled.sum() for row in self.rows))


@dataclass(frozen=True)
class Batch:
    """Episodes and columns on three axes: token ``[N]``, turn ``[M]``, episode ``[E]``.

    Tokens run row after row, episode after episode; ``infra_fail`` episodes are refused. With one episode of one
    row of 7 tokens (the example of Row) and another of 3 tokens::

        row_lengths     7 3        row_episode   0 1
        token_episode   0 0 0 0 0 0 0 1 1 1

    ``columns`` holds what stages have added, by name: each array has N, M or E entries.
    """

    episodes: tuple[Episode, ...]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self):
        for e in self.episodes:
            if e.status == "infra_fail":
                raise RecordError(f"Episode {e.id} failed ({e.reason}) and may not enter a batch")

    def with_columns(self, **columns: np.ndarray) -> "Batch":
        return Batch(self.episodes, {**self.columns, **columns})

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for e in self.episodes for row in e.rows)

    @cached_property
    def row_lengths(self) -> np.ndarray:  # [R]
        return np.array([len(row) for row in self.rows], dtype=np.int64)

    @cached_property
    def row_episode(self) -> np.ndarray:  # [R]
        return np.repeat(np.arange(len(self.episodes)), np.array([len(e.rows) for e in self.episodes], dtype=np.int64))

    @cached_property
    def token_row(self) -> np.ndarray:  # [N]
        return np.repeat(np.arange(len(self.rows)), self.row_lengths)

    @cached_property
    def token_episode(self) -> np.ndarray:  # [N]
        return self.row_episode[self.token_row]

    @cached_property
    def turn_episode(self) -> np.ndarray:  # [M]
        return np.repeat(np.arange(len(self.episodes)), np.array([len(e.turns) for e in self.episodes], dtype=np.int64))

    @cached_property
    def token_turn(self) -> np.ndarray:
        """[N] index on the turn axis of the turn a token belongs to, -1 for the prompt.

        Raises RecordError when a segment names a turn that its episode does not have.
        """
        first = np.cumsum([0, *(len(e.turns) for e in self.episodes)])
        out = np.full(int(self.row_lengths.sum()), -1, dtype=np.int64)
        at = 0
        for r, row in enumerate(self.rows):
            for s in row.segments:
                episode = self.episodes[self.row_episode[r]]
                if s.turn >= len(episode.turns):
                    raise RecordError(f"Episode {episode.id}: a segment names turn {s.turn} of {len(episode.turns)}")
                if s.turn >= 0:
                    out[at + s.start : at + s.end] = first[self.row_episode[r]] + s.turn
            at += len(row)
        return out

    def tokens(self, name: str) -> np.ndarray:
        """[N] a column of Row (``tokens``, ``sampled``, ``logp``, ``version``) over the whole batch."""
        return np.concatenate([np.zeros(0, dtype=TOKEN_COLUMNS[name]), *(getattr(row, name) for row in self.rows)])

    def channel(self, name: str) -> np.ndarray:
        """[N] bool: the channel's mask over the whole batch."""
        return np.concatenate([np.zeros(0, dtype=bool), *(row.channel(name) for row in self.rows)])

    def by(self, key: str) -> np.ndarray:
        """[E] small integers, equal where ``key`` (``group``, ``branch`` or ``domain``) is equal."""
        values = [e.task.domain if key == "domain" else getattr(e, key) for e in self.episodes]
        return np.unique(np.array(values), return_inverse=True)[1]

    @cached_property
    def rewards(self) -> np.ndarray:
        """[E] summed reward of each episode."""
        return np.array([e.reward for e in self.episodes], dtype=np.float64)

    def to_tokens(self, values: np.ndarray, axis: str) -> np.ndarray:
        """[N] values of the ``episode`` or ``turn`` axis spread over the tokens (turn: 0 on the prompt)."""
        if axis == "token":
            return values
        if axis == "episode":
            return values[self.token_episode]
        return np.where(self.token_turn >= 0, values[np.maximum(self.token_turn, 0)], 0.0)


@dataclass(frozen=True)
class View:
    """A row's tokens to score, placed in a context of their own.

    The policy sampled ``7 8 2`` after the prompt ``1 5``; the view ``hint`` puts a hint before it::

        row     "t4/0/2"    name  "hint"
        tokens  1 9 9 5 7 8 2
        scored          4 5 6       places in ``tokens``, in the order of the row's sampled tokens

    ``under`` names the weights that score: ``reference``, or the present ones (empty). Raises RecordError when a scored
    place is the first token, which nothing predicts, or is not there.
    """

    row: str
    name: str
    tokens: np.ndarray  # [T] int64
    scored: np.ndarray  # [n] int64
    under: str = ""

    def __post_init__(self):
        for name in ("tokens", "scored"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        if len(self.scored) and not (self.scored.min() > 0 and self.scored.max() < len(self.tokens)):
            raise RecordError(
                f"view {self.name!r} of row {self.row!r} scores places {self.scored.min()} to {self.scored.max()} of {len(self.tokens)} "
                "tokens; they must be from 1 on, because nothing predicts the first token"
            )
