"""Importance weights against numbers derived from their definitions (M32), and the age limit (I3)."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mcore_agent.batch.age import limit_age
from mcore_agent.batch.correction import weigh
from mcore_agent.batch.microbatch import PlanError
from mcore_agent.loss.aggregate import weights
from mcore_agent.loss.common import LossError
from mcore_agent.loss.correction import Correction
from mcore_agent.types import Batch
from tests.strategies import SEEDS, cut_rows, episode_of, random_batch, row_of, with_columns

INF = math.inf
RATIOS = [0.5, -0.5, 1.2]  # logarithms


def batch_with(*gaps, mask=None) -> Batch:
    """One episode per list of log-ratios: a prompt token of junk, then its sampled tokens."""
    batch = Batch(tuple(episode_of(f"e{i}", "g", 0.0, mask or [0] + [1] * len(g)) for i, g in enumerate(gaps)))
    prox = np.concatenate([[np.nan, *(-1 + np.array(g))] for g in gaps])
    old = np.concatenate([[np.nan, *([-1] * len(g))] for g in gaps])
    return batch.with_columns(logp_prox=prox, logp_old=old)


def found(batch: Batch, **knobs) -> list[float]:
    return weigh(batch, Correction(**knobs))[0].tolist()


def test_f24_tokens_truncated_at_2():
    """e^.5 = 1.64872, e^-.5 = .60653, e^1.2 = 3.32 and so 2. The prompt's NaN is not looked at."""
    got = found(batch_with(RATIOS), high=2.0)
    np.testing.assert_allclose(got, [0, math.exp(0.5), math.exp(-0.5), 2], rtol=1e-6)
    assert [round(w, 5) for w in got] == [0, 1.64872, 0.60653, 2]


def test_f24_geometric_mean_is_rejected_by_a_narrow_band():
    """(.5 - .5 + 1.2) / 3 = .4 and e^.4 = 1.49182, outside [.99, 1.01] and inside [.5, 1.5]."""
    assert found(batch_with(RATIOS), level="geometric", treatment="mask", low=0.99, high=1.01) == [0, 0, 0, 0]
    got = found(batch_with(RATIOS), level="geometric", treatment="mask", low=0.5, high=1.5)
    np.testing.assert_allclose(got, [0] + [math.exp(0.4)] * 3, rtol=1e-6)
    assert round(got[1], 5) == 1.49182


TOKEN, SEQUENCE, GEOMETRIC = [math.exp(r) for r in RATIOS], [math.exp(1.2)] * 3, [math.exp(0.4)] * 3


@pytest.mark.parametrize(("level", "raw"), [("token", TOKEN), ("sequence", SEQUENCE), ("geometric", GEOMETRIC)])
@pytest.mark.parametrize(("treatment", "low", "high"), [
    ("truncate", 0, 2), ("truncate", 0, INF), ("clip", 0.8, 1.6), ("clip", 0, 1.2), ("mask", 0.7, 2), ("mask", 0, 1.4), ("mask", 0, INF),
])  # fmt: skip
def test_the_three_knobs_are_independent(level, raw, treatment, low, high):
    expected = {
        "truncate": [min(w, high) for w in raw],
        "clip": [low if w < low else high if w > high else w for w in raw],
        "mask": [w if low <= w <= high else 0 for w in raw],
    }[treatment]
    got = found(batch_with(RATIOS), level=level, treatment=treatment, low=low, high=high)
    np.testing.assert_allclose(got, [0, *expected], rtol=1e-6)


