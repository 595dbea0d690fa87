"""mcore_agent: agentic reinforcement learning on Megatron-Core and SGLang.

Importing this package loads none of torch, megatron or sglang: names are resolved on first use.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "Batch": "types",
    "Episode": "types",
    "Row": "types",
    "Segment": "types",
    "Task": "types",
    "Turn": "types",
    "register": "registry",
    "load_config": "config",
    "train": "loop",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"mcore_agent.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'mcore_agent' has no attribute {name!r}")
