"""What a run holds on every rank: the learner, where it stands in its recipe, and how it hands over to the engine."""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert.errors import ConvertError
from ckpt_convert.mcore_folder import HF, read_meta
from mcore_agent.batch.microbatch import Plan
from mcore_agent.config import Config, ConfigError, StageConfig
from mcore_agent.config_losses import correction_of
from mcore_agent.coordinator import Remote
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.critic import critic_of
from mcore_agent.lead import Lead
from mcore_agent.learner.checkpoint import CheckpointError, Writing, all_done
from mcore_agent.loss.correction import correct
from mcore_agent.loss.derived import NOW, fresh
from mcore_agent.policy import Part, Parts, Policy
from mcore_agent.registry import create
from mcore_agent.state import Checkpoints, StateError, StateStore
from mcore_agent.teacher import teacher_of
from mcore_agent.types import Batch, Episode

LEAVE_S = 1.0  # how long an interrupted run waits for its writer; ranks are killed after processes.GRACE_S


@dataclass
class Progress:
    """Where a run stands; part of every checkpoint."""

    stage: int = 0
    done: int = 0  # optimizer steps of that stage
    over: bool = False  # that stage has ended
    step: int = 0  # over all stages
    wall_s: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)  # one entry per evaluation
    rewards: list[float] = field(default_factory=list)  # mean reward of each rl step
    mismatch: float = 0.0  # largest |log-probability difference| between engine and learner so far

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class Flight:
    """A checkpoint whose files are being written; there is at most one."""

    step: int
    folder: Path
    writings: list[Writing]  # this rank's


def learning_rate(stage: StageConfig, steps: int, done: int) -> float:
    """The rate of the stage's step number ``done`` (from 1): a pure function, so that a resume cannot shift it."""
    if done <= stage.warmup:
        return stage.lr * done / stage.warmup
    if stage.schedule == "constant" or steps <= stage.warmup + 1:
        return stage.lr
    along = (done - stage.warmup - 1) / (steps - stage.warmup - 1)
    shape = 1 - along if stage.schedule == "linear" else (1 + math.cos(math.pi * along)) / 2
    return stage.lr * (stage.lr_end + (1 - stage.lr_end) * shape)


@contextmanager
def open_session(config: Config, folder: Path, started: float) -> Iterator["Session"]:
    """A session on this rank; everything it opened is closed when the block ends, however it ends."""
    with ExitStack() as stack:
        yield Session(config, folder, started, stack)


