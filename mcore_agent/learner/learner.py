"""The learner: one model, its optimizer, and the few things a training loop does with them."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads

from ckpt_convert.families import family_of
from ckpt_convert.source import TensorSource, check_source
from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner import checkpoint, optimizer
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.model import PLAIN, Model, Setup, build
from mcore_agent.learner.offload import Offload
from mcore_agent.learner.optimizer import OptimSpec
from mcore_agent.learner.step import Ask, LearnerError, Pass, run
from mcore_agent.learner.value import NAME as VALUE_HEAD
from mcore_agent.protocols import LossTerm

__all__ = ["Layout", "Learner", "LearnerError", "OptimSpec", "Setup", "StepStats"]


@dataclass(frozen=True)
class StepStats:
    """One optimizer step. Loss and metrics are sums over the global batch, taken before the update."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    metrics: dict[str, float]
    logp: list[np.ndarray]  # of this data-parallel rank: per micro-batch [T] float32
    applied: bool  # False: loss or gradient norm was not finite, and the update was skipped
    passes_s: float  # seconds of forward, backward and gradient reduction


class Learner:
    """Every method is collective: all ranks call it alike, each with its own micro-batches.

    ``hf_config`` is the content of a Hugging Face ``config.json``; the model follows from it alone. The weights are
    undefined until ``load_weights`` or ``load``. ``temperature`` is that of all log-probabilities and may be set anew.
    Raises ConvertError or LayoutError for a model that cannot be, or cannot be split so. Its memory may be given back
    (``offload``); what then needs it raises OffloadError.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        groups: Groups,
        dtype: str,
        optim: OptimSpec,
        temperature: float = 1.0,
        setup: Setup = PLAIN,
    ):
        self.spec = optim
        self.temperature = temperature
        self.groups = groups
        self.model: Model = build(family_of(hf_config), groups, dtype, replace(setup, whole_matrices=optim.whole_matrices))
        self.optimizer = optimizer.make(self.model, optim)
        # a machine without a GPU has only the memory that the copies would be in
        self.offload = Offload(self.model.chunks, self.optimizer, to_host=torch.cuda.is_available())
        self._kept: dict[str, list[torch.Tensor]] = {}
        self.snapshots: dict[str, int] = {}  # name of each snapshot: how many of any name had been taken
        self._taken = 0

    # ------------------------------------------------------------------------------------------------- weights

    def load_weights(self, source: TensorSource) -> None:
        """Fills this rank's shards from Hugging Face tensors and starts the optimizer afresh.

        Raises ConvertError unless the source holds exactly the tensors that the config implies.
        """
        self.offload.need("load weights")
        check_source(self.model.family, source)
        with torch.no_grad():
            for name, parameter in self.model.parameters().items():
                if name.startswith(VALUE_HEAD):  # no checkpoint of other makers has one
                    parameter.zero_()
                else:
                    parameter.copy_(self.model.shard(name, source.get))
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forgets moments and step counts; the weights stay."""
        self.offload.need("start its optimizer afresh")
        optimizer.reset(self.optimizer)

    def save(self, folder: Path, weights_only: bool = False) -> None:
        """Writes weights and optimizer state into an existing empty folder; see ``checkpoint.save``.

        What had been given back is here again for that time only.
        """
        with self.offload.awake():
            checkpoint.save(folder, self.model, None if weights_only else self.optimizer)

    def begin_save(self, folder: Path) -> checkpoint.Writing:
        """As ``save``, but the files are written while the learner does other things; see ``checkpoint.begin``.

        What had been given back is here again only until it is copied. The copies need that much host memory.
        """
        with self.offload.awake():
            return checkpoint.begin(folder, self.model, self.optimizer)

    def load(self, folder: Path, weights_only: bool = False) -> None:
        """Reads a checkpoint of any layout. With ``weights_only`` the optimizer starts afresh."""
        self.offload.need("load a checkpoint")
        checkpoint.load(folder, self.model, None if weights_only else self.optimizer)
        if weights_only:
            self.reset_optimizer()

    # ------------------------------------------------------------------------------------------------- passes

    def step(self, micro: Sequence[MicroBatch], terms: Sequence[LossTerm], lr: float) -> StepStats:
        """One optimizer step at ``lr`` on the sum over all micro-batches of all ranks. Raises LearnerError."""
        clock = time.monotonic()
        done = self.gradients(micro, terms)
        passes_s = time.monotonic() - clock
        update = optimizer.Update(False, math.nan)
        if math.isfinite(done.loss):
            update = optimizer.update(self.optimizer, self.spec, lr)
        return StepStats(done.loss, update.grad_norm, lr, done.metrics, done.logp, update.applied, passes_s)

    def gradients(self, micro: Sequence[MicroBatch], terms: Sequence[LossTerm]) -> Pass:
        """Fresh gradients in every parameter's ``main_grad``, reduced over ranks, without an update."""
        self.offload.need("compute gradients")
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        done = run(self.model, micro, Ask(terms, self.temperature), gradients=True)
        if self.groups.layout.world > 1:  # alone there is nothing to reduce, and it would copy all gradients
            finalize_model_grads(self.model.chunks, None)
        return done

    def loss(self, micro: Sequence[MicroBatch], terms: Sequence[LossTerm]) -> float:
        """The global loss, without gradients."""
        self.offload.need("compute a loss", parameters_only=True)
        return run(self.model, micro, Ask(terms, self.temperature), gradients=False).loss

    def outputs(
        self, micro: Sequence[MicroBatch], report: Iterable[str] = (), *, top_k: int = 0, under: str | None = None
    ) -> list[dict[str, np.ndarray]]:
        """Per micro-batch ``logp`` [T] and the outputs named in ``report`` (``ModelOut``), without gradients.

        ``under``: with the weights of that snapshot instead of the current ones. Raises LearnerError when there is none.
        """
        self.offload.need("compute log-probabilities", parameters_only=True)
        ask = Ask((), self.temperature, frozenset(report), top_k)
        with self._weights_of(under) if under else nullcontext():
            return run(self.model, micro, ask, gradients=False).outputs

    def logprobs(self, micro: Sequence[MicroBatch], under: str | None = None) -> list[np.ndarray]:
        """Per micro-batch [T]; see ``outputs``."""
        return [found["logp"] for found in self.outputs(micro, under=under)]

    # ----------------------------------------------------------------------------------------- other weights

    def snapshot(self, name: str) -> None:
        """Keeps a copy of the current weights, in host memory, in place of an earlier one of that name."""
        self.offload.need("keep its weights", parameters_only=True)
        self._taken += 1
        self.snapshots[name] = self._taken
        self._kept[name] = [p.detach().to("cpu", copy=True) for p in self.model.parameters().values()]

    @contextmanager
    def _weights_of(self, name: str) -> Iterator[None]:
        """The snapshot's weights in place of the current ones, which wait where the snapshot was."""
        if name not in self._kept:
            raise LearnerError(f"there are no weights {name!r}: call snapshot({name!r}) first; kept are {sorted(self._kept) or 'none'}")
        self._exchange(self._kept[name])
        try:
            yield
        finally:
            self._exchange(self._kept[name])

    @torch.no_grad()
    def _exchange(self, kept: list[torch.Tensor]) -> None:
        """Needs memory for one more parameter on a GPU, and none on a CPU."""
        for i, parameter in enumerate(self.model.parameters().values()):
            if parameter.device == kept[i].device:
                parameter.data, kept[i] = kept[i], parameter.data
            else:
                own = parameter.data.to(kept[i].device)
                parameter.data.copy_(kept[i])
                kept[i].copy_(own)
