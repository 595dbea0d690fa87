"""The learner: one model, its optimizer, and the few things a training loop does with them."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from mcore_agent.learner.model import Model, build
from mcore_agent.learner.optimizer import OptimSpec
from mcore_agent.learner.step import LearnerError, Pass, run
from mcore_agent.protocols import LossTerm

__all__ = ["Layout", "Learner", "LearnerError", "OptimSpec", "StepStats"]


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
    Raises ConvertError or LayoutError for a model that cannot be, or cannot be split so.
    """

    def __init__(self, hf_config: Mapping[str, Any], groups: Groups, dtype: str, optim: OptimSpec, temperature: float = 1.0):
        self.spec = optim
        self.temperature = temperature
        self.groups = groups
        self.model: Model = build(family_of(hf_config), groups, dtype)
        self.optimizer = optimizer.make(self.model, optim)
        self._reference: list[torch.Tensor] | None = None

    # ------------------------------------------------------------------------------------------------- weights

    def load_weights(self, source: TensorSource) -> None:
        """Fills this rank's shards from Hugging Face tensors and starts the optimizer afresh.

        Raises ConvertError unless the source holds exactly the tensors that the config implies.
        """
        check_source(self.model.family, source)
        layout, rank = self.groups.layout, self.groups.tp_rank
        with torch.no_grad():
            for name, parameter in self.model.parameters().items():
                parameter.copy_(self.model.family.to_mcore(name, source.get, layout.tp, rank))
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forgets moments and step counts; the weights stay."""
        optimizer.reset(self.optimizer)

    def save(self, folder: Path, weights_only: bool = False) -> None:
        """Writes weights and optimizer state into an existing empty folder; see ``checkpoint.save``."""
        checkpoint.save(folder, self.model, None if weights_only else self.optimizer)

    def load(self, folder: Path, weights_only: bool = False) -> None:
        """Reads a checkpoint of any layout. With ``weights_only`` the optimizer starts afresh."""
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
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        done = run(self.model, micro, terms, self.temperature, gradients=True)
        if self.groups.layout.world > 1:  # alone there is nothing to reduce, and it would copy all gradients
            finalize_model_grads(self.model.chunks, None)
        return done

    def loss(self, micro: Sequence[MicroBatch], terms: Sequence[LossTerm]) -> float:
        """The global loss, without gradients."""
        return run(self.model, micro, terms, self.temperature, gradients=False).loss

    def logprobs(self, micro: Sequence[MicroBatch], reference: bool = False) -> list[np.ndarray]:
        """Per micro-batch ``[T]`` float32, without gradients; ``reference``: under the weights of the snapshot."""
        if not reference:
            return run(self.model, micro, (), self.temperature, gradients=False).logp
        with self._reference_weights():
            return run(self.model, micro, (), self.temperature, gradients=False).logp

    def snapshot_reference(self) -> None:
        """Keeps a copy of the current weights as the reference policy, in place of an earlier one."""
        self._reference = [p.detach().clone() for p in self.model.parameters().values()]

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise LearnerError("there is no reference policy: call snapshot_reference first")
        parameters = list(self.model.parameters().values())
        current = [p.data for p in parameters]
        try:
            for parameter, kept in zip(parameters, self._reference, strict=True):
                parameter.data = kept
            yield
        finally:
            for parameter, own in zip(parameters, current, strict=True):
                parameter.data = own
