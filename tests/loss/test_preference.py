"""Pairs of answers (M26), one's own right answers (M18), and the columns that terms make of a whole batch, by hand."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from mcore_agent.loss.common import LossError
from mcore_agent.loss.derived import derive, own_rows, sums, top_k_needed
from mcore_agent.loss.distill_top_k import DistillTopK
from mcore_agent.loss.dpo import Dpo
from mcore_agent.loss.positive_nll import PositiveNll
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.types import Batch, Episode, Task
from tests.invariants.evaluate import evaluate
from tests.strategies import episode_of, row_of


def side(id: str, group: str, branch: str, *masks) -> Episode:
    """An answer with one row for each mask of the channel ``dpo``."""
    rows = tuple(replace(row_of([0] * len(mask)), channels={"dpo": np.array(mask, dtype=bool)}) for mask in masks)
    return Episode(id, Task(group, "toy", ()), group, rows, branch=branch)


def preferred(episodes, gaps):
    """A batch with random references, and log-probs ``gaps`` over them at the tokens of the channel, in order."""
    batch = Batch(tuple(episodes))
    mask = batch.channel("dpo")
    reference = -np.random.default_rng(3).exponential(1.0, len(mask))
    gap = np.zeros(len(mask))
    gap[mask] = gaps
    return batch.with_columns(logp_ref=reference), reference + gap


PAIR = (side("w", "p", "chosen", [0, 1, 0, 1], [0, 1]), side("l", "p", "rejected", [0, 0, 1, 1, 1]))


@pytest.mark.parametrize(("budget", "dp"), [(100, 1), (5, 1), (2, 3)])
@pytest.mark.parametrize(("gaps", "beta", "loss", "slope"), [
    ([0] * 6, 1.0, math.log(2), 0.5),  # m = 0: -ln(1/2); 1 - sigmoid = 1/2
    # (.2 + .1 - .3) + ln 3 / 2 - (.4 - .4 - ln 3 / 2) = ln 3: sigmoid = 3/4
    ([0.2, 0.1, -0.3 + math.log(3) / 2, 0.4, -0.4, -math.log(3) / 2], 1.0, -math.log(3 / 4), 0.25),
    ([1, 1, 0, 0, -2, 0], 0.5, -math.log(1 / (1 + math.exp(-2))), 0.5 * (1 - 1 / (1 + math.exp(-2)))),  # beta m = .5 * (2 + 2)
])  # fmt: skip
def test_the_loss_of_a_pair(gaps, beta, loss, slope, budget, dp):
    """M26: -ln sigmoid(beta m), .69315 at m = 0 and .28768 at ln 3; -beta (1 - sigmoid) by a chosen token and the opposite by a
    rejected one, in whatever rows and micro-batches."""
    batch, logp = preferred(PAIR, gaps)
    found = evaluate(batch, [Dpo(beta=beta)], {"logp": logp}, token_budget=budget, dp=dp)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.metrics["dpo_loss"] == pytest.approx(loss, rel=1e-6)
    sign = np.where(batch.token_episode == 0, -1, 1)
    np.testing.assert_allclose(found.grads["logp"], np.where(batch.channel("dpo"), sign * slope, 0), rtol=1e-5, atol=1e-12)


def test_pairs_are_averaged_and_other_tokens_do_not_matter():
    """Pairs with m = 0 and ln 3, the second in another order: (.69315 + .28768) / 2; its gradients are half of those alone. NaN
    between the answers' own tokens changes nothing."""
    second = (side("l2", "q", "rejected", [0, 1]), side("w2", "q", "chosen", [0, 1, 1]))
    batch, logp = preferred([*PAIR, *second], [0] * 6 + [0.0, math.log(3), 0.0])
    outside = ~batch.channel("dpo")
    batch = batch.with_columns(logp_ref=np.where(outside, np.nan, batch.columns["logp_ref"]))
    found = evaluate(batch, [Dpo(beta=1.0)], {"logp": np.where(outside, np.inf, logp)}, token_budget=3, dp=2)
    assert found.loss == pytest.approx((math.log(2) - math.log(3 / 4)) / 2, rel=1e-6)
    assert found.metrics["dpo_margin"] == pytest.approx(math.log(3) / 2, rel=1e-6)
    assert found.metrics["dpo_accuracy"] == pytest.approx(1 / 2, rel=1e-6)
    assert found.grads["logp"][batch.token_episode == 2].tolist() == pytest.approx([0, 0.125], rel=1e-6)
    assert found.grads["logp"][batch.token_episode == 3].tolist() == pytest.approx([0, -0.125, -0.125], rel=1e-6)


