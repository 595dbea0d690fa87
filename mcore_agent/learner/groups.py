"""Process groups: who this rank is, and with whom it shares tensors, stages, data and experts."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


class LayoutError(ValueError):
    """A parallel layout that cannot be: the message names the key, the value, the reason and a way out."""


@dataclass(frozen=True)
class Layout:
    """How many ranks share what. ``world = tp * pp * dp``; the experts of a layer are split over ``ep`` of the
    ``dp`` ranks, and each expert over ``tp``.

    >>> Layout(tp=2, dp=4, ep=2).world
    8
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self):
        for key in ("tp", "pp", "ep", "dp"):
            if getattr(self, key) < 1:
                raise LayoutError(f"learner.{key} is {getattr(self, key)}; it counts ranks, so it is at least 1")
        if self.dp % self.ep:
            raise LayoutError(
                f"learner.ep is {self.ep} but learner.dp is {self.dp}: experts are split over data-parallel ranks, "
                f"so ep must divide dp; set learner.dp to a multiple of {self.ep}"
            )

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Groups:
    """This rank's place in each group, and the groups.

    Ranks are numbered ``tp + TP * (dp + DP * pp)``; ``ep_rank`` is ``dp_rank % EP``.
    """

    layout: Layout
    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    ep_rank: int
    tp: Any  # ranks that split the same tensors
    pp: Any  # the stages of one replica
    dp: Any  # ranks that hold the same dense parameters
    ep: Any  # ranks that hold the different experts of one layer

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    def global_rank(self, tp: int = 0, dp: int = 0, pp: int = 0) -> int:
        return tp + self.layout.tp * (dp + self.layout.dp * pp)


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
            f"the layout {layout} needs {layout.world} ranks (tp * pp * dp) but {dist.get_world_size()} run; "
            f"start {layout.world} ranks or change learner.tp, learner.pp or learner.dp"
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
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
        ep=parallel_state.get_expert_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
    )
    if made != layout:
        raise LayoutError(f"the process groups are those of {made}, not of {layout}; call groups.initialize again")
    return Groups(
        layout=layout,
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
    )


def destroy() -> None:
    """Leaves all groups."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
