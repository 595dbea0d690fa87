"""AdamW on Megatron's distributed optimizer: each data-parallel rank keeps and updates its share of the parameters."""

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer

from mcore_agent.learner.model import Model


@dataclass(frozen=True)
class OptimSpec:
    """AdamW (1711.05101). The learning rate is given with every step; norms and biases are not decayed."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest gradient norm; 0: no clipping


@dataclass(frozen=True)
class Update:
    applied: bool  # False: the gradient norm was not finite, nothing was changed
    grad_norm: float  # before clipping, over all parameters of all ranks


def make(model: Model, spec: OptimSpec) -> ChainedOptimizer:
    """One optimizer for the dense and one for the expert parameters, chained. Collective over all ranks."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=spec.eps,
        clip_grad=spec.clip_grad,
        bf16=model.dtype == torch.bfloat16,
        params_dtype=model.dtype,
        use_distributed_optimizer=True,
    )
    made = get_megatron_optimizer(config, model.chunks, use_gloo_process_groups=False)
    for part in live_parts(made):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True  # one pass over memory instead of ten
    return made


def live_parts(optimizer: ChainedOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain that hold parameters on this rank."""
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def update(optimizer: ChainedOptimizer, spec: OptimSpec, lr: float) -> Update:
    """Clips the gradients to ``spec.clip_grad`` and takes one step at ``lr``. Collective over all ranks.

    A gradient norm that is not finite leaves parameters and optimizer state as they are.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_mult"]
        group["weight_decay"] = spec.weight_decay * group["wd_mult"]
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return Update(False, norm)
    if spec.clip_grad > 0:
        for part in live_parts(optimizer):
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=spec.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return Update(True, norm)


def reset(optimizer: ChainedOptimizer) -> None:
    """Forgets moments and step counts, as if the optimizer had just been made for the current parameters."""
    for part in live_parts(optimizer):
        part.optimizer.state.clear()
    optimizer.reload_model_params()
