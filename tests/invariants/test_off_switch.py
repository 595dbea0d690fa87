"""I5: a loss term that is switched off leaves loss and gradients bit-equal, because it is never evaluated."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from mcore_agent.batch.plan import plan
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.loss.total import total_loss
from mcore_agent.protocols import ModelOut
from tests.invariants.evaluate import LOSSES, alike, evaluate, outputs_for, term_of
from tests.strategies import SEEDS, random_batch, trained_batch, with_columns


@dataclass(frozen=True)
class Explodes:
    """A term that must not be looked at: it needs what nobody has."""

    channel: ClassVar[str] = "pg"
    needs: ClassVar[tuple[str, ...]] = ("no such column",)
    scales_with: ClassVar[str | None] = None
    coef: float = 0.0
    aggregate: str = "no such aggregation"

    def per_token(self, out, columns):
        raise AssertionError("evaluated although its coefficient is 0")


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_a_coefficient_of_zero_is_the_same_as_no_term(name, place):
    off = replace(term_of(name), coef=0.0)
    for seed in SEEDS[place:60:3]:
        batch = trained_batch(seed)
        outputs = outputs_for(batch, seed)
        alone = evaluate(batch, [PpoClip()], outputs)
        terms = [off, PpoClip()] if place == 0 else [PpoClip(), off]
        beside = evaluate(batch, terms, outputs)
        assert beside.loss == alone.loss and beside.metrics == alone.metrics
        assert alike(beside, alone)


def test_a_term_that_is_off_is_neither_planned_nor_evaluated():
    batch = with_columns(random_batch(1), 1)
    made = [plan(batch, terms, token_budget=30) for terms in ([PpoClip()], [PpoClip(), Explodes()])]
    for first, second in zip(made[0].slots[0], made[1].slots[0], strict=True):
        assert first.columns.keys() == second.columns.keys() == {"advantage", "logp_old", "mask:pg", "w:0"}
        columns = {k: torch.tensor(v) for k, v in second.columns.items()}
        logp = torch.tensor(first.columns["logp_old"]) + 0.1
        values = [total_loss(ModelOut(logp), columns, terms)[0] for terms in ([PpoClip()], [PpoClip(), Explodes()])]
        assert torch.equal(*values)
