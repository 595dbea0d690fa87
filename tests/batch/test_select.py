"""Parts of a batch: whole episodes, whole groups, with their own part of every column."""

import numpy as np
import pytest

from mcore_agent.batch.microbatch import PlanError
from mcore_agent.batch.select import minibatches, select
from mcore_agent.types import Batch, Turn
from tests.strategies import SEEDS, batch_of, episode_of, random_batch, with_columns

TURNS = (Turn(0, "a"), Turn(1, "b"))
BATCH = Batch((
    episode_of("a", "g", 1.0, [0, 1, 1], [0, 1]),
    episode_of("b", "g", 0.0, [0, 1], turns=TURNS),
    episode_of("c", "h", 0.0, [0, 1, 1, 1], turns=TURNS),
)).with_columns(token=np.arange(11), turn=np.arange(4), episode=np.arange(3))  # fmt: skip


def test_each_axis_follows_its_episodes():
    """Episodes a, b, c have tokens 0-4, 5-6, 7-10 and turns none, 0-1, 2-3."""
    part = select(BATCH, [2, 0])
    assert [e.id for e in part.episodes] == ["c", "a"]
    assert part.columns["token"].tolist() == [7, 8, 9, 10, 0, 1, 2, 3, 4]
    assert part.columns["turn"].tolist() == [2, 3]
    assert part.columns["episode"].tolist() == [2, 0]


def test_a_column_of_no_or_of_two_axes_is_refused():
    with pytest.raises(PlanError, match="column 'odd' has 5 entries"):
        select(BATCH.with_columns(odd=np.zeros(5)), [0])
    both = Batch((episode_of("a", "g", 1.0, turns=TURNS), episode_of("b", "g", 0.0))).with_columns(x=np.arange(2))
    with pytest.raises(PlanError, match="column 'x' with 2 entries could be of axis turn or episode"):
        select(both, [1])
    assert select(both, [0, 1]).columns["x"].tolist() == [0, 1]  # both readings agree


def test_minibatches_are_whole_groups_each_once():
    for seed in SEEDS:
        batch = with_columns(random_batch(seed), seed)
        groups = len(set(e.group for e in batch.episodes))
        n = 1 + seed % groups
        parts = minibatches(batch, n)
        assert len(parts) == n and all(part.episodes for part in parts)
        assert sorted(e.id for part in parts for e in part.episodes) == sorted(e.id for e in batch.episodes)
        homes = {(e.group, i) for i, part in enumerate(parts) for e in part.episodes}
        assert len(homes) == groups
        for part in parts:
            order = [batch.episodes.index(e) for e in part.episodes]
            assert order == sorted(order)
            for name in part.columns:
                expected = [batch.columns[name][batch.token_episode == i] for i in order]
                assert np.array_equal(part.columns[name], np.concatenate(expected))


def test_minibatches_have_about_equal_tokens():
    """Groups of 12, 6, 3, 3 tokens in two parts: 12 | 6 + 3 + 3."""
    batch = batch_of([0.0] * 8, groups="aabcdaab")
    assert sorted(len(p.token_row) for p in minibatches(batch, 2)) == [12, 12]


def test_more_parts_than_groups_are_refused():
    with pytest.raises(PlanError, match="3 mini-batches asked of a batch of 2 groups"):
        minibatches(BATCH, 3)
    with pytest.raises(PlanError, match="0 mini-batches"):
        minibatches(BATCH, 0)
    assert minibatches(BATCH, 1) == [BATCH]
