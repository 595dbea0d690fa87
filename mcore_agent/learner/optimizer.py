"""Optimizers on Megatron's distributed optimizer: each data-parallel rank keeps and updates its share of the parameters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from mcore_agent.learner import muon
from mcore_agent.learner.model import Model
from mcore_agent.learner.muon import Matrix, Momentum
from mcore_agent.learner.precision import megatron_fields

USES = {
    "adamw": {"betas", "eps", "offload"},
    "sgd": {"momentum", "nesterov"},
    "muon": {"betas", "eps", "momentum", "nesterov", "scale", "rest_lr"},
}
ALWAYS = {"name", "weight_decay", "clip_grad"}


class OptimError(ValueError):
    """Settings of an optimizer that cannot be: the message names the key, the value, the reason and a way out."""


@dataclass(frozen=True)
class OptimSpec:
    """``adamw`` (1711.05101), ``sgd`` with momentum, or ``muon``: Muon for the linear weights inside layers and AdamW for the rest.

    The learning rate is given with every step. Weight decay is decoupled from the gradient; norms and biases have none.
    Raises OptimError for a setting that the optimizer has no use for.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest gradient norm; 0: no clipping
    name: str = "adamw"
    momentum: float = 0.95
    nesterov: bool = True
    scale: str = "rms_match"  # of Muon's updates: rms_match (root mean square 0.2 lr) or fan_in (lr / sqrt(fan in))
    rest_lr: float = 1.0  # learning rate of what Muon leaves to AdamW, in learning rates of Muon
    offload: bool = False  # AdamW's moments and master weights live in host memory, and the CPU takes the steps

    def __post_init__(self):
        if self.name not in USES:
            raise OptimError(f"learner.optimizer is {self.name!r}; use {', '.join(USES)}")
        if self.scale not in muon.SCALES:
            raise OptimError(f"learner.scale is {self.scale!r}; use {' or '.join(muon.SCALES)}")
        values = vars(self)
        for field in fields(self):
            if field.name not in USES[self.name] | ALWAYS and values[field.name] != field.default:
                users = ", ".join(name for name, used in USES.items() if field.name in used)
                raise OptimError(
                    f"learner.{field.name} is {values[field.name]!r}, but {self.name} has no use for it; "
                    f"leave it out, or set learner.optimizer to {users}"
                )

    @property
    def whole_matrices(self) -> bool:
        """Whether the model must be wrapped with ``muon.whole_matrices``."""
        return self.name == "muon"


@dataclass(frozen=True)
class Update:
    applied: bool  # False: the gradient norm was not finite, nothing was changed
    grad_norm: float  # before clipping, over all parameters of all ranks


def make(model: Model, spec: OptimSpec) -> ChainedOptimizer:
    """Optimizers for the dense and the expert parameters (and, with Muon, for the matrices of each), chained.

    Collective over all ranks. Raises OptimError for offload where there is no device to offload from, or no master weights.
    """
    config = _config(model, spec)
    if spec.name == "adamw":
        made = get_megatron_optimizer(config, model.chunks, use_gloo_process_groups=False)
    else:
        made = _chain(model, spec, config)
    for part in live_parts(made):
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = True  # one pass over memory instead of ten
        _begin(part.optimizer)
    return made


def _config(model: Model, spec: OptimSpec) -> OptimizerConfig:
    offload: dict[str, Any] = {}
    if spec.offload:
        check_offload(model.dtype, torch.cuda.is_available())
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "use_precision_aware_optimizer": True,  # without it the master weights would stay on the device
            "store_param_remainders": False,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return OptimizerConfig(
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
        **offload,
        **megatron_fields(model.precision)[1],
    )


def check_offload(dtype: torch.dtype, cuda: bool) -> None:
    """Raises OptimError where optimizer state cannot be offloaded."""
    if not cuda:
        raise OptimError(
            "learner.offload is on, but torch sees no GPU: the optimizer is in host memory as it is; switch learner.offload off"
        )
    if dtype != torch.bfloat16:
        raise OptimError(
            f"learner.offload is on with {dtype}: Megatron 0.19.2 offloads the master weights of 16-bit parameters only; "
            "set precision.dtype to bf16 or switch learner.offload off"
        )


# ------------------------------------------------------------------------------------------------ SGD and Muon


def _chain(model: Model, spec: OptimSpec, config: OptimizerConfig) -> ChainedOptimizer:
    """Parts in the order: what is not a matrix, matrices; first dense, then experts. A part without parameters is left out."""
    whole = muon.matrices(model.chunks, model.config) if spec.whole_matrices else {}
    muon.unmark(whole)
    parts: list[MegatronOptimizer] = []
    for expert in (False, True):
        for orthogonal in (False, True):
            buffers = {
                i: [b for b in (c.expert_parallel_buffers if expert else c.buffers) if (b.params[0] in whole) == orthogonal]
                for i, c in enumerate(model.chunks)
            }
            if any(buffers.values()):
                parts.append(_part(model, spec, config, buffers, expert, whole if orthogonal else {}))
    made = ChainedOptimizer(parts)
    for part in parts[:-1]:
        part._defer_param_sync = True  # the last part gathers the parameters of all
    for part in parts:
        if isinstance(part.optimizer, Momentum):
            part.config = replace(config, optimizer="lion")  # the release's name for state that is one moment, exp_avg
    return made


