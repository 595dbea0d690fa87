"""What every loss term does alike: leave masked-out tokens out of the arithmetic, and refuse bad settings."""

import math
from collections.abc import Mapping

import torch

from mcore_agent import registry


class LossError(ValueError):
    """A loss term has a bad setting, or was not given what it needs."""


def mask_of(columns: Mapping[str, torch.Tensor], channel: str) -> torch.Tensor:
    """[T] bool: the tokens of the channel, from the column ``mask:<channel>``."""
    return column(columns, f"mask:{channel}") != 0


def column(columns: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """[T] a stored column, detached. Raises LossError when the micro-batch has no such column."""
    if name not in columns:
        raise LossError(f"the micro-batch has no column {name!r}; it has: {', '.join(sorted(columns))}")
    return columns[name].detach()


def keep(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[T] ``values`` where ``mask``, else 0 with gradient exactly 0, even where a value is NaN or infinite.

    It must come before any arithmetic: 0 * NaN is NaN, and so is the gradient of exp at infinity times 0.
    """
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def check_clip(name: str, clip: float | None) -> None:
    """Raises LossError unless ``clip`` is None (off) or above 0."""
    if clip is not None and not clip > 0:
        raise LossError(f"loss {name!r}: clip is {clip}, but must be above 0; leave it out to switch it off")


def check_term(name: str, coef: float, aggregate: str) -> None:
    """Raises LossError for a coefficient that is not finite, RegistryError for an unknown aggregation."""
    if not math.isfinite(coef):
        raise LossError(f"loss {name!r}: coef is {coef!r}, but must be finite; 0 switches the term off")
    registry.get("aggregation", aggregate)
