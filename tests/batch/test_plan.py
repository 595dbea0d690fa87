"""Packing: every row exactly once, within the budget, evenly dealt, the same every time."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from mcore_agent.batch.microbatch import MicroBatch, Plan, PlanError, filler
from mcore_agent.batch.plan import gather, plan, split, to_column
from mcore_agent.batch.rowset import RowSet, rowset
from mcore_agent.loss.k3_kl import K3Kl
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.types import Batch
from tests.strategies import SEEDS, batch_of, episode_of, random_batch, with_columns


def rows_of(lengths) -> RowSet:
    """Rows of the given lengths; row i has tokens 100 * i + place, and the column ``id`` repeats them."""
    tokens = np.concatenate([np.zeros(0), *(100 * i + np.arange(n) for i, n in enumerate(lengths))])
    return RowSet(tokens, np.array(lengths), np.arange(len(lengths)), len(lengths), {"id": tokens, "w:0": tokens * 0 + 1})


@pytest.mark.defect("B17")
def test_packing_keeps_every_row_once_and_whole():
    """For random lengths, budgets and ranks: tokens, lengths, starts and columns of each row are those it came with."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 60, int(rng.integers(0, 40)))
        budget, dp = int(rng.integers(1, 120)), int(rng.integers(1, 6))
        rows = rows_of(lengths)
        made = split(rows, budget, dp)
        assert len(made.slots) == dp and len({len(rank) for rank in made.slots}) == 1
        assert made.rows.tolist() == list(range(len(lengths)))
        assert made.empty == (len(lengths) == 0) == (len(made.slots[0]) == 0)
        for micro in (m for rank in made.slots for m in rank):
            assert micro.starts[0] == 0 and micro.starts[-1] == len(micro.tokens) == micro.lengths.sum()
            assert len(micro.tokens) <= budget or len(micro.rows) == 1
            for i, row in enumerate(micro.rows):
                place = slice(micro.starts[i], micro.starts[i + 1])
                assert micro.positions[place].tolist() == list(range(micro.lengths[i]))
                if row < 0:
                    assert micro.lengths.tolist() == [2] and not micro.columns["w:0"].any()
                    continue
                assert micro.lengths[i] == lengths[row]
                assert micro.tokens[place].tolist() == micro.columns["id"][place].tolist() == (100 * row + np.arange(lengths[row])).tolist()


def test_ranks_differ_by_at_most_one_micro_batch():
    """In tokens and in cost (length + length**2 / even_length); and micro-batches of a slot are of about one size."""
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 400, int(rng.integers(1, 60)))
        dp = int(rng.integers(2, 5))
        made = split(rows_of(lengths), int(rng.integers(100, 900)), dp, even_length=150)

        def cost(micro):
            real = micro.lengths[micro.rows >= 0]
            return float((real + real**2 / 150).sum())

        per_rank = [sum(map(cost, rank)) for rank in made.slots]
        assert max(per_rank) - min(per_rank) <= max(cost(m) for rank in made.slots for m in rank) + 1e-9


def test_the_dearest_micro_batch_goes_to_the_rank_that_has_least():
    """Rows of 9, 7, 6, 3 tokens, one to a micro-batch: 9 + 3 against 7 + 6, not 9 + 6 against 7 + 3."""
    made = split(rows_of([9, 3, 7, 6]), token_budget=9, dp=2, even_length=10**9)
    assert [[m.lengths.tolist() for m in rank] for rank in made.slots] == [[[9], [3]], [[7], [6]]]


def test_attention_counts_in_the_balance():
    """Rows of 90, 45, 45 on two ranks: in tokens 90 : 90 is even, but with even_length 30 the long row costs
    90 + 270 = 360 and a short one 45 + 67.5. Adding a row of 60 (180): tokens alone put it anywhere, cost with the short ones."""
    made = split(rows_of([90, 45, 45, 60]), token_budget=150, dp=2, even_length=30)
    assert sorted(m.rows.tolist() for rank in made.slots for m in rank) == [[0], [1, 2, 3]]


