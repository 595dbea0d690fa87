"""Advantages reach the policy's own tokens, and only those."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError, scores
from mcore_agent.credit.pipeline import KINDS, assign
from mcore_agent.registry import RegistryError, register
from mcore_agent.types import Batch
from tests.strategies import batch_of, episode_of

SPECS = [{"name": "grpo", "eps": 0}]


@pytest.fixture
def planted():
    """Registers variants for one test and takes them out again."""
    before = {kind: dict(registry.variants(kind)) for kind in KINDS}
    yield register
    for kind, known in before.items():
        registry._found[kind].clear()
        registry._found[kind].update(known)


@pytest.mark.defect("A11")
def test_every_row_gets_its_episodes_scalar_times_its_own_mask():
    """Episode a (+1) has rows with masks 0 1 1 and 0 0 1 0, episode b (-1) has 0 1: no row borrows another's mask."""
    batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1], [0, 0, 1, 0]), episode_of("b", "g", 0.0, [0, 1])))
    advantage = assign(batch, SPECS).columns["advantage"]
    assert advantage.dtype == np.float32
    assert advantage.tolist() == [0, 1, 1, 0, 0, 1, 0, 0, -1]


@pytest.mark.defect("A17")
def test_rewards_and_tokens_stay_together_in_any_order():
    """Episode i has reward i and i + 1 sampled tokens; whatever the order, its tokens carry its own advantage."""
    rewards = [0.0, 1.0, 2.0, 3.0, 4.0]
    episodes = [episode_of(f"e{i}", "g", r, [0] + [1] * (i + 1)) for i, r in enumerate(rewards)]
    expected = (np.array(rewards) - 2) / np.sqrt(2)  # variance (4 + 1 + 0 + 1 + 4) / 5 = 2
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(5)
        batch = assign(Batch(tuple(episodes[i] for i in order)), SPECS)
        for place, i in enumerate(order):
            own = batch.columns["advantage"][batch.token_episode == place]
            np.testing.assert_allclose(own, [0] + [expected[i]] * (i + 1), rtol=1e-6)


def test_a_narrower_pg_channel_wins_over_the_sampled_mask():
    episode = episode_of("a", "g", 1.0, [0, 1, 1, 1])
    narrow = replace(episode.rows[0], channels={"pg": np.array([False, True, False, True])})
    batch = Batch((replace(episode, rows=(narrow,)), episode_of("b", "g", 0.0, [0, 1])))
    assert assign(batch, SPECS).columns["advantage"].tolist() == [0, 1, 0, 1, 0, -1]


def test_a_transform_follows_the_estimator_and_cannot_reach_other_tokens(planted):
    @planted("transform", "doubled_everywhere")
    @dataclass(frozen=True)
    class Doubled:
        needs: ClassVar[tuple[str, ...]] = ()
        preserves: ClassVar[frozenset[str]] = frozenset()

        def __call__(self, advantage, batch):
            return 2 * advantage + 1

    batch = assign(batch_of([1, 0]), [*SPECS, {"name": "doubled_everywhere"}])
    assert batch.columns["advantage"].tolist() == [0, 3, 3, 0, -1, -1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_a_part_says_of_other_tokens_is_dropped(planted, dtype):
    """A shaping gives 5 to every token, and an estimator every token what its episode earned: with one own token in the first
    episode and two in the second they are 5 and 10 there, and nothing elsewhere."""

    @planted("shaping", "five")
    @dataclass(frozen=True)
    class Five:
        needs: ClassVar[tuple[str, ...]] = ()

        def __call__(self, batch):
            return np.full(len(batch.token_row), 5, dtype=dtype)

    @planted("estimator", "score_everywhere")
    @dataclass(frozen=True)
    class ScoreEverywhere:
        needs: ClassVar[tuple[str, ...]] = ()
        gives: ClassVar[tuple[str, ...]] = ()
        axis: ClassVar[str] = "token"

        def __call__(self, batch):
            return scores(batch)[batch.token_episode].astype(dtype)

    batch = Batch((episode_of("a", "g", 0.0, [0, 1, 0]), episode_of("b", "g", 0.0, [0, 1, 1])))
    found = assign(batch, [{"name": "five"}, {"name": "score_everywhere"}]).columns
    assert found["token_reward"].tolist() == [0, 5, 0, 0, 5, 5]
    assert found["advantage"].tolist() == [0, 5, 0, 0, 10, 10] and found["advantage"].dtype == np.float32


def test_a_turn_estimator_is_spread_over_turns_and_a_missing_column_is_named(planted):
    @planted("estimator", "by_values")
    @dataclass(frozen=True)
    class ByValues:
        needs: ClassVar[tuple[str, ...]] = ("values",)
        gives: ClassVar[tuple[str, ...]] = ()
        axis: ClassVar[str] = "token"

        def __call__(self, batch):
            return batch.columns["values"]

    spec = [{"name": "by_values"}]
    batch = batch_of([1, 0])
    with pytest.raises(CreditError, match="'by_values' needs the batch column 'values'; there are: none"):
        assign(batch, spec)
    with pytest.raises(CreditError, match=r"gave shape \(2,\), expected \(6,\)"):
        assign(batch.with_columns(values=np.zeros(2)), spec)
    with pytest.raises(CreditError, match="not finite, at token 3"):
        assign(batch.with_columns(values=np.array([0, 0, 0, np.inf, 0, np.nan])), spec)


def test_bad_input_is_refused_by_name():
    with pytest.raises(CreditError, match="names no estimator"):
        assign(batch_of([1, 0]), [])
    with pytest.raises(RegistryError, match=r"no part of credit 'grop'; did you mean 'grpo'\?"):
        assign(batch_of([1, 0]), [{"name": "grop"}])
    with pytest.raises(CreditError, match="credit names grpo, grpo; give exactly one"):
        assign(batch_of([1, 0]), [*SPECS, {"name": "grpo"}])
    with pytest.raises(CreditError, match="episode 'e0' is in the batch 2 times"):
        assign(Batch(batch_of([1, 0]).episodes[:1] * 2), SPECS)


def test_a_batch_without_episodes_has_an_empty_column():
    assert assign(Batch(()), SPECS).columns["advantage"].shape == (0,)
