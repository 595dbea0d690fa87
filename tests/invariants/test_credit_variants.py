"""What must hold for every part of credit in the registry (I2, I6), on random batches: a new file is tested as soon as it is there."""

import json

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.batch.plan import plan
from mcore_agent.batch.select import select
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.protocols import Stateful
from tests.invariants.credited import (
    baseline,
    batch_for,
    credited,
    cut_for,
    estimators,
    given_by,
    label,
    made,
    needs_greedy,
    part_of,
    permuted_for,
    planted,
    switched_off,
    variants_of,
)
from tests.strategies import SEEDS

ESTIMATORS = estimators()
every_estimator = pytest.mark.parametrize("spec", ESTIMATORS, ids=label)


def sample(spec, count: int, salt: int) -> list[int]:
    """Seeds: others for each part and test, always the same."""
    seed = sum(map(ord, label(spec))) + salt
    return sorted(np.random.default_rng(seed).choice(len(SEEDS), count, replace=False).tolist())


def close(found: np.ndarray, expected: np.ndarray, batch) -> bool:
    """Up to the rounding of sums of its rewards."""
    scale = max(1.0, float(abs(batch.rewards).max(initial=0.0)))
    return bool(np.allclose(found, expected, rtol=1e-5, atol=1e-6 * min(1.0, float(abs(expected).max(initial=0.0))) + 1e-12 * scale))


# --------------------------------------------------------------------------------------------- estimators


@every_estimator
def test_the_policys_own_tokens_alone_get_something_and_all_of_it_is_finite(spec):
    """On 200 batches; and what stands outside of these tokens, NaN or infinity, does not change a bit."""
    greedy, moved = needs_greedy(spec), 0
    for seed in SEEDS:
        batch, clean = batch_for(seed, greedy), given_by(tuple(spec.items()), seed)
        mask = batch.channel("pg")
        for name, values in clean.items():
            assert values.shape == mask.shape and np.isfinite(values).all() and not values[~mask].any(), name
        moved += bool(clean["advantage"].any())
        dirty = credited(planted(batch), spec).columns
        for name, values in clean.items():
            assert np.array_equal(dirty[name], values), f"{name} of seed {seed} depends on other tokens' numbers"
    assert moved > 50  # the test would be empty if nothing ever moved


@every_estimator
def test_the_order_of_episodes_does_not_matter(spec):
    for seed in SEEDS:
        moved, source = permuted_for(seed, needs_greedy(spec))
        assert close(credited(moved, spec).columns["advantage"], baseline(tuple(spec.items()), seed)[source], moved), f"seed {seed}"


@pytest.mark.defect("A2")
@every_estimator
def test_an_episode_votes_once_however_its_rows_are_cut(spec):
    for seed in SEEDS:
        cut, source = cut_for(seed, needs_greedy(spec))
        expected = np.where(cut.channel("pg"), baseline(tuple(spec.items()), seed)[source], 0)
        assert np.array_equal(credited(cut, spec).columns["advantage"], expected), f"seed {seed}"


@pytest.mark.defect("A1")
@every_estimator
def test_an_episode_is_held_against_what_the_estimator_says(spec):
    """Against its group: each group alone gets what it gets among others, and an episode alone may not. Against a critic's
    values, or nothing: each episode alone gets it too. Against the batch: groups do matter to one another."""
    compares = made(spec).compares
    assert compares in ("group", "batch", "values", "history", "none")
    group_matters = episode_matters = False
    for seed in sample(spec, 30, 4):
        batch, together = batch_for(seed, needs_greedy(spec)), baseline(tuple(spec.items()), seed)
        groups = batch.by("group")
        for group in range(int(groups.max()) + 1):
            members = np.flatnonzero(groups == group)
            alone, own = part_of(batch, members)
            group_matters |= not close(credited(alone, spec).columns["advantage"], together[own], batch)
        if compares != "batch":
            assert not group_matters, f"seed {seed}: groups see each other"
        for episode in range(len(batch.episodes)) if compares in ("values", "none") or not episode_matters else ():
            alone, own = part_of(batch, [episode])
            episode_matters |= not close(credited(alone, spec).columns["advantage"], together[own], batch)
        if compares in ("values", "none"):
            assert not episode_matters, f"seed {seed}: episodes see each other"
    assert group_matters == (compares == "batch")
    assert episode_matters or compares != "group"


