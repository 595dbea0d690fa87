"""The density of a verifier, from episodes (M90)."""

from dataclasses import replace

from mcore_agent.credit.density import Density, densities
from mcore_agent.types import Batch
from tests.credit.walks import walk
from tests.strategies import SEEDS, random_batch


def test_one_of_six():
    """k = 1, C = 6: .1667."""
    assert abs(Density(1, 6).value - 1 / 6) < 1e-12
    lone = walk("a", [""] * 6, [0, 0, 0, 0, 0, 1.0])
    assert densities(Batch((lone,))) == {"g": Density(1, 6)}


def test_decisions_are_counted_along_the_shortest_success():
    """Successes of 4 and 3 turns, a failure of 5: C = 3. Shown are turn 1 (by the success) and turn 0 (by the failure), while
    the failure's turn 4 lies behind the chain. The second group succeeded without rewards of turns, the third did not."""
    long, short = walk("a", [""] * 4, 1.0), replace(walk("b", [""] * 3, [0, 0.5, 0]), rewards={"step": [0, 0.5, 0], "outcome": 1.0})
    lost = walk("c", [""] * 5, [-0.2, 0, 0, 0, -1.0])
    batch = Batch((long, lost, short, walk("d", [""] * 2, 1.0, "h"), walk("e", [""] * 2, 0.0, "i")))
    assert densities(batch) == {"g": Density(2, 3), "h": Density(0, 2)}
    assert densities(Batch((lost, long)), success=2.0) == {}


def test_any_batch_can_be_measured():
    for seed in SEEDS[:60]:
        assert all(0 <= d.exposed <= d.chain for d in densities(random_batch(seed)).values())
