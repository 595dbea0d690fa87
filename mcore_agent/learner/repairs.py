"""Repairs of megatron-core 0.19.2 that any device needs. ``tests/learner/test_repairs.py`` fails once one is not needed.

**Checkpoint writer.** A save that waits for its end still starts a manager process on every rank, which imports
``__main__`` again and outlives a killed rank; within one process a plain queue does.

**Sharded optimizer state.** A buffer of several buckets (tied embeddings under pipeline parallelism have their own)
is gathered without the padding between buckets, but cut up with it: all parameters after the first bucket get their
neighbours' moments and master weights, silently, unless every bucket happens to be a multiple of 128.

**AdamW's step**, where neither Transformer Engine nor Apex is installed. In that case the distributed optimizer
drives ``torch.optim.AdamW``, whose step count lives with each parameter, and three places are wrong:
``state_dict`` asserts that a step was taken, loading raises KeyError ``'step'``, and after a load all parameters
share one step tensor, so that every parameter's update counts for all.
"""

import functools
import queue
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

RELEASE = "0.19.2"


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
