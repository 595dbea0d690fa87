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
from tests.strategies import random_logp

LOSSES = sorted(registry.variants("loss"))
AGGREGATIONS = sorted(registry.variants("aggregation"))
ESTIMATORS = sorted(registry.variants("estimator"))


OUTPUTS = ("logp", "entropy", "value")


@dataclass(frozen=True)
class Evaluated:
    """Summed loss and metrics, and the gradients by each output of the model at every token of the batch."""

    loss: float
    metrics: dict[str, float]
    grads: dict[str, np.ndarray]  # [N] float32


def evaluate(batch: Batch, terms, outputs: dict[str, np.ndarray], token_budget: int = 10**9, dp: int = 1) -> Evaluated:
    """``outputs`` [N] by name are what the learner's model would give."""
    names = {name: f"out/{name}" for name in OUTPUTS}
    carried = batch.with_columns(**{names[name]: values for name, values in outputs.items()})
    made = split(rowset(carried, terms, columns=tuple(names.values())), token_budget, dp)
    loss, metrics, grads = 0.0, {}, {name: [] for name in OUTPUTS}
    for rank in made.slots:
        for side in grads.values():
            side.append([])
        for micro in rank:
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in micro.columns.items()}
            leaves = {name: columns.pop(column).requires_grad_() for name, column in names.items()}
            value, extra = total_loss(ModelOut(**leaves), columns, terms)
            if value.requires_grad:
                value.backward()
            loss += value.item()
            for name, number in extra.items():
                metrics[name] = metrics.get(name, 0.0) + number.item()
            for name, leaf in leaves.items():
                grads[name][-1].append(np.zeros(len(micro.tokens)) if leaf.grad is None else leaf.grad.numpy())
    return Evaluated(loss, metrics, {name: to_column(batch, gather(made, side)) for name, side in grads.items()})


def outputs_for(batch: Batch, seed: int) -> dict[str, np.ndarray]:
    """[N] plausible log-probs (near ``logp_old``), entropies in nats, and values near the column ``values``."""
    rng = np.random.default_rng(4000 + seed)
    entropy = rng.uniform(0, 3, len(batch.token_row))
    value = np.asarray(batch.columns["values"], dtype=np.float64) + rng.normal(scale=0.5, size=len(batch.token_row))
    return {"logp": random_logp(batch, seed), "entropy": entropy, "value": value}


def alike(a: Evaluated, b: Evaluated) -> bool:
    """Whether all gradients are equal to the bit."""
    return all(np.array_equal(a.grads[name], b.grads[name]) for name in OUTPUTS)
