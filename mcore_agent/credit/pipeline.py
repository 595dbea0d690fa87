"""From rewards to the column ``advantage``: one estimator, then transforms, on the policy's own tokens only."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.protocols import Credit
from mcore_agent.types import Batch


def assign(batch: Batch, specs: Sequence[Mapping[str, Any]]) -> Batch:
    """The batch with ``advantage`` [N] float32 and what else the estimator gives, all 0 outside the channel ``pg``.

    ``specs[0]`` names an estimator, the others transforms ``(advantage [N], batch) -> [N]``, which leave the further
    columns alone; each is ``{"name": …, argument: …}``. Raises RegistryError for an unknown one, CreditError when a needed
    column is missing, an episode id occurs twice (it would vote twice), the estimator gives other columns than it says,
    or a result has the wrong shape or is not finite.
    """
    if not specs:
        raise CreditError("credit names no estimator; for example [{name: grpo}]")
    twice = [name for name, count in Counter(e.id for e in batch.episodes).items() if count > 1]
    if twice:
        raise CreditError(f"episode {twice[0]!r} is in the batch {sum(e.id == twice[0] for e in batch.episodes)} times")
    estimator, *transforms = [registry.create("transform" if place else "estimator", spec) for place, spec in enumerate(specs)]
    missing = [name for name in estimator.needs if name not in batch.columns]
    if missing:
        raise CreditError(f"estimator {specs[0]['name']!r} needs the batch column {missing[0]!r}; there are: "
                          f"{', '.join(sorted(batch.columns)) or 'none'}")  # fmt: skip
    mask = batch.channel("pg")
    if not batch.episodes:
        return batch.with_columns(**{name: np.zeros(0, dtype=np.float32) for name in ("advantage", *estimator.gives)})
    made = estimator(batch)
    credit = made if isinstance(made, Credit) else Credit(made)
    if credit.columns.keys() != set(estimator.gives):
        raise CreditError(f"estimator {specs[0]['name']!r} gave the columns {sorted(credit.columns)}, but says {sorted(estimator.gives)}")
    values = _sound(credit.advantage, _size(batch, estimator.axis), specs[0]["name"])
    found = {name: np.where(mask, _sound(column, len(mask), specs[0]["name"]), 0.0) for name, column in credit.columns.items()}
    advantage = np.where(mask, batch.to_tokens(values, estimator.axis), 0.0)
    for spec, transform in zip(specs[1:], transforms, strict=True):
        advantage = np.where(mask, _sound(transform(advantage, batch), len(mask), spec["name"]), 0.0)
    found["advantage"] = advantage
    return batch.with_columns(**{name: column.astype(np.float32) for name, column in found.items()})


def _size(batch: Batch, axis: str) -> int:
    sizes = {"episode": len(batch.episodes), "turn": len(batch.turn_episode), "token": len(batch.token_row)}
    return sizes[axis]


def _sound(values: np.ndarray, size: int, name: str) -> np.ndarray:
    if np.shape(values) != (size,):
        raise CreditError(f"{name!r} gave shape {np.shape(values)}, expected ({size},)")
    if not np.all(np.isfinite(values)):
        raise CreditError(f"{name!r} gave a value that is not finite, at index {int(np.argmin(np.isfinite(values)))}")
    return values
