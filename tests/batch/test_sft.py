"""Demonstrations train by imitation and take part in nothing else."""

import numpy as np
import pytest

from mcore_agent.batch.sft import demonstration
from mcore_agent.credit.pipeline import assign
from mcore_agent.types import Batch, RecordError, Task
from tests.strategies import batch_of

TASK = Task("t", "toy", ())
DEMO = demonstration(TASK, [11, 12, 21, 2], [0, 0, 1, 1], "d")


def test_nothing_is_sampled_and_the_channel_is_the_given_mask():
    (row,) = DEMO.rows
    assert row.tokens.tolist() == [11, 12, 21, 2]
    assert not row.sampled.any() and row.version.tolist() == [-1] * 4 and row.logp.tolist() == [0] * 4
    assert row.channel("sft").tolist() == [False, False, True, True]
    assert not row.channel("pg").any()


def test_demonstrations_change_no_advantage():
    rollouts = batch_of([1, 0, 0, 1])
    specs = [{"name": "grpo"}]
    mixed = assign(Batch((DEMO, *rollouts.episodes)), specs).columns["advantage"]
    assert mixed[:4].tolist() == [0] * 4
    assert np.array_equal(mixed[4:], assign(rollouts, specs).columns["advantage"])


@pytest.mark.parametrize(("mask", "says"), [
    ([0, 0, 0, 0], "no token is trained"),
    ([1, 0, 1, 1], "the first token is trained"),
    ([0, 1], r"4 tokens, but a mask of shape \(2,\)"),
])  # fmt: skip
def test_a_mask_that_cannot_be_trained_is_refused(mask, says):
    with pytest.raises(RecordError, match=f"demonstration 'd': {says}"):
        demonstration(TASK, [11, 12, 21, 2], mask, "d")
