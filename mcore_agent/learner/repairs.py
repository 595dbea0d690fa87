"""Repairs megatron-core 0.19.2's distributed optimizer where neither Transformer Engine nor Apex is installed.

In that case it drives ``torch.optim.AdamW``, whose step count lives with each parameter, and three places are wrong:
``state_dict`` asserts that a step was taken, loading raises KeyError ``'step'``, and after a load all parameters
share one step tensor, so that every parameter's update counts for all. ``tests/learner/test_repairs.py`` fails once
the installed release no longer needs this.
"""

import functools
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

RELEASE = "0.19.2"


def needed() -> bool:
    """True where the distributed optimizer drives torch's AdamW."""
    return not distrib_optimizer.HAVE_APEX_OR_TE


def install() -> bool:
    """Installs the repairs where they are needed; True when this call did it."""
    if not needed() or hasattr(DistributedOptimizer.state_dict, "__wrapped__"):
        return False
    for name, repair in REPAIRS.items():
        original = getattr(DistributedOptimizer, name)
        setattr(DistributedOptimizer, name, functools.wraps(original)(repair(original)))
    return True


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
    "state_dict": _state_of_fresh_optimizer,
    "_set_main_param_and_optimizer_states": _load_without_step_tensor,
    "load_state_dict": _own_step_after_load,
}
