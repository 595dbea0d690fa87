"""Sharded checkpoints in Megatron's torch_dist format: written under one layout, read under any other."""

import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from mcore_agent.learner.model import Model
from mcore_agent.learner.optimizer import live_parts
from mcore_agent.learner.value import NAME as VALUE_HEAD

SHARDING = "fully_reshardable"


class CheckpointError(RuntimeError):
    """Tensors that cannot be written or read: the message names the folder, the reason and a way out."""


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": SHARDING,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _sharded(model: Model, optimizer: ChainedOptimizer | None, loading: bool) -> dict[str, Any]:
    """Tensors by their global names. How the optimizer is divided into parts depends on the layout, so of what is not
    a tensor only the step count is kept, which is common to all parts; the rest follows from the configuration."""
    metadata = _metadata()
    # interleaved parts count their layers over the whole model, so that their names do not clash
    state: dict[str, Any] = {f"model{i}": module.sharded_state_dict(metadata=metadata) for i, module in enumerate(model.modules)}
    if optimizer is not None:
        made = [part.sharded_state_dict(state, is_loading=loading, metadata=metadata) for part in live_parts(optimizer)]
        state["optimizer"] = {str(i): part["param_state"] for i, part in enumerate(made)}
        state["step"] = made[0]["optimizer"]["param_groups"][0]["step"]
    return state


def save(folder: Path, model: Model, optimizer: ChainedOptimizer | None) -> None:
    """Writes this rank's shards (and the optimizer's, if given) into an existing empty folder. Collective.

    Only the tensors: making the folder appear at once and whole is the caller's task. Raises CheckpointError.
    """
    try:
        dist_checkpointing.save(_sharded(model, optimizer, loading=False), str(folder))
    except CheckpointException as e:  # torch keeps the kind of error of its writer threads, and drops the rest
        if not e.failures:
            raise CheckpointError(f"{folder}: the tensors cannot be written; the coordinating rank says why") from e
        free = shutil.disk_usage(folder).free
        raise CheckpointError(
            f"{folder}: the tensors cannot be written ({_last_line(e)}); {free} bytes are free there: is the disk full? "
            "Free space and give the same command again"
        ) from e


def load(folder: Path, model: Model, optimizer: ChainedOptimizer | None) -> None:
    """Reads what ``save`` wrote, whatever its layout was; without ``optimizer`` only the weights. Collective.

    Raises CheckpointError when the files are damaged, or are those of another model.
    """
    try:
        asked = _sharded(model, optimizer, loading=True)
        fresh = _without_value_head(asked, folder) if optimizer is None else {}
        state = dist_checkpointing.load(asked, str(folder))
    except (Exception, CheckpointException) as e:  # whatever unpickling damaged bytes may raise
        raise CheckpointError(
            f"{folder}: the tensors cannot be read ({_last_line(e)}); they are damaged or of another model: "
            "copy them again, or delete the checkpoint to go on from the one before"
        ) from e
    for i, module in enumerate(model.modules):
        module.load_state_dict(state[f"model{i}"] | fresh.get(f"model{i}", {}))
    if optimizer is None:
        return
    for i, part in enumerate(live_parts(optimizer)):
        own = part.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = state["step"]
        part.load_state_dict(own | {"param_state": state["optimizer"][str(i)], "param_state_sharding_type": SHARDING})


def _without_value_head(asked: dict[str, Any], folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Leaves a value head out of what is asked for when the checkpoint has none: weights of a policy start a critic.

    Returns what it starts from instead: zeros.
    """
    if any(key.startswith(VALUE_HEAD) for key in dist_checkpointing.load_tensors_metadata(str(folder))):
        return {}
    fresh = {}
    for part, state in asked.items():
        names = [name for name in state if name.startswith(VALUE_HEAD)] if part.startswith("model") else []
        fresh[part] = {name: torch.zeros_like(state.pop(name).data) for name in names}
    return fresh


def _last_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[-1][:300]
