"""Playing many episodes at once: clients, retries, and what each has sampled so far."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mcore_agent.agent.episode import Agent, Away, EngineFault, Sampling, play
from mcore_agent.agent.seeds import derive
from mcore_agent.protocols import Completion, Domain, Engine, InfraError, Request
from mcore_agent.rollout.stats import Ledger, kind
from mcore_agent.types import GREEDY, Episode, Task

OnTurn = Callable[[Request, Completion], None]  # called with every answer of an engine that an episode goes on with
NEVER = 2**31 - 1  # the oldest version of no tokens
ABORT_S = 10.0  # how long an engine may take to end requests that nobody wants any more


@dataclass(eq=False)
class Job:
    """One episode to be played, and how far its present attempt has come. ``order`` is its place in the engine's batches."""

    name: str
    task: Task
    group: str
    seed: int
    order: tuple[int, ...]
    branch: str = ""
    born: int = -1  # the weights that were served when it was started
    asked: str = ""  # the request in flight
    sampled: int = 0  # tokens
    oldest: int = NEVER  # weight version among them
    unwanted: bool = False  # it is being given up


class Player:
    """Plays episodes with an engine. Those whose infrastructure failed are played again at most ``max_retries`` times."""

    def __init__(
        self, engine: Engine, domain: Domain, agent: Agent, max_retries: int, away: Away | None = None, on_turn: OnTurn | None = None
    ):
        self.engine, self.domain, self.agent, self.max_retries, self.on_turn = engine, domain, agent, max_retries, on_turn
        self.away = away

    def start(
        self, jobs: Sequence[Job], sampling: Sampling, ledger: Callable[[], Ledger], *, together: bool
    ) -> list[asyncio.Task[Episode]]:
        """A running task for each job, all begun at the next turn of the event loop.

        An engine may wait for every open client before it forms a batch. ``together``: no request is made before all are
        open, and each closes as soon as its episode ends, so that batches do not depend on the clock. Otherwise an engine is
        never kept waiting for an environment: clients are away meanwhile, and where the engine knows no ``away`` there are none.
        ``ledger`` is asked for at the time of counting.
        """
        away = nullcontext if together or self.away is None else self.away
        clients = together or self.away is not None
        to_open, all_open = len(jobs), asyncio.Event()

        async def one(job: Job) -> Episode:
            nonlocal to_open
            if not clients:
                return await self._attempts(job, sampling, ledger, away)
            with self.engine.client():
                to_open -= 1
                if not to_open or not together:
                    all_open.set()
                await all_open.wait()
                return await self._attempts(job, sampling, ledger, away)

        return [asyncio.create_task(one(job), name=job.name) for job in jobs]

    async def give_up(self, jobs: Sequence[Job], tasks: Sequence[asyncio.Task[Episode]]) -> None:
        """Ends jobs of ``start``: their requests are aborted, so that their tokens are counted, and then the rest of them."""
        for job in jobs:
            job.unwanted = True
        asking = [(job.asked, task) for job, task in zip(jobs, tasks, strict=True) if job.asked]
        if asking:
            with suppress(InfraError):  # an engine that is gone: its tokens are gone too
                await self.engine.abort([request for request, _ in asking])
                await asyncio.wait([task for _, task in asking], timeout=ABORT_S)
        await end(tasks)

    async def _attempts(self, job: Job, sampling: Sampling, ledger: Callable[[], Ledger], away: Away) -> Episode:
        for attempt in range(self.max_retries + 1):
            # A retry starts from nothing. It draws anew: the same draws could meet the same failure.
            seed = derive(job.seed, "retry", attempt) if attempt else job.seed
            how = replace(sampling, temperature=0.0) if job.branch == GREEDY else sampling
            episode = await play(
                job.task, self.domain, partial(self._ask, job), self.agent, how,
                seed=seed, group=job.group, episode=job.name, order=job.order, away=away,
            )  # fmt: skip
            if job.branch:
                episode = _of_branch(episode, job.branch)
            if episode.status != "infra_fail" or job.unwanted:
                return episode
            reason = kind(episode)
            if attempt < self.max_retries:
                ledger().retries[reason] += 1
                reason = "retry"
            ledger().dropped_tokens[reason] += job.sampled
            job.sampled, job.oldest = 0, NEVER
        return episode

    async def _ask(self, job: Job, request: Request) -> Completion:
        if job.unwanted:
            raise InfraError("given up")
        job.asked = request.id
        try:
            completion = await self.engine.generate(request)
        finally:
            job.asked = ""
        job.sampled += len(completion.tokens)
        if len(completion.version):
            job.oldest = min(job.oldest, int(completion.version.min()))
            if job.oldest < job.born:
                raise EngineFault(
                    f"request {request.id}: answered by weights of version {job.oldest}, but the engine was said to serve {job.born} "
                    "before it was asked; publish to every engine before the next collection"
                )
        if job.unwanted:
            raise InfraError("given up")
        if self.on_turn is not None:
            self.on_turn(request, completion)
        return completion


def _of_branch(episode: Episode, branch: str) -> Episode:
    """The episode as one of its branch; of a greedy one no token is for the policy gradient (M13)."""
    if branch != GREEDY:
        return replace(episode, branch=branch)
    rows = tuple(replace(row, channels={**row.channels, "pg": np.zeros(len(row), dtype=bool)}) for row in episode.rows)
    return replace(episode, branch=branch, rows=rows)


async def end(tasks: Sequence[asyncio.Task[Episode]]) -> None:
    """Cancels tasks and waits until their environments are closed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
