"""What credit takes beside its input (tools/bench_credit.py measures the time as well)."""

import numpy as np
import pytest

from mcore_agent.credit import stretches
from mcore_agent.credit.pipeline import Pipeline, assign
from mcore_agent.credit.sums import decayed_sum, run_ends
from mcore_agent.types import Batch
from tests.strategies import SEEDS, random_batch, with_values
from tools.bench_credit import CREDITS, NAMES, batch_of, nbytes, peak


@pytest.mark.parametrize("name", [*NAMES, *CREDITS])
def test_memory_is_at_most_twice_the_input(name):
    batch = batch_of(episodes=96, tokens=6000, turns=7)
    assert len(batch.token_turn) == len(batch.token_episode) > stretches.PART
    pipeline = Pipeline(CREDITS.get(name, [{"name": name}]))
    assert peak(lambda: pipeline(batch)) <= 2 * nbytes(batch)


@pytest.mark.parametrize("name", ["gae", "turn_gae", "bilevel_gae", "vtrace", "sapo", "vapo"])
def test_working_in_parts_changes_no_bit(name, monkeypatch):
    """Parts of one episode each, of about 40 tokens, and one part for all."""
    lam = "critic_lam" if name == "vapo" else "lam"
    for seed in SEEDS[:30]:
        batch = with_values(random_batch(seed), seed)
        found = []
        for size in (1, 40, 10**9):
            monkeypatch.setattr(stretches, "PART", size)
            found.append(assign(batch, [{"name": name, "gamma": 0.9, lam: 0.8}]).columns)
        for column in ("advantage", "returns"):
            assert all(np.array_equal(found[0][column], other[column]) for other in found[1:])


def test_parts_are_whole_episodes_and_leave_nothing_out(monkeypatch):
    monkeypatch.setattr(stretches, "PART", 40)
    for seed in SEEDS[:60]:
        batch = random_batch(seed)
        pieces = list(stretches.parts(batch))
        ends = [0, *(p.stop for p in pieces)]
        assert [p.start for p in pieces] == ends[:-1] and ends[-1] == len(batch.token_row)
        assert all(batch.token_episode[p.stop - 1] < batch.token_episode[p.stop] for p in pieces[:-1])
        assert all(p.stop - p.start >= 40 for p in pieces[:-1])
    assert not list(stretches.parts(Batch(())))


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.97, 1.0, "each"])
def test_sums_are_the_recurrence(decay):
    """Runs of 1 to 300 steps, against a loop from the end."""
    rng = np.random.default_rng(0)
    run = np.repeat(np.arange(9), [1, 300, 2, 7, 64, 65, 1, 33, 128])
    delta = rng.normal(size=len(run))
    share = rng.uniform(size=len(run)) if decay == "each" else np.full(len(run), decay)
    expected = delta.copy()
    for t in range(len(run) - 2, -1, -1):
        if run[t] == run[t + 1]:
            expected[t] += share[t] * expected[t + 1]
    found = decayed_sum(delta, run_ends(run), share if decay == "each" else decay)
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)
    assert np.array_equal(decayed_sum(delta, run_ends(run), share), found)
