"""One episode: the policy and an environment take turns over one growing row of token ids."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np

from mcore_agent.agent.render import ChatRenderer
from mcore_agent.agent.seeds import derive
from mcore_agent.protocols import Completion, Domain, Env, InfraError, Observation, Parser, Request
from mcore_agent.types import Episode, Row, Segment, Task, Turn

Generate = Callable[[Request], Awaitable[Completion]]
Away = Callable[[], AbstractContextManager[None]]
OVERFLOW = re.compile(r"context_overflow|(exceed|longer than).*context", re.IGNORECASE)  # how engines say that a request does not fit


class EpisodeFailure(InfraError):
    """An infrastructure failure with its ``kind``, which is counted; the text says more."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"{kind}: {text}" if text else kind)


class EngineFault(RuntimeError):
    """The engine broke its protocol: a fault of the program, not of the infrastructure."""


@dataclass(frozen=True)
class Limits:
    """Budgets of one episode. Raises ValueError for one that lets nothing be sampled."""

    max_turns: int  # assistant turns
    max_new: int  # tokens per assistant turn
    max_tokens: int  # tokens of the row, prompt and observations included
    env_timeout_s: float | None = None  # seconds for one call of the environment

    def __post_init__(self):
        for name in ("max_turns", "max_new", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}; give at least 1")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    routing: bool = False  # keep the experts that the engine sent each token to


@dataclass(frozen=True)
class Agent:
    """What stands between an engine and an environment."""

    renderer: ChatRenderer
    parser: Parser
    limits: Limits


async def play(
    task: Task,
    domain: Domain,
    generate: Generate,
    agent: Agent,
    sampling: Sampling,
    *,
    seed: int,
    group: str,
    episode: str,
    order: tuple[int, ...] = (),
    away: Away = nullcontext,
) -> Episode:
    """Plays ``task`` to its end; the environment is closed whatever happens.

    The status is ``ok`` when the environment ended the episode; ``truncated`` when a budget did (reason: ``max_turns``,
    ``max_new``, ``max_tokens``, ``prompt_overflow``, ``obs_overflow``, and ``context_overflow`` when the engine refused a
    request that its model cannot hold); ``infra_fail`` when the environment or the
    engine failed (reason: ``env_error``, ``env_timeout``, ``engine_error``, ``engine_abort``, and a text), and then
    the episode has no rows. Draws depend on ``seed`` alone. All requests are one session, named by the episode and its seed.
    Every call of the environment runs inside ``away()``: an engine then need not wait for it. Any other exception is a fault
    and propagates.
    """
    failed = Episode(episode, task, group, status="infra_fail", seed=seed)
    tape = _Tape()
    ask = _Ask(generate, sampling, agent.renderer.stop, seed, episode, order)
    try:
        env = domain.make(task, derive(seed, "env"))
        try:
            turns, status, reason = await _turns(task, env, ask, agent, tape, away)
        except BaseException:
            with suppress(InfraError), away():  # a second failure would hide the first
                await env.close()
            raise
        with away():
            await env.close()
    except EpisodeFailure as e:
        return replace(failed, reason=str(e))
    except InfraError as e:  # of make and close
        return replace(failed, reason=f"env_error: {e}")
    return Episode(episode, task, group, (tape.row(),), tuple(turns), status=status, reason=reason, seed=seed)


async def _turns(task: Task, env: Env, ask: "_Ask", agent: Agent, tape: "_Tape", away: Away) -> tuple[list[Turn], str, str]:
    """Plays until the environment or a budget ends it. Returns the turns, the status and its reason."""
    render, limits = agent.renderer, agent.limits
    turns: list[Turn] = []
    obs = await _call(env.reset(), limits, away)
    if obs.done:
        raise EpisodeFailure("env_error", "the environment ended before the first turn")
    tape.add(render.prompt([*task.messages, *obs.messages]), "prompt", -1)
    if tape.length >= limits.max_tokens:
        return turns, "truncated", "prompt_overflow"
    for index in range(limits.max_turns):
        max_new = min(limits.max_new, limits.max_tokens - tape.length)
        completion = await ask(index, tape.tokens(), max_new)
        if completion is None:
            return turns, "truncated", "context_overflow"
        action = agent.parser.parse(render.reply(completion.tokens))
        tape.add(completion.tokens, "action" if action.calls else "answer", index, completion)
        turn = Turn(index, action.text, obs.state_key, tuple(turn.state_key for turn in turns))
        if completion.finish == "length":
            return [*turns, turn], "truncated", "max_new" if max_new == limits.max_new else "max_tokens"
        obs = await _call(env.step(action), limits, away)
        turns.append(replace(turn, feedback=obs.feedback))
        if obs.done:
            return turns, "ok", ""
        if index + 1 == limits.max_turns:
            break
        ids = render.observation(obs.messages, int(completion.tokens[-1]))
        if tape.length + len(ids) >= limits.max_tokens:
            return turns, "truncated", "obs_overflow"
        tape.add(ids, "obs", index)
    return turns, "truncated", "max_turns"


