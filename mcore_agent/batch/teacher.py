"""What a teacher says of a batch's tokens, as columns for loss terms that distil (M104; GKD, 2306.13649 sec. 3)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mcore_agent.batch.microbatch import Plan
from mcore_agent.batch.plan import gather, to_column
from mcore_agent.loss.derived import TEACHER, likeliest
from mcore_agent.types import Batch


def teacher_columns(batch: Batch, plan: Plan, outputs: Sequence[Sequence[Mapping[str, np.ndarray]]], top_k: int) -> dict[str, np.ndarray]:
    """[N] float32 by name: the teacher's log-probability of each token, and the ``top_k`` likeliest ones with theirs.

    ``outputs[dp rank][slot]`` of the micro-batches of ``plan`` have ``logp`` [T] and, with ``top_k``, ``top_ids`` and ``top_logp``
    [T, top_k]. Rows that are not in the plan get 0.
    """

    def column(of: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> np.ndarray:
        return to_column(batch, gather(plan, [[of(out) for out in rank] for rank in outputs]) if not plan.empty else [])

    found = {TEACHER: column(lambda out: out["logp"])}
    for names, output in zip(likeliest(top_k), ("top_ids", "top_logp"), strict=True):
        found |= {name: column(lambda out, i=i, output=output: out[output][:, i]) for i, name in enumerate(names)}  # type: ignore[misc]
    return found
