"""Values remembered for prompts (M93, M94) against numbers worked out by hand."""

import json
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.beta import Beta, EventLog
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.credit.spo import Spo
from mcore_agent.credit.spo_pp import SpoPp
from mcore_agent.protocols import Rescoring, Stateful
from mcore_agent.types import Batch, Task
from tests.strategies import SEEDS, cut_rows, episode_of, random_batch, row_of, with_values

NAMES = ["spo", "spo_pp"]


def asked(*rewards, task="t", version=0, id="e", mask=(0, 1, 1), logp=-1.0) -> Batch:
    """Answers to one prompt by the policy of a version; the learner gives each token ``logp``."""

    def episode(i, reward):
        row = row_of(mask)
        row = replace(row, version=np.where(row.sampled, version, -1))
        return replace(episode_of(f"{id}{i}", f"{task}{i}", reward), task=Task(task, "toy", ()), rows=(row,))

    batch = Batch(tuple(episode(i, float(r)) for i, r in enumerate(rewards)))
    return batch.with_columns(logp_prox=np.where(batch.channel("pg"), logp, 0.0).astype(np.float32))


def advantages(estimator, batch: Batch, now: float = -1.0) -> list[float]:
    """[E]; what the estimator kept is scored ``now`` at every token."""
    if not isinstance(estimator, Rescoring):
        return estimator(batch).advantage.tolist()
    views = estimator.views(batch, lambda text: [])
    return estimator(batch, [np.full(len(v.scored), now) for v in views]).advantage.tolist()


# ---------------------------------------------------------------------------------------------------- values of SPO


@pytest.mark.parametrize("make", [Spo, SpoPp])
def test_the_first_answer(make):
    """v = 4 / 8 = .5, A = 1 - .5; then a = .875 * 4 + 1 = 4.5 and b = .875 * 4 = 3.5: v = .5625 of 8, as much as before."""
    estimator = make()
    assert advantages(estimator, asked(1)) == [0.5]
    assert estimator.value("t") == 0.5625 and estimator.value("other") == 0.5
    known = estimator.known["t"] if make is Spo else estimator.logs["t"].posterior(0.96, 0.875)
    assert (known.a, known.b) == (4.5, 3.5)


def test_evidence_stays_at_8_while_the_policy_moves_fast():
    """n = 7/8 n + 1 has the solution 8."""
    spo = Spo()
    for step in range(50):
        advantages(spo, asked(step % 2), now=-9.0)
        assert spo.known["t"].a + spo.known["t"].b == pytest.approx(8, rel=1e-12)


def test_forgetting_by_drift():
    """2^(-.06 / .06) = .5, held at .875; 2^0 = 1, held at .96; in between 2^(-.006 / .06) = 2^-.1 = .933."""
    assert Spo().rho(0.06) == 0.875 and Spo().rho(0.0) == 0.96 and Spo().rho(None) == 0.875
    assert Spo().rho(0.006) == pytest.approx(2**-0.1)


def test_the_drift_is_that_of_the_kept_answer():
    """Kept with -1 at both tokens and now -1.012 and -1: D = .006. a = 2^-.1 * 4.5 + 0, b = 2^-.1 * 3.5 + 1."""
    spo = Spo()
    advantages(spo, asked(1))
    batch = asked(0, id="later")
    (view,) = spo.views(batch, lambda text: [])
    assert (view.row, view.tokens.tolist(), view.scored.tolist(), view.under) == ("t", [1, 2, 3], [1, 2], "")
    credit = spo(batch, [np.array([-1.012, -1.0])])
    assert credit.advantage.tolist() == [-0.5625] and credit.numbers["drift"] == pytest.approx(0.006, rel=1e-4)
    np.testing.assert_allclose([spo.known["t"].a, spo.known["t"].b], [2**-0.1 * 4.5, 2**-0.1 * 3.5 + 1], rtol=1e-5)


def test_a_still_policy_keeps_more():
    """D = 0: rho .96. a = .96 * 4.5 + 1 = 5.32, b = .96 * 3.5 = 3.36."""
    spo = Spo()
    advantages(spo, asked(1))
    assert advantages(spo, asked(1, id="f")) == [1 - 0.5625]
    np.testing.assert_allclose([spo.known["t"].a, spo.known["t"].b], [5.32, 3.36], rtol=1e-12)


@pytest.mark.parametrize("make", [Spo, SpoPp])
def test_several_answers_are_compared_with_the_same_value_and_forget_once(make):
    """A = .5 -.5 .5; a = 3.5 + 2 and b = 3.5 + 1: v = 5.5 / 10."""
    estimator = make()
    assert advantages(estimator, asked(1, 0, 1)) == [0.5, -0.5, 0.5]
    assert estimator.value("t") == 0.55