def test_rows_are_packed_tightly():
    """16 rows of 25 with a budget of 100 need 4 micro-batches, not more: 2 ranks have 2 slots each, no filler."""
    made = split(rows_of([25] * 16), token_budget=100, dp=2)
    assert [[len(m.rows) for m in rank] for rank in made.slots] == [[4, 4], [4, 4]]


def test_fewer_rows_than_ranks_are_filled_up():
    made = split(rows_of([5, 9]), token_budget=100, dp=3)
    assert [rank[0].rows.tolist() for rank in made.slots] == [[1], [0], [-1]]
    assert made.rows.tolist() == [0, 1] and made.dropped == 0


def test_the_same_rows_give_the_same_plan():
    rows = rows_of([7, 3, 7, 7, 3, 11])
    first, second = split(rows, 14, 2), split(rows, 14, 2)
    assert [[m.rows.tolist() for m in rank] for rank in first.slots] == [[m.rows.tolist() for m in rank] for rank in second.slots]


def test_gather_undoes_the_deal():
    for seed in SEEDS[:50]:
        batch = random_batch(seed)
        made = split(rowset(batch), token_budget=11, dp=3)
        outputs = [[m.tokens * 0.5 for m in rank] for rank in made.slots]
        per_row = gather(made, outputs)
        for row, got in zip(batch.rows, per_row, strict=True):
            assert got is not None and got.tolist() == (row.tokens * 0.5).tolist()
        assert to_column(batch, per_row).tolist() == (batch.tokens("tokens") * 0.5).tolist()


def test_gather_leaves_rows_out_that_were_not_planned():
    batch = with_columns(batch_of([1, 0, 0]), 0).with_columns(advantage=np.array([0, 1, 1, 0, 0, 0, 0, -1, 0], dtype=np.float32))
    made = plan(batch, [PpoClip()], token_budget=100)
    assert made.rows.tolist() == [0, 2] and made.dropped == 1
    per_row = gather(made, [[m.tokens for m in rank] for rank in made.slots])
    assert per_row[1] is None
    assert to_column(batch, per_row).tolist() == [1, 2, 3, 0, 0, 0, 1, 2, 3]
    with pytest.raises(PlanError, match=r"an output has shape \(5,\), its micro-batch \(6,\)"):
        gather(made, [[np.zeros(5)]])


def test_rows_that_give_nothing_are_left_out_but_stay_in_the_denominators():
    """Three rows of two tokens; the middle one has advantage 0. Weights stay 1/6, as if nothing had been left out."""
    batch = with_columns(batch_of([1, 0, 0]), 0).with_columns(advantage=np.array([0, 1, 1, 0, 0, 0, 0, -1, 0], dtype=np.float32))
    (micro,) = plan(batch, [PpoClip()], token_budget=100).slots[0]
    assert micro.columns["w:0"].tolist() == [0, np.float32(1 / 6), np.float32(1 / 6)] * 2
    assert micro.columns["mask:pg"].tolist() == [0, 1, 1] * 2
    assert micro.columns.keys() == {"w:0", "mask:pg", "advantage", "logp_old"}


def test_a_term_that_does_not_scale_with_the_advantage_keeps_its_rows():
    batch = with_columns(batch_of([1, 1, 1]), 0).with_columns(advantage=np.zeros(9, dtype=np.float32))
    assert plan(batch, [PpoClip()], token_budget=100, dp=2).empty
    for terms in ([PpoClip(), K3Kl()], [K3Kl(), PpoClip()]):
        assert plan(batch, terms, token_budget=100, dp=2).rows.tolist() == [0, 1, 2]
    assert plan(batch, [PpoClip(), K3Kl(coef=0.0)], token_budget=100, dp=2).empty
    assert plan(batch, [SftNll()], token_budget=100).dropped == 3


def test_an_empty_plan_is_legal_and_says_so():
    empty = plan(Batch(()), [SftNll()], token_budget=9, dp=3)
    assert empty.empty and empty.slots == [[], [], []] and empty.count == 0
    assert gather(empty, [[], [], []]) == []


