"""Collection: many episodes at once, in an order that does not depend on which ends first."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_agent.agent.episode import Agent, Sampling, play
from mcore_agent.agent.seeds import derive
from mcore_agent.protocols import Domain, Engine
from mcore_agent.types import Episode, Task

Progress = Callable[[int, int], None]  # episodes finished, episodes in all
SAMPLE, GREEDY = Sampling(), Sampling(temperature=0.0)


@dataclass(frozen=True)
class CollectStats:
    """What happened in one collection. ``retries`` counts attempts played again, ``dropped`` episodes given up, by reason."""

    episodes: int
    ok: int
    truncated: Mapping[str, int] = field(default_factory=dict)  # reason -> episodes
    retries: Mapping[str, int] = field(default_factory=dict)  # reason -> attempts
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> episodes
    turns: int = 0
    failed_turns: int = 0  # turns whose feedback is not ok
    sampled_tokens: int = 0
    tokens: int = 0  # of all rows
    wall_s: float = 0.0

    def metrics(self, prefix: str = "rollout") -> dict[str, float]:
        """Flat numbers for the metrics file."""
        out: dict[str, float] = {
            f"{prefix}/{name}": getattr(self, name)
            for name in ("episodes", "ok", "turns", "failed_turns", "sampled_tokens", "tokens", "wall_s")
        }
        for name in ("truncated", "retries", "dropped"):
            out |= {f"{prefix}/{name}/{reason}": count for reason, count in getattr(self, name).items()}
        return out


Collected = tuple[list[Episode], CollectStats]


@dataclass(frozen=True)
class _Job:
    """One episode to be played. ``index`` is its place in the result and in the engine's batches."""

    index: int
    task: Task
    group: str
    name: str
    seed: int


class Collector:
    """Plays tasks with an engine. Episodes whose infrastructure failed are replayed at most ``max_retries`` times.

    Raises ValueError for a ``group_size`` below 1 or a negative ``max_retries``.
    """

    def __init__(self, engine: Engine, domain: Domain, agent: Agent, group_size: int = 1, max_retries: int = 2):
        if group_size < 1 or max_retries < 0:
            raise ValueError(f"Collector: group_size is {group_size} (at least 1), max_retries is {max_retries} (at least 0)")
        self.engine, self.domain, self.agent = engine, domain, agent
        self.group_size, self.max_retries = group_size, max_retries

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        run_seed: int,
        step: int,
        sampling: Sampling = SAMPLE,
        progress: Progress | None = None,
    ) -> Collected:
        """``group_size`` episodes of each task, group after group.

        A seed depends on the run's seed, the step, the task's id and the number of the sample, so a rerun draws the
        same. Episodes that failed to the last retry are in the list too, as ``infra_fail`` (I8).
        """
        jobs = _jobs(tasks, self.group_size, f"train/{step}", (run_seed, "train", step))
        return await self._play(jobs, sampling, progress)

    async def evaluate(
        self,
        tasks: Sequence[Task],
        *,
        run_seed: int,
        step: int = 0,
        sampling: Sampling = GREEDY,
        progress: Progress | None = None,
    ) -> Collected:
        """Each task exactly once. Seeds do not depend on ``step``, so that evaluations of a run compare.

        Infrastructure failures are in the list and in ``dropped``: they are no zeros. Raises ValueError when a task
        is given twice.
        """
        twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
        if twice:
            raise ValueError(f"evaluate: task {twice[0]!r} is given more than once; every item is scored exactly once")
        return await self._play(_jobs(tasks, 1, f"eval/{step}", (run_seed, "eval")), sampling, progress)

    async def _play(self, jobs: Sequence[_Job], sampling: Sampling, progress: Progress | None) -> Collected:
        started, retries = time.perf_counter(), Counter[str]()
        opened, finished, all_open = 0, 0, asyncio.Event()

        async def one(job: _Job) -> Episode:
            nonlocal opened, finished
            # An engine may wait for every open client before it forms a batch. No request is made before all are
            # open, and each closes as soon as its episode ends: batches do not depend on the clock.
            with self.engine.client():
                opened += 1
                if opened == len(jobs):
                    all_open.set()
                await all_open.wait()
                episode = await self._attempts(job, sampling, retries)
            finished += 1
            if progress is not None:
                progress(finished, len(jobs))
            return episode

        running = [asyncio.create_task(one(job), name=job.name) for job in jobs]
        try:
            episodes = list(await asyncio.gather(*running))
        finally:
            # After a fault or a cancellation the other episodes stop too, and their environments are closed.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return episodes, _stats(episodes, retries, time.perf_counter() - started)

    async def _attempts(self, job: _Job, sampling: Sampling, retries: Counter[str]) -> Episode:
        for attempt in range(self.max_retries + 1):
            # A retry starts from nothing (C7). It draws anew: the same draws could meet the same failure.
            seed = derive(job.seed, "retry", attempt) if attempt else job.seed
            episode = await play(
                job.task,
                self.domain,
                self.engine.generate,
                self.agent,
                sampling,
                seed=seed,
                group=job.group,
                episode=job.name,
                order=(job.index,),
            )
            if episode.status != "infra_fail":
                return episode
            if attempt < self.max_retries:
                retries[_kind(episode)] += 1
        return episode


def _jobs(tasks: Sequence[Task], group_size: int, prefix: str, seeds: tuple[int | str, ...]) -> list[_Job]:
    seen: Counter[str] = Counter()
    jobs: list[_Job] = []
    for slot, task in enumerate(tasks):
        group = f"{prefix}/{slot}/{task.id}"
        for sample in range(group_size):
            # A task drawn twice in one step goes on counting, or both groups would hold the same episodes.
            number = seen[task.id] * group_size + sample
            jobs.append(_Job(len(jobs), task, group, f"{group}#{sample}", derive(*seeds, task.id, number)))
        seen[task.id] += 1
    return jobs


def _kind(episode: Episode) -> str:
    return episode.reason.partition(":")[0]


def _stats(episodes: Sequence[Episode], retries: Counter[str], wall_s: float) -> CollectStats:
    reasons = {status: Counter(_kind(e) for e in episodes if e.status == status) for status in ("truncated", "infra_fail")}
    turns = [turn for e in episodes for turn in e.turns]
    return CollectStats(
        episodes=len(episodes),
        ok=sum(e.status == "ok" for e in episodes),
        truncated=dict(sorted(reasons["truncated"].items())),
        retries=dict(sorted(retries.items())),
        dropped=dict(sorted(reasons["infra_fail"].items())),
        turns=len(turns),
        failed_turns=sum(not turn.feedback.ok for turn in turns),
        sampled_tokens=sum(e.sampled_tokens for e in episodes),
        tokens=int(np.sum([len(row) for e in episodes for row in e.rows], dtype=np.int64)),
        wall_s=wall_s,
    )
