"""What the tests of ragged input run on ranks."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Groups
from mcore_agent.learner.model import Setup
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import Weights, learner_of, relative, whole_gradients

Slots = list[list[MicroBatch]]


def compare_all(
    groups: Groups, config: dict[str, Any], weights: Weights, batches: dict[str, Slots], references: dict[str, Weights], setup: Setup
) -> dict[str, tuple[float, list[np.ndarray], float, bool]]:
    """Per batch: (global loss, this replica's log-probabilities, largest distance of a gradient from its reference, all are finite).

    One learner computes all of them, so that what one leaves behind would show in the next.
    """
    learner = learner_of(groups, config, weights, setup=setup)
    out = {}
    for name, slots in batches.items():
        done = learner.gradients(slots[groups.dp_rank], [SftNll()])
        found = whole_gradients(learner)
        finite = all(bool(torch.isfinite(grad).all()) for grad in found.values())
        out[name] = done.loss, done.logp, max(relative(learner, found, references[name]).values()), finite
    return out


def routed(groups: Groups, config: dict[str, Any], weights: Weights, slots: Slots) -> tuple[float, list[np.ndarray], Weights]:
    """(loss, log-probabilities, gradients by Hugging Face name) of one process."""
    learner = learner_of(groups, config, weights)
    done = learner.gradients(slots[groups.dp_rank], [SftNll()])
    family = learner.model.family
    found = whole_gradients(learner)
    return done.loss, done.logp, {hf: t for name, grad in found.items() for hf, t in family.to_hf(name, [grad]).items()}


def norms(groups: Groups, config: dict[str, Any], weights: Weights, slots: Slots) -> list[float]:
    """The gradient norm of two steps at rate 0, of a batch and of its first micro-batch alone."""
    learner = learner_of(groups, config, weights, clip_grad=0.0)
    own = slots[groups.dp_rank]
    return [learner.step(micro, [SftNll()], 0.0).grad_norm for micro in (own, own[:1])]


class Peak(TorchDispatchMode):
    """The most bytes of tensors alive that operations in the block had made."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._now = 0, 0
        self._sizes: dict[int, int] = {}  # by address of the storage
        self._users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                address = t.untyped_storage().data_ptr()
                if not self._users.get(address):
                    self._sizes[address] = t.untyped_storage().nbytes()
                    self._now += self._sizes[address]
                self._users[address] = self._users.get(address, 0) + 1
                weakref.finalize(t, self._gone, address)
        self.most = max(self.most, self._now)
        return out

    def _gone(self, address: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            self._now -= self._sizes.pop(address)


def peaks(
    groups: Groups, config: dict[str, Any], weights: Weights, micro: MicroBatch, counts: Sequence[int], setup: Setup
) -> list[tuple[int, int]]:
    """For each number of equal micro-batches: (bytes at the peak of a pass for log-probabilities, of one with gradients)."""
    learner = learner_of(groups, config, weights, setup=setup)
    out = []
    for count in (counts[0], *counts):  # the first pass makes what stays
        with Peak() as scored:
            learner.outputs([micro] * count, ["entropy"])
        with Peak() as trained:
            learner.gradients([micro] * count, [SftNll()])
        out.append((scored.most, trained.most))
    return out[1:]