@pytest.mark.defect("A3")
@pytest.mark.parametrize("spec", [s for s in ESTIMATORS if made(s).compares not in ("history", "none")], ids=label)
def test_equal_rewards_teach_nothing(spec):
    """Exactly 0 in every group of two or more, so that the surrogate has no row to train on. To an estimator with values the
    rewards are equal when the values foretell them; one that scores views of its own gets the same score for all of them."""
    compares, checked = made(spec).compares, 0
    for seed in sample(spec, 60, 5):
        batch = batch_for(seed, needs_greedy(spec), equal=True, demos=False)
        if compares != "group" and (batch.rewards != 0).any():
            continue  # equal within groups only, and later rewards may count less
        nothing = np.zeros(len(batch.token_row), dtype=np.float32)
        batch = batch.with_columns(values=nothing, values_behind=nothing)
        found = credited(batch, spec, score=lambda view: np.full(len(view.scored), -1.0, dtype=np.float32))
        several = np.bincount(batch.by("group"))[batch.by("group")] > 1
        assert not found.columns["advantage"][several[found.token_episode]].any(), f"seed {seed}"
        if several.all():
            assert plan(found, [PpoClip()], token_budget=64, dp=2).empty
            checked += 1
    assert checked > 5


@pytest.mark.parametrize("spec", [s for kind in ("estimator", "normalizer", "transform", "filter", "shaping") for s in variants_of(kind)
                                  if isinstance(made(s), Stateful)], ids=label)  # fmt: skip
def test_what_is_remembered_goes_through_json(spec):
    """A pipeline that starts from the saved state goes on with the same bits, and its history has an effect."""
    specs = [spec] if spec["name"] in registry.variants("estimator") else [{"name": "grpo"}, spec]
    mattered = False
    for seed in sample(spec, 20, 6):
        first, second = (batch_for(s, needs_greedy(spec)) for s in (seed, (seed + 1) % len(SEEDS)))
        pipeline, other = Pipeline(specs), Pipeline(specs)
        credited(first, pipeline=pipeline)
        other.load_state_dict(json.loads(json.dumps(pipeline.state_dict())))
        went_on, resumed = (credited(second, pipeline=p).columns["advantage"] for p in (pipeline, other))
        assert np.array_equal(went_on, resumed) and pipeline.state_dict() == other.state_dict()
        mattered |= not np.array_equal(went_on, credited(second, *specs).columns["advantage"])
    assert mattered


# -------------------------------------------------------------------------------- filters and shapings


@pytest.mark.parametrize("spec", variants_of("filter"), ids=label)
def test_a_filter_keeps_episodes_as_they_are(spec):
    """Its choice does not depend on order (of groups that differ) nor on how rows are cut, and of kept groups nothing changes."""
    part, dropped = made(spec), 0
    for seed in SEEDS:
        batch = batch_for(seed)
        kept = part(batch)
        assert kept.dtype == bool and kept.shape == (len(batch.episodes),)
        dropped += int((~kept).sum())
        assert np.array_equal(part(cut_for(seed, False)[0]), kept) and np.array_equal(part(planted(batch)), kept)
        chosen = select(batch, np.flatnonzero(kept))
        assert all(a is batch.episodes[i] for a, i in zip(chosen.episodes, np.flatnonzero(kept), strict=True))
        moved = permuted_for(seed, False)[0]
        assert int(part(moved).sum()) == int(kept.sum()) or len(set(np.round(batch.rewards, 12))) < len(batch.episodes)
    assert dropped


