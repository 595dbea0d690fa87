"""What only rank 0 has: environment, tasks, agent, scores, and the run folder that people read."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_convert.write import carry_files, whole_or_nothing
from mcore_agent import summary
from mcore_agent.agent.render import ChatRenderer
from mcore_agent.agent.tokenizer import contents, load_tokenizer, save_tokenizer, train_tokenizer
from mcore_agent.batch.age import limit_age
from mcore_agent.batch.correction import weigh
from mcore_agent.batch.marks import marked
from mcore_agent.batch.microbatch import Plan
from mcore_agent.batch.plan import gather, split, to_column
from mcore_agent.batch.rowset import experts_of, rowset
from mcore_agent.batch.select import minibatches, select, usable
from mcore_agent.batch.sft import demonstration
from mcore_agent.config import Config, ConfigError
from mcore_agent.credit.groups import informative
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.loss.correction import Correction
from mcore_agent.loss.derived import derive
from mcore_agent.metrics import Console, Metrics
from mcore_agent.mismatch import DriftAlarm, drift_by_age, dump, numbers_of, outliers
from mcore_agent.policy import Policy
from mcore_agent.protocols import InfraError
from mcore_agent.registry import create
from mcore_agent.reward.pipeline import Scorer
from mcore_agent.state import write_atomic
from mcore_agent.types import GREEDY, Batch, Episode, Message, View

TOKENIZER_DIALOGS = 500  # demonstrations that a new tokenizer is trained on
DUMPED = 16  # rows of a dump of what engine and learner differ on
OUTAGE = 3  # steps in a row without a single episode that could be played: then the run ends


class Outage(InfraError):
    """Every episode failed, each after its retries: the environment or the engine is down, and going on is of no use."""

    def __init__(self, when: str, episodes: Sequence[Episode]):
        ((reason, count),) = Counter(e.reason for e in episodes).most_common(1)
        super().__init__(f"{when} no episode could be played to its end; {count} of the last {len(episodes)} failed with: {reason}. "
                         "Mend the environment and give the same command again")  # fmt: skip


Plans = list[tuple[str, Plan]]  # ("train", "critic" or "probe", plan): a probe only compares log-probabilities
COMPARED = ("logp_old", "mask:pg")  # columns that engine and learner are compared by


class Lead:
    """Plays, scores and writes. Every random draw is a function of the run's seed, the step and the task."""

    def __init__(self, config: Config, policy: Policy, stack: ExitStack, files: Path | None = None):
        """``files`` is the folder where the model's config and tokenizer are, or are to be kept."""
        c = config
        self.config, self.policy, self.files = config, policy, files
        self.console = Console()
        stack.callback(self.console.close)
        self.domain = create("env", c.env)
        self.demos = create("source", {"name": "epochs", "seed": c.run.seed}, domain=self.domain)
        self.tokenizer = self._tokenizer()
        self.renderer = ChatRenderer(self.tokenizer, self.domain.tools)
        self._keep_files()
        services = {"decode": lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True)}
        self.scorer, self.outcome = Scorer(c.reward, services), Scorer([{"name": "outcome"}])
        self.alarm = DriftAlarm(stop=c.correction.stop)
        self.step = 0
        self.barren = 0  # steps in a row without a usable episode
        self.paces: list[float] = []  # seconds of the last steps
        self.label = ""
        self._stack = stack

    def _tokenizer(self) -> Any:
        """That of ``files``, the model's own, or one trained on demonstrations."""
        if self.files and self.files.is_dir():
            return load_tokenizer(self.files)
        if self.config.model.path:
            return load_tokenizer(self.policy.hf_folder)
        dialogs = [self._dialog(i) for i in range(TOKENIZER_DIALOGS)]
        return train_tokenizer(contents(dialogs), self.config.model.vocab)

    def _keep_files(self) -> None:
        """Fills ``files`` once, when everything in it has proved to be of use."""
        size = self.policy.hf_config["vocab_size"]
        if max(self.tokenizer.get_vocab().values()) >= size:
            raise ConfigError("model", size, f"is the vocabulary of the model, but the tokenizer has {len(self.tokenizer)} tokens",
                              "Give a tokenizer and a model that belong together")  # fmt: skip
        if self.files is None or self.files.is_dir():
            return
        with whole_or_nothing(self.files) as folder:
            if self.config.model.path:
                carry_files(self.policy.hf_folder, folder)
            else:
                (folder / "config.json").write_text(json.dumps(self.policy.hf_config, indent=1))
                save_tokenizer(self.tokenizer, folder)

    def _dialog(self, index: int) -> list[Message]:
        size = self.domain.size("train")
        return self._demo(self.domain.task("train", index % size if size else index))

    def _demo(self, task: Any) -> list[Message]:
        dialog = self.domain.demo(task, self.config.run.seed)
        if dialog is None:
            raise ConfigError("env", self.config.env["name"], "has no demonstrations", "Start from model.path and drop sft stages")
        return dialog

    def open_run(self, folder: Path, step: int, resumed: Path | None) -> None:
        """Starts writing to a run folder; on a resume after ``step``."""
        t = self.config.tracking
        self.folder = folder
        (folder / "episodes").mkdir(exist_ok=True)
        self.metrics = Metrics(folder, resume_step=step, wandb=t.wandb, project=t.project, name=t.name, config=self.config.to_dict())
        self._stack.push(lambda error, *_: self.metrics.close(exit_code=int(error is not None)))
        self.console.say(f"Run folder {folder}" + (f", resumed after step {step} from {resumed.name}" if resumed else ""))

    # --------------------------------------------------------------------------------------------- the ring

    def collect(self, step: int, numbers: dict[str, Any]) -> list[Episode]:
        """The step's episodes, group after group."""
        self.step = step
        episodes, stats = self.policy.serving.play("collect", step, self.policy.version, progress=self._playing("collect"))
        numbers.update(stats)
        good = usable(episodes)[0]
        self.barren = 0 if any(e.sampled_tokens for e in good) else self.barren + 1
        if self.barren == OUTAGE and good:
            raise ConfigError("rollout.max_tokens", self.config.rollout.max_tokens,
                              f"in {OUTAGE} steps no token was sampled; the last episode ended with: {good[-1].reason}",
                              "Raise it, or shorten the prompts")  # fmt: skip
        if self.barren == OUTAGE:
            raise Outage(f"in {OUTAGE} steps", episodes)
        return episodes

    def reward(self, episodes: list[Episode], step: int, numbers: dict[str, Any]) -> list[Episode]:
        """Named rewards for every episode that did not fail."""
        scored, found = self.scorer(episodes)
        numbers |= {f"reward/{name}": value for name, value in found.items()}
        good = [e.reward for e in scored if e.status != "infra_fail" and e.branch != GREEDY]
        if good:
            numbers["reward/mean"] = float(np.mean(good))
        self._write_episodes(scored, step)
        return scored

    def batch(self, episodes: list[Episode], pipeline: Pipeline, version: int, numbers: dict[str, Any]) -> Batch:
        """What weights of ``version`` learn from; failed episodes are left out and were counted, as are tokens that are too old."""
        batch, oldest = Batch(tuple(usable(episodes)[0])), self.config.correction.max_age
        kept = pipeline.keep(batch)
        if len(kept) < len(batch.episodes):
            numbers["credit/filtered_out"] = len(batch.episodes) - len(kept)
            batch = select(batch, kept)
        if oldest and batch.episodes:
            batch, numbers["correction/too_old"] = limit_age(batch, version, oldest)
        if not batch.episodes:
            return batch
        batch = batch.with_columns(logp_old=batch.tokens("logp"))
        return batch.with_columns(routing=experts_of(batch)) if self.config.learner.routing_replay == "rollout" else batch

    def compare(self, batch: Batch, version: int, correction: Correction | None, numbers: dict[str, Any]) -> Batch:
        """Engine against learner, by age of the tokens; with a correction the batch gets its weights."""
        if not batch.episodes:
            return batch
        ages = drift_by_age(batch, version)
        numbers.update(numbers_of(ages))
        if 0 in ages:
            numbers["mismatch/age_0/logp_abs_mean"] = ages[0].abs_mean
        every = self.config.correction.dump_every
        if every and self.step % every == 0:
            dump(self.folder / "mismatch" / f"step-{self.step:06d}.jsonl", outliers(batch, DUMPED))
        if correction is None:
            return batch
        weight, found = weigh(batch, correction)
        numbers.update(found)
        return batch.with_columns(is_weight=weight)

    def watch(self, numbers: dict[str, Any]) -> None:
        """Says when engine and learner drift apart. Raises MismatchError where the recipe wants the run to end then."""
        lagging = self.config.rollout.max_lag > 0  # the weights of older tokens have moved, which is no drift
        mean = numbers.get("mismatch/age_0/logp_abs_mean" if lagging else "mismatch/logp_abs_mean")
        if mean is not None and (text := self.alarm.observe(mean)):
            self.console.say(text)
        numbers["mismatch/alarm"] = int(self.alarm.active)

    def views(self, batch: Batch, pipeline: Pipeline) -> list[View]:
        """What the learner is to score before credit is assigned."""
        return pipeline.views(batch, lambda text: self.tokenizer.encode(text, add_special_tokens=False))

    def credit(self, batch: Batch, pipeline: Pipeline, scores: Sequence[np.ndarray], numbers: dict[str, Any]) -> Batch:
        """The batch with advantages."""
        batch, found = pipeline(batch, scores)
        numbers |= {f"credit/{name}": value for name, value in found.items()}
        if batch.episodes:
            mask = batch.channel("pg")
            batch = batch.with_columns(**{"mask:pg": mask.astype(np.float32)})
            group = batch.by("group")
            numbers["credit/groups"] = int(group.max()) + 1
            numbers["credit/groups_with_signal"] = len(np.unique(group[informative(batch)]))
        return batch

    def imitate(self, count: int, step: int) -> Batch:
        """Demonstrations as rows of the channel ``sft``."""
        episodes = []
        for i, task in enumerate(self.demos.next(count)):
            tokens, mask = self.renderer.demo(self._demo(task), len(task.messages))
            episodes.append(demonstration(task, tokens, mask, f"demo/{step}/{i}"))
        return Batch(tuple(episodes))

    def parts(self, batch: Batch, terms: Sequence[Any], kind: str) -> list[Batch]:
        """The mini-batches, whole groups each, with the channels that ``terms`` want marked; none of an empty batch."""
        if not batch.episodes or kind != "rl":
            return [batch] if batch.episodes else []
        return minibatches(marked(batch, terms), min(self.config.batch.minibatches, int(batch.by("group").max()) + 1))

    def plans(self, part: Batch, roles: Mapping[str, Sequence[Any]], kind: str, first: bool) -> Plans:
        """What to compute of a mini-batch: one plan for each role that gets anything from it. The ``first`` of an rl stage is saved."""
        plans: Plans = []
        for role, terms in roles.items():
            compared = COMPARED if kind == "rl" and role == "train" else ()
            rows = rowset(derive(part, terms), terms, compared)
            if compared and first:
                rows.save(self.folder / "batch.npz")
            plan = split(rows, self.config.batch.token_budget, self.config.learner.dp)
            if not plan.empty:
                plans.append((role, plan))
        return plans

    def probe(self, batch: Batch) -> Plans:
        """A look at all rows, where no training measures the mismatch."""
        rows = rowset(batch, columns=COMPARED)
        return [("probe", split(rows, self.config.batch.token_budget, self.config.learner.dp))]

    def whole_plan(self, batch: Batch) -> Plan:
        """All rows of the batch, for a pass that only looks."""
        return split(rowset(batch), self.config.batch.token_budget, self.config.learner.dp)

    def with_column(self, batch: Batch, name: str, plan: Plan, outputs: list[list[np.ndarray]]) -> Batch:
        """The batch with a column [N] of what a pass over ``plan`` gave; the column ``routing`` is [N, layers, experts per token]."""
        if name == "routing":
            if plan.empty:
                return batch
            return batch.with_columns(routing=np.concatenate([row for row in gather(plan, outputs) if row is not None]))
        rows = gather(plan, outputs) if not plan.empty else []
        return batch.with_columns(**{name: to_column(batch, rows)})

    # ------------------------------------------------------------------------------------------- measurement

    def evaluate(self, step: int) -> dict[str, float]:
        """Greedy and sampled success over the evaluation tasks, each scored once; failures are not counted as zeros."""
        size = self.domain.size(self.config.run.eval_split)
        count = min(self.config.run.eval_tasks, size or self.config.run.eval_tasks)
        entry: dict[str, float] = {}
        for name in ("greedy", "sampled"):
            episodes = self.policy.serving.play("evaluate", step, count, name == "greedy", progress=self._playing(name))
            good = [e for e in self.outcome(episodes)[0] if e.status != "infra_fail"]
            if not good:
                raise Outage("in an evaluation", episodes)
            entry[f"{name}_success"] = float(np.mean([e.reward >= 1 for e in good]))
            entry[f"{name}_reward"] = float(np.mean([e.reward for e in good]))
            entry[f"{name}_failed"] = len(episodes) - len(good)
        return entry

    def step_took(self, seconds: float) -> None:
        self.paces = [*self.paces[-19:], seconds]

    def _playing(self, what: str) -> Any:
        return lambda done, total: self.console.progress(f"{self.label} {what}".strip(), done, total)

    def log(self, kind: str, done: int, total: int, step: int, numbers: dict[str, Any]) -> None:
        """One record in ``metrics.jsonl``; on the console a line for each rl step and each evaluation."""
        self.metrics.log(step, {"stage": kind, **numbers})
        self.label = f"{kind} {done + 1}/{total}"
        line = summary.step_line(kind, done, total, numbers)
        if kind == "rl" or "eval/sampled_success" in numbers:
            self.console.say(line)
        pace = float(np.mean(self.paces)) if self.paces else None
        self.console.progress(kind, done, total, line.partition("  ")[2], pace * (total - done) if pace else None)

    def _write_episodes(self, episodes: list[Episode], step: int) -> None:
        lines = [json.dumps(summary.episode_record(e, self.tokenizer)) + "\n" for e in episodes]
        (self.folder / "episodes" / f"step-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")

    def describe(self, folder: Path) -> None:
        """Adds to a checkpoint what makes it a model by itself: config and tokenizer."""
        assert self.files
        self.policy.describe(folder, self.files)

    def finish(self, progress: Any, wall_s: float) -> dict[str, Any]:
        """Writes ``summary.json`` and prints the learning curve and the table."""
        result = summary.summarize(progress, wall_s)
        write_atomic(self.folder / "summary.json", (json.dumps(result, indent=1) + "\n").encode())
        self.console.say(summary.closing(progress, result, self.folder))
        return result
