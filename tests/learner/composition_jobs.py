"""What the tests of composed parallelism run on ranks."""

from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

from ckpt_convert.source import DictSource
from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Groups
from mcore_agent.learner.learner import Learner, OptimSpec
from mcore_agent.learner.model import Setup
from mcore_agent.learner.moe_losses import LossRouter, RouterLosses
from mcore_agent.learner.packing import pack
from mcore_agent.protocols import LossTerm
from tests.learner.jobs import Weights, learner_of, whole_gradients


def router_gradients(
    groups: Groups,
    config: dict[str, Any],
    weights: Weights,
    slots: list[list[MicroBatch]],
    terms: list[LossTerm],
    reference: Weights,
    setup: Setup,
    scale: float,
) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, relative distance of every gradient from ``scale`` times the reference's), with the loss scaled for fp16's sake."""
    learner = Learner(config, groups, "fp32", OptimSpec(), setup=setup)
    learner.load_weights(DictSource(weights))
    learner.model.config.grad_scale_func = lambda loss: loss * scale
    done = learner.gradients(slots[groups.dp_rank], terms)
    apart = {}
    for name, found in whole_gradients(learner).items():
        want = scale * learner.model.shard(name, reference.__getitem__)
        apart[name] = float((found - want).norm() / want.norm().clamp_min(1e-12))
    return done.metrics, apart


def bias_counts(groups: Groups, config: dict[str, Any], padding: list[bool]) -> list[float]:
    """Tokens per expert that a router with an expert bias counts, when only some of its tokens are real."""
    learner = Learner(config, groups, "fp32", OptimSpec(), setup=Setup(losses=RouterLosses(aux=0.1)))
    [router, *_] = [m for m in learner.model.modules[0].modules() if isinstance(m, LossRouter)]
    router.enable_expert_bias = True
    router.local_tokens_per_expert = torch.zeros(4)
    router.expert_bias = torch.zeros(4)
    logits = torch.eye(4)[torch.arange(len(padding)) % 4][:, None] + torch.tensor([0.1, 0.0, 0.0, 0.5])
    router.routing(logits, torch.tensor(padding)[:, None])
    return router.local_tokens_per_expert.tolist()


def token_counts(groups: Groups, real: list[int]) -> tuple[float, float]:
    """Megatron's (own, all ranks') tokens when ``real[rank]`` of 6 are no padding; each goes to 2 of 4 experts."""
    chosen = torch.zeros(6, 4, dtype=torch.bool)
    chosen[: real[groups.tp_rank], :2] = True
    _, own, total = get_tokens_per_expert_and_token_count(chosen, groups.tp, topk=2, with_padding_mask=True)
    return float(own), float(total)


def smoothed_loss(groups: Groups, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[T] Megatron's smoothed cross entropy of logits ``[T, V]``, of which every rank takes its part of the vocabulary."""
    mine = logits.chunk(groups.layout.tp, -1)[groups.tp_rank].clone()
    return vocab_parallel_cross_entropy(mine, targets, 0.1)


def labelled_loss(groups: Groups, config: dict[str, Any], weights: Weights, tokens: torch.Tensor, gather: bool) -> torch.Tensor:
    """[T] GPTModel's own loss for labels, from gathered logits or from each rank's part of them."""
    model = learner_of(groups, config, weights).model
    rows = pack(np.array([len(tokens)]), model.frequencies, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        labels = tokens.roll(-1)[None]
        return model.modules[0](tokens[None], None, None, labels=labels, packed_seq_params=rows, runtime_gather_output=gather)[0]


def averaged_loss(groups: Groups, config: dict[str, Any], weights: Weights, per_token: bool) -> float:
    """What Megatron's schedule makes of a loss of 6 that the loss function says is of 3 tokens."""
    settings = learner_of(groups, config, weights).model.config
    settings.calculate_per_token_loss = per_token
    out, _ = forward_step_calc_loss(
        None,
        torch.tensor(6.0),
        lambda found: (found, torch.tensor(3), None),
        settings,
        None,
        False,
        1,
        [],
        cp_group_size=1,
        is_last_stage=True,
    )
    return float(out)


def split_parameters(groups: Groups, config: dict[str, Any], weights: Weights) -> dict[str, tuple[bool, bool]]:
    """Per parameter: (holds this rank only a part of it, does Megatron's gradient norm add up what the ranks hold)."""
    learner = learner_of(groups, config, weights)
    family = learner.model.family
    out = {}
    for name, parameter in learner.model.parameters().items():
        whole = family.to_mcore(name, weights.__getitem__, 1, 0)
        out[name] = parameter.numel() < whole.numel(), bool(getattr(parameter, "tensor_model_parallel", None))
    return out
