"""Sharded checkpoints in Megatron's torch_dist format: written under one layout, read under any other."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer

from mcore_agent.learner.model import Model


def _sharded(model: Model, optimizer: ChainedOptimizer | None, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {"model": model.modules[0].sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state


def save(folder: Path, model: Model, optimizer: ChainedOptimizer | None) -> None:
    """Writes this rank's shards (and the optimizer's, if given) into an existing empty folder. Collective.

    Only the tensors: making the folder appear at once and whole is the caller's task.
    """
    dist_checkpointing.save(_sharded(model, optimizer, loading=False), str(folder))


def load(folder: Path, model: Model, optimizer: ChainedOptimizer | None) -> None:
    """Reads what ``save`` wrote, whatever its layout was; without ``optimizer`` only the weights. Collective."""
    state = dist_checkpointing.load(_sharded(model, optimizer, loading=True), str(folder))
    model.modules[0].load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
