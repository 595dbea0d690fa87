"""The filter of StarPO-S (M22), and StarPO's recipe, which is GRPO over whole episodes of many turns (M21)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from mcore_agent import registry
from mcore_agent.batch.select import select
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import Pipeline, assign
from mcore_agent.credit.top_spread import TopSpread
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.types import Batch
from tests.credit.test_baselines import greedy_of
from tests.invariants.evaluate import alike, evaluate, outputs_for
from tests.strategies import SEEDS, batch_of, episode_of, random_batch, with_columns

RECIPES = Path(__file__).parent.parent.parent / "recipes"
# two episodes each, rewards m -+ s: deviations 0, .1, .5 and .3; the members of groups are mixed
FOUR = batch_of([1, 0.4, 0, 0.1, 1, 0.6, 1, 0.7], groups="abcdabcd")


def test_the_best_quarter_of_four_groups():
    """M22: deviations 0 .1 .5 .3, share .25: the third group alone; .5: the third and the fourth; .7 of 4 is 2; .1 still is 1."""
    for share, kept in ((0.25, "c"), (0.5, "cd"), (0.7, "cd"), (0.75, "bcd"), (1.0, "abcd"), (0.1, "c")):
        expected = [e.group in kept for e in FOUR.episodes]
        assert TopSpread(share=share)(FOUR).tolist() == expected


def test_groups_of_equal_deviation_stay_in_their_order():
    batch = batch_of([5, 6, 1, 2, 8, 9], groups="zzyyxx")
    assert TopSpread(share=0.4)(batch).tolist() == [True, True, False, False, False, False]


def test_what_is_kept_stays_as_it_is_to_the_bit():
    """M22: rows are the same objects, and advantages those that the groups get among the others."""
    for seed in SEEDS[:40]:
        batch = random_batch(seed, demos=False)
        pipeline = Pipeline([{"name": "top_spread", "share": 0.5}, {"name": "grpo"}])
        places = pipeline.keep(batch)
        kept = select(batch, places)
        assert all(a is batch.rows[b] for a, b in zip(kept.rows, np.flatnonzero(np.isin(batch.row_episode, places)), strict=True))
        whole = assign(batch, [{"name": "grpo"}]).columns["advantage"]
        assert np.array_equal(pipeline(kept)[0].columns["advantage"], whole[np.isin(batch.token_episode, places)])
        groups, left = ({e.group for e in b.episodes if any(row.sampled.any() for row in e.rows)} for b in (batch, kept))
        assert len(left) == (max(1, len(groups) // 2) if groups else 0)


@pytest.mark.defect("A12")
def test_the_tasks_own_reward_decides_and_not_a_penalty_on_length():
    """All of group a are right, at different lengths; in b one is wrong. By the sum a has the larger deviation."""

    def with_length(episode, penalty):
        return replace(episode, rewards={**episode.rewards, "overlong": penalty})

    rewards, penalties = [1.0, 1.0, 1.0, 0.0], [0.0, -2.0, 0.0, 0.0]
    batch = Batch(tuple(map(with_length, batch_of(rewards, "aabb").episodes, penalties)))
    assert TopSpread(share=0.5)(batch).tolist() == [True, True, False, False]
    assert TopSpread(share=0.5, reward="outcome")(batch).tolist() == [False, False, True, True]
    with pytest.raises(CreditError, match="reward is 'outcom', but episode 'e0' has only outcome, overlong"):
        TopSpread(reward="outcom")(batch)


def test_a_greedy_episode_goes_with_its_group_and_does_not_count():
    """Its reward 9 would make a the loudest group."""
    batch = Batch((*batch_of([1, 1, 1, 0], "aabb").episodes, greedy_of("a", 9.0), greedy_of("b", 0.0)))
    assert TopSpread(share=0.5)(batch).tolist() == [False, False, True, True, False, True]


def test_demonstrations_stay():
    """They are no group: of the others the better half is kept."""
    demo = replace(episode_of("d", "demo", 0.0, [0, 0]), rewards={})
    batch = Batch((demo, *batch_of([1, 1, 1, 0], "aabb").episodes))
    assert TopSpread(share=0.5)(batch).tolist() == [True, False, False, True, True]
    assert TopSpread(reward="outcome")(Batch((demo,))).tolist() == [True]


def test_settings_out_of_range_are_refused():
    for share in (0.0, 1.5):
        with pytest.raises(CreditError, match=f"'top_spread': share is {share}, but must be above 0 and at most 1"):
            registry.create("filter", {"name": "top_spread", "share": share})


def loss_of(recipe: dict, seed: int):
    batch = with_columns(random_batch(seed), seed)
    batch = assign(batch, recipe["credit"])
    return evaluate(batch, [registry.create("loss", spec) for spec in recipe["loss"]], outputs_for(batch, seed))


def test_starpo_is_grpo_over_all_turns():
    """M21: loss, metrics and gradients of StarPO's recipe are those of GRPO with the clipped surrogate, bit by bit."""
    recipe = yaml.safe_load((RECIPES / "starpo.yaml").read_text())
    moved = 0
    for seed in SEEDS[:40]:
        ours = loss_of(recipe, seed)
        batch = assign(with_columns(random_batch(seed), seed), [{"name": "grpo"}])
        theirs = evaluate(batch, [PpoClip(clip_low=0.2, clip_high=0.2)], outputs_for(batch, seed))
        assert ours.loss == theirs.loss and ours.metrics == theirs.metrics and alike(ours, theirs)
        moved += bool(ours.loss)
    assert moved > 30 and recipe["rollout"]["group_size"] == 16 and recipe["rollout"]["max_turns"] > 1


def test_starpo_s_adds_the_filter_and_a_higher_bound():
    """M22: a quarter of the groups, clip_high .28, no KL term."""
    recipe = yaml.safe_load((RECIPES / "starpo_s.yaml").read_text())
    assert recipe["credit"] == [{"name": "top_spread", "share": 0.25}, {"name": "grpo"}]
    assert recipe["loss"] == [{"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "aggregate": "token_mean"}]