def test_what_is_no_pair_is_refused():
    for episodes, says in (
        (PAIR[:1], "the group 'p' has 1 chosen, but a pair is one 'chosen' and one 'rejected' episode"),
        ((*PAIR, side("l2", "p", "rejected", [0, 1])), "1 chosen, 2 rejected"),
        ((PAIR[0], side("l2", "p", "", [0, 1])), "1 without a branch, 1 chosen"),
    ):
        batch, logp = preferred(episodes, 0)
        with pytest.raises(LossError, match=says):
            derive(batch.with_columns(logp_now=logp), [Dpo()])
    with pytest.raises(LossError, match="no column 'logp_now'"):
        derive(preferred(PAIR, [0] * 6)[0], [Dpo()])
    with pytest.raises(LossError, match="'dpo': beta is 0.0"):
        Dpo(beta=0.0)


# ------------------------------------------------------------------------------------- one's own right answers


def test_right_answers_are_imitated_and_others_left_alone():
    """M18: of episodes with 3 and 5 tokens the first has reward 1. Log-probs -1, -2, -6: the loss is .1 * 9 / 3, its tokens get
    -.1 / 3 each, and the other episode nothing, also where its log-probs are NaN."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1], [0, 1]), episode_of("b", "g", 0.0, [0, 1, 1, 1, 1, 1])))
    logp = np.array([0, -1, -2, 0, -6, 0, -3, -3, -3, -3, -3.0])
    found = evaluate(batch, [PositiveNll()], {"logp": logp})
    assert found.loss == pytest.approx(0.1 * 9 / 3, rel=1e-6)
    expected = np.where(batch.channel("pg") & (batch.token_episode == 0), -0.1 / 3, 0)
    np.testing.assert_allclose(found.grads["logp"], expected, rtol=1e-6)
    assert derive(batch, [PositiveNll()]).columns["positive_share"].tolist() == pytest.approx([0, 8 / 3, 8 / 3, 0, 8 / 3] + [0] * 6)


def test_the_mean_over_right_answers_follows_the_aggregation():
    """Right episodes of 2 and 1 tokens and a wrong one: by episode (1 + 3) / 2 / 2 + 5 / 2, by token (1 + 3 + 5) / 3."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1]), episode_of("b", "g", 0.0, [0, 1]), episode_of("c", "g", 2.0, [0, 1])))
    logp = np.array([0, -1, -3, 0, -7, 0, -5.0])
    for aggregate, expected in (("episode_mean", 2 / 2 + 5 / 2), ("token_mean", 9 / 3)):
        assert evaluate(batch, [PositiveNll(coef=1.0, aggregate=aggregate)], {"logp": logp}).loss == pytest.approx(expected, rel=1e-6)
    nothing = evaluate(batch, [PositiveNll(threshold=3.0)], {"logp": logp})
    assert nothing.loss == 0 and not nothing.grads["logp"].any()
    with pytest.raises(LossError, match="'positive_nll': threshold is nan"):
        PositiveNll(threshold=math.nan)


# ------------------------------------------------------------------------------------------ derived columns


def test_sums_of_rows_and_of_what_is_beside_them():
    """Rows of 2 and 1 masked tokens with 1 2 | 4, and another episode of one row with 8."""
    batch = Batch((episode_of("a", "g", 0.0, [0, 1, 1], [0, 1]), episode_of("b", "g", 0.0, [0, 1])))
    found = sums(np.array([0, 1, 2, 0, 4, 0, 8.0]), batch.channel("pg"), batch)
    assert found.row.tolist() == [3, 3, 3, 4, 4, 8, 8]
    assert found.episode.tolist() == [7, 7, 7, 7, 7, 8, 8]
    assert found.rest.tolist() == [4, 4, 4, 3, 3, 0, 0]
    assert found.size.tolist() == [3, 3, 3, 3, 3, 1, 1]
    row = torch.tensor([5, 5, 5, 2, 2, 9, 9])
    assert own_rows(torch.tensor([0, 1, 2, 0, 4, 0, 8.0]), row).tolist() == found.row.tolist()


@dataclass(frozen=True)
class Derives:
    number: float
    coef: float = 1.0
    channel: ClassVar[str] = "pg"

    def derive(self, batch):
        return {"mine": np.full(len(batch.token_row), self.number)}


def test_terms_derive_columns_unless_they_are_off_and_may_not_disagree():
    batch = Batch((episode_of("a", "g", 0.0, [0, 1]),))
    assert derive(batch, [PpoClip(), Derives(1.0, coef=0.0)]) is batch
    assert derive(batch, [Derives(1.0), Derives(1.0), Derives(2.0, coef=0.0)]).columns["mine"].tolist() == [1.0, 1.0]
    with pytest.raises(LossError, match="two loss terms derive different columns 'mine'"):
        derive(batch, [Derives(1.0), Derives(2.0)])


def test_the_most_likely_tokens_are_asked_for_by_the_terms_that_are_on():
    assert top_k_needed([PpoClip()]) == 0
    assert top_k_needed([DistillTopK(top_k=3), PpoClip(), DistillTopK(top_k=5), DistillTopK(top_k=9, coef=0.0)]) == 5