@pytest.mark.parametrize("spec", variants_of("shaping"), ids=label)
def test_a_shaping_gives_finite_rewards_to_the_policys_own_tokens(spec):
    """In any order and cut; other tokens' numbers have no effect; an estimator sees it as if the episode had earned it."""
    part, moved = made(spec), 0
    for seed in SEEDS:
        batch = batch_for(seed)
        mask, given = batch.channel("pg"), part(batch)
        assert given.shape == mask.shape and np.isfinite(given[mask]).all()
        moved += bool(given[mask].any())
        assert np.array_equal(part(planted(batch))[mask], given[mask])
        other, source = permuted_for(seed, False)
        np.testing.assert_allclose(part(other)[mask[source]], given[source][mask[source]], rtol=1e-9, atol=1e-12)
        cut, source = cut_for(seed, False)
        np.testing.assert_allclose(part(cut)[cut.channel("pg")], given[source][cut.channel("pg")], rtol=1e-9, atol=1e-12)
    assert moved > 50


@pytest.mark.parametrize("spec", [s for kind in ("shaping", "transform") for s in variants_of(kind) if switched_off(s)], ids=label)
def test_a_part_that_is_switched_off_leaves_every_bit_as_it_was(spec):
    """Off is with every number at 0; with its own numbers it does change something."""
    off, estimator, changed = switched_off(spec), {"name": "grpo"}, False
    in_order = (lambda part: (part, estimator)) if spec["name"] in registry.variants("shaping") else (lambda part: (estimator, part))
    for seed in SEEDS:
        batch, alone = batch_for(seed), baseline((("name", "grpo"),), seed)
        assert np.array_equal(credited(batch, *in_order(off)).columns["advantage"], alone), f"seed {seed}"
        changed = changed or not np.array_equal(credited(batch, *in_order(spec)).columns["advantage"], alone)
    assert changed


# ------------------------------------------------------------------------- transforms and normalizers


def advantages(batch, seed: int, flat: bool = False) -> np.ndarray:
    """[N] random advantages of the policy's own tokens, or one for each episode."""
    rng = np.random.default_rng(7000 + seed)
    scale = (1.0, 1e6, 1e-9)[seed % 3]
    values = rng.normal(size=len(batch.episodes))[batch.token_episode] if flat else rng.normal(size=len(batch.token_row))
    return np.where(batch.channel("pg") & (rng.random(len(batch.episodes)) < 0.8)[batch.token_episode], scale * values, 0.0)


def applied(spec, advantage: np.ndarray, batch) -> np.ndarray:
    """[N] by a part of its own, which remembers nothing."""
    return np.where(batch.channel("pg"), made(spec)(advantage, batch), 0.0)


WEIGHERS = [s for kind in ("transform", "normalizer") for s in variants_of(kind)]


@pytest.mark.parametrize("spec", WEIGHERS, ids=label)
def test_what_weighs_advantages_is_finite_and_sees_neither_order_nor_cuts(spec):
    moved = 0
    for seed in SEEDS:
        batch, given = batch_for(seed), advantages(batch_for(seed), seed, flat=seed % 2 == 0)
        before, found = given.copy(), applied(spec, given, batch)
        assert np.array_equal(given, before), "it changed its argument"
        assert found.shape == given.shape and np.isfinite(found).all()
        moved += not np.allclose(found, given, rtol=1e-9, atol=0)
        scale = abs(found).max(initial=0.0)
        assert np.array_equal(applied(spec, given, planted(batch)), found)
        other, source = permuted_for(seed, False)
        np.testing.assert_allclose(applied(spec, given[source], other), found[source], rtol=1e-7, atol=1e-9 * scale)
        cut, source = cut_for(seed, False)
        trained = cut.channel("pg")
        np.testing.assert_allclose(applied(spec, np.where(trained, given[source], 0), cut), np.where(trained, found[source], 0),
                                   rtol=1e-7, atol=1e-9 * scale)  # fmt: skip
    assert moved > 20