def test_each_episode_is_a_sequence_of_its_own():
    """Sums .3 + .2 = .5 and -1; means .25 and -1."""
    batch = batch_with([0.3, 0.2], [-1.0])
    np.testing.assert_allclose(found(batch, level="sequence"), [0, *[math.exp(0.5)] * 2, 0, math.exp(-1)], rtol=1e-6)
    np.testing.assert_allclose(found(batch, level="geometric"), [0, *[math.exp(0.25)] * 2, 0, math.exp(-1)], rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_an_episode_has_the_same_weights_however_it_is_cut_into_rows(level):
    knobs = Correction("mask", level, 0.8, 1.2)
    some = 0
    for seed in SEEDS[:40]:
        batch = with_columns(random_batch(seed), seed)
        cut, source = cut_rows(batch)
        whole, numbers = weigh(batch, knobs)
        parts, same = weigh(cut.with_columns(**{k: v[source] for k, v in batch.columns.items()}), knobs)
        assert np.array_equal(parts, np.where(cut.channel("pg"), whole[source], 0)) and same == pytest.approx(numbers, rel=1e-12)
        some += int((whole[batch.channel("pg")] == 0).any() and whole.any())
    assert some > 10


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("treatment", ["truncate", "clip", "mask"])
def test_equal_policies_have_weight_exactly_1(level, treatment):
    for seed in SEEDS[:20]:
        batch = with_columns(random_batch(seed), seed)
        batch = batch.with_columns(logp_prox=batch.columns["logp_old"])
        weight, numbers = weigh(batch, Correction(treatment, level, 0.0 if treatment == "truncate" else 0.99, 1.01))
        assert weight.dtype == np.float32 and np.array_equal(weight, batch.channel("pg"))
        if batch.channel("pg").any():
            assert numbers["correction/ess"] == pytest.approx(1) and numbers["correction/dropped"] == 0
            assert numbers[f"correction/{level}/outside"] == 0 and numbers[f"correction/{level}/max"] == 1


def test_the_numbers_by_hand():
    """Ratios 1, 3 of episode a and 1 / 4 of b, masked to [.5, 2]: weights 1, 0, 0.
    Tokens: mean 4.25 / 3, share outside 2 / 3, ess 4.25^2 / (3 * (1 + 9 + 1/16)). Episodes: 3 and 1/4, both outside."""
    weight, n = weigh(batch_with([0, math.log(3)], [math.log(0.25)]), Correction("mask", "token", 0.5, 2.0))
    assert weight.tolist() == [0, 1, 0, 0, 0]
    assert n["correction/weight_mean"] == pytest.approx(1 / 3) and n["correction/weight_max"] == 1
    assert n["correction/dropped"] == pytest.approx(2 / 3) and n["correction/ess"] == pytest.approx(1 / 3)  # 1^2 / (3 * 1^2)
    assert n["correction/token/mean"] == pytest.approx(4.25 / 3) and n["correction/token/max"] == pytest.approx(3)
    assert n["correction/token/outside"] == pytest.approx(2 / 3)
    assert n["correction/token/ess"] == pytest.approx(4.25**2 / (3 * (1 + 9 + 1 / 16)))
    assert n["correction/sequence/mean"] == pytest.approx(3.25 / 2) and n["correction/sequence/outside"] == 1
    assert n["correction/geometric/mean"] == pytest.approx((math.sqrt(3) + 0.25) / 2)
    assert n["correction/geometric/outside"] == pytest.approx(1 / 2)


def test_absurd_ratios_and_nothing_at_all():
    weight, numbers = weigh(batch_with([900.0, -900.0]), Correction(level="token", high=INF))
    assert np.isfinite(weight).all() and weight[1] == pytest.approx(math.exp(20), rel=1e-6) and 0 < weight[2] < 1e-8
    assert all(math.isfinite(v) for v in numbers.values())
    empty = Batch((episode_of("a", "g", 0.0, [0, 0]),)).with_columns(logp_prox=np.zeros(2), logp_old=np.zeros(2))
    assert weigh(empty, Correction())[0].tolist() == [0, 0] and weigh(empty, Correction())[1] == {}


@pytest.mark.defect("C19")
@pytest.mark.parametrize("name", ["logp_prox", "logp_old"])
def test_a_missing_column_is_an_error_and_not_zeros(name):
    batch = batch_with(RATIOS)
    without = Batch(batch.episodes, {k: v for k, v in batch.columns.items() if k != name})
    with pytest.raises(PlanError, match=f"no column '{name}'"):
        weigh(without, Correction())
    with pytest.raises(PlanError, match=rf"'{name}' has shape \(3,\), expected one number per token \(4,\)"):
        weigh(batch.with_columns(**{name: np.zeros(3)}), Correction())
    with pytest.raises(PlanError, match=f"'{name}' is nan at token 2 of the batch, which episode 'e0' sampled"):
        weigh(batch.with_columns(**{name: np.array([0, -1, np.nan, -1])}), Correction())


@pytest.mark.parametrize(("knobs", "says"), [
    ({"treatment": "cut"}, "treatment is 'cut'; known: truncate, clip, mask"),
    ({"level": "row"}, "level is 'row'; known: token, sequence, geometric"),
    ({"high": 0.9}, r"\[0.0, 0.9\], but must hold 1"),
    ({"treatment": "mask", "low": 1.1}, r"\[1.1, 2.0\], but must hold 1"),
    ({"treatment": "clip", "low": -0.1}, "must hold 1"),
    ({"treatment": "mask", "low": 1.0, "high": 1.0}, "low < high"),
    ({"low": 0.5}, "low is 0.5, but 'truncate' bounds from above only"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(knobs, says):
    with pytest.raises(LossError, match=says):
        Correction(**knobs)


# ---------------------------------------------------------------------------------------------------------- age


def aged() -> Batch:
    """Tokens sampled by versions 3, 5, 7 with an observation between."""
    row = replace(row_of([0, 1, 1, 0, 1]), version=np.array([-1, 3, 5, -1, 7]))
    other = replace(row_of([0, 1]), version=np.array([-1, 7]), channels={"sft": np.array([True, False])})
    first = replace(episode_of("a", "g", 1.0), rows=(row,))
    return Batch((first, replace(episode_of("b", "g", 0.0), rows=(other,)))).with_columns(x=np.arange(7))


@pytest.mark.parametrize(("max_age", "expected"), [(0, [4]), (1, [4]), (2, [2, 4]), (3, [2, 4]), (4, [1, 2, 4])])
def test_tokens_over_the_age_limit_leave_the_channel(max_age, expected):
    """At version 7 the ages are 4, 2, 0; what leaves is in no numerator and no denominator, and stays as context."""
    whole = aged()
    batch, left = limit_age(whole, 7, max_age)
    assert np.flatnonzero(batch.channel("pg")[:5]).tolist() == expected and left == 3 - len(expected)
    assert np.array_equal(batch.tokens("tokens"), aged().tokens("tokens")) and np.array_equal(batch.columns["x"], np.arange(7))
    assert np.array_equal(batch.tokens("sampled"), aged().tokens("sampled"))
    assert batch.rows[1] is whole.rows[1]  # a row without old tokens is left alone
    weight = weights("token_mean", batch.channel("pg"), batch)
    assert weight[expected].tolist() == [np.float32(1 / (len(expected) + 1))] * len(expected)


def test_nothing_old_is_the_same_batch_and_the_future_an_error():
    batch = aged()
    assert limit_age(batch, 7, 4) == (batch, 0) and limit_age(batch, 7, 4)[0] is batch
    with pytest.raises(PlanError, match="sampled by weight version 7, but the present one is 6"):
        limit_age(batch, 6, 9)
    with pytest.raises(PlanError, match="max_age is -1"):
        limit_age(batch, 7, -1)


def test_every_trained_token_is_young_enough():
    """I3, for random batches with versions 0 to 2."""
    for seed in SEEDS[:60]:
        for max_age in (0, 1, 2):
            batch, left = limit_age(random_batch(seed), 2, max_age)
            before, after = random_batch(seed).channel("pg"), batch.channel("pg")
            assert not (after & ~before).any() and left == before.sum() - after.sum()
            assert np.array_equal(after, before & (batch.tokens("version") >= 2 - max_age))
