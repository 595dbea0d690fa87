"""Groups between being drawn and being learned from: first in, first out, and none older than the bound."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_agent.rollout.playing import NEVER, Job
from mcore_agent.rollout.records import load_episodes, pack, save_episodes, task_from, task_record
from mcore_agent.rollout.stats import versions
from mcore_agent.types import Episode, Task

if TYPE_CHECKING:
    import asyncio


@dataclass(eq=False)
class Group:
    """All episodes of one drawn task. It waits, is played (``jobs`` and ``running``), and is complete (``episodes``)."""

    wave: int  # the step for which it was drawn
    slot: int  # its place in that step
    task: Task
    twin: int  # how many groups of the same task were drawn for that step before
    born: int = -1  # the weights that were served when it was started
    jobs: list[Job] = field(default_factory=list)
    running: "list[asyncio.Task[Episode]]" = field(default_factory=list)
    left: int = 0  # episodes that have not ended
    episodes: list[Episode] | None = None
    _oldest: int = NEVER

    @property
    def name(self) -> str:
        return f"train/{self.wave}/{self.slot}/{self.task.id}"

    @property
    def waits(self) -> bool:
        return self.episodes is None and not self.jobs

    @property
    def oldest(self) -> int:
        """The oldest weight version of its sampled tokens, so far."""
        return self._oldest if self.episodes is not None else min((job.oldest for job in self.jobs), default=NEVER)

    @property
    def sampled(self) -> int:
        """Tokens that its episodes have sampled so far; failed attempts were counted elsewhere."""
        if self.episodes is not None:
            return sum(e.sampled_tokens for e in self.episodes)
        return sum(job.sampled for job in self.jobs)

    def begin(self, version: int, jobs: Sequence[Job], running: "Sequence[asyncio.Task[Episode]]") -> None:
        self.born, self.jobs, self.running, self.left = version, list(jobs), list(running), len(jobs)

    def finish(self, episodes: Sequence[Episode]) -> None:
        self.episodes, self._oldest = list(episodes), int(versions(episodes).min(initial=NEVER))
        self.jobs, self.running, self.left = [], [], 0

    def rewind(self) -> None:
        """What was played is forgotten; the group waits again."""
        self.born, self.jobs, self.running, self.left = -1, [], [], 0


class Buffer:
    """Holds at most so many groups that none can outgrow ``max_lag`` while weights advance once per batch.

    A batch is ``prompts`` groups. At weight version v at most ``(v + max_lag + 1) * prompts`` groups have been started (M35,
    arXiv 2505.24298 §5.1), of which ``v * prompts`` were learned from; so what may be held is a function of the version alone,
    and is right after a resume. Groups that are dropped give their place back.

    ``over_sample`` is a fraction: a batch is the first complete groups, in the order of their drawing, among the oldest
    ``ceil(prompts * (1 + over_sample))``; with 0 nothing is ever overtaken.
    """

    def __init__(self, prompts: int, group_size: int, max_lag: int = 0, over_sample: float = 0.0):
        """Raises ValueError for arguments out of range."""
        least = {"prompts": (prompts, 1), "group_size": (group_size, 1), "max_lag": (max_lag, 0), "over_sample": (over_sample, 0)}
        for name, (value, low) in least.items():
            if not low <= value < math.inf:
                raise ValueError(f"Collector: {name} is {value}; give at least {low}")
        if max_lag and over_sample > max_lag:
            raise ValueError(
                f"Collector: over_sample is {over_sample}, but with max_lag {max_lag} only {max_lag + 1} batches may be in flight; "
                f"give at most {max_lag}"
            )
        self.prompts, self.group_size, self.max_lag = prompts, group_size, max_lag
        self.window = prompts + math.ceil(round(prompts * over_sample, 6))  # 100 * 1.1 is above 110
        self.capacity = (max_lag + 1) * prompts if max_lag else self.window
        self.groups: list[Group] = []  # in the order in which they were drawn
        self.version = -1
        self._taken = 0  # groups handed out at this version
        self._wave, self._slot, self._seen = -1, 0, Counter[str]()  # where the next group is drawn

    # ------------------------------------------------------------------------------------------------ in and out

    def open(self, step: int, version: int) -> None:
        """A batch is wanted for ``step`` by weights of ``version``. Raises ValueError for a version that goes back."""
        self.serve(version)
        self._taken = 0  # one more batch is wanted, also where the weights did not change
        if self._wave < step or (self.max_lag == 0 and self._wave != step):
            self._move_to(step)

    def serve(self, version: int) -> None:
        """The engine serves weights of ``version``. Raises ValueError for a version that goes back."""
        if version < self.version:
            raise ValueError(f"weights of version {version} after those of version {self.version}; versions only grow")
        if version > self.version:
            self.version, self._taken = version, 0

    @property
    def room(self) -> int:
        """How many groups may be drawn now. None before a first batch is wanted: their step is not known."""
        if self._wave < 0:
            return 0
        return max(0, self.capacity - self._taken - len(self.groups)) if self.max_lag or not self._taken else 0

    def draw(self, tasks: Sequence[Task]) -> None:
        """New groups. Raises RecordError for a task that could not be saved with groups in flight."""
        for task in tasks:
            if self.max_lag:
                pack(task_record(task), f"task {task.id}")
                if self._slot == self.prompts:
                    self._move_to(self._wave + 1)
            self.groups.append(Group(self._wave, self._slot, task, self._seen[task.id]))
            # A task drawn twice for one step goes on counting, or both groups would hold the same episodes.
            self._seen[task.id] += 1
            self._slot += 1

    def _move_to(self, wave: int) -> None:
        self._wave, self._slot = wave, 0
        self._seen.clear()

    def stale(self) -> list[Group]:
        """Groups that hold a token older than the bound, those that are still played included."""
        bound = self.version - self.max_lag
        return [g for g in self.groups if g.born < bound and g.oldest < bound]

    def ready(self) -> list[Group] | None:
        """The next batch in the order of drawing, None while it is not complete."""
        complete = [g for g in self.groups[: self.window] if g.episodes is not None]
        return complete[: self.prompts] if len(complete) >= self.prompts else None

    def take(self, batch: Sequence[Group]) -> None:
        self.remove(batch)
        self._taken += len(batch)

    def remove(self, groups: Sequence[Group]) -> None:
        gone = {id(g) for g in groups}
        self.groups = [g for g in self.groups if id(g) not in gone]

    # ----------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """For JSON: where drawing stands, and every group that was drawn and not handed out. ``save`` keeps what was played."""
        groups = [{"wave": g.wave, "slot": g.slot, "twin": g.twin, "task": pack(task_record(g.task), g.name)} for g in self.groups]
        return {"group_size": self.group_size, "wave": self._wave, "slot": self._slot, "seen": dict(self._seen), "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """All groups wait; those that ``load`` does not bring back are played again. Raises ValueError for another group size."""
        if state["group_size"] != self.group_size:
            raise ValueError(f"group_size was {state['group_size']} when saved and is {self.group_size}; resume with the same")
        self._wave, self._slot, self._seen = state["wave"], state["slot"], Counter(state["seen"])
        self.groups = [Group(g["wave"], g["slot"], task_from(g["task"]), g["twin"]) for g in state["groups"]]

    def save(self, path: Path) -> None:
        """Complete groups, in one file that is whole or absent. Raises OSError."""
        save_episodes(path, [e for g in self.groups if g.episodes is not None for e in g.episodes])

    def load(self, path: Path) -> None:
        """After ``load_state_dict``. Groups that it does not know were handed out, and are left alone. Raises RecordError."""
        played: dict[str, list[Episode]] = {}
        for episode in load_episodes(path):
            played.setdefault(episode.group, []).append(episode)
        for group in self.groups:
            if group.waits and group.name in played:
                group.finish(played[group.name])
