"""Process groups: who this rank is, and with whom it shares tensors, stages, data and experts."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from mcore_agent.layout import Layout, LayoutError


@dataclass(frozen=True)
class Groups:
    """This rank's place in each group, and the groups.

    Ranks are numbered ``tp + TP * (cp + CP * (dp + DP * pp))``; as holders of experts
    ``etp + ETP * (ep + EP * (expert_dp + EDP * pp))``.
    """

    layout: Layout
    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    ep_rank: int
    etp_rank: int
    tp: Any  # ranks that split the same tensors
    pp: Any  # the stages of one replica
    cp: Any  # ranks that split the same micro-batch
    dp: Any  # ranks that hold the same dense parameters and have other micro-batches
    ep: Any  # ranks that hold the different experts of one layer

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    def global_rank(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        n = self.layout
        return tp + n.tp * (cp + n.cp * (dp + n.dp * pp))

    def expert_rank(self, etp: int = 0, ep: int = 0, pp: int = 0) -> int:
        """The first rank that holds this part of these experts."""
        n = self.layout
        return etp + n.etp * (ep + n.ep * (n.expert_dp * pp))

    def shard(self, expert: bool) -> tuple[int, int]:
        """(parts, this rank's part) of a parameter that is split over tensor-parallel ranks."""
        return (self.layout.etp, self.etp_rank) if expert else (self.layout.tp, self.tp_rank)


def device() -> torch.device:
    """Where this rank's parameters live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _backend(name: str) -> str:
    if name == "nccl" and not torch.cuda.is_available():
        raise LayoutError("learner.backend is 'nccl', which needs a GPU, and torch sees none; use 'auto' or 'gloo'")
    if name == "gloo" and torch.cuda.is_available():
        raise LayoutError("learner.backend is 'gloo', but with a GPU the learner's tensors are on it; use 'auto' or 'nccl'")
    if name not in ("auto", "gloo", "nccl"):
        raise LayoutError(f"learner.backend is {name!r}; use 'auto', 'gloo' or 'nccl'")
    return "nccl" if torch.cuda.is_available() else "gloo"


def initialize(
    layout: Layout,
    *,
    backend: str = "auto",
    store: dist.Store | None = None,
    rank: int = 0,
    timeout_s: float = 1800.0,
) -> Groups:
    """Joins the process group (once) and makes the groups of ``layout`` (again, when the layout changes).

    The place among the ranks comes from ``store`` and ``rank``, or from torchrun's environment (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), or this process is alone. A collective that waits ``timeout_s`` seconds raises.
    Raises LayoutError when the number of ranks is not the layout's, or the backend has no hardware.
    """
    kind = _backend(backend)
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if store is not None:
            dist.init_process_group(kind, store=store, rank=rank, world_size=layout.world, timeout=timeout)
        elif "RANK" in os.environ:
            dist.init_process_group(kind, timeout=timeout)
        else:
            dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if dist.get_world_size() != layout.world:
        raise LayoutError(
            f"the layout {layout} needs {layout.world} ranks (tp * cp * dp * pp) but {dist.get_world_size()} run; "
            f"start {layout.world} ranks or change learner.tp, pp, cp or dp"
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    return current(layout)


def current(layout: Layout) -> Groups:
    """The groups that ``initialize`` made. Raises LayoutError when there are none or they are another layout's."""
    if not parallel_state.model_parallel_is_initialized():
        raise LayoutError(f"no process groups: call groups.initialize({layout}) first")
    made = Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=layout.vpp,  # a rank has its own parts, so neither this nor sp shows in the groups
        cp=parallel_state.get_context_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        sp=layout.sp,
    )
    if made != layout:
        raise LayoutError(f"the process groups are those of {made}, not of {layout}; call groups.initialize again")
    return Groups(
        layout=layout,
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
    )


def destroy() -> None:
    """Leaves all groups. Their threads end when nobody holds them any more: models do, until they are collected."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
