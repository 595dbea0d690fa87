"""Columns of a teacher (M104): every token gets what the teacher said of it, however rows were dealt."""

import numpy as np
import pytest

from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import rowset
from mcore_agent.batch.teacher import teacher_columns
from mcore_agent.loss.derived import likeliest, of_teacher, taught
from mcore_agent.loss.distill import Distill
from mcore_agent.loss.distill_top_k import DistillTopK
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.types import Batch, Episode
from tests.strategies import batch_of, row_of


@pytest.mark.parametrize(("budget", "dp"), [(100, 1), (4, 2), (3, 3)])
def test_what_was_said_of_a_token_is_found_at_it(budget, dp):
    """Rows of tokens 7 5 9 | 4 2 in one episode and 8 3 6 1 in another; of token t the teacher says -t, and likeliest are t + 20 and
    t + 30 with -t / 4 and -t / 2."""
    rows = [row_of([0] * len(tokens), tokens) for tokens in ([7, 5, 9], [4, 2], [8, 3, 6, 1])]
    task = batch_of([1]).episodes[0].task
    batch = Batch((Episode("a", task, "g", tuple(rows[:2])), Episode("b", task, "g", (rows[2],))))
    plan = split(rowset(batch), budget, dp)

    def said(tokens):
        t = tokens.astype(np.float64)
        return {"logp": -t, "top_ids": np.stack([tokens + 20, tokens + 30], 1), "top_logp": np.stack([-t / 4, -t / 2], 1)}

    found = teacher_columns(batch, plan, [[said(micro.tokens) for micro in rank] for rank in plan.slots], top_k=2)
    assert found["logp_teacher"].tolist() == [-7, -5, -9, -4, -2, -8, -3, -6, -1]
    assert found["teacher_id:0"].tolist() == [27, 25, 29, 24, 22, 28, 23, 26, 21]
    assert found["teacher_id:1"].tolist() == [37, 35, 39, 34, 32, 38, 33, 36, 31]
    assert found["teacher_logp:0"].tolist() == [-1.75, -1.25, -2.25, -1, -0.5, -2, -0.75, -1.5, -0.25]
    assert found["teacher_logp:1"].tolist() == [-3.5, -2.5, -4.5, -2, -1, -4, -1.5, -3, -0.5]
    assert len(found) == 5 and all(values.dtype == np.float32 for values in found.values())
    assert list(teacher_columns(batch, plan, [[said(m.tokens) for m in rank] for rank in plan.slots], top_k=0)) == ["logp_teacher"]


def test_a_batch_of_nothing():
    batch = Batch(())
    assert teacher_columns(batch, split(rowset(batch), 10), [[]], top_k=1)["teacher_id:0"].shape == (0,)


def test_who_needs_a_teacher():
    ids, logp = likeliest(2)
    assert DistillTopK(top_k=2).needs == ("top_logp", "top_ids", *ids, *logp) and all(map(of_teacher, (*ids, *logp, *Distill().needs)))
    assert taught([PpoClip(), Distill()]) and taught([DistillTopK()])
    assert not taught([PpoClip(), Distill(coef=0.0)]) and not of_teacher("logp_ref")
