"""I8: a failure of infrastructure is not a zero reward: it leaves the statistics and is counted with its reason."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent.batch.select import usable
from mcore_agent.credit.pipeline import assign
from mcore_agent.reward.pipeline import score
from mcore_agent.types import Batch, RecordError
from tests.invariants.credited import batch_for, credited, estimators, label, needs_greedy
from tests.strategies import batch_of, with_values


def failed(episode, reason="sandbox died"):
    return replace(episode, status="infra_fail", reason=reason)


@pytest.mark.defect("A5")
@pytest.mark.parametrize("spec", estimators(), ids=label)
def test_failed_episodes_leave_the_group_statistics(spec):
    """With failures among them, in any place, the others get what they get without them."""
    for seed in range(0, 200, 5):
        whole = batch_for(seed, needs_greedy(spec)).episodes
        rng = np.random.default_rng(seed)
        lost = rng.random(len(whole)) < 0.4
        mixed = [failed(e) if gone else e for e, gone in zip(whole, lost, strict=True)]
        kept, reasons = usable(mixed)
        assert [e.id for e in kept] == [e.id for e, gone in zip(whole, lost, strict=True) if not gone]
        assert sum(reasons.values()) == lost.sum()
        without = with_values(Batch(tuple(e for e, gone in zip(whole, lost, strict=True) if not gone)), seed)
        found = [credited(b, spec).columns["advantage"] for b in (Batch(tuple(kept), without.columns), without)]
        assert np.array_equal(*found)


@pytest.mark.defect("A5")
def test_the_numbers_of_a_group_with_a_failure():
    """[1, 0, failed]: mean 1/2, deviation 1/2, so +-1. Counted as a zero the mean would be 1/3 and the first 1.41."""
    ok = batch_of([1, 0, 0]).episodes
    kept, reasons = usable([ok[0], failed(ok[1]), ok[2]])
    assert reasons == {"sandbox died": 1}
    advantage = assign(Batch(tuple(kept)), [{"name": "grpo", "eps": 0}]).columns["advantage"]
    assert advantage.tolist() == [0, 1, 1, 0, -1, -1]


def test_a_failed_episode_may_not_enter_a_batch():
    with pytest.raises(RecordError, match=r"Episode e1 failed \(sandbox died\) and may not enter a batch"):
        Batch((batch_of([1, 0]).episodes[0], failed(batch_of([1, 0]).episodes[1])))


def test_reasons_are_counted_apart_and_a_group_may_vanish():
    a, b, c = batch_of([1, 0, 0], groups="ggh").episodes
    kept, reasons = usable([failed(a), failed(b, "engine aborted"), failed(c)])
    assert kept == [] and reasons == {"sandbox died": 2, "engine aborted": 1}


def test_scoring_leaves_failures_as_they_are():
    gone = failed(batch_of([1]).episodes[0])
    assert score([gone], [{"name": "outcome"}]) == [gone]