@pytest.mark.parametrize("make", [Spo, SpoPp])
def test_scores_have_a_range_of_their_own(make):
    """From -1 to 3: v = .5 is the score 1; 2 is evidence 3/4, and 9 counts as full success. Scores are not cut in A."""
    estimator = make(worst=-1.0, best=3.0)
    assert advantages(estimator, asked(2)) == [1.0]
    assert estimator.value("t") == (3.5 + 0.75) / 8
    other = make(worst=-1.0, best=3.0)
    assert advantages(other, asked(9)) == [8.0] and other.value("t") == 4.5 / 8


@pytest.mark.parametrize("make", [Spo, SpoPp])
def test_values_converge_to_the_rate_of_success(make):
    """M93: Bernoulli .3, a still policy. The mean of v over the last 400 of 500 answers is within .05, as is that of A of 0."""
    rng, estimator, seen, gained = np.random.default_rng(0), make(), [], []
    for step in range(500):
        gained += advantages(estimator, asked(rng.random() < 0.3, version=step))
        seen.append(estimator.value("t"))
    assert abs(np.mean(seen[100:]) - 0.3) < 0.05 and abs(np.mean(gained[100:])) < 0.05


@pytest.mark.parametrize("name", NAMES)
def test_single_answers_never_degenerate(name):
    """M93: whatever was seen, every single answer has an advantage, of the right sign, and a batch of them has a spread."""
    pipeline = Pipeline([{"name": name}])
    for step in range(40):
        batch = Batch(tuple(e for t in range(5) for e in asked(t > 1, task=f"t{t}", version=step, id=f"{t}/{step}/").episodes))
        batch = batch.with_columns(logp_prox=np.where(batch.channel("pg"), -1.0, 0).astype(np.float32))
        scores = [np.full(len(v.scored), -1.0) for v in pipeline.views(batch, lambda text: [])]
        own = pipeline(batch, scores)[0].columns["advantage"][batch.channel("pg")]
        assert (own[:4] < 0).all() and (own[4:] > 0).all()


# --------------------------------------------------------------------------------------------------- what is kept


def test_what_is_kept_of_an_answer():
    """The row with most own tokens, as far as its last one, and at most ``stored`` tokens of it."""
    rows = (row_of([0, 1]), row_of([0, 0, 1, 0, 1, 1, 0], tokens=[9, 8, 7, 6, 5, 4, 3]))
    batch = asked(1)
    batch = Batch((replace(batch.episodes[0], rows=rows),))
    batch = batch.with_columns(logp_prox=np.array([0, -1, 0, 0, -2, 0, -3, -4, 0], dtype=np.float32))
    for stored, tokens, scored, logp in ((2048, [9, 8, 7, 6, 5, 4], [2, 4, 5], [-2, -3, -4]), (5, [9, 8, 7, 6, 5], [2, 4], [-2, -3]),
                                         (2, [1, 2], [1], [-1])):  # fmt: skip
        spo = Spo(stored=stored)
        spo(batch)
        kept = spo.answers["t"]
        assert (kept.tokens.tolist(), kept.scored.tolist(), kept.logp.tolist()) == (tokens, scored, logp)
    spo = Spo(stored=1)
    spo(batch)
    assert not spo.answers and not spo.views(batch, lambda text: [])


def test_a_score_too_few_is_refused():
    spo = Spo()
    spo(asked(1))
    with pytest.raises(CreditError, match="asked for 1 scores and got 0"):
        spo(asked(1, id="f"), [])


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_goes_through_a_checkpoint(name):
    whole, broken = Pipeline([{"name": name}]), Pipeline([{"name": name}])
    assert isinstance(whole.estimator, Stateful) and isinstance(whole.estimator, Rescoring) == (name == "spo")
    for step in range(4):
        batch = asked(step % 2, step % 3 == 0, version=step, id=f"{step}/", logp=-1.0 - 0.001 * step)
        found = []
        for pipeline in (whole, broken):
            scores = [np.full(len(v.scored), -1.0) for v in pipeline.views(batch, lambda text: [])]
            found.append(pipeline(batch, scores)[0].columns["advantage"].tolist())
        assert found[0] == found[1] and any(found[0])
        saved, broken = json.loads(json.dumps(broken.state_dict())), Pipeline([{"name": name}])
        broken.load_state_dict(saved)
        assert broken.state_dict() == whole.state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_random_batches_twice(name):
    """Rows may be cut anywhere; numbers are finite, nothing outside the own tokens is touched, and the memory sees no demonstration."""
    for seed in SEEDS[:40]:
        batch = with_values(random_batch(seed), seed)
        cut, source = cut_rows(batch)
        cut = cut.with_columns(**{k: v[source] for k, v in batch.columns.items()})
        pipelines = Pipeline([{"name": name}]), Pipeline([{"name": name}])
        for b, pipeline in zip((batch, cut), pipelines, strict=True):
            for _ in range(2):
                scores = [np.full(len(v.scored), -1.0) for v in pipeline.views(b, lambda text: [])]
                found = pipeline(b, scores)[0].columns["advantage"]
            assert np.isfinite(found).all() and not found[~b.channel("pg")].any()
        first, second = (p.state_dict()["0"] for p in pipelines)
        key = "known" if name == "spo" else "logs"
        assert not any(task.startswith("demo") for task in first[key])
        if name == "spo_pp":
            assert first == second


