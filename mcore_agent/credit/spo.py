"""A value that is remembered for every prompt, instead of a group of answers to it (M93; SPO, 2509.13232 sec. 3)."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mcore_agent.credit.beta import Beta, Scale, check_memory, tasks_of
from mcore_agent.credit.groups import CreditError, scores
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch, View


@dataclass(frozen=True)
class Kept:
    """The last answer to a prompt, and what the learner thought of its tokens then."""

    tokens: np.ndarray  # [T] int32
    scored: np.ndarray  # [n] int32 places in ``tokens``
    logp: np.ndarray  # [n] float32


@register("estimator", "spo")
@dataclass
class Spo:
    """``A = r - v`` with ``v = a / (a + b)`` as it was before; then ``a = rho a + r`` and ``b = rho b + 1 - r``.

    How much is forgotten follows from how far the policy has moved for this prompt: D is the mean ``|change of logp|`` on the
    tokens of its last answer, which the learner scores again, and ``rho = clip(2^(-D / half), rho_low, rho_high)``. Without an
    answer kept, rho is ``rho_low``; so is the weight of the start, v = 1/2. Several answers to a prompt in one batch are
    compared with the same v and forget once. Scores from ``worst`` to ``best`` are evidence from 0 to 1, and v is in their unit.

    A new prompt has a = b = 4. A success gets A = 1 - .5 = .5 and leaves a = .875 * 4 + 1 = 4.5, b = 3.5: v = .5625.
    """

    half: float = 0.06  # D at which half is forgotten
    rho_low: float = 0.875
    rho_high: float = 0.96
    worst: float = 0.0
    best: float = 1.0
    stored: int = 2048  # tokens kept of a prompt with its last answer, from its start
    known: dict[str, Beta] = field(init=False, default_factory=dict)
    answers: dict[str, Kept] = field(init=False, default_factory=dict)

    needs: ClassVar[tuple[str, ...]] = ("logp_prox",)  # the learner's: the engine's rounding would count as drift
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "history"
    under: ClassVar[str] = ""

    def __post_init__(self):
        self.scale = Scale(self.worst, self.best)
        check_memory("estimator 'spo'", self.rho_low, self.scale)
        if not self.rho_low <= self.rho_high <= 1:
            raise CreditError(f"estimator 'spo': rho_high is {self.rho_high}, but must be from rho_low ({self.rho_low}) to 1")
        if not 0 < self.half < math.inf:
            raise CreditError(f"estimator 'spo': half is {self.half}, but must be finite and above 0")
        if self.stored < 1:
            raise CreditError(f"estimator 'spo': stored is {self.stored}, but must be at least 1")

    def value(self, task: str) -> float:
        """Expected success of a prompt, from 0 to 1."""
        return self.known.get(task, Beta.prior(self.rho_low)).value

    def rho(self, drift: float | None) -> float:
        """The share of the evidence that stays."""
        return self.rho_low if drift is None else min(self.rho_high, max(self.rho_low, 2 ** (-drift / self.half)))

    def views(self, batch: Batch, encode: Callable[[str], list[int]]) -> list[View]:
        """The kept answers to the batch's prompts, for the present policy to score."""
        kept = {task: self.answers[task] for task in tasks_of(batch) if task in self.answers}
        return [View(row=task, name="kept", tokens=k.tokens, scored=k.scored) for task, k in kept.items()]

    def __call__(self, batch: Batch, scored: Sequence[np.ndarray] = ()) -> Credit:
        """[E] float64 advantages; the memory then knows the batch."""
        tasks, reward = tasks_of(batch), scores(batch)
        asked = [task for task in tasks if task in self.answers]
        if len(asked) != len(scored):
            raise CreditError(f"estimator 'spo' asked for {len(asked)} scores and got {len(scored)}")
        drift = {t: float(np.mean(abs(now - self.answers[t].logp))) for t, now in zip(asked, scored, strict=True)}
        gained = np.zeros(len(batch.episodes))
        for task, places in tasks.items():
            gained[places] = reward[places] - self.scale.score(self.value(task))
            evidence = [self.scale.evidence(float(reward[i])) for i in places]
            self.known[task] = self.known.get(task, Beta.prior(self.rho_low)).after(self.rho(drift.get(task)), evidence)
        self._keep(batch, tasks)
        numbers = {"drift": float(np.mean(list(drift.values())))} if drift else {}
        return Credit(gained, numbers=numbers | {"prompts_known": len(self.known)})

    def _keep(self, batch: Batch, tasks: Mapping[str, np.ndarray]) -> None:
        """The longest row of one answer to each task, whichever order they came in."""
        mask, start = batch.channel("pg"), np.cumsum([0, *batch.row_lengths])
        for task, places in tasks.items():
            last = max(places, key=lambda i: batch.episodes[i].id)
            rows = np.flatnonzero(batch.row_episode == last)
            spans = [slice(start[r], min(start[r + 1], start[r] + self.stored)) for r in rows]
            r, span = max(zip(rows, spans, strict=True), key=lambda pair: int(mask[pair[1]].sum()))
            at = np.flatnonzero(mask[span])
            at = at[at > 0]  # nothing predicts a row's first token
            self.answers.pop(task, None)
            if len(at):
                tokens = batch.rows[r].tokens[: at[-1] + 1].astype(np.int32)
                logp = np.asarray(batch.columns["logp_prox"][span][at], dtype=np.float32)
                self.answers[task] = Kept(tokens, at.astype(np.int32), logp)

    def state_dict(self) -> dict[str, Any]:
        answers = {task: [_text(k.tokens), _text(k.scored), _text(k.logp)] for task, k in self.answers.items()}
        return {"known": {task: [k.a, k.b] for task, k in self.known.items()}, "answers": answers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.known = {task: Beta(a, b) for task, (a, b) in state["known"].items()}
        self.answers = {
            task: Kept(_array(tokens, np.int32), _array(scored, np.int32), _array(logp, np.float32))
            for task, (tokens, scored, logp) in state["answers"].items()
        }


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _array(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype)