def test_without_terms_all_rows_are_kept_for_a_forward_pass():
    batch = batch_of([1, 1])
    made = plan(batch, [], token_budget=100)
    assert made.rows.tolist() == [0, 1] and made.slots[0][0].columns == {}


def test_named_columns_travel_beside_those_that_terms_need():
    batch = with_columns(batch_of([1, 0]), 0).with_columns(age=np.arange(6))
    (micro,) = plan(batch, [SftNll(), K3Kl()], token_budget=100, columns=["age"]).slots[0]
    assert micro.columns["age"].tolist() == list(range(6)) and micro.columns["age"].dtype == np.float32
    assert micro.columns.keys() == {"age", "logp_ref", "mask:pg", "mask:sft", "w:0", "w:1"}


def test_a_missing_or_misshapen_column_is_named():
    with pytest.raises(PlanError, match=r"no column 'advantage'.*it has: none"):
        plan(batch_of([1, 0]), [PpoClip()], token_budget=10)
    with pytest.raises(PlanError, match=r"'logp_ref' has shape \(2,\), expected one number per token \(6,\)"):
        plan(batch_of([1, 0]).with_columns(logp_ref=np.zeros(2)), [K3Kl()], token_budget=10)
    with pytest.raises(PlanError, match="token_budget is 0 and dp is 1"):
        split(rows_of([3]), 0)


def test_outputs_of_the_learner_are_not_looked_for_in_the_batch():
    @dataclass(frozen=True)
    class NeedsEntropy:
        channel: ClassVar[str] = "pg"
        needs: ClassVar[tuple[str, ...]] = ("entropy", "logp")
        scales_with: ClassVar[str | None] = None
        coef: float = 1.0
        aggregate: str = "token_mean"

    assert plan(batch_of([1, 0]), [NeedsEntropy()], token_budget=10).slots[0][0].columns.keys() == {"mask:pg", "w:0"}


@pytest.mark.parametrize(("change", "says"), [
    ({"lengths": [3, 1]}, r"lengths \[3, 1\] do not add up to 5 tokens"),
    ({"lengths": [5, 0]}, r"lengths \[5, 0\] do not add up to 5 tokens, each at least 1"),
    ({"rows": [4]}, "1 row indices for 2 rows"),
    ({"columns": {"advantage": np.zeros(4)}}, r"column 'advantage' has shape \(4,\)"),
    ({"tokens": [], "lengths": [], "rows": []}, "a micro-batch without rows"),
    ({"rows": [4, -1], "columns": {"w:0": np.ones(5)}}, "column 'w:0' gives a filler row a weight"),
])  # fmt: skip
def test_a_micro_batch_that_contradicts_itself_is_refused(change, says):
    good = MicroBatch(np.array([11, 21, 2, 12, 22]), np.array([3, 2]), np.array([4, 1]))
    with pytest.raises(PlanError, match=says):
        replace(good, **change)


def test_a_plan_that_contradicts_itself_is_refused():
    one, two = (MicroBatch(np.arange(3), np.array([3]), np.array([i])) for i in (0, 1))
    with pytest.raises(PlanError, match=r"ranks have \[1, 2\] slots"):
        Plan([[one], [two, filler([])]], 2)
    with pytest.raises(PlanError, match="a row is in the plan twice"):
        Plan([[one], [one]], 2)
    with pytest.raises(PlanError, match="row 1 is in the plan, but the batch has 1 rows"):
        Plan([[two]], 1)
    with pytest.raises(PlanError, match="different columns"):
        Plan([[one], [filler(["w:0"])]], 1)
    assert Plan([[one], [filler([])]], 5).dropped == 4


def test_two_rows_of_one_episode_are_two_rows():
    batch = Batch((episode_of("a", "g", 1.0, [0, 1], [0, 1, 1]), episode_of("b", "g", 0.0, [0, 1])))
    assert rowset(batch).lengths.tolist() == [2, 3, 2]
