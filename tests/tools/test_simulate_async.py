"""tools/simulate_async.py and tools/bench_collect.py: bounded-async against strict collection in simulated time."""

import math
from collections import Counter

import numpy as np
import pytest

from tools.bench_collect import measure
from tools.simulate_async import TARGET, Case, Outcome, run

SHAPE = {"steps": 10, "prompts": 5, "group_size": 3}


def trace(outcome: Outcome) -> list[tuple]:
    rows = [(e, row) for batch in outcome.batches for e in batch for row in e.rows]
    return [(e.id, e.seed, e.status, row.tokens.tobytes(), row.version.tobytes()) for e, row in rows]


@pytest.mark.parametrize(("seed", "train_s"), [(0, 15.0), (1, 45.0)])
def test_bounded_async_has_one_and_a_half_times_the_throughput(seed: int, train_s: float):
    """M35, with tools of 1 to 20 turns of the model. No token is older than the bound, every group is complete, a rerun is equal."""
    strict, bounded, again = (run(Case(max_lag=lag, seed=seed, train_s=train_s, **SHAPE)) for lag in (0, 1, 1))
    print(f"{bounded.rate / strict.rate:.2f} x")
    assert bounded.rate >= TARGET * strict.rate
    assert trace(bounded) == trace(again) and bounded.seconds == again.seconds
    assert [(e.id, e.seed) for b in bounded.batches for e in b] == [(e.id, e.seed) for b in strict.batches for e in b]
    for version, batch in enumerate(bounded.batches):
        assert list(Counter(e.group for e in batch).values()) == [3] * 5
        ages = version - np.concatenate([row.version[row.sampled] for e in batch for row in e.rows])
        assert ages.min() >= 0 and ages.max() <= 1
    assert max(s.lag_max for s in bounded.stats) == 1 and max(s.lag_max for s in strict.stats) == 0


def test_the_coordinators_cpu_time_is_measured():
    found = measure(episodes=16, turns=3, virtual=True)
    print(found)
    assert found["turns"] == 48 and found["wall_s"] == pytest.approx(6) and 0 < found["cpu_ms_per_turn"] < math.inf