async def _call(answer: Awaitable[Observation], limits: Limits, away: Away) -> Observation:
    """One call of the environment. Raises EpisodeFailure when it fails or takes too long."""
    try:
        with away():
            async with asyncio.timeout(limits.env_timeout_s):
                return await answer
    except InfraError as e:
        raise EpisodeFailure("env_error", str(e)) from e
    except TimeoutError as e:
        raise EpisodeFailure("env_timeout", str(e) or f"no answer within {limits.env_timeout_s} s") from e


@dataclass(frozen=True)
class _Ask:
    """Asks the engine for one turn."""

    generate: Generate
    sampling: Sampling
    stop: tuple[int, ...]
    seed: int
    episode: str
    order: tuple[int, ...]

    async def __call__(self, turn: int, tokens: np.ndarray, max_new: int) -> Completion | None:
        """None when the model cannot hold the request. Raises EpisodeFailure when the engine fails, EngineFault when it breaks
        its promise."""
        s = self.sampling
        request = Request(
            f"{self.episode}/{turn}", tokens, max_new, self.stop, s.temperature, s.top_p, s.top_k,
            seed=derive(self.seed, "turn", turn), order=(*self.order, turn), session=f"{self.episode}@{self.seed}",
            routing=s.routing,
        )  # fmt: skip
        try:
            completion = await self.generate(request)
        except InfraError as e:
            raise EpisodeFailure("engine_error", str(e)) from e
        if completion.finish == "error" and OVERFLOW.search(completion.error):
            return None
        if completion.finish in ("abort", "error"):
            raise EpisodeFailure(f"engine_{completion.finish}", completion.error)
        _check(completion, request)
        return completion


def _check(c: Completion, request: Request) -> None:
    """Every sampled token needs its own log-probability and version (C15, C19), and a stop its token (C3)."""
    n = len(c.tokens)
    if not 1 <= n <= request.max_new or len(c.logp) != n or len(c.version) != n:
        sizes = f"{n} tokens (1 to {request.max_new} asked), {len(c.logp)} logp, {len(c.version)} versions"
        raise EngineFault(f"request {request.id}: {sizes}")
    if c.finish not in ("stop", "length"):
        raise EngineFault(f"request {request.id}: finish is {c.finish!r}")
    if request.routing and (c.routing is None or len(c.routing) != len(request.tokens) + n - 1):
        found = "nothing" if c.routing is None else f"those of {len(c.routing)} tokens"
        raise EngineFault(f"request {request.id}: experts of {len(request.tokens) + n - 1} tokens were asked for, {found} came")
    if c.finish == "stop" and int(c.tokens[-1]) not in request.stop:
        raise EngineFault(f"request {request.id}: stopped at token {int(c.tokens[-1])}, not one of {request.stop}")


class _Tape:
    """The row of an episode that is being played. Only completions enter the sampled mask (I1)."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []  # tokens, sampled, logp, version
        self.segments: list[Segment] = []
        self.length = 0
        self.routing: np.ndarray | None = None  # of all tokens but the last, as of the last answer

    def add(self, tokens: np.ndarray, kind: str, turn: int, sampled: Completion | None = None) -> None:
        n, none = len(tokens), np.zeros(len(tokens))
        if sampled is not None:
            self.parts.append((tokens, none + 1, sampled.logp, sampled.version))
            self.routing = sampled.routing
        else:
            self.parts.append((tokens, none, none, none - 1))
        self.segments.append(Segment(self.length, self.length + n, turn, kind))
        self.length += n

    def tokens(self) -> np.ndarray:
        return np.concatenate([part[0] for part in self.parts])

    def row(self) -> Row:
        tokens, sampled, logp, version = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        routing = self.routing
        if routing is not None:  # what comes after the last token that was read has no sampled token behind it
            routing = np.concatenate([routing, np.repeat(routing[-1:], len(tokens) - len(routing), axis=0)])
        return Row(tokens, sampled, logp, version, tuple(self.segments), routing=routing)
