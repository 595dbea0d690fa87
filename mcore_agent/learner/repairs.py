"""Repairs of megatron-core 0.19.2 and torch 2.14 that any device needs.

``tests/learner/test_repairs.py`` fails once one is not needed.

**Checkpoint writer.** A save that waits for its end still starts a manager process on every rank, which imports
``__main__`` again and outlives a killed rank; within one process a plain queue does. All saves share it, so that two of
which one is not finished would take each other's results: each gets its own.

**Sharded optimizer state.** A buffer of several buckets (tied embeddings under pipeline parallelism have their own)
is gathered without the padding between buckets, but cut up with it: all parameters after the first bucket get their
neighbours' moments and master weights, silently, unless every bucket happens to be a multiple of 128.

**AdamW's step**, where neither Transformer Engine nor Apex is installed. In that case the distributed optimizer
drives ``torch.optim.AdamW``, whose step count lives with each parameter, and three places are wrong:
``state_dict`` asserts that a step was taken, loading raises KeyError ``'step'``, and after a load all parameters
share one step tensor, so that every parameter's update counts for all.

**Gloo's workers.** Each gloo group of torch 2.14 runs its collectives on two threads, and each of them, once a collective
is done and without the lock, writes its name into the group's status (``ProcessGroupGloo::runLoop``). When the names do
not fit into a ``std::string`` itself, as that of the distributed optimizer's coalesced all-gather does not, two writes at
once free the same memory twice: some time later the rank aborts in ``malloc``. One thread cannot race.
"""

import functools
import os
import queue
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.distributed_c10d import Backend, ProcessGroupGloo

RELEASE = "0.19.2"
TORCH = "2.14"


def needed() -> bool:
    """True where the distributed optimizer drives torch's AdamW."""
    return not distrib_optimizer.HAVE_APEX_OR_TE


def install() -> None:
    """Installs the repairs that are needed, once."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    for name, (repair, wanted) in REPAIRS.items():
        original = getattr(DistributedOptimizer, name)
        if wanted() and not hasattr(original, "__wrapped__"):
            setattr(DistributedOptimizer, name, functools.wraps(original)(repair(original)))
    Backend._ensure_backend_registered("gloo")
    Backend._plugins["GLOO"] = Backend._plugins["GLOO"]._replace(creator_fn=_gloo_with_one_worker)


def own_results() -> None:
    """To be called before each save: its writers report to a queue of its own."""
    filesystem_async._results_queue = queue.Queue()


def _gloo_with_one_worker(group: Any, _: Any) -> ProcessGroupGloo:
    """What torch makes of its ``_DistributedBackendOptions``, but for the number of threads."""
    options = ProcessGroupGloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    options._devices = devices or [ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = group.timeout
    options.enable_reconfigure = group.enable_reconfigure
    options.global_ranks_in_group = group.global_ranks_in_group
    options.group_name = group.group_id
    return ProcessGroupGloo(group.store, group.group_rank, group.group_size, options)


def _always() -> bool:
    return True


def _padding_between_buckets(original: Any) -> Any:
    def get_parameter_state_dp_zero(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> dict[Any, Any] | None:
        state = original(self, *args, **kwargs)
        for index, buffer in enumerate(self.buffers if state is not None else ()):
            for tensors in state[index].values():
                for key, flat in tensors.items():
                    if torch.is_tensor(flat):
                        tensors[key] = _spread(flat, buffer)
        return state

    return get_parameter_state_dp_zero


def _spread(flat: torch.Tensor, buffer: Any) -> torch.Tensor:
    """[numel] a buffer's state with each bucket where the buffer has it, from the buckets one right after another."""
    out = flat.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        out[bucket.offset : bucket.offset + bucket.numel_unpadded] = flat[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return out


def _state_of_fresh_optimizer(original: Any) -> Any:
    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        inner = self.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if "step" not in state:  # what AdamW itself would make at its first step
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
        if not any(group["params"] for group in inner.param_groups):  # a rank that owns nothing has no step to tell of
            groups = [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups]
            return {"optimizer": {"param_groups": [group | {"step": 0.0} for group in groups]}}
        return original(self)

    return state_dict


def _load_without_step_tensor(original: Any) -> Any:
    def set_states(self: DistributedOptimizer, model_param: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        step = state.pop("step", None)  # it travels with the parameter groups, not with the tensors
        try:
            original(self, model_param, tensors)
        finally:
            if step is not None:
                state["step"] = step

    return set_states


def _own_step_after_load(original: Any) -> Any:
    def load_state_dict(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return load_state_dict


REPAIRS = {
    "get_parameter_state_dp_zero": (_padding_between_buckets, _always),
    "state_dict": (_state_of_fresh_optimizer, needed),
    "_set_main_param_and_optimizer_states": (_load_without_step_tensor, needed),
    "load_state_dict": (_own_step_after_load, needed),
}