def _part(
    model: Model,
    spec: OptimSpec,
    config: OptimizerConfig,
    buffers: dict[int, list[Any]],
    expert: bool,
    whole: dict[torch.nn.Parameter, tuple[int, ...]],
) -> MegatronOptimizer:
    """One distributed optimizer for all parameters of ``buffers``."""
    groups = _param_groups(buffers, expert, spec.rest_lr if spec.whole_matrices and not whole else 1.0)
    ranks = ProcessGroupCollection.setup_process_groups_for_optimizer(None, model.chunks, False)
    split = ranks["expt_tp_pp_with_egtp_remat_group"] if expert else ranks["mp_group"]
    places: dict[str, Any] = {
        "model_chunks": model.chunks,
        "per_model_buffers": buffers,
        "data_parallel_group": ranks["intra_expt_dp_group" if expert else "intra_dp_cp_group"],
        "data_parallel_group_gloo": None,
        "data_parallel_group_idx": split.rank(),
        "distributed_optimizer_instance_id": 0,
    }
    if spec.whole_matrices and not whole:
        return _get_megatron_optimizer_based_on_param_groups(
            config,
            param_groups=groups,
            model_parallel_group=split,
            intra_dist_opt_group=ranks["intra_dist_opt_group"],
            **places,
        )
    precision = torch.bfloat16 if model.dtype == torch.bfloat16 else torch.float32
    inner = Momentum(groups, spec.momentum, spec.nesterov, spec.scale, precision)
    part = DistributedOptimizer(inner, config, None, _begin, **places)
    tensor_parallel = ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp"])
    part.grad_stats_parallel_group = ranks["intra_dist_opt_group"]
    part.tp_group, part.expert_tp_group = tensor_parallel.tp, tensor_parallel.expt_tp
    if whole:
        inner.matrices = dict(_matrices_of(part, whole, tensor_parallel.expt_tp if expert else tensor_parallel.tp))
    return part


def _param_groups(buffers: dict[int, list[Any]], expert: bool, lr_mult: float) -> list[dict[str, Any]]:
    """Two groups, with the keys that Megatron's have: matrices, which are decayed, and norms and biases, which are not."""
    parameters = [p for found in buffers.values() for buffer in found for p in buffer.params]
    return [
        {
            "params": [p for p in parameters if (p.dim() > 1) == decayed],
            "is_expert_parallel": expert,
            "default_config": True,
            "wd_mult": float(decayed),
            "lr_mult": lr_mult,
            "is_decoupled_lr": False,
            "max_lr": None,
            "min_lr": None,
        }
        for decayed in (True, False)
    ]


def _matrices_of(
    part: DistributedOptimizer, whole: dict[torch.nn.Parameter, tuple[int, ...]], group: Any
) -> Iterator[tuple[torch.Tensor, Matrix]]:
    """(the flat shard that the optimizer updates, what matrix it is) for each parameter that this rank owns."""
    pairs = ((part.model_float16_groups, part.shard_fp32_from_float16_groups), (part.model_fp32_groups, part.shard_fp32_groups))
    for models, shards in pairs:
        for parameter, shard in zip(chain.from_iterable(models), chain.from_iterable(shards), strict=True):
            if shard.numel() != parameter.numel():
                raise OptimError("learner.optimizer is 'muon', but a rank owns part of a matrix: wrap the model with muon.whole_matrices")
            split = parameter.partition_dim if hasattr(parameter, "partition_dim") and parameter.partition_dim >= 0 else None
            yield shard, Matrix(tuple(parameter.shape), whole[parameter], split, group)


# ------------------------------------------------------------------------------------------------ use


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
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(part.get_parameters(), spec.clip_grad, norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()
    return Update(True, norm)


def reset(optimizer: ChainedOptimizer) -> None:
    """Forgets moments and step counts, as if the optimizer had just been made for the current parameters."""
    for part in live_parts(optimizer):
        part.optimizer.state.clear()
        _begin(part.optimizer)
    optimizer.reload_model_params()


def _begin(inner: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """State before the first step, where the optimizer does not make it by itself when it is needed.

    Offloaded AdamW keeps state in one optimizer for each parameter. Megatron fills it by a step on random gradients.
    """
    if isinstance(inner, Momentum):
        inner.begin()
    if isinstance(inner, HybridDeviceOptimizer):
        for sub in inner.sub_optimizers:
            for group in sub.param_groups:
                for parameter in group["params"]:
                    sub.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        inner._sync_sub_optimizers_state_to_hdo()
