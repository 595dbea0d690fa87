"""Sharded checkpoints in Megatron's torch_dist format: written under one layout, read under any other.

A save that does not wait copies its tensors into host memory, and a thread of the same process writes them with Megatron's
own writer, which knows no collective. Megatron 0.19.2 would fork a process instead, which gloo's and torch's threads do not
survive, or hand over to nvidia-resiliency-ext. What has to be said between ranks is said when the save is finished.
"""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from mcore_agent.learner import groups, repairs
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
    repairs.own_results()
    with _clear_errors(folder):
        dist_checkpointing.save(_sharded(model, optimizer, loading=False), str(folder))


def begin(folder: Path, model: Model, optimizer: ChainedOptimizer | None) -> "Writing":
    """As ``save``, but returns once this rank's tensors are copied: the model may change at once. Collective."""
    repairs.own_results()
    with _clear_errors(folder):
        request = dist_checkpointing.save(
            _sharded(model, optimizer, loading=False), str(folder), async_sharded_save=True, async_strategy="mcore"
        )
    return Writing(folder, request)


class Writing:
    """A save of which this rank's files are being written by a thread. Each rank has one; all ranks finish it alike."""

    def __init__(self, folder: Path, request: Any):
        """``request`` is Megatron's AsyncRequest, not yet begun; its tensors are copied here."""
        self._folder, self._request = folder, request
        self._stop = threading.Event()
        self._buckets = request.async_fn_args[1] if request.async_fn else []
        _copy(self._buckets)
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        """Megatron's writer keeps an error for ``finish``; what it writes is dropped piece by piece."""
        if self._request.async_fn:
            rank, _, results = self._request.async_fn_args
            buckets = [(path, key, (objects, _each(tensors, self._stop))) for path, key, (objects, tensors) in self._buckets]
            self._request.async_fn(rank, buckets, results, **self._request.async_fn_kwargs)

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to write, be it for an error."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for the files of all ranks and adds what makes them a checkpoint. Once; collective.

        Raises CheckpointError, on every rank, when one could not write.
        """
        self._thread.join()
        with _clear_errors(self._folder):
            for complete in self._request.finalize_fns:
                complete()
        self._request, self._buckets = None, []

    def abandon(self, limit_s: float) -> None:
        """Stops after the tensor that is being written, waiting for at most ``limit_s`` seconds. The folder stays unusable."""
        self._stop.set()
        self._thread.join(limit_s)


def all_done(writings: Sequence[Writing]) -> bool:
    """Whether every rank has written the files of all these saves, so that ``finish`` need not wait. Collective."""
    if dist.get_world_size() == 1:
        return all(w.done for w in writings)
    left = torch.tensor([sum(not w.done for w in writings)], device=groups.device())
    dist.all_reduce(left)
    return not left.item()


def _copy(buckets: list[Any]) -> None:
    """Puts copies in host memory in the place of the tensors to write, which are the model's own or views of them."""
    for _, _, (_, tensors) in buckets:
        for i, (item, tensor) in enumerate(tensors):
            tensors[i] = item, tensor.clone() if tensor.is_cpu else tensor.to("cpu", non_blocking=True)
    torch.cuda.synchronize()


def _each(tensors: list[Any], stop: threading.Event) -> Iterator[Any]:
    """Takes the tensors out of the list, one by one, until told to stop."""
    tensors.reverse()
    while tensors:
        if stop.is_set():
            raise InterruptedError("the run ends")
        yield tensors.pop()


@contextmanager
def _clear_errors(folder: Path) -> Iterator[None]:
    try:
        yield
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

    Raises CheckpointError, on every rank, when the files that one of them needs are damaged, or are those of another
    model. Parameters and optimizer state are undefined then.
    """
    try:
        state = _read(folder, model, optimizer)
    except CheckpointError:
        _any_rank(True)
        raise
    if _any_rank(False):  # Megatron reads without a collective, so that only who needs a file knows that it is damaged
        raise CheckpointError(
            f"{folder}: the tensors cannot be read on another rank, which says why; copy them again, or delete the checkpoint "
            "to go on from the one before"
        )
    for i, module in enumerate(model.modules):
        module.load_state_dict(state[f"model{i}"])
    if optimizer is None:
        return
    for i, part in enumerate(live_parts(optimizer)):
        own = part.state_dict()
        for group in own["optimizer"]["param_groups"]:
            group["step"] = state["step"]
        part.load_state_dict(own | {"param_state": state["optimizer"][str(i)], "param_state_sharding_type": SHARDING})


def _read(folder: Path, model: Model, optimizer: ChainedOptimizer | None) -> dict[str, Any]:
    """This rank's part of a checkpoint, as ``_sharded`` names it; a value head that is not there starts from zeros."""
    try:
        asked = _sharded(model, optimizer, loading=True)
        fresh = _without_value_head(asked, folder) if optimizer is None else {}
        state = dist_checkpointing.load(asked, str(folder))
    except (Exception, CheckpointException) as e:  # whatever unpickling damaged bytes may raise
        raise CheckpointError(
            f"{folder}: the tensors cannot be read ({_last_line(e)}); they are damaged or of another model: "
            "copy them again, or delete the checkpoint to go on from the one before"
        ) from e
    for part, tensors in fresh.items():
        state[part] |= tensors
    return state


def _any_rank(failed: bool) -> bool:
    """Whether ``failed`` holds on any rank. Collective."""
    if dist.get_world_size() == 1:
        return failed
    found = torch.tensor([int(failed)], device=groups.device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


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
