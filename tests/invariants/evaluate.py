"""Loss and gradient of a batch as the learner would sum them over micro-batches and ranks, in float64."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from mcore_agent import registry
from mcore_agent.batch.plan import gather, split, to_column
from mcore_agent.batch.rowset import rowset
from mcore_agent.loss.derived import NOW, derive
from mcore_agent.loss.total import outputs_needed, total_loss
from mcore_agent.protocols import LossTerm, ModelOut
from mcore_agent.types import Batch
from tests.strategies import TOP_K, random_logp, random_top

LOSSES = sorted(registry.variants("loss"))
AGGREGATIONS = sorted(registry.variants("aggregation"))
ESTIMATORS = sorted(registry.variants("estimator"))

# What the model gives a loss, each one number per token, and what of it has a gradient.
OUTPUTS = ("logp", "entropy", "value", "value_behind", *(f"top_logp:{i}" for i in range(TOP_K)))
GIVEN = (*OUTPUTS, *(f"top_ids:{i}" for i in range(TOP_K)))


@dataclass(frozen=True)
class Evaluated:
    """Summed loss and metrics, and the gradients by each output of the model at every token of the batch."""

    loss: float
    metrics: dict[str, float]
    grads: dict[str, np.ndarray]  # [N] float32


def term_of(name: str, **settings) -> LossTerm:
    """A loss of the registry, with as many likeliest tokens as the columns of tests have."""
    if "top_k" in inspect.signature(registry.get("loss", name)).parameters:
        settings["top_k"] = TOP_K
    return registry.create("loss", {"name": name, **settings})


def model_out(given: Mapping[str, torch.Tensor]) -> ModelOut:
    """From one tensor [T] for each name in ``GIVEN``, or some of them."""
    top = [given[f"top_logp:{i}"] for i in range(TOP_K) if f"top_logp:{i}" in given]
    ids = [given[f"top_ids:{i}"] for i in range(TOP_K) if f"top_ids:{i}" in given]
    return ModelOut(
        given["logp"], given.get("entropy"), value=given.get("value"), value_behind=given.get("value_behind"),
        top_logp=torch.stack(top, 1) if top else None, top_ids=torch.stack(ids, 1).nan_to_num(0, 0, 0).long() if ids else None,
    )  # fmt: skip


def evaluate(batch: Batch, terms, outputs: Mapping[str, np.ndarray], token_budget: int = 10**9, dp: int = 1) -> Evaluated:
    """``outputs`` [N] by name are what the learner's model would give; a pass before the step has given its log-probs too."""
    wanted = {"logp", *outputs_needed(terms)}
    names = {name: f"out/{name}" for name in GIVEN if name.split(":")[0] in wanted}
    carried = derive(batch.with_columns(**{NOW: outputs["logp"]}), terms)
    carried = carried.with_columns(**{column: outputs[name] for name, column in names.items()})
    made = split(rowset(carried, terms, columns=tuple(names.values())), token_budget, dp)
    loss, metrics, grads = 0.0, {}, {name: [] for name in names if name in OUTPUTS}
    for rank in made.slots:
        for side in grads.values():
            side.append([])
        for micro in rank:
            columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in micro.columns.items()}
            leaves = {name: columns.pop(column).requires_grad_(name in OUTPUTS) for name, column in names.items()}
            value, extra = total_loss(model_out(leaves), columns, terms)
            if value.requires_grad:
                value.backward()
            loss += value.item()
            for name, number in extra.items():
                metrics[name] = metrics.get(name, 0.0) + number.item()
            for name, side in grads.items():
                grad = leaves[name].grad
                side[-1].append(np.zeros(len(micro.tokens)) if grad is None else grad.numpy())
    nothing = np.zeros(len(batch.token_row), dtype=np.float32)
    found = {name: to_column(batch, gather(made, side)) for name, side in grads.items()}
    return Evaluated(loss, metrics, {name: found.get(name, nothing) for name in OUTPUTS})


def outputs_for(batch: Batch, seed: int) -> dict[str, np.ndarray]:
    """[N] plausible log-probs (near ``logp_old``), entropies in nats, values near the column ``values``, and likeliest tokens."""
    rng = np.random.default_rng(4000 + seed)
    entropy = rng.uniform(0, 3, len(batch.token_row))
    value = np.asarray(batch.columns["values"], dtype=np.float64) + rng.normal(scale=0.5, size=len(batch.token_row))
    ids, top = random_top(rng, len(batch.token_row))
    likeliest = {f"top_logp:{i}": top[:, i] for i in range(TOP_K)} | {f"top_ids:{i}": ids[:, i] for i in range(TOP_K)}
    return {"logp": random_logp(batch, seed), "entropy": entropy, "value": value, "value_behind": np.roll(value, -1), **likeliest}


def alike(a: Evaluated, b: Evaluated) -> bool:
    """Whether all gradients are equal to the bit."""
    return all(np.array_equal(a.grads[name], b.grads[name]) for name in OUTPUTS)