class Session:
    """One rank of a run. Methods that only rank 0 does return None elsewhere; the others are collective."""

    def __init__(self, config: Config, folder: Path, started: float, stack: ExitStack):
        self.config, self.folder, self.started = config, folder, started
        self.progress, self.store = Progress(), StateStore()
        self.checkpoints = Checkpoints(folder / "checkpoints", config.run.keep)
        self.policy = Policy(config, stack)
        self.critic = critic_of(config, self.policy)
        self.correction = correction_of(config)
        self.pipeline = Pipeline(config.credit)
        self.teacher = teacher_of(config, self.policy)
        self.lead = Lead(config, self.policy, stack, folder / HF) if self.policy.rank == 0 else None
        if self.teacher and self.lead:
            self.teacher.check(self.lead.tokenizer)
        self.policy.serving.open(self.lead.tokenizer if self.lead else None)
        self.store.add("progress", self.progress)
        self.store.add("policy", self.policy)
        if self.policy.serving.coordinator and self.lead:
            self.store.add("rollout", Remote(self.policy.serving.coordinator))
            self.store.add("demos", self.lead.demos)
            self.store.add("alarm", self.lead.alarm)
            self.store.add("credit", self.pipeline)
        self.flight: Flight | None = None
        stack.push(self._leave)
        self.numbers: dict[str, Any] = {}
        self.clocks = (0.0, 0.0)  # wall and CPU seconds when the step began
        self.earlier_s = 0.0
        self._restore(folder)

    def _restore(self, folder: Path) -> None:
        """Continues from the latest checkpoint, or starts from the recipe's weights."""
        latest, damaged = self.policy.share(self._usable() if self.lead else None)
        if latest is None:
            self.policy.start()
            if self.critic:
                self.critic.start()
        else:
            self.policy.load(latest)
            if not self.lead:  # the task source lives on rank 0 only, but every rank needs the rest
                for name in ("rollout", "demos", "alarm", "credit"):
                    self.store.add(name, _Ignored())
            self.store.load(latest / "state.json")
            self.policy.serving.tell("load", latest)
            self.earlier_s = self.progress.wall_s
        if self.lead:
            self.lead.open_run(folder, self.progress.step, resumed=latest)
            for what in damaged:
                self.lead.console.say(f"A newer checkpoint is damaged and passed over: {what}")

    def _usable(self) -> tuple[Path | None, list[str]]:
        """Rank 0: the newest whole checkpoint, and what is wrong with newer ones. Raises ConfigError when none is whole."""
        try:
            return self.checkpoints.usable(self._damage)
        except StateError as e:
            way = "Copy one back, choose another run.dir, or delete its checkpoints to start over"
            raise ConfigError("run.dir", str(self.folder), str(e), way) from e

    def _damage(self, checkpoint: Path) -> str | None:
        try:
            read_meta(checkpoint)
            self.store.read(checkpoint / "state.json")
        except (ConvertError, StateError) as e:
            return str(e)
        return None

    # ------------------------------------------------------------------------------------------- the recipe

    def schedule(self) -> Iterator[tuple[StageConfig, int]]:
        """Every stage and step from where the run stands; steps count over all stages, from 1."""
        p = self.progress
        for index in range(p.stage, len(self.config.stages)):
            stage = self.config.stages[index]
            if index != p.stage:
                p.stage, p.done, p.over = index, 0, False
            if not p.over:
                self._begin(stage)
            while not p.over:
                self.numbers = {}
                clock = time.monotonic()
                self.clocks = clock, time.process_time()
                p.step, p.done = p.step + 1, p.done + 1
                p.over = p.done >= self.config.steps(stage)
                yield stage, p.step
                if self.lead:
                    self.lead.step_took(time.monotonic() - clock)

    def _begin(self, stage: StageConfig) -> None:
        specs = self.config.loss if stage.kind == "rl" else [{"name": "sft_nll"}]
        temperature = self.config.rollout.temperature if stage.kind == "rl" else 1.0
        terms = [create("loss", spec) for spec in specs]
        self.terms = correct(terms, self.correction) if stage.kind == "rl" else terms
        fresh = self.progress.done == 0
        self.policy.begin(temperature, fresh)
        if self.critic and stage.kind == "rl" and fresh:
            self.critic.begin(first=all(earlier.kind != "rl" for earlier in self.config.stages[: self.progress.stage]))
        if stage.kind == "rl" and self._reference():
            self.policy.keep_reference(self.folder / "reference", fresh)
        if stage.kind == "rl":
            self._timed("publish", self.policy.serve)

    def _due(self, stage: StageConfig) -> bool:
        """Whether an evaluation follows this step."""
        p = self.progress
        return bool(self.config.run.eval_tasks) and (p.over or bool(stage.eval_every and p.done % stage.eval_every == 0))

    # --------------------------------------------------------------------------------------------- the ring

    def collect(self, step: int) -> list[Episode] | None:
        """Rank 0: the step's episodes, whole groups in the order of their tasks; None elsewhere."""
        return self._timed("collect", lambda: self.lead.collect(step, self.numbers)) if self.lead else None

    def reward(self, episodes: list[Episode] | None) -> list[Episode] | None:
        return self.lead.reward(episodes, self.progress.step, self.numbers) if self.lead and episodes is not None else None

    def credit(self, episodes: list[Episode] | None) -> Batch | None:
        """Rank 0: the batch with advantages; None elsewhere."""
        batch = self.lead.batch(episodes, self.pipeline, self.policy.version, self.numbers) if self.lead and episodes is not None else None
        if self.config.learner.routing_replay == "old":
            batch = self._with_column(batch, "routing", self.policy.routing)
        if self.critic:
            batch = self._timed("values", partial(self._with_column, batch, self.critic.column, self.critic.values))
        if self._proximal():
            batch = self._timed("proximal", partial(self._with_column, batch, "logp_prox", self.policy.logp))
            if self.lead and batch is not None:
                batch = self.lead.compare(batch, self.policy.version, self.correction, self.numbers)
        if "logp_ref" in self.pipeline.needs:
            batch = self._timed("reference", partial(self._with_column, batch, "logp_ref", self.policy.reference_logp))
        scores = self._timed("rescore", partial(self._rescore, batch)) if self.pipeline.rescores else ()
        return self.lead.credit(batch, self.pipeline, scores, self.numbers) if self.lead and batch is not None else None

    def _rescore(self, batch: Batch | None) -> list[np.ndarray]:
        """Rank 0: log-probabilities of what the estimator wants scored, in the order of its views. Collective."""
        views = self.lead.views(batch, self.pipeline) if self.lead and batch is not None else None
        return self.policy.rescore(views)

    def _reference(self) -> bool:
        """Whether the weights of the stage's start must be kept."""
        return self.pipeline.reference or any("logp_ref" in term.needs for term in self.terms)

    def _proximal(self) -> bool:
        """Whether the log-probabilities of the weights that a batch finds are needed, beside those of the weights that sampled."""
        every = self.config.correction.dump_every
        needed = {name for part in (*self.terms, self.pipeline) for name in part.needs}
        return "logp_prox" in needed or bool(every and self.progress.step % every == 0)

    def imitate(self, stage: StageConfig, step: int) -> Batch | None:
        """Rank 0: a batch of demonstrations; None elsewhere."""
        return self.lead.imitate(stage.demos, step) if self.lead else None

    def split(self, stage: StageConfig, batch: Batch | None) -> Parts:
        """This rank's micro-batches, one part for each optimizer step that the batch makes, each when it is asked for."""
        self.roles = {"train": self.terms}
        if self.critic and stage.kind == "rl":
            self.roles = self.critic.roles(self.terms, self.progress.done)
        if "logp_ref" not in self.pipeline.needs and any("logp_ref" in term.needs for term in self.roles.get("train", ())):
            batch = self._with_column(batch, "logp_ref", self.policy.reference_logp)
        if self.teacher:
            batch = self._timed("teacher", partial(self.teacher.columns, batch, self.roles.get("train", ())))
        return self._parts(stage, batch)

    def _parts(self, stage: StageConfig, batch: Batch | None) -> Iterator[Part]:
        """A mini-batch is planned when its turn comes: some of its columns tell of the weights that the step before has made."""
        terms, lead = self.roles.get("train", []), self.lead if batch is not None else None
        parts = lead.parts(batch, [term for role in self.roles.values() for term in role], stage.kind) if lead and batch is not None else []
        probe = stage.kind == "rl" and not self._proximal()
        for i in range(count := self.policy.share(len(parts))):
            part = parts[i] if lead else None
            if fresh(terms):
                part = self._with_column(part, NOW, self.policy.logp)
            plans = lead.plans(part, self.roles, stage.kind, first=i == 0) if lead and part is not None else None
            if lead and batch is not None and plans is not None and probe and i == 0 and (count > 1 or "train" not in dict(plans)):
                plans = lead.probe(batch) + plans
            yield from self.policy.deal(plans)

    def _with_column(self, batch: Batch | None, name: str, look: Callable[[Plan | None], Any]) -> Batch | None:
        """Rank 0: the batch with what a collective pass over all its rows gives; None elsewhere."""
        plan = self.lead.whole_plan(batch) if self.lead and batch is not None else None
        found = look(plan)
        if not self.lead or batch is None or plan is None:
            return None
        return self.lead.with_column(batch, name, plan, found)

    def update(self, stage: StageConfig, step: int, parts: Parts) -> None:
        """One optimizer step per part and learner; a part without signal leaves the weights alone."""
        self.settle(wait=False)  # before this step collected, a checkpoint may have been written long ago
        steps, rl = self.config.steps(stage), stage.kind == "rl"
        rate = learning_rate(stage, steps, self.progress.done)
        critic: list[Part] = []  # which learns when the policy has

        def policy() -> Iterator[Part]:
            for part in parts:
                if part[0] == "critic":
                    critic.append(part)
                else:
                    yield part

        compare = rl and not self._proximal()
        self._timed("update", lambda: self.policy.update(policy(), self.roles.get("train", []), rate, compare, self.numbers))
        if self.critic and rl:
            own = learning_rate(replace(stage, lr=self.critic.lr or stage.lr), steps, self.progress.done)
            self._timed("critic", partial(self.critic.update, critic, own, self.numbers))
        self.progress.mismatch = max(self.progress.mismatch, self.numbers.get("mismatch/logp_abs_max", 0.0))

    def publish(self, stage: StageConfig, step: int) -> None:
        """The engine serves the new weights before it is next asked for anything."""
        if stage.kind == "rl" or self._due(stage):
            self._timed("publish", self.policy.serve)

    def evaluate(self, stage: StageConfig, step: int) -> None:
        """Success on the evaluation split when it is due; ends the stage once its target is reached."""
        if not self._due(stage):
            return
        if self.lead:
            entry = self._timed("evaluate", lambda: self.lead.evaluate(step))
            self.progress.curve.append({"step": step, "stage": stage.kind, **entry})
            self.numbers.update({f"eval/{name}": value for name, value in entry.items()})
            reached = bool(stage.until_success) and entry["sampled_success"] >= stage.until_success
            self.progress.over = self.progress.over or reached
        self.progress.over = self.policy.share(self.progress.over if self.lead else None)

    def log(self, stage: StageConfig, step: int) -> None:
        wall, cpu = time.monotonic() - self.clocks[0], time.process_time() - self.clocks[1]
        self.numbers["time/step_s"] = wall - self.numbers.get("time/evaluate_s", 0.0)
        self.numbers["time/step_cpu_s"] = cpu  # of this process, evaluation included
        self.numbers |= self.policy.serving.handovers()
        if self.lead:
            self.lead.watch(self.numbers)
            self.progress.rewards += [self.numbers["reward/mean"]] if "reward/mean" in self.numbers else []
            self.lead.log(stage.kind, self.progress.done, self.config.steps(stage), step, self.numbers)

    def save(self, stage: StageConfig, step: int) -> None:
        """A checkpoint when it is due and at the end of each stage; with ``run.async_save`` it is complete some steps later."""
        self.settle(wait=False)
        every = self.config.run.save_every
        if not self.progress.over and not (every and self.progress.done % every == 0):
            return
        self.settle(wait=True)
        self.progress.wall_s = self.earlier_s + time.time() - self.started
        partial = self.policy.share(self.checkpoints.partial(step) if self.lead else None)
        with self._filling(partial):
            writings = self._timed("save", lambda: self.policy.save(partial))
            if self.lead:
                self.policy.serving.tell("save", partial)
                self.store.save(partial / "state.json")
        self.flight = Flight(step, partial, writings)
        if not writings:
            self.settle(wait=True)

    def settle(self, wait: bool) -> None:
        """Completes the checkpoint in flight if the files of all ranks are there; with ``wait`` they are waited for.

        Raises CheckpointError when a rank could not write.
        """
        if self.flight is None or not (wait or all_done(self.flight.writings)):
            return
        flight, self.flight = self.flight, None
        with self._filling(flight.folder):
            try:
                for writing in flight.writings:
                    writing.finish()
            except BaseException:
                for writing in flight.writings:
                    writing.abandon(LEAVE_S)
                raise
            if self.lead:
                self.lead.describe(flight.folder)
                self.checkpoints.commit(flight.step)

    @contextmanager
    def _filling(self, partial: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.lead:  # a full disk gets its space back
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _leave(self, _: Any, error: BaseException | None, __: Any) -> None:
        """The run ends with a checkpoint in flight. One process completes it, unless it was interrupted; with more ranks
        nobody knows where the others are, and the checkpoint before stays the last one."""
        flight = self.flight
        if flight is None:
            return
        if self.lead and self.config.world == 1 and isinstance(error, Exception):
            try:
                self.settle(wait=True)
            except (CheckpointError, OSError) as e:
                self.lead.console.say(f"The checkpoint of step {flight.step} is given up: {e}")
            return
        for writing in flight.writings:
            writing.abandon(LEAVE_S)

    def finish(self) -> dict[str, Any]:
        """Writes ``summary.json`` and the Hugging Face folder, prints what happened. Rank 0 returns the summary."""
        self.settle(wait=True)
        if self.config.run.export:
            self.policy.export(self.folder / "export", self.folder / HF)
        if not self.lead:
            return {}
        wall_s = self.earlier_s + time.time() - self.started
        return self.lead.finish(self.progress, wall_s)

    def _timed(self, name: str, work: Any) -> Any:
        clock = time.monotonic()
        result = work()
        self.numbers[f"time/{name}_s"] = time.monotonic() - clock
        return result


class _Ignored:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