@pytest.mark.parametrize("spec", variants_of("transform"), ids=label)
def test_a_transform_preserves_what_it_says(spec):
    """I6. Sums are compared up to the rounding of what was summed."""
    kept = made(spec).preserves
    assert kept <= {"sign", "sum", "turn_sum", "mean_weight"}
    for seed in SEEDS:
        batch = batch_for(seed)
        flat = seed % 2 == 0
        given = advantages(batch, seed, flat)
        found = applied(spec, given, batch)
        mass = 1e-9 * abs(given).max(initial=0.0) * 20
        if "sign" in kept:
            assert (np.sign(found) * np.sign(given) >= 0).all() and not found[given == 0].any()
        size = len(batch.episodes)
        totals = [np.bincount(batch.token_episode, weights=v, minlength=size) for v in (given, found)]
        if "sum" in kept or "turn_sum" in kept:
            np.testing.assert_allclose(totals[1], totals[0], rtol=1e-6, atol=mass)
        if "mean_weight" in kept and flat:
            np.testing.assert_allclose(totals[1], totals[0], rtol=1e-6, atol=mass)
        if "turn_sum" in kept:
            place = np.where(batch.token_turn >= 0, batch.token_turn, len(batch.turn_episode) + batch.token_episode)
            turns = [np.bincount(place, weights=v) for v in (given, found)]
            np.testing.assert_allclose(turns[1], turns[0], rtol=1e-6, atol=mass)


def members(measure: str, batch) -> tuple[np.ndarray, np.ndarray]:
    """[N] the unit within which a normalizer of this measure treats all tokens alike, and the member that a token belongs to."""
    everyone = np.zeros(len(batch.token_row), dtype=np.int64)
    token = np.arange(len(everyone))
    if measure in ("group", "graph"):
        return batch.by("group")[batch.token_episode], token
    if measure == "domain":
        return batch.by("domain")[batch.token_episode], token
    if measure == "trajectory":
        return everyone, batch.token_episode
    turn = np.where(batch.token_turn >= 0, batch.token_turn, len(batch.turn_episode) + batch.token_episode)
    return everyone, turn if measure == "turn" else token


@pytest.mark.parametrize("spec", variants_of("normalizer"), ids=label)
def test_a_normalizer_has_the_measure_that_it_says(spec):
    """Within its unit (a domain, a group, else the batch) it maps advantages by one line, which never falls."""
    measure = made(spec).measure
    assert measure in ("trajectory", "token", "turn", "group", "graph", "batch", "domain")
    for seed in SEEDS:
        batch, given, found = normalized(spec, seed)
        unit = members(measure, batch)[0]
        for own in (batch.channel("pg") & (unit == u) for u in np.unique(unit)):
            slope, offset = line(given[own], found[own])
            assert slope >= 0
            np.testing.assert_allclose(found[own], slope * given[own] + offset, rtol=1e-7, atol=1e-9)


def test_a_normalizer_that_centers_gives_each_member_of_its_measure_the_same_say():
    """The mean is then 0 and the mean square 1, with the weight 1/n on each of the n tokens of a member."""
    checked = dict.fromkeys(map(label, variants_of("normalizer")), 0)
    for spec in variants_of("normalizer"):
        for seed in SEEDS:
            batch, given, found = normalized(spec, seed)
            unit, member = members(made(spec).measure, batch)
            for own in (batch.channel("pg") & (unit == u) for u in np.unique(unit)):
                slope, offset = line(given[own], found[own])
                if abs(offset) <= 1e-6 * abs(slope):
                    continue
                weight = 1 / np.bincount(member[own])[member[own]]
                assert abs(np.average(found[own], weights=weight)) < 1e-9, spec
                assert np.average(found[own] ** 2, weights=weight) == pytest.approx(1, rel=1e-6), spec
                checked[label(spec)] += 1
    assert sum(count > 50 for count in checked.values()) >= 3, checked


def normalized(spec, seed: int):
    """A batch, one advantage for each of its episodes spread over its own tokens, and what the normalizer makes of them."""
    batch = batch_for(seed, demos=False)
    values = np.random.default_rng(8000 + seed).normal(0.4, 1.0, len(batch.episodes))
    given = np.where(batch.channel("pg"), values[batch.token_episode], 0.0)
    return batch, given, applied(spec, given, batch)


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and offset through the points of least and greatest x; through 0 where all have one x."""
    if len(x) and np.ptp(x) > 1e-9:
        low, high = x.argmin(), x.argmax()
        slope = float((y[high] - y[low]) / (x[high] - x[low]))
        return slope, float(y[low] - slope * x[low])
    return (float(y[0] / x[0]), 0.0) if len(x) else (0.0, 0.0)
