"""Loss and gradient of a batch as the learner would sum them over micro-batches and ranks, in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from mcore_agent import registry
from mcore_agent.batch.plan import gather, split, to_column
from mcore_agent.batch.rowset import rowset
from mcore_agent.loss.total import total_loss
from mcore_agent.protocols import ModelOut
from mcore_agent.types import Batch

LOSSES = sorted(registry.variants("loss"))
AGGREGATIONS = sorted(registry.variants("aggregation"))
ESTIMATORS = sorted(registry.variants("estimator"))


@dataclass(frozen=True)
class Evaluated:
    """Summed loss and metrics, and the gradients by log-prob and entropy at every token of the batch."""

    loss: float
    metrics: dict[str, float]
    logp_grad: np.ndarray  # [N] float32
    entropy_grad: np.ndarray  # [N] float32


def evaluate(batch: Batch, terms, logp, entropy, token_budget: int = 10**9, dp: int = 1) -> Evaluated:
    """``logp`` and ``entropy`` [N] are what the learner's model would give."""
    carried = batch.with_columns(**{"out/logp": logp, "out/entropy": entropy})
    made = split(rowset(carried, terms, columns=("out/logp", "out/entropy")), token_budget, dp)
    loss, metrics, grads = 0.0, {}, ([], [])
    for rank in made.slots:
        for side in grads:
            side.append([])
        for micro in rank:
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in micro.columns.items()}
            leaves = [columns.pop(name).requires_grad_() for name in ("out/logp", "out/entropy")]
            value, extra = total_loss(ModelOut(*leaves), columns, terms)
            if value.requires_grad:
                value.backward()
            loss += value.item()
            for name, number in extra.items():
                metrics[name] = metrics.get(name, 0.0) + number.item()
            for side, leaf in zip(grads, leaves, strict=True):
                side[-1].append(np.zeros(len(micro.tokens)) if leaf.grad is None else leaf.grad.numpy())
    logp_grad, entropy_grad = (to_column(batch, gather(made, side)) for side in grads)
    return Evaluated(loss, metrics, logp_grad, entropy_grad)


def entropy_for(batch: Batch, seed: int) -> np.ndarray:
    """[N] plausible entropies in nats."""
    return np.random.default_rng(4000 + seed).uniform(0, 3, len(batch.token_row))
