"""Muon (Jordan 2024; 2502.16982): the momentum of every matrix inside the layers, orthogonalized.

Megatron 0.19.2 has a Muon of its own (``dist_muon``). It is not used: its layer-wise wrapper steps bf16 models only,
writes checkpoints that no other data-parallel size can read, orthogonalizes routers, and gate and up as one matrix.
Here Megatron's distributed optimizer drives the optimizer below. The buffers that hold matrices are laid out so that
each data-parallel rank owns whole ones, as Megatron's layer-wise layout does.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.transformer import TransformerConfig

# (a, b, c) of X <- a X + b (X X^T) X + c (X X^T)^2 X, chosen for five steps (modded-nanogpt, 2025-01)
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
SCALES = ("rms_match", "fan_in")


@dataclass(frozen=True)
class Matrix:
    """What a flat parameter shard is: this tensor-parallel rank's part of some matrices stacked by rows."""

    shape: tuple[int, int]  # of this rank's part
    blocks: tuple[int, ...]  # rows of the fused matrices; the pattern repeats down the stack, once for each query group
    split: int | None = None  # the dimension that is split over ``group``
    group: Any = None  # tensor-parallel ranks


def row_blocks(name: str, shape: torch.Size, config: TransformerConfig) -> tuple[int, ...] | None:
    """Rows of the matrices fused into the parameter; None when Muon leaves it alone.

    Muon takes the linear weights inside layers. Embedding, output layer, heads, norms, biases and routers are not among them.
    """
    words = name.split(".")
    if "layers" not in words or len(shape) != 2 or not (words[-2].startswith("linear_") and words[-1].startswith("weight")):
        return None
    if words[-2] == "linear_qkv":
        query = config.num_attention_heads // config.num_query_groups * config.kv_channels
        gate = (query,) if config.attention_output_gate else ()
        return (query, *gate, config.kv_channels, config.kv_channels)
    if words[-2] == "linear_fc1" and config.gated_linear_unit:
        return (shape[0] // 2, shape[0] // 2)
    return (shape[0],)


def matrices(modules: Iterable[torch.nn.Module], config: TransformerConfig) -> dict[torch.nn.Parameter, tuple[int, ...]]:
    """The parameters that Muon updates, with their row blocks."""
    named = [pair for module in modules for pair in module.named_parameters()]
    found = {parameter: row_blocks(name, parameter.shape, config) for name, parameter in named if parameter.requires_grad}
    return {parameter: blocks for parameter, blocks in found.items() if blocks is not None}


def whole_matrices(module: torch.nn.Module, config: TransformerConfig, dp: int, expert_dp: int, ddp: DistributedDataParallelConfig) -> Any:
    """Megatron's FullParamLayout in which one of the ``dp`` (context parallelism included) ranks owns all of a matrix.

    The marks that it leaves on the parameters must stay until the module is wrapped; ``optimizer.make`` takes them off.
    """
    for parameter in matrices([module], config):
        parameter.is_managed_by_layer_wise_optimizer = True  # type: ignore[attr-defined]
    parameters = [p for p in module.parameters() if p.requires_grad]
    made = LayerWiseDistributedOptimizer.compute_full_param_layout(parameters, None, dp, ddp, expert_data_parallel_world_size=expert_dp)
    # Padding lies between the shards of a bucket, not only at its end, where checkpoints would cut it off.
    layouts = {
        key: replace(one, per_bucket_numel_unpadded=[end - start for start, end in one.bucket_indices])
        if key.is_managed_by_layer_wise_optimizer
        else one
        for key, one in made.layouts.items()
    }
    return FullParamLayout(layouts=layouts)


def unmark(parameters: Iterable[torch.nn.Parameter]) -> None:
    """After wrapping: Megatron's distributed optimizer gathers only buffers that no layer-wise optimizer manages."""
    for parameter in parameters:
        parameter.is_managed_by_layer_wise_optimizer = False  # type: ignore[attr-defined]


def orthogonal(matrix: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """[m, n] with the singular vectors of ``matrix`` and singular values near 1 (zero stays zero): Newton-Schulz, five steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = (x / x.norm().clamp_min(1e-7)).to(precision)
    for a, b, c in QUINTIC:
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, alpha=c, beta=b), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


def scale_of(rows: int, columns: int, convention: str) -> float:
    """What an orthogonal [rows, columns] matrix is multiplied by before the learning rate.

    ``fan_in``: an update has root mean square lr / sqrt(columns), and maps inputs of norm 1 to outputs in proportion to the
    size of the layer. ``rms_match``: it has root mean square 0.2 lr, about that of AdamW's (2502.16982, section 2.2).
    """
    if convention == "fan_in":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5


def orthogonal_update(momentum: torch.Tensor, matrix: Matrix, convention: str, precision: torch.dtype) -> torch.Tensor:
    """[rows, columns] update direction of a parameter from its momentum; each fused matrix is orthogonalized by itself.

    Collective over ``matrix.group``: every tensor-parallel rank gathers the momentum and keeps its part of the result.
    """
    rows, columns = matrix.shape
    stacked = momentum.view(rows // sum(matrix.blocks), sum(matrix.blocks), columns)
    out = []
    for part in stacked.split(matrix.blocks, dim=1):
        whole = _gathered(part.reshape(-1, columns), matrix)
        found = orthogonal(whole, precision) * scale_of(whole.shape[0], whole.shape[1], convention)
        out.append(_own(found, matrix).reshape(part.shape))
    return torch.cat(out, dim=1).view(rows, columns)


def _gathered(own: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    if matrix.split is None or matrix.group.size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(matrix.group.size())]
    dist.all_gather(parts, own.contiguous(), group=matrix.group)
    return torch.cat(parts, dim=matrix.split)


def _own(whole: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    if matrix.split is None or matrix.group.size() == 1:
        return whole
    return whole.chunk(matrix.group.size(), dim=matrix.split)[matrix.group.rank()]


class Momentum(torch.optim.Optimizer):
    """SGD with momentum; for parameters listed in ``matrices`` the update is orthogonalized (Muon).

    Weight decay is decoupled from the gradient. The momentum is called ``exp_avg``, as Megatron's checkpoints name it.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, nesterov: bool, scale: str, precision: torch.dtype):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "step": 0})
        self.momentum, self.nesterov = momentum, nesterov
        self.scale, self.precision = scale, precision
        self.matrices: dict[torch.Tensor, Matrix] = {}

    def begin(self) -> None:
        """Zero momentum for every parameter, as if no step had been taken."""
        self.state.clear()
        for group in self.param_groups:
            group["step"] = 0
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                if not HAVE_APEX_OR_TE:  # then the distributed optimizer wants torch's step count beside each moment
                    self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective over tensor-parallel ranks when there are matrices. Every parameter must have a gradient."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if "step" in state:
                    state["step"] += 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(self._direction(parameter, parameter.grad, state["exp_avg"]).view(-1), alpha=group["lr"])

    def _direction(self, parameter: torch.Tensor, gradient: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        if parameter not in self.matrices:
            average.mul_(self.momentum).add_(gradient)
            return gradient.add(average, alpha=self.momentum) if self.nesterov else average
        average.lerp_(gradient, 1 - self.momentum)
        direction = gradient.lerp(average, self.momentum) if self.nesterov else average
        return orthogonal_update(direction, self.matrices[parameter], self.scale, self.precision)
