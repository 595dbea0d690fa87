"""Aggregations against numbers derived from their definitions (M16, M25)."""

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.loss.aggregate import weights
from mcore_agent.types import Batch
from tests.strategies import batch_of, episode_of

AGGREGATIONS = sorted(registry.variants("aggregation"))


def loss_of(name: str, batch: Batch, per_token) -> float:
    values = np.zeros(len(batch.token_row))
    values[batch.channel("pg")] = per_token
    return float(weights(name, batch.channel("pg"), batch) @ values)


@pytest.mark.parametrize(("name", "expected"), [
    ("token_mean", (1 + 0 + 0 + 0) / 4),
    ("seq_mean_token_mean", (1 / 1 + 0 / 3) / 2),
    ("seq_mean_token_sum", (1 + 0) / 2),
    ("episode_mean", (1 / 1 + 0 / 3) / 2),
    ("seq_mean_token_sum_norm", (1 + 0) / 2 / 3),  # the longest row has 3
    ("episode_mean_token_sum", (1 + 0) / 2),
])  # fmt: skip
def test_two_sequences(name, expected):
    """M16: one sequence of 1 token with loss 1, one of 3 tokens with loss 0: .25 by tokens, .5 by sequences."""
    batch = Batch((episode_of("a", "g", 0.0, [0, 1]), episode_of("b", "g", 0.0, [0, 1, 0, 1, 1])))
    assert loss_of(name, batch, [1, 0, 0, 0]) == pytest.approx(expected, rel=1e-7)


# Rollout a has rows of 2 and 6 sampled tokens, b one row of 4.
ROLLOUTS = Batch((
    episode_of("a", "g", 0.0, [0, 1, 1], [0, 0] + [1] * 6),
    episode_of("b", "g", 0.0, [0] + [1] * 4),
))  # fmt: skip


@pytest.mark.parametrize(("name", "a", "b"), [
    ("episode_mean", 1 / 2, 1 / 2),  # 8 tokens of 1 / (8 * 2), 4 tokens of 1 / (4 * 2)
    ("token_mean", 8 / 12, 4 / 12),
    ("seq_mean_token_mean", 2 / 3, 1 / 3),  # three rows, each of mass 1/3
    ("seq_mean_token_sum", 8 / 3, 4 / 3),
    ("seq_mean_token_sum_norm", 8 / 3 / 6, 4 / 3 / 6),  # three rows, the longest of 6 tokens
    ("episode_mean_token_sum", 8 / 2, 4 / 2),
])  # fmt: skip
def test_f22_mass_of_rollouts_with_several_rows(name, a, b):
    """M25: the mean per rollout gives a and b half each, whatever their rows."""
    weight = weights(name, ROLLOUTS.channel("pg"), ROLLOUTS)
    assert weight.dtype == np.float32
    np.testing.assert_allclose([weight[ROLLOUTS.token_episode == e].sum() for e in (0, 1)], [a, b], rtol=1e-6)
    if name == "episode_mean":
        assert set(weight[ROLLOUTS.channel("pg") & (ROLLOUTS.token_episode == 0)]) == {np.float32(1 / 16)}


@pytest.mark.defect("B6")
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_denominators_count_the_mask_and_not_the_response(name):
    """The same two sampled tokens with 0 or 50 observed ones between them give the same weights."""
    short = Batch((episode_of("a", "g", 0.0, [0, 1, 1]), episode_of("b", "g", 0.0, [0, 1])))
    long = Batch((episode_of("a", "g", 0.0, [0, 1] + [0] * 50 + [1]), episode_of("b", "g", 0.0, [0, 1])))
    got = [weights(name, b.channel("pg"), b)[b.channel("pg")].tolist() for b in (short, long)]
    assert got[0] == got[1]


@pytest.mark.defect("B7")
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_in_the_mask_gives_zeros(name):
    batch = Batch((episode_of("a", "g", 0.0, [0, 0, 0]), episode_of("b", "g", 0.0, [0, 0])))
    weight = weights(name, batch.channel("pg"), batch)
    assert weight.tolist() == [0.0] * 5
    one = Batch((*batch.episodes, episode_of("c", "g", 0.0, [0, 1])))
    assert weights(name, one.channel("pg"), one).tolist() == [0.0] * 6 + [1.0]  # units without a token are not counted


def test_a_batch_without_episodes_has_no_weights():
    for name in AGGREGATIONS:
        assert weights(name, np.zeros(0, dtype=bool), Batch(())).shape == (0,)


def test_a_channel_is_counted_by_its_own_mask():
    batch = batch_of([0.0, 0.0])
    assert weights("token_mean", batch.channel("sft"), batch).tolist() == [0.0] * 6
