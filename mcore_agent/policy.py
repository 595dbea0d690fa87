"""The policy on every rank: trained by the learner, served by engines, by turns."""

import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckpt_convert.families import family_of
from ckpt_convert.mcore_folder import HF, TENSORS, Meta, is_mcore, read_meta, write_meta
from ckpt_convert.source import RandomSource, SafetensorsSource
from ckpt_convert.write import carry_files, write_folder
from mcore_agent.batch.microbatch import MicroBatch, Plan
from mcore_agent.config import Config, threads_per_rank
from mcore_agent.config_rules import hf_config_of, precision_of
from mcore_agent.coordinator import open_coordinator
from mcore_agent.learner import checkpoint, groups
from mcore_agent.learner.learner import Learner, OptimSpec, Setup, StepStats
from mcore_agent.learner.moe_losses import RouterLosses
from mcore_agent.learner.rescore import Rescorer
from mcore_agent.learner.wait import open_line
from mcore_agent.mismatch import Drift, drift
from mcore_agent.protocols import LossTerm
from mcore_agent.serving import Serving
from mcore_agent.state import finish_folder
from mcore_agent.types import View
from mcore_agent.weights.export import export

log = logging.getLogger(__name__)
LIVES = 3  # times that engines may die of one and the same publish
Part = tuple[str, list[MicroBatch]]  # ("train", "critic" or "probe", this rank's micro-batches)
Parts = Iterable[Part]


def optimizer_of(c: Config) -> OptimSpec:
    """Raises OptimError for settings that contradict each other."""
    o = c.learner
    return OptimSpec(
        betas=(o.betas[0], o.betas[1]),
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip_grad=o.clip_grad,
        name=o.optimizer,
        momentum=o.momentum,
        nesterov=o.nesterov,
        scale=o.scale,
        rest_lr=o.rest_lr,
        offload=o.offload,
    )


