"""Groups of episodes times prompts (M38; GRPO, 2402.03300), drawn ahead, handed out in an order that no one's speed changes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mcore_agent.agent.episode import Agent, Away, Sampling
from mcore_agent.agent.seeds import derive
from mcore_agent.protocols import Domain, Engine, TaskSource
from mcore_agent.rollout.buffer import Buffer, Group
from mcore_agent.rollout.playing import Job, OnTurn, Player, end
from mcore_agent.rollout.stats import CollectStats, Ledger, measure
from mcore_agent.types import Episode, Task

Progress = Callable[[int, int], None]  # episodes finished, episodes in all
Collected = tuple[list[Episode], CollectStats]
SAMPLE, GREEDY = Sampling(), Sampling(temperature=0.0)


class Stopped(RuntimeError):
    """``stop`` was called while a collection waited."""


class Collector:
    """Draws tasks from ``source``, plays ``group_size`` episodes of each, and hands out ``prompts`` whole groups at a time.

    With ``max_lag`` 0 nothing is played between two collections. Above 0 the next groups are played in the background on the
    event loop, at most ``(max_lag + 1) * prompts`` of them, and a group that holds a token more than ``max_lag`` weight
    versions old is dropped (M35). An episode in flight goes on under newer weights: its tokens keep their own versions
    (M99). ``over_sample`` starts a larger share of groups than is asked for and hands out those that are complete first; the tail
    is dropped at ``max_lag`` 0 and kept otherwise. See Buffer. All methods belong to one event loop.

    Without over-sampling groups are handed out exactly in the order of their drawing, and their seeds depend on the run's seed,
    the step they are drawn for, the task and the number of the sample alone. ``away`` is for an engine
    that waits for open clients, and needed only above ``max_lag`` 0: inside it the engine does not wait for the episode.
    ``branches`` names further episodes of each group, such as a greedy one. ``on_turn`` is called with each request and its
    answer. Raises ValueError for arguments out of range.
    """

    def __init__(
        self,
        engine: Engine,
        domain: Domain,
        agent: Agent,
        source: TaskSource,
        *,
        run_seed: int,
        prompts: int,
        group_size: int,
        max_retries: int = 2,
        max_lag: int = 0,
        over_sample: float = 0.0,
        sampling: Sampling = SAMPLE,
        branches: Sequence[str] = (),
        away: Away | None = None,
        on_turn: OnTurn | None = None,
    ):
        if max_retries < 0:
            raise ValueError(f"Collector: max_retries is {max_retries}; give at least 0")
        self.source, self.run_seed, self.sampling = source, run_seed, sampling
        self.branches = tuple(branches)
        self.buffer = Buffer(prompts, group_size, max_lag, over_sample)
        self._player = Player(engine, domain, agent, max_retries, away, on_turn)
        self._ledger = Ledger()
        self._changed: asyncio.Event | None = None  # there while a collection waits
        self._progress: Progress | None = None
        self._fault: BaseException | None = None
        self._stops = 0

    @property
    def size(self) -> int:
        """Episodes of a group."""
        return self.buffer.group_size + len(self.branches)

    # -------------------------------------------------------------------------------------------------- collection

    async def collect(self, step: int, version: int, progress: Progress | None = None) -> Collected:
        """``prompts`` complete groups for ``step``, to be learned from by weights of ``version``, which the engine serves.

        Episodes come group after group in the order of drawing; those that failed to the last retry are among them, as
        ``infra_fail`` (I8). No token is more than ``max_lag`` versions old (I3). ``source.observe`` is told of them.
        After an exception everything that was in flight is stopped, and its groups wait to be played again. Raises
        EngineFault when an engine broke its promise, Stopped, whatever an environment or the source raised, and
        RuntimeError for a second collection at the same time.
        """
        if self._changed is not None:
            raise RuntimeError(f"collect for step {step} while another collection waits; one at a time")
        clock = asyncio.get_running_loop().time
        started, self._changed, self._progress = clock(), asyncio.Event(), progress
        try:
            self.buffer.open(step, version)
            batch = await self._batch(self._changed)
            if self.buffer.max_lag == 0:
                await self._drop([g for g in self.buffer.groups if g not in batch], "tail")
            episodes = [e for group in batch for e in group.episodes or ()]
            buffered, playing = self._counts()
            stats = measure(episodes, self._ledger, clock() - started, version, buffered - len(batch), playing)
        except BaseException:
            # A fault or a cancellation: the other episodes stop too, and their environments are closed.
            await self.stop()
            raise
        finally:
            self._changed = self._progress = None
        self.buffer.take(batch)
        self._ledger = Ledger()
        self.source.observe(episodes)
        if self.buffer.max_lag:
            self._fill()
        return episodes, stats

    def advance(self, version: int) -> None:
        """To be called when the engine serves weights of a new version: they make room for more groups in the background.

        Raises ValueError for a version that goes back.
        """
        self.buffer.serve(version)
        if self.buffer.max_lag:
            self._fill()

    async def stop(self) -> None:
        """Nothing is played any more when this returns: tasks have ended and environments are closed.

        No group is lost: complete ones stay, the others wait, and a later collection plays them from their start.
        """
        self._stops += 1
        playing = [g for g in self.buffer.groups if g.running]
        tasks = [task for g in playing for task in g.running]
        self._ledger.dropped_tokens["stop"] += sum(g.sampled for g in playing)
        for group in playing:
            group.rewind()
        await end(tasks)
        if self._changed is not None:
            self._changed.set()

    async def _batch(self, changed: asyncio.Event) -> list[Group]:
        """Waits for the next batch; plays, and drops what has become too old."""
        stops = self._stops
        while True:
            changed.clear()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            if self._stops != stops:
                raise Stopped("the collector was stopped while a collection waited")
            await self._drop(self.buffer.stale(), "stale")
            self._fill()
            batch = self.buffer.ready()
            if batch is not None:
                return batch
            await changed.wait()

    async def _drop(self, groups: Sequence[Group], reason: str) -> None:
        """Gives groups up, complete or not, and counts them."""
        if not groups:
            return
        jobs = [job for g in groups for job in g.jobs]
        tasks = [task for g in groups for task in g.running]
        self.buffer.remove(groups)
        for group in groups:
            group.running = []
        await self._player.give_up(jobs, tasks)
        self._ledger.dropped[reason] += len(groups) * self.size
        self._ledger.dropped_tokens[reason] += sum(g.sampled for g in groups)

    def _fill(self) -> None:
        """Draws what there is room for, and starts all groups that wait."""
        if self.buffer.room:
            self.buffer.draw(self.source.next(self.buffer.room))
        waiting = [g for g in self.buffer.groups if g.waits]
        jobs = [self._jobs(g) for g in waiting]
        flat = [job for of_group in jobs for job in of_group]
        tasks = iter(self._player.start(flat, self.sampling, lambda: self._ledger, together=self.buffer.max_lag == 0))
        for group, of_group in zip(waiting, jobs, strict=True):
            running = [next(tasks) for _ in of_group]
            group.begin(self.buffer.version, of_group, running)
            for task in running:
                task.add_done_callback(partial(self._ended, group))

    def _jobs(self, group: Group) -> list[Job]:
        size, made = self.buffer.group_size, []
        for sample in range(size):
            seed = derive(self.run_seed, "train", group.wave, group.task.id, group.twin * size + sample)
            order = (group.wave, group.slot, sample)
            made.append(Job(f"{group.name}#{sample}", group.task, group.name, seed, order, born=self.buffer.version))
        for number, branch in enumerate(self.branches, size):
            seed = derive(self.run_seed, branch, group.wave, group.task.id, group.twin)
            order = (group.wave, group.slot, number)
            made.append(Job(f"{group.name}#{branch}", group.task, group.name, seed, order, branch, self.buffer.version))
        return made

    def _ended(self, group: Group, task: asyncio.Task[Episode]) -> None:
        """An episode has ended. It changes no one's turn: a collection that waits is woken."""
        if task not in group.running:  # given up
            return
        group.left -= 1
        if task.cancelled():
            self._fault = self._fault or RuntimeError(f"episode {task.get_name()} was cancelled by someone else")
        elif (fault := task.exception()) is not None:
            self._fault = self._fault or fault
        elif self._progress is not None:
            size, window = self.size, self.buffer.groups[: self.buffer.window]
            total = self.buffer.prompts * size
            self._progress(min(total, sum(size if g.episodes is not None else len(g.jobs) - g.left for g in window)), total)
        if group.left == 0 and self._fault is None:
            group.finish([t.result() for t in group.running])
        if self._changed is not None and (group.episodes is not None or self._fault is not None):
            self._changed.set()

    def _counts(self) -> tuple[int, int]:
        """Complete groups, and groups in flight."""
        return sum(g.episodes is not None for g in self.buffer.groups), sum(bool(g.running) for g in self.buffer.groups)

    # ------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """For JSON: every task that was drawn and not handed out. The source's own state is kept by its owner, at the same moment."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Groups of the state are played by the next collections under their own names and seeds. Raises ValueError."""
        self.buffer.load_state_dict(state)

    def save(self, path: Path) -> None:
        """Complete groups that wait, as a file. Raises OSError, RecordError."""
        self.buffer.save(path)

    def load(self, path: Path) -> None:
        """Brings back what ``save`` wrote, after ``load_state_dict``; without it those groups are played again. Raises RecordError."""
        self.buffer.load(path)

    # -------------------------------------------------------------------------------------------------- evaluation

    async def evaluate(
        self, tasks: Sequence[Task], *, run_seed: int, step: int = 0, sampling: Sampling = GREEDY, progress: Progress | None = None
    ) -> Collected:
        """Each task exactly once. Seeds do not depend on ``step``, so that evaluations of a run compare.

        Infrastructure failures are in the list and in ``dropped``: they are no zeros. Raises ValueError when a task
        is given twice.
        """
        twice = [name for name, count in Counter(task.id for task in tasks).items() if count > 1]
        if twice:
            raise ValueError(f"evaluate: task {twice[0]!r} is given more than once; every item is scored exactly once")
        jobs = []
        for i, task in enumerate(tasks):
            group, seed = f"eval/{step}/{i}/{task.id}", derive(run_seed, "eval", task.id, 0)
            jobs.append(Job(f"{group}#0", task, group, seed, (i,), born=self.buffer.version))
        clock, ledger, finished = asyncio.get_running_loop().time, Ledger(), 0

        def ended(_: asyncio.Task[Episode]) -> None:
            nonlocal finished
            finished += 1
            if progress is not None:
                progress(finished, len(jobs))

        started = clock()
        running = self._player.start(jobs, sampling, lambda: ledger, together=True)
        try:
            for playing in running:
                playing.add_done_callback(ended)
            episodes = list(await asyncio.gather(*running))
        finally:
            await end(running)
        return episodes, measure(episodes, ledger, clock() - started)
