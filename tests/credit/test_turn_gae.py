"""Advantages over turns and on two levels, by hand (M5, M6)."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import assign
from mcore_agent.credit.turn_steps import TurnSteps
from mcore_agent.types import Batch, Episode, Segment, Task, Turn
from tests.strategies import SEEDS, episode_of, random_batch, row_of, with_values


def turns_of(lengths, rewards, id="a", observed=1, group="g") -> Episode:
    """One row: a prompt token, then turns of so many sampled tokens, each with ``observed`` tokens of an observation after it."""
    mask, segments = [0], [Segment(0, 1, -1, "prompt")]
    for turn, length in enumerate(lengths):
        segments.append(Segment(len(mask), len(mask) + length, turn, "action"))
        mask += [1] * length
        segments.append(Segment(len(mask), len(mask) + observed, turn, "obs"))
        mask += [0] * observed
    records = tuple(Turn(i, "act") for i in range(len(lengths)))
    return Episode(id, Task(id, "toy", ()), group, (row_of(mask, segments=tuple(segments)),), records, {"step": list(rewards)})


def at_steps(batch: Batch, values) -> np.ndarray:
    """[N] the values at the sampled tokens, NaN at all others: whoever reads those is found out."""
    out = np.full(len(batch.token_row), np.nan)
    out[batch.channel("pg")] = values
    return out


def credited(batch: Batch, values, name="turn_gae", **settings):
    """Advantages and returns at the sampled tokens."""
    batch = batch.with_columns(values=at_steps(batch, values), values_behind=at_steps(batch, values))
    found = assign(batch, [{"name": name, **settings}]).columns
    mask = batch.channel("pg")
    assert not found["advantage"][~mask].any() and not found["returns"][~mask].any()
    return found["advantage"][mask], found["returns"][mask]


@pytest.mark.parametrize(("gamma", "lam", "expected"), [
    # from the end: delta = 1 - .5 = .5, then twice gamma * .5 - .5
    (0.99, 0.95, [-0.005 + 0.9405 * 0.46525, -0.005 + 0.9405 * 0.5, 0.5]),  # .43257, .46525, .5
    (1, 1, [0.5, 0.5, 0.5]),
    (1, 0, [0, 0, 0.5]),
])  # fmt: skip
def test_three_turns_by_hand(gamma, lam, expected):
    """M5: r = 0 0 1 and V = .5 in the states where the turns of 2, 1 and 3 tokens begin; values later in a turn are not read."""
    batch = Batch((turns_of([2, 1, 3], [0, 0, 1]),))
    advantage, returns = credited(batch, [0.5, 9, 0.5, 0.5, -9, 9], gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantage, np.repeat(expected, [2, 1, 3]), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(returns, np.repeat(np.array(expected) + 0.5, [2, 1, 3]), rtol=1e-6)


def test_every_token_that_a_turn_was_rewarded_for_counts_in_it():
    """.25 and .5 for two tokens of turn 0, 3 for the episode: turn 0 earns .75, turn 1 3. With V = 0: A = 3.75 and 3."""
    episode = replace(turns_of([2, 1], [0, 0]), rewards={"outcome": 3.0})
    batch = Batch((episode,)).with_columns(token_reward=np.array([0, 0.25, 0.5, 0, 0, 0]))
    advantage, _ = credited(batch, np.zeros(3))
    assert advantage.tolist() == [3.75, 3.75, 3.0]


def test_an_episode_without_records_of_turns_is_one_turn():
    """Reward 1, V = .2 where its first token was drawn: A = .8 on all three tokens, in two rows."""
    advantage, returns = credited(Batch((episode_of("a", "g", 1.0, [0, 1, 1], [0, 0, 1]),)), [0.2, 5, 7])
    np.testing.assert_allclose(advantage, [0.8] * 3, rtol=1e-6)
    np.testing.assert_allclose(returns, [1.0] * 3, rtol=1e-6)


def test_rows_whose_turns_interleave_are_put_in_order():
    """Row 0 holds turns 0 and 2, row 1 holds turn 1: with V = 1 2 4 by turn, reward 0 and gamma .5, lam 0: A = 0, 0, -4."""
    whole = turns_of([1, 1, 1], [0, 0, 0], observed=0)
    first = row_of([0, 1, 1], segments=(Segment(1, 2, 0, "action"), Segment(2, 3, 2, "action")))
    second = row_of([0, 1], segments=(Segment(1, 2, 1, "action"),))
    batch = Batch((replace(whole, rows=(first, second)),))
    advantage, _ = credited(batch, [1, 4, 2], gamma=0.5, lam=0)  # tokens: turn 0, turn 2, turn 1
    assert advantage.tolist() == [0, -4, 0]
    turns = TurnSteps.of(batch)
    assert turns.steps.tolist() == [1, 4, 2] and turns.size.tolist() == [1, 1, 1]


@pytest.mark.defect("A8")
@pytest.mark.parametrize("name", ["turn_gae", "bilevel_gae"])
def test_observations_are_transparent(name):
    found = []
    for count in (0, 7, 500):
        batch = Batch((turns_of([2, 3], [0.5, 1.0], observed=count),))
        found.append([x.tolist() for x in credited(batch, [0.3, -0.2, 0.7, 0.15, 0.4], name)])
    assert found[0] == found[1] == found[2] and len(set(found[0][0])) >= 2


def test_two_levels_by_hand():
    """The example of the docstring: turn A = 1 - .4 = .6; turn 0 ends with .5 * (.4 + .6) = .5; then tokens towards their ends."""
    batch = Batch((turns_of([2, 2], [0, 1]),))
    advantage, returns = credited(batch, [0.1, 0.2, 0.4, 0.7], "bilevel_gae", turn_gamma=0.5)
    np.testing.assert_allclose(advantage, [0.4, 0.3, 0.6, 0.3], rtol=1e-6)
    np.testing.assert_allclose(returns, [0.5, 0.5, 1, 1], rtol=1e-6)


def test_both_levels_have_a_lambda_of_their_own():
    """As above with turn_lam 0: turn 0 ends with .5 * .4 = .2. With gamma .5 and lam 0 in a turn: .5 * .2 - .1 = 0, .2 - .2 = 0,
    then .5 * .7 - .4 = -.05 and 1 - .7 = .3."""
    batch = Batch((turns_of([2, 2], [0, 1]),))
    advantage, _ = credited(batch, [0.1, 0.2, 0.4, 0.7], "bilevel_gae", turn_gamma=0.5, turn_lam=0, gamma=0.5, lam=0)
    np.testing.assert_allclose(advantage, [0, 0, -0.05, 0.3], atol=1e-7)


def test_one_turn_is_gae_of_its_tokens():
    """M6, with rewards in the middle of the turn too."""
    rng = np.random.default_rng(0)
    batch = Batch(tuple(turns_of([n], [float(n)], id=f"e{n}") for n in (1, 3, 7)))
    batch = batch.with_columns(token_reward=np.where(batch.channel("pg"), rng.normal(size=len(batch.token_row)), 0))
    values = rng.normal(size=11)
    for settings in ({}, {"gamma": 0.9, "lam": 0.7}):
        ours, gae = credited(batch, values, "bilevel_gae", turn_gamma=0.5, **settings), credited(batch, values, "gae", **settings)
        assert np.array_equal(ours, gae) and ours[0].any()


def test_one_token_in_each_turn_is_turn_gae():
    """M6."""
    rng = np.random.default_rng(1)
    batch = Batch(tuple(turns_of([1] * n, rng.normal(size=n), id=f"e{n}") for n in (1, 3, 7)))
    values = rng.normal(size=11)
    ours = credited(batch, values, "bilevel_gae", turn_gamma=0.9, turn_lam=0.7)
    theirs = credited(batch, values, "turn_gae", gamma=0.9, lam=0.7)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_turn_that_earns_nothing_still_ends():
    """M6: turn 1 of three earns 0, and so do all but the last; V = 0, turn_gamma .5: turns end with .25, .5 and 1."""
    batch = Batch((turns_of([2, 3, 1], [0, 0, 1]),))
    advantage, _ = credited(batch, np.zeros(6), "bilevel_gae", turn_gamma=0.5)
    assert advantage.tolist() == [0.25, 0.25, 0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("name", ["turn_gae", "bilevel_gae"])
def test_random_batches_have_finite_numbers_and_lam_1_is_the_return(name):
    """With lam 1 and no discount on any level, returns are what the episode still earns: all of it here, in every token."""
    for seed in SEEDS[:60]:
        plain = (replace(e, rewards={"outcome": e.reward}) for e in random_batch(seed).episodes)
        batch = with_values(Batch(tuple(plain)), seed)
        settings = {"turn_gamma": 1.0} if name == "bilevel_gae" else {}
        found = assign(batch, [{"name": name, **settings}]).columns
        goal = np.where(batch.channel("pg"), batch.rewards[batch.token_episode], 0)
        np.testing.assert_allclose(found["returns"], goal, rtol=1e-5, atol=1e-5 * max(1, abs(goal).max()))


@pytest.mark.parametrize(("name", "key"), [
    ("turn_gae", "gamma"), ("turn_gae", "lam"), ("bilevel_gae", "turn_gamma"), ("bilevel_gae", "turn_lam"), ("bilevel_gae", "gamma"),
    ("bilevel_gae", "lam"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(name, key):
    with pytest.raises(CreditError, match=rf"'{name}': {key} is -0.1, but must be in \[0, 1\]"):
        registry.create("estimator", {"name": name, key: -0.1})
    with pytest.raises(CreditError, match=f"'{name}' needs the batch column 'values'"):
        assign(Batch((turns_of([1], [0]),)), [{"name": name}])