# ------------------------------------------------------------------------------------------------- order of events


def test_events_are_folded_by_version():
    """The example of EventLog: .875 * (4, 4) + (1, 0), then .96 * (4.5, 3.5) + (0, 1); two versions apart .96^2; far apart .875."""

    def after(*events):
        log = EventLog(Beta.prior(0.875))
        assert all(log.add(v, e, 64, 0.96, 0.875) for v, e in events)
        return log.posterior(0.96, 0.875)

    np.testing.assert_allclose((after((3, 1)).a, after((3, 1)).b), (4.5, 3.5), rtol=1e-15)
    two = after((3, 1), (4, 0))
    np.testing.assert_allclose((two.a, two.b), (4.32, 4.36), rtol=1e-15)
    apart = after((3, 1), (5, 0))
    np.testing.assert_allclose((apart.a, apart.b), (0.9216 * 4.5, 0.9216 * 3.5 + 1), rtol=1e-15)
    far = after((3, 1), (40, 0))
    np.testing.assert_allclose((far.a, far.b), (0.875 * 4.5, 0.875 * 3.5 + 1), rtol=1e-15)
    same = after((3, 1), (3, 0))
    np.testing.assert_allclose((same.a, same.b), (4.5, 4.5), rtol=1e-15)


def test_any_order_of_arrival_gives_the_same_bits():
    """M94: five episodes of versions 3 3 4 7 9 with fractions for scores, one by one in all 120 orders, and all at once."""
    events = [(3, 0.1), (3, 0.7), (4, 1.0), (7, 0.3), (9, 0.2)]
    found = set()
    for order in permutations(range(5)):
        spo = SpoPp()
        for i in order:
            spo(asked(events[i][1], version=events[i][0], id=f"{i}/"))
        found.add(json.dumps(spo.state_dict()))
        found.add(json.dumps([spo.value("t")]))
    together = SpoPp()
    parts = [asked(reward, version=version, id=f"{i}/").episodes[0] for i, (version, reward) in enumerate(events)]
    together(Batch(tuple(parts[i] for i in (4, 0, 2, 1, 3))))
    found.add(json.dumps(together.state_dict()))
    assert len(found) == 2
    by_receipt = Spo()  # which does not sort: the order shows
    values = set()
    for order in ((0, 4), (4, 0)):
        by_receipt.known = {}
        for i in order:
            advantages(by_receipt, asked(events[i][1], id=f"{i}/"))
        values.add(by_receipt.value("t"))
    assert len(values) == 2


def test_settled_evidence_changes_no_bit_and_what_comes_later_is_counted():
    """A window of 2 versions against one of 64, in order: the same value. Then a version 3 behind the newest comes too late."""
    short, long = SpoPp(window=2), SpoPp()
    for version in range(9):
        batch = asked(version % 2, version=version, id=f"{version}/")
        short(batch), long(batch)
        assert short.value("t") == long.value("t")
    assert len(short.logs["t"].events) == 3 and len(long.logs["t"].events) == 9
    before, late = short.value("t"), asked(1, version=5, id="late")
    assert short(late).numbers["late"] == 1 and short.value("t") == before
    assert long(late).numbers["late"] == 0 and long.value("t") != before


def test_the_version_is_that_of_the_first_own_token():
    row = replace(row_of([0, 1, 1]), version=np.array([-1, 2, 5]))
    batch = asked(1)
    spo = SpoPp()
    spo(Batch((replace(batch.episodes[0], rows=(row,)),)))
    assert list(spo.logs["t"].events) == [2]


@pytest.mark.parametrize(("spec", "says"), [
    ({"name": "spo", "rho_low": 1.0}, "rho_low is 1.0"), ({"name": "spo", "rho_high": 0.5}, "rho_high is 0.5"),
    ({"name": "spo", "half": 0.0}, "half is 0.0"), ({"name": "spo", "stored": 0}, "stored is 0"),
    ({"name": "spo", "worst": 1.0}, "worst is 1.0 and best 1.0"),
    ({"name": "spo_pp", "rho": 0.0}, "rho is 0.0"),
    ({"name": "spo_pp", "rho_low": -0.5}, "rho_low is -0.5"), ({"name": "spo_pp", "window": 0}, "window is 0"),
    ({"name": "spo_pp", "best": -1.0}, "worst is 0.0 and best -1.0"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(spec, says):
    with pytest.raises(CreditError, match=rf"estimator '{spec['name']}': {says}.*must"):
        registry.create("estimator", spec)
