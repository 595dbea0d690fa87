"""Draws and truncation, from their definitions."""

import numpy as np
import pytest
import torch

from mcore_agent.protocols import Request
from mcore_agent.rollout.sampling import Draw, sample, truncate, uniforms


def draw(*rows: dict) -> Draw:
    requests = [Request(str(i), np.array([1]), 1, **row) for i, row in enumerate(rows)]
    return Draw.of(requests, torch.device("cpu"))


@pytest.mark.parametrize("axis", ["seeds", "positions", "both"])
def test_uniforms_are_uniform(axis: str):
    """Counts in 50 cells and of consecutive pairs in 100 cells: chi-square below mean + 5 standard deviations."""
    n = 20_000
    count, fixed = np.arange(n, dtype=np.uint64), np.full(n, 17, dtype=np.uint64)
    u = uniforms(fixed if axis == "positions" else count, (fixed if axis == "seeds" else count).astype(np.int64))
    assert u.min() >= 0 and u.max() < 1
    for cells in (np.floor(u * 50), np.floor(u[:-1] * 10) * 10 + np.floor(u[1:] * 10)):
        kinds = int(cells.max()) + 1
        expected = len(cells) / kinds
        statistic = ((np.bincount(cells.astype(int)) - expected) ** 2 / expected).sum()
        assert abs(statistic - (kinds - 1)) < 5 * (2 * (kinds - 1)) ** 0.5


def test_uniforms_depend_on_each_argument():
    seeds, positions = np.meshgrid(np.arange(40, dtype=np.uint64), np.arange(40))
    assert len(np.unique(uniforms(seeds.ravel(), positions.ravel()))) == 1600


def test_truncate():
    """Sorted: .4 .3 .15 .1 .05 at ids 3 0 4 2 1. Nucleus .6 needs .4 + .3; after top-k 3 (mass .85) .8 of it is .68."""
    probs = torch.tensor([0.3, 0.05, 0.1, 0.4, 0.15])

    def kept(top_k: int, top_p: float) -> set[int]:
        out = truncate(probs, top_k, top_p)
        assert torch.equal(out[out > 0], probs[out > 0])
        return set(out.nonzero()[:, 0].tolist())

    assert kept(0, 0.6) == {3, 0}
    assert kept(0, 0.7 + 1e-6) == {3, 0, 4}
    assert kept(0, 1e-9) == {3}
    assert kept(2, 1.0) == {3, 0}
    assert kept(3, 0.8) == {3, 0}
    assert kept(3, 0.9) == {3, 0, 4}
    assert kept(99, 1.0) == {0, 1, 2, 3, 4}


def test_a_batch_of_different_parameters():
    """Greedy, hot and truncated rows side by side; log-probabilities are after temperature, before truncation."""
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    ids, logp = sample(logits.clone(), draw({"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 1}), np.array([4, 4, 4]))
    assert ids[0] == 1 and ids[2] == 1
    for row, temperature in ((0, 1.0), (1, 2.0), (2, 1.0)):
        weights = np.exp(np.array([1.0, 3.0, 2.0]) / temperature)
        assert logp[row].item() == pytest.approx(np.log(weights[ids[row]] / weights.sum()), abs=1e-6)


def test_inverse_of_the_distribution_function():
    """The id is the first whose cumulated probability exceeds u; tokens of probability 0 never come."""
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    seeds = range(300)
    ids, _ = sample(weights.log().expand(300, -1).clone(), draw(*({"seed": s} for s in seeds)), np.full(300, 9))
    u = uniforms(np.array(seeds, dtype=np.uint64), np.full(300, 9))
    assert ids.tolist() == [1 if x < 0.2 else 3 if x < 0.7 else 4 for x in u]


def test_a_draw_does_not_depend_on_its_neighbours():
    logits = torch.randn(7, 31, generator=torch.Generator().manual_seed(0))
    rows = [{"seed": s, "temperature": 1.5} for s in range(7)]
    together, _ = sample(logits.clone(), draw(*rows), np.arange(7))
    for i in range(7):
        alone, _ = sample(logits[i : i + 1].clone(), draw(rows[i]), np.array([i]))
        assert alone[0] == together[i]


def test_negative_and_large_seeds():
    assert draw({"seed": -1}, {"seed": 2**64 + 3}).seeds.tolist() == [2**64 - 1, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show(bad: float):
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 2.0, 1.0]])
    ids, logp = sample(logits, draw({}, {}), np.array([1, 1]))
    assert not torch.isfinite(logp[0]) and torch.isfinite(logp[1])
    assert 0 <= ids[0] < 3


def test_repeated_draws_are_those_of_the_rows():
    """Three positions of each of four unlike rows at once give the tokens of three single steps."""
    rows = [{"seed": 3, "temperature": 0.0}, {"seed": 4, "temperature": 2.0}, {"seed": 5, "top_k": 2}, {"seed": 6, "top_p": 0.5}]
    logits = torch.randn(4, 3, 23, generator=torch.Generator().manual_seed(1))
    places = np.array([[7, 8, 9], [2, 3, 4], [30, 31, 32], [0, 1, 2]])
    ids, logp = sample(logits.clone().flatten(0, 1), draw(*rows).repeat(3), places.ravel())
    for step in range(3):
        one, value = sample(logits[:, step].clone(), draw(*rows), places[:, step])
        assert torch.equal(ids.view(4, 3)[:, step], one) and torch.equal(logp.view(4, 3)[:, step], value)
