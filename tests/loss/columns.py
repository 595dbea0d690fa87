"""Columns of one micro-batch for tests of loss terms."""

import torch

from mcore_agent.protocols import ModelOut


def columns_of(mask, **values) -> dict[str, torch.Tensor]:
    """float64 columns; ``mask`` serves for both channels, and the weight of term 0 is its token mean."""
    mask = torch.tensor(mask, dtype=torch.float64)
    columns = {name: torch.as_tensor(v, dtype=torch.float64) for name, v in values.items()}
    return {"mask:pg": mask, "mask:sft": mask, "w:0": mask / mask.sum().clamp(min=1), **columns}


def out_of(logp, entropy=None) -> ModelOut:
    """Model output with float64 leaves that record gradients."""
    leaves = [None if v is None else torch.as_tensor(v, dtype=torch.float64).clone().requires_grad_() for v in (logp, entropy)]
    return ModelOut(logp=leaves[0], entropy=leaves[1])
