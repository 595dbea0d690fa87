"""Advantages from values against numbers worked out by hand (M4), and the returns that a critic learns (M24)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.batch.select import usable
from mcore_agent.credit.gae import Gae
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import assign
from mcore_agent.credit.stretches import step_rewards
from mcore_agent.credit.sums import decayed_sum, run_ends
from mcore_agent.protocols import Credit
from mcore_agent.types import Batch, Episode, Segment, Task, Turn
from tests.credit.test_assign import planted  # noqa: F401
from tests.strategies import SEEDS, batch_of, episode_of, random_batch, row_of, with_values


def credited(batch: Batch, values, **settings) -> tuple[list[float], list[float]]:
    """(advantages, returns) [N]"""
    found = assign(batch.with_columns(values=np.array(values, dtype=np.float64)), [{"name": "gae", **settings}]).columns
    return found["advantage"].tolist(), found["returns"].tolist()


def test_two_tokens_by_hand():
    """The example of the docstring. Reward 1, V = .2, .6, lam 1/2: delta = (.4, .4); A = (.4 + .4 / 2, .4); A + V = (.8, 1)."""
    advantage, returns = credited(Batch((episode_of("a", "g", 1.0, [0, 1, 1]),)), [9, 0.2, 0.6], lam=0.5)
    np.testing.assert_allclose(advantage, [0, 0.6, 0.4], rtol=1e-6)
    np.testing.assert_allclose(returns, [0, 0.8, 1.0], rtol=1e-6)


def test_three_tokens_with_discount_by_hand():
    """Reward 1 at the end, V = .5 .5 .5, gamma .99, lam .95. From the end: delta = 1 - .5 = .5, then twice
    .99 * .5 - .5 = -.005. A = .5; -.005 + .9405 * .5 = .46525; -.005 + .9405 * .46525 = .4325676."""
    advantage, _ = credited(Batch((episode_of("a", "g", 1.0, [0, 1, 1, 1]),)), [0, 0.5, 0.5, 0.5], gamma=0.99, lam=0.95)
    np.testing.assert_allclose(advantage, [0, 0.4325676, 0.46525, 0.5], rtol=1e-6)


@pytest.mark.defect("A8")
@pytest.mark.parametrize("lam", [0, 0.3, 1])
@pytest.mark.parametrize("gamma", [0.9, 1])
def test_observations_are_transparent(gamma, lam):
    """M4: the same episode with 0, 7 or 500 tokens of an observation in it, whose values are junk, gives the same bits."""
    found = []
    for count in (0, 7, 500):
        batch = Batch((episode_of("a", "g", 1.0, [0, 1, 1, *[0] * count, 1, 1]),))
        values = np.array([np.nan, 0.3, -0.2, *[np.nan] * count, 0.7, 0.15])
        advantage, returns = credited(batch, values, gamma=gamma, lam=lam)
        mask = batch.channel("pg")
        assert not np.array(advantage)[~mask].any() and not np.array(returns)[~mask].any()
        found.append((np.array(advantage)[mask].tolist(), np.array(returns)[mask].tolist()))
    assert found[0] == found[1] == found[2] and len(set(found[0][0])) == 4


def test_lam_1_is_return_minus_value_and_lam_0_one_step():
    """M4: with lam 1 A = G - V, where G = gamma^(steps to the end) * reward; with lam 0 A = r + gamma V' - V."""
    for seed in SEEDS[:50]:
        batch = with_values(random_batch(seed), seed)
        value, mask = batch.columns["values"], batch.channel("pg")
        far, near = (assign(batch, [{"name": "gae", "gamma": 0.9, "lam": lam}]).columns for lam in (1.0, 0.0))
        for i, episode in enumerate(batch.episodes):
            if any(np.ndim(value) for value in episode.rewards.values()):
                continue  # of these the next tests speak
            own = np.flatnonzero(mask & (batch.token_episode == i))
            goal = [episode.reward * 0.9 ** (len(own) - 1 - k) for k in range(len(own))]
            np.testing.assert_allclose(far["advantage"][own], goal - value[own], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(far["returns"][own], goal, rtol=1e-5, atol=1e-6)
            following = [*(0.9 * value[own][1:]), episode.reward] if len(own) else []
            np.testing.assert_allclose(near["advantage"][own], following - value[own], rtol=1e-5, atol=1e-6)


def two_turns(rewards, second=(0, 1, 1, 0)) -> Episode:
    """Turn 0 samples 2 tokens, turn 1 those of ``second`` after an observation."""
    row = row_of([0, 1, 1, 0, *second], segments=(
        Segment(0, 1, -1, "prompt"), Segment(1, 3, 0, "action"), Segment(3, 4, 0, "obs"), Segment(4, 4 + len(second), 1, "action"),
    ))  # fmt: skip
    return Episode("a", Task("a", "toy", ()), "g", (row,), tuple(Turn(i, "act") for i in range(2)), rewards)


def test_rewards_of_turns_count_where_the_turn_ends():
    """.25 for turn 0, -1 for turn 1 and 3 for the whole: at tokens 2, 6 and 6. With V = 0 and lam 1 A is what is to come."""
    batch = Batch((episode_of("b", "g", 5.0, [0, 1]), two_turns({"step": [0.25, -1.0], "outcome": 3.0})))
    assert step_rewards(batch).tolist() == [0, 5, 0, 0, 0.25, 0, 0, 0, 2, 0]
    advantage, returns = credited(batch, np.zeros(10))
    assert advantage == returns == [0, 5, 0, 2.25, 2.25, 0, 0, 2, 2, 0]


@pytest.mark.parametrize(("second", "expected"), [
    ((0, 0), [0, 0, 0.25 - 1, 0, 0, 0]),  # turn 1 has no token of its own: its reward follows what turn 0 said
    ((1, 0), [0, 0, 0.25, 0, -1, 0]),
])  # fmt: skip
def test_no_reward_of_a_turn_is_lost(second, expected):
    assert step_rewards(Batch((two_turns({"step": [0.25, -1.0]}, second),))).tolist() == expected


def test_a_reward_before_the_first_token_counts_at_it():
    silent = two_turns({"step": [0.25, -1.0]})
    narrow = replace(silent.rows[0], channels={"pg": np.array([0, 0, 0, 0, 0, 1, 1, 0], dtype=bool)})
    assert step_rewards(Batch((replace(silent, rows=(narrow,)),))).tolist() == [0, 0, 0, 0, 0, 0.25, -1, 0]
    nothing = replace(narrow, channels={"pg": np.zeros(8, dtype=bool)})
    assert not step_rewards(Batch((replace(silent, rows=(nothing,)),))).any()


def test_an_episode_goes_on_in_its_next_row_but_not_in_the_next_episode():
    """Episode a samples one token in each of two rows, b one token. With V = 1, 2, 4 and gamma .5, lam 1:
    a: delta = .5 * 2 - 1 = 0, then 8 - 2 = 6; A = 0 + .5 * 6 = 3, 6. b: 0 - 4."""
    batch = Batch((episode_of("a", "g", 8.0, [0, 1], [0, 0, 1]), episode_of("b", "h", 0.0, [0, 1])))
    advantage, returns = credited(batch, [0, 1, 0, 0, 2, 0, 4], gamma=0.5)
    assert advantage == [0, 3, 0, 0, 6, 0, -4]
    assert returns == [0, 4, 0, 0, 8, 0, 0]


def test_a_failed_episode_stays_out():
    """Between two others it changes no number of theirs."""
    a, b, c = batch_of([1, 0, 3]).episodes
    kept, reasons = usable([a, replace(b, status="infra_fail", reason="sandbox died"), c])
    assert reasons == {"sandbox died": 1}
    advantage, returns = credited(Batch(tuple(kept)), [0, 0.5, 0.25, 0, 1, 2], lam=0)
    assert advantage == [0, 0.25 - 0.5, 1 - 0.25, 0, 2 - 1, 3 - 2]
    assert returns == [0, 0.25, 1, 0, 2, 3]


def test_returns_are_not_touched_by_a_transform(planted):  # noqa: F811
    """M24: the critic learns A + V of the advantages before they are whitened."""

    @planted("transform", "tripled")
    @dataclass(frozen=True)
    class Tripled:
        needs: ClassVar[tuple[str, ...]] = ()
        preserves: ClassVar[frozenset[str]] = frozenset()

        def __call__(self, advantage, batch):
            return 3 * advantage

    batch = Batch((episode_of("a", "g", 1.0, [0, 1]),)).with_columns(values=np.array([0, 0.25]))
    found = assign(batch, [{"name": "gae"}, {"name": "tripled"}]).columns
    assert found["advantage"].tolist() == [0, 2.25] and found["returns"].tolist() == [0, 1]
    assert found["returns"].dtype == np.float32


def test_an_estimator_gives_what_it_says(planted):  # noqa: F811
    @planted("estimator", "other")
    @dataclass(frozen=True)
    class Other:
        given: str = "returns"

        needs: ClassVar[tuple[str, ...]] = ()
        gives: ClassVar[tuple[str, ...]] = ("returns",)
        axis: ClassVar[str] = "episode"

        def __call__(self, batch):
            return Credit(batch.rewards, {self.given: np.full(len(batch.token_row), np.inf)} if self.given else {})

    with pytest.raises(CreditError, match=r"'other' gave the columns \['else'\], but says \['returns'\]"):
        assign(batch_of([1]), [{"name": "other", "given": "else"}])
    with pytest.raises(CreditError, match=r"'other' gave the columns \[\]"):
        assign(batch_of([1]), [{"name": "other", "given": ""}])
    with pytest.raises(CreditError, match="not finite, at token 0"):
        assign(batch_of([1]), [{"name": "other"}])


def test_edges():
    nothing = Batch((episode_of("a", "g", 1.0, [0, 0]),))
    assert credited(nothing, [1, 1]) == ([0, 0], [0, 0])
    assert assign(Batch((), {"values": np.zeros(0)}), [{"name": "gae"}]).columns["returns"].shape == (0,)
    with pytest.raises(CreditError, match="'gae' needs the batch column 'values'; there are: none"):
        assign(nothing, [{"name": "gae"}])
    for name in ("gamma", "lam"):
        with pytest.raises(CreditError, match=rf"{name} is 1.1, but must be in \[0, 1\]"):
            registry.create("estimator", {"name": "gae", name: 1.1})
    assert Gae(gamma=0).gamma == 0


def test_sums_of_ragged_episodes():
    """Runs of 1, 3 and 2 with decay 1/2, each from its end: 1 | 1 + (1 + 1/2) / 2, 1 + 1/2, 1 | 1 + 1/2, 1."""
    out = decayed_sum(np.ones(6), run_ends(np.array([0, 2, 2, 2, 5, 5])), 0.5)
    assert out.tolist() == [1, 1.75, 1.5, 1, 1.5, 1]