class Policy:
    """Methods are collective unless they say otherwise."""

    def __init__(self, config: Config, stack: ExitStack):
        c = config
        self.config = config
        self.hf_config = hf_config_of(config)
        torch.set_num_threads(threads_per_rank(c))
        first = os.environ.get("RANK", "0") == "0"
        coordinator = stack.enter_context(open_coordinator(c)) if first else None  # it imports while this rank does
        self.groups = groups.initialize(c.layout, backend=c.learner.backend)
        stack.callback(groups.destroy)
        self.rank = self.groups.rank
        self.line = stack.enter_context(open_line(self.groups))
        optim = optimizer_of(c)
        losses = RouterLosses(aux=c.learner.aux_loss, z=c.learner.z_loss)
        setup = Setup(
            recompute=c.learner.recompute,
            dispatcher=c.learner.dispatcher,
            grouped_gemm=c.learner.grouped_gemm,
            precision=precision_of(c),
            losses=losses,
            head="both" if c.critic.mode == "shared" else "lm",
            detach_value=c.critic.detach,
        )
        self.setup = setup
        self.learner = Learner(self.hf_config, self.groups, c.precision.dtype, optim, c.rollout.temperature, setup)
        self.learners = {TENSORS: self.learner}  # by their folders in a checkpoint; they sleep and wake together
        self.rescorer = Rescorer(self.learner, self.line, c.batch.token_budget)
        self.version = 0  # of the learner's weights: batches learned from
        self.serving = Serving(c, self.hf_config, self.groups, self.line, coordinator, self.learners, self._save, stack)

    def serve(self) -> None:
        """The engines serve the learner's weights."""
        self.serving.serve(self.version)

    def train_mode(self) -> None:
        """The learners have the memory."""
        self.serving.slicer.train()

    # ------------------------------------------------------------------------------------------- the learner

    def start(self) -> None:
        """Weights of the recipe: a Hugging Face folder, a Megatron checkpoint, or random ones."""
        path = Path(self.config.model.path)
        if not self.config.model.path:
            self.learner.load_weights(RandomSource(family_of(self.hf_config), self.config.run.seed))
        elif is_mcore(path):
            self.load_weights(path)
        else:
            self.learner.load_weights(SafetensorsSource(path))

    @property
    def hf_folder(self) -> Path:
        """Where ``model.path`` keeps config and tokenizer."""
        path = Path(self.config.model.path)
        return path / HF if is_mcore(path) else path

    def begin(self, temperature: float, fresh: bool) -> None:
        """A stage begins (``fresh``) or goes on."""
        self.learner.temperature = temperature
        if fresh:
            self.train_mode()
            self.learner.reset_optimizer()

    def keep_reference(self, folder: Path, fresh: bool) -> None:
        """The weights of the stage's start become the reference policy, kept in ``folder`` for a resume."""
        self.train_mode()
        if fresh:
            partial = folder.with_name(folder.name + ".partial")
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
            self.share(None)
            self.learner.save(partial, weights_only=True)
            if self.rank == 0:
                finish_folder(partial, folder)
            self.learner.snapshot("reference")
        else:
            self.learner.load(folder, weights_only=True)
            self.learner.snapshot("reference")
            self.learner.load(self._loaded / TENSORS)

    def routing(self, plan: Plan | None) -> list[list[np.ndarray]] | None:
        """Rank 0 gives a plan and gets the experts that the present weights choose ``[dp rank][slot]``, each [T, layers, k]."""
        self.train_mode()
        found = self.rescorer.outputs(plan, report=("routing",))
        return None if found is None else [[out["routing"] for out in rank] for rank in found]

    def logp(self, plan: Plan | None) -> list[list[np.ndarray]] | None:
        """Rank 0 gives a plan and gets the present weights' log-probabilities ``[dp rank][slot]``, each [T]."""
        self.train_mode()
        found = self.rescorer.outputs(plan)
        return None if found is None else [[out["logp"] for out in rank] for rank in found]

    def reference_logp(self, plan: Plan | None) -> list[list[np.ndarray]] | None:
        """Rank 0 gives a plan and gets the reference policy's log-probabilities ``[dp rank][slot]``, each [T]."""
        self.train_mode()
        found = self.rescorer.outputs(plan, under="reference")
        return None if found is None else [[out["logp"] for out in rank] for rank in found]

    def rescore(self, views: Sequence[View] | None) -> list[np.ndarray]:
        """Rank 0 gives views and gets the log-probabilities [n] of each one's scored tokens; nothing elsewhere."""
        self.train_mode()
        found: dict[int, np.ndarray] = {}
        for under in self.share(sorted({view.under for view in views}) if views is not None else None) or ():
            asked = None if views is None else [i for i, view in enumerate(views) if view.under == under]
            chosen = None if views is None or asked is None else [views[i] for i in asked]
            scored = self.rescorer.score(chosen, self.version, under=under or None)
            found |= {i: out["logp"] for i, out in zip(asked or (), scored or (), strict=True)}
        return [found[i] for i in range(len(views))] if views is not None else []

    def deal(self, plans: list[tuple[str, Plan]] | None) -> list[Part]:
        """Each data-parallel rank gets its micro-batches from rank 0, which alone has ``plans``."""
        dealt = None
        if plans is not None:
            dealt = [[(kind, plan.slots[r]) for kind, plan in plans] for r in range(self.groups.layout.dp)]
        return self.line.scatter(dealt)

    def step(self, learner: Learner, micro: Sequence[MicroBatch], terms: Sequence[LossTerm], lr: float) -> StepStats:
        """An optimizer step of one of the learners."""
        self.train_mode()
        return self.serving.slicer.fire("update", learner, micro, terms, lr)

    def update(self, parts: Parts, terms: Sequence[LossTerm], lr: float, compare: bool, numbers: dict[str, Any]) -> None:
        """An optimizer step for each training part, before the next is taken. ``compare``: measures engine against learner on
        sampled tokens."""
        gap: Drift | None = None
        stats: list[StepStats] = []
        passes_s = 0.0
        for kind, micro in parts:
            if kind == "probe":
                self.train_mode()
                clock = time.monotonic()
                gap = _gap(micro, self.learner.logprobs(micro))
                passes_s += time.monotonic() - clock
                continue
            done = self.step(self.learner, micro, terms, lr)
            if compare and gap is None:
                gap = _gap(micro, done.logp)
            stats.append(done)
            passes_s += done.passes_s
        self.version += any(s.applied for s in stats)  # one for all steps: what is never published has no number
        numbers["time/passes_s"] = passes_s
        numbers["lr"], numbers["version"] = lr, self.version
        numbers["optimizer_steps"] = sum(s.applied for s in stats)
        numbers["skipped_not_finite"] = sum(not s.applied for s in stats)
        if stats:
            numbers["loss"], numbers["grad_norm"] = stats[-1].loss, stats[-1].grad_norm
            numbers |= {f"loss/{name}": value for name, value in stats[-1].metrics.items()}
        if compare and gap is not None:
            numbers |= self._of_all(gap).numbers()

    def _of_all(self, gap: Drift) -> Drift:
        """The ranks' sums; those that share a micro-batch count it alike, which no ratio shows."""
        if self.groups.layout.world == 1:
            return gap
        sums = torch.tensor([gap.tokens, gap.abs_sum, gap.k3_sum], device=groups.device(), dtype=torch.float64)
        most = torch.tensor([gap.abs_max], device=groups.device(), dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return Drift(int(sums[0]), float(sums[1]), float(most), float(sums[2]))

    # ------------------------------------------------------------------------------------------- checkpoints

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        return self.line.share(value)

    def save(self, folder: Path) -> list[checkpoint.Writing]:
        """Writes the learner's part of a checkpoint into an existing folder; legal in every state of the table.

        Returns what is still being written, with ``run.async_save``; else everything is.
        """
        return self.serving.slicer.fire("save", folder)

    def _save(self, folder: Path) -> list[checkpoint.Writing]:
        if self.rank == 0:
            for name in self.learners:
                (folder / name).mkdir(exist_ok=True)
        self.share(None)
        if self.config.run.async_save:
            return [learner.begin_save(folder / name) for name, learner in self.learners.items()]
        for name, learner in self.learners.items():
            learner.save(folder / name)
        return []

    def load_weights(self, folder: Path) -> None:
        """The weights of a checkpoint folder, whatever layout wrote it. Raises ConvertError when it is not whole."""
        read_meta(folder)
        self.learner.load(folder / TENSORS, weights_only=True)

    def load(self, folder: Path) -> None:
        """Continues exactly from a checkpoint folder. Raises ConvertError when it is not whole."""
        read_meta(folder)
        for name, learner in self.learners.items():
            learner.load(folder / name)
        self._loaded = folder

    def describe(self, folder: Path, files: Path) -> None:
        """Rank 0, after ``save``: config, tokenizer and meta data make the folder a model by itself."""
        carry_files(files, folder / HF)
        ranks = asdict(self.groups.layout)
        write_meta(folder, Meta(self.learner.model.family.model_type, self.config.precision.dtype, ranks))

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]

    def export(self, folder: Path, files: Path) -> None:
        """Writes the policy as a Hugging Face folder, with the config and tokenizer of ``files``; keeps an existing one."""
        if self.share(folder.exists() if self.rank == 0 else None):
            return
        tensors = export(self.learner.model)
        if self.rank == 0:
            write_folder(folder, tensors, self.learner.model.family.shapes(), self.learner.model.dtype, files)
        else:
            for _ in tensors:
                pass


def _gap(micro: Sequence[MicroBatch], logp: Sequence[np.ndarray]) -> Drift:
    """Learner's against engine's log-probabilities of sampled tokens."""
    parts = []
    for m, found in zip(micro, logp, strict=True):
        chosen = m.columns["mask:pg"] > 0
        parts.append(drift(found[chosen], m.columns["logp_old"][chosen]))
    return sum(parts, Drift())
