"""The sum of loss terms over one micro-batch. Nothing is divided here: the weights hold the global denominators."""

from collections.abc import Mapping, Sequence

import torch

from mcore_agent.loss.common import column
from mcore_agent.protocols import LossTerm, ModelOut


def total_loss(
    out: ModelOut, columns: Mapping[str, torch.Tensor], terms: Sequence[LossTerm]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """``sum_i coef_i * sum_t w:i[t] * per_token_i[t]`` and, by name, ``sum_t w:i[t] * metric[t]`` (detached): float64 scalars.

    Summed over all micro-batches and ranks, a metric is its weighted mean over the global batch; rows that were left
    out because they contribute nothing count as 0 in it. A term whose coefficient is 0 is not evaluated.
    Raises ValueError when two active terms give a metric of one name.
    """
    loss = out.logp.new_zeros((), dtype=torch.float64)
    metrics: dict[str, torch.Tensor] = {}
    for index, term in enumerate(terms):
        if term.coef == 0:
            continue
        per_token, extra = term.per_token(out, columns)
        # Advantages of a group cancel: in float32 the sum would depend on how the batch was split.
        weight = column(columns, f"w:{index}").double()
        loss = loss + term.coef * (weight * per_token.double()).sum()
        for name, values in extra.items():
            if name in metrics:
                raise ValueError(f"two loss terms give the metric {name!r}; leave one of them out")
            metrics[name] = (weight * values.double()).sum()
    return loss, metrics


def outputs_needed(terms: Sequence[LossTerm]) -> frozenset[str]:
    """Names of the model outputs beside logp (for example ``entropy``) that the active terms need."""
    optional = {name for name in ModelOut.__dataclass_fields__ if name != "logp"}
    return frozenset(name for term in terms if term.coef != 0 for name in term.needs if name in optional)
