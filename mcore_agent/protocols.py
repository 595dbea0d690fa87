"""The seams between stages. A variant is one file behind one of these protocols, found by the registry."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from mcore_agent.types import Batch, Episode, Feedback, Message, Task, View

if TYPE_CHECKING:
    import torch


class InfraError(RuntimeError):
    """The environment or the engine failed, not the policy: the episode is retried or dropped, never scored 0."""


class EngineDown(InfraError):
    """The engine's process is gone, frozen, or answers garbage: its requests may be asked of another, with the same tokens."""


# --------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. ``error`` is set instead of a name when the call could not be parsed."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Action:
    """One assistant turn: its text without the end token, and the tool calls in it (none: a final answer)."""

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Observation:
    """What the environment returns. ``messages`` are appended to the dialog; ``done`` ends the episode."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    feedback: Feedback = Feedback()
    state_key: str = ""  # equal for equal states of the environment *before* the next action


@runtime_checkable
class Env(Protocol):
    """One live episode of an environment. Raises InfraError when the environment itself fails."""

    async def reset(self) -> Observation: ...

    async def step(self, action: Action) -> Observation: ...

    async def close(self) -> None: ...


@runtime_checkable
class Domain(Protocol):
    """A family of tasks, registered under the kind ``env``; its constructor takes the recipe's arguments.

    ``tools`` are JSON schemas of functions (OpenAI format), empty for none. ``size`` is the number of tasks of a
    split, None when they are generated without end. ``task(split, i)`` is a pure function of its arguments.
    ``demo(task, seed)`` returns the messages of a demonstration (the prompt's included) or None.
    """

    tools: Sequence[Mapping[str, Any]]

    def size(self, split: str) -> int | None: ...

    def task(self, split: str, index: int) -> Task: ...

    def make(self, task: Task, seed: int) -> Env: ...

    def demo(self, task: Task, seed: int) -> list[Message] | None: ...


@runtime_checkable
class TaskSource(Protocol):
    """Chooses tasks. Its state goes to the checkpoint, so that a resumed run draws the same tasks."""

    def next(self, k: int) -> list[Task]: ...

    def observe(self, episodes: Sequence[Episode]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Parser(Protocol):
    """Splits an assistant turn into text and tool calls; a malformed call becomes a ToolCall with ``error``."""

    def parse(self, text: str) -> Action: ...


# --------------------------------------------------------------------------------------------------- engine


@dataclass(frozen=True)
class Request:
    """Token ids in. ``seed`` alone decides the random draws, whatever else runs beside it."""

    id: str
    tokens: np.ndarray  # [P] int64
    max_new: int
    stop: tuple[int, ...] = ()
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 0
    order: tuple[int, ...] = ()  # place in a batch: requests that run together are sorted by it
    session: str = ""  # requests of one session extend one another: an engine that had the last has its keys and values
    routing: bool = False  # report the experts that each token was sent to


@dataclass(frozen=True)
class Completion:
    """Token ids out. ``logp`` is taken after temperature over the whole vocabulary (before top-p and top-k).

    ``finish`` is ``stop`` (the last token is a stop token, which is included), ``length``, ``abort`` or ``error``
    (``error`` then says why); every request ends with one of them. ``routing`` has an entry for every token of prompt and
    answer that the model read: all but the last.
    """

    tokens: np.ndarray  # [N] int64
    logp: np.ndarray  # [N] float32
    version: np.ndarray  # [N] int32
    finish: str
    cached: int = 0  # prompt tokens whose keys and values were reused
    error: str = ""
    routing: np.ndarray | None = None  # [P + N - 1, moe layers, experts per token] int32, if asked for


@runtime_checkable
class Engine(Protocol):
    """Serves the current weights. All engines look the same to the code that plays episodes.

    A client is one episode: the engine may wait for every open client's next request before it forms a batch.
    ``update`` outside ``begin_update`` … ``end_update`` raises; ``end_update`` raises unless every parameter was
    given exactly once, then drops cached keys and values and serves ``version``. Every call raises EngineDown when the
    engine's process is gone or answers garbage; a request then may be asked of another engine.

    ``pause``: ``in_place`` keeps requests and their keys and values, ``retract`` keeps the requests (their keys and values
    are computed again), ``abort`` ends them as ``abort``. ``progress`` grows while the engine works (tokens so far);
    ``memory`` is bytes by kind that the engine holds now.
    """

    version: int

    def client(self) -> AbstractContextManager[None]: ...
    async def generate(self, request: Request) -> Completion: ...
    async def abort(self, ids: Iterable[str] | None = None) -> None: ...
    async def pause(self, mode: str = "in_place") -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None: ...
    async def wake(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None: ...
    async def begin_update(self) -> None: ...
    async def update(self, bucket: Iterable[tuple[str, "torch.Tensor"]]) -> None: ...
    async def end_update(self, version: int) -> None: ...
    async def flush(self) -> None: ...
    async def checksum(self) -> dict[str, str]: ...
    async def progress(self) -> int: ...
    async def memory(self) -> dict[str, int]: ...
    async def close(self) -> None: ...
    def capabilities(self) -> frozenset[str]: ...


# --------------------------------------------------------------------------------------------------- sandbox


class SandboxError(InfraError):
    """The sandbox itself failed, not what ran in it. ``kind`` is a word to count by."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"sandbox_{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class ExecLimits:
    """What one command and everything that it starts may use together; ``file_bytes`` is for each file that they write."""

    wall_s: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20  # of stdout and stderr, each
    file_bytes: int = 64 << 20
    processes: int = 64

    def __post_init__(self):
        for name in ("wall_s", "memory_bytes", "output_bytes", "file_bytes", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ExecLimits.{name} is {getattr(self, name)}, but must be above 0")


@dataclass(frozen=True)
class Ran:
    """How a command ended. ``reason``: ``ok`` (by itself, whatever its code), the limit that ended it (``timeout``, ``memory``,
    ``output``, ``processes``), ``killed`` (by a signal) or ``missing`` (there is no such program).

    ``code`` is the exit status, 128 + n after signal n. Output beyond its limit is cut.
    """

    code: int
    stdout: bytes
    stderr: bytes
    reason: str
    wall_s: float


@runtime_checkable
class Sandbox(Protocol):
    """A folder of its own, and commands that run in it. Paths are relative to that folder, which is also where commands start.

    ``isolates`` says what a command cannot reach: ``files`` (outside the folder), ``network``, ``processes``. When ``exec``
    returns, nothing that the command started is alive. ``kill``, from any thread, ends what runs and removes the folder; a second
    one does nothing. Raises SandboxError when the sandbox fails or is killed, for a path that leads out of its folder, and for put
    and get while a command runs.
    """

    @property
    def isolates(self) -> frozenset[str]: ...
    def start(self) -> None: ...
    def exec(
        self, command: Sequence[str], limits: ExecLimits = ..., stdin: bytes = b"", env: Mapping[str, str] = ...
    ) -> Ran: ...
    def put(self, path: str, data: bytes) -> None: ...
    def get(self, path: str) -> bytes: ...
    def kill(self) -> None: ...


# ------------------------------------------------------------------------------------- reward, credit and loss


@dataclass(frozen=True)
class Scored:
    """Named rewards of one episode, a scalar or one number per turn each, and numbers to log beside them."""

    rewards: Mapping[str, float | list[float]]
    numbers: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Reward(Protocol):
    """Named numbers for one finished episode: a scalar or one number per turn; none at all when it cannot tell.

    Several threads call it at once. Raises InfraError when something other than the policy failed.
    """

    def score(self, episode: Episode) -> dict[str, float | list[float]] | Scored: ...


@runtime_checkable
class Comparing(Protocol):
    """A reward that sees an episode among its siblings: the episodes of its group that did not fail, itself included.

    A greedy episode is a sibling of greedy ones only.
    """

    def score_among(self, episode: Episode, siblings: Sequence[Episode]) -> dict[str, float | list[float]] | Scored: ...


@dataclass(frozen=True)
class Credit:
    """Advantages on an estimator's axis, the token columns [N] that it gives beside them, and numbers to log."""

    advantage: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Estimator(Protocol):
    """Advantages from a batch. ``axis`` says on which axis (token, turn, episode) the result lives.

    ``needs`` names batch columns (for example ``values``) that the loop must provide beforehand, or ``branch:greedy`` for a
    greedy episode in every group, which nobody trains on; ``gives`` names the columns (for example ``returns``) that come
    with the advantages in a Credit; an estimator that gives none may return an array. ``compares`` says what an episode is
    held against, and tests hold it to that: ``group`` (its own group alone; equal rewards in it give 0), ``batch``, ``values``
    (a critic's), ``history`` (what the estimator remembers) or ``none``.
    """

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    axis: str
    compares: str

    def __call__(self, batch: Batch) -> np.ndarray | Credit: ...


@runtime_checkable
class Rescoring(Protocol):
    """An estimator that first has the learner score tokens in contexts of its own making.

    ``scores[i]`` are the log-probabilities [n] of the scored tokens of view i. ``encode`` makes token ids of a text. ``under``
    names the weights of all its views, as ``View.under`` does.
    """

    under: str

    def views(self, batch: Batch, encode: Callable[[str], list[int]]) -> Sequence[View]: ...

    def __call__(self, batch: Batch, scores: Sequence[np.ndarray]) -> np.ndarray | Credit: ...


@runtime_checkable
class Stateful(Protocol):
    """Remembers something between steps; it goes to the checkpoint as JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Filter(Protocol):
    """[E] bool: the episodes to learn from. What it drops leaves every statistic and every denominator."""

    needs: tuple[str, ...]

    def __call__(self, batch: Batch) -> np.ndarray: ...


class Shaping(Protocol):
    """[N] rewards for single tokens, added to what the episodes earned before an estimator sees them."""

    needs: tuple[str, ...]

    def __call__(self, batch: Batch) -> np.ndarray: ...


class Transform(Protocol):
    """Re-weights advantages [N]. ``preserves`` says what it keeps, and a test holds it to that:

    ``sign``: no token's advantage changes sign; ``sum``: the sum over the tokens of each episode; ``turn_sum``: of each turn;
    ``mean_weight``: where an episode's advantages are all equal, their mean over its tokens.
    """

    needs: tuple[str, ...]
    preserves: frozenset[str]

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray: ...


class Normalizer(Protocol):
    """Sets the scale of advantages [N]. ``measure`` is the population whose members count alike:

    ``trajectory``, ``token``, ``turn``, ``group``, ``graph``, ``batch`` or ``domain``.
    """

    needs: tuple[str, ...]
    measure: str

    def __call__(self, advantage: np.ndarray, batch: Batch) -> np.ndarray: ...


@dataclass(frozen=True)
class ModelOut:
    """What the learner hands to a loss: columns over the tokens of one micro-batch, aligned with ``tokens``."""

    logp: "torch.Tensor"  # [T] log-probability of each token at the run's temperature; 0 at the first of a row
    entropy: "torch.Tensor | None" = None  # [T] of the distribution that token t was drawn from; only if needed
    log_sum: "torch.Tensor | None" = None  # [T] logsumexp of that distribution's logits over temperature; only if needed
    top_logp: "torch.Tensor | None" = None  # [T, k] its highest log-probabilities, falling; only if needed
    top_ids: "torch.Tensor | None" = None  # [T, k] and their token ids; both 0 at the first of a row
    hidden: "torch.Tensor | None" = None  # [n, h] hidden states at the n positions asked for
    value: "torch.Tensor | None" = None  # [T] of the state that token t was drawn in; only if needed
    value_behind: "torch.Tensor | None" = None  # [T] of the state with token t in it: the value of what it does


@runtime_checkable
class LossTerm(Protocol):
    """A loss per token. It enters the total as ``coef * sum_t weight[t] * per_token[t]``.

    ``channel`` names the token mask; the weights come from an aggregation of that mask over the global batch, so a
    term never sees a denominator. ``needs`` names columns (``advantage``, ``logp_old``, ``logp_ref``) and outputs
    (``entropy``). ``scales_with`` names a column to which the term is proportional: rows in which it is 0
    everywhere contribute nothing and may be left out. ``per_token`` may return metrics beside the loss: each is a
    ``[T]`` tensor, averaged with the same weights.
    """

    channel: str
    needs: tuple[str, ...]
    scales_with: str | None
    coef: float
    aggregate: str

    def per_token(
        self, out: ModelOut, columns: Mapping[str, "torch.Tensor"]
    ) -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]: ...
