"""What the tests of the learner run on ranks."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckpt_convert.source import DictSource
from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Groups
from mcore_agent.learner.learner import Learner, OptimSpec
from mcore_agent.learner.model import PLAIN, Setup
from mcore_agent.protocols import LossTerm

Weights = dict[str, torch.Tensor]


def learner_of(
    groups: Groups, config: dict[str, Any], weights: Weights, dtype: str = "fp32", setup: Setup = PLAIN, **optim: Any
) -> Learner:
    learner = Learner(config, groups, dtype, OptimSpec(**optim), setup=setup)
    learner.load_weights(DictSource(weights))
    return learner


def whole_gradients(learner: Learner) -> Weights:
    """This rank's gradients by global name, gathered from the data-parallel ranks that each hold a share."""
    for chunk in learner.model.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.chunk(group.size())), own, group=group)
    return {name: parameter.main_grad.clone() for name, parameter in learner.model.parameters().items()}


def relative(learner: Learner, found: Weights, reference: Weights) -> dict[str, float]:
    """Relative distance of each local tensor from the shard of a Hugging Face tensor."""
    out = {}
    for name, value in found.items():
        want = learner.model.shard(name, reference.__getitem__)
        out[name] = float((value - want).norm() / want.norm().clamp_min(1e-12))
    return out


def compare(
    groups: Groups,
    config: dict[str, Any],
    weights: Weights,
    slots: list[list[MicroBatch]],
    terms: list[LossTerm],
    reference: Weights,
    temperature: float,
    dtype: str = "fp32",
    setup: Setup = PLAIN,
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """(global loss, this replica's log-probabilities, distance of every gradient from Hugging Face's)."""
    learner = learner_of(groups, config, weights, dtype, setup)
    learner.temperature = temperature
    done = learner.gradients(slots[groups.dp_rank], terms)
    return done.loss, done.logp, relative(learner, whole_gradients(learner), reference)


def alone(
    groups: Groups,
    config: dict[str, Any],
    weights: Weights,
    micro: list[MicroBatch],
    terms: list[LossTerm],
    dtype: str,
) -> tuple[float, list[np.ndarray], Weights]:
    """(loss, log-probabilities, gradients by Hugging Face name) of one process."""
    learner = learner_of(groups, config, weights, dtype)
    done = learner.gradients(micro, terms)
    grads: Weights = {}
    for name, value in whole_gradients(learner).items():
        if name != "output_layer.weight" or not learner.model.family.arch.tied:
            grads |= learner.model.family.to_hf(name, [value])
    return done.loss, done.logp, grads


def gloo_threads() -> int:
    """Threads of this process that run gloo's collectives, once their number has stayed the same for a while.

    A new thread gets its name late, and those of a group that has gone end late.
    """

    def count() -> int:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                names.append((task / "comm").read_text())
        return sum(name.startswith("pt_gloo_runloop") for name in names)

    counts = [count()]
    while len(counts) < 5 or (len(counts) < 100 and len(set(counts[-5:])) > 1):
        time.sleep(0.05)
        counts.append(count())
    return counts[-1]
