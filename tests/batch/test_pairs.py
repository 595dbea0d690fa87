"""The best and the worst episode of a group as a pair to prefer between (M26), by hand."""

import dataclasses

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.batch.marks import MAKERS, marked
from mcore_agent.batch.pairs import preferences
from mcore_agent.loss.derived import Marking
from mcore_agent.loss.dpo import Dpo, pairs
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.types import GREEDY, Batch
from tests.strategies import SEEDS, batch_of, episode_of, random_batch, with_greedy


def branches(batch: Batch) -> list[str]:
    return [e.branch for e in batch.episodes]


def test_best_and_worst_of_each_group_are_chosen_the_first_of_equals():
    """Group g: .2 .9 .1 .9 .1 in the places 0 1 3 4 6, so that place 1 is the first best and 3 the first worst. Group h: 1 1."""
    batch = batch_of([0.2, 0.9, 1, 0.1, 0.9, 1, 0.1], "gghgghg")
    made = preferences(batch, "dpo")
    assert branches(made) == ["", "chosen", "", "rejected", "", "", ""]
    assert pairs(made, made.channel("dpo")) == [(1, 3)]
    assert made.channel("dpo").tolist() == [e in (1, 3) and s for e, s in zip(batch.token_episode, batch.tokens("sampled"), strict=True)]
    assert np.array_equal(made.channel("pg"), batch.channel("pg")) and branches(batch) == [""] * 7


def test_all_rows_and_nothing_but_what_was_sampled():
    made = preferences(Batch((episode_of("a", "g", 1.0, [0, 1, 0], [0, 0, 1, 1]), episode_of("b", "g", 0.0, [0, 1, 1]))), "dpo")
    assert made.channel("dpo").astype(int).tolist() == [0, 1, 0, 0, 0, 1, 1, 0, 1, 1]


def test_rounding_is_no_preference():
    """.1 + .2 and .3 differ in the last bit."""
    assert 0.1 + 0.2 != 0.3
    assert branches(preferences(batch_of([0.1 + 0.2, 0.3]), "dpo")) == ["", ""]


def test_shaped_rewards_count_and_columns_stay():
    """Rewards 1 and 0 with .5 and 2 more on their tokens: 1.5 < 2."""
    batch = batch_of([1, 0]).with_columns(token_reward=np.array([0, 0.5, 0, 0, 0, 2.0]))
    made = preferences(batch, "dpo")
    assert branches(made) == ["rejected", "chosen"] and made.columns is batch.columns


def test_who_is_not_trained_on_is_no_side_of_a_pair():
    """A greedy episode of reward 5 beside 1 and 0; a demonstration, a group of one and an empty batch give nothing."""
    episode = episode_of("greedy", "g", 5.0, branch=GREEDY)
    rows = tuple(dataclasses.replace(row, channels={"pg": np.zeros(3, dtype=bool)}) for row in episode.rows)
    made = preferences(Batch((dataclasses.replace(episode, rows=rows), *batch_of([1, 0]).episodes)), "dpo")
    assert branches(made) == [GREEDY, "chosen", "rejected"]
    assert branches(preferences(batch_of([3]), "dpo")) == [""] and preferences(Batch(()), "dpo").episodes == ()


def test_only_where_an_active_term_wants_it():
    batch = batch_of([1, 0])
    assert marked(batch, [PpoClip(), Dpo(coef=0.0)]) is batch
    assert branches(marked(batch, [PpoClip(), Dpo()])) == ["chosen", "rejected"]


def test_every_term_that_wants_marks_names_one_who_makes_them():
    wanted = {variant.rows for variant in registry.variants("loss").values() if "rows" in vars(variant)}
    assert wanted == MAKERS.keys() and isinstance(Dpo(), Marking) and not isinstance(PpoClip(), Marking)


@pytest.mark.parametrize("seed", SEEDS[::10])
def test_any_batch_gives_pairs_that_the_loss_takes(seed):
    """At most one pair in a group, whose chosen side has the higher reward, in a batch with greedy episodes and demonstrations."""
    batch = with_greedy(random_batch(seed, hard=True), seed)
    batch = Batch(tuple(e for e in batch.episodes if not e.id.startswith("pair")))
    made = preferences(batch, "dpo")
    for chosen, rejected in pairs(made, made.channel("dpo")):
        assert batch.rewards[chosen] > batch.rewards[rejected] and made.episodes[chosen].group == made.episodes[rejected].group
