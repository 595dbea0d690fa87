"""The learner: Megatron-Core behind a small surface.

Importing any module of this package first adapts Megatron-Core to the machine (``cpu.py``, only without CUDA) and
repairs what is wrong in it and in torch's gloo groups (``repairs.py``).
"""

import logging
import warnings

from mcore_agent.learner import cpu

for _noisy in ("megatron", "torch.utils.cpp_extension"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)  # deprecations, and what is not installed, at every import
warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")

cpu.install()

from mcore_agent.learner import repairs  # noqa: E402  imports megatron

repairs.install()
