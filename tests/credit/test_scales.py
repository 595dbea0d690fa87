"""Normalizers by token, turn and trajectory (M93, M94, M96) and by domain (M79)."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.domain_norm import DomainEma, DomainNorm
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import Pipeline, assign
from mcore_agent.credit.standardize import Standardize
from mcore_agent.protocols import Stateful
from mcore_agent.types import Batch, Task
from tests.credit.test_turn_gae import turns_of
from tests.strategies import SEEDS, cut_rows, episode_of, random_batch

LOW = -1 / np.sqrt(3)
PAIR = Batch((episode_of("a", "g", 0.0, [0, 1]), episode_of("b", "g", 0.0, [0, 1, 1, 0, 1])))  # 1 and 3 own tokens
PAIR_ADVANTAGE = np.array([0, 1.0, 0, -1, -1, 0, -1])


def test_by_token():
    """M94. n = 1, 3 and A = 1, -1: mean (1 - 3) / 4 = -.5, variance (2.25 + 3 * .25) / 4 = .75: 1.5 / .866 = 1.7321 and -.5774.
    Sum 1.7321 - 3 * .5774 = 0, and squares (3 + 3 / 3) / 4 = 1."""
    found = Standardize()(PAIR_ADVANTAGE, PAIR)
    np.testing.assert_allclose(found, [0, np.sqrt(3), 0, LOW, LOW, 0, LOW], rtol=1e-12)
    assert found.sum() == pytest.approx(0, abs=1e-12) and (found**2).sum() / 4 == pytest.approx(1)


def test_by_trajectory():
    """M93. Two trajectories, 1 and -1: mean 0 and deviation 1 already; by token their mean is -.5."""
    found = Standardize(measure="trajectory")(PAIR_ADVANTAGE, PAIR)
    np.testing.assert_allclose(found, PAIR_ADVANTAGE, rtol=1e-12)
    assert found.sum() / 4 == pytest.approx(-0.5)
    # Three trajectories of 1, 3 and 2 tokens with 5, 2, 2: mean 3, variance (4 + 1 + 1) / 3 = 2.
    batch = Batch((*PAIR.episodes, episode_of("c", "g", 0.0, [1, 1])))
    found = Standardize(measure="trajectory")(np.array([0, 5.0, 0, 2, 2, 0, 2, 2, 2]), batch)
    np.testing.assert_allclose(found[batch.channel("pg")], np.array([2, -1, -1, -1, -1, -1]) / np.sqrt(2), rtol=1e-12)


def test_by_turn():
    """Turns of 2, 1 and 3 tokens with 1, 4, 1: mean 2, variance (1 + 4 + 1) / 3 = 2."""
    batch = Batch((turns_of([2, 1], [0, 0], id="a"), turns_of([3], [0], id="b")))
    advantage = np.zeros(len(batch.token_row))
    advantage[batch.channel("pg")] = [1, 1, 4, 1, 1, 1]
    found = Standardize(measure="turn")(advantage, batch)[batch.channel("pg")]
    np.testing.assert_allclose(found, np.array([-1, -1, 2, -1, -1, -1]) / np.sqrt(2), rtol=1e-12)


@pytest.mark.parametrize("measure", ["token", "turn", "trajectory"])
def test_every_measure_has_mean_0_and_variance_1_and_sees_no_row(measure):
    """Weighted by the measure; and cutting rows changes no bit."""
    moved = 0
    for seed in SEEDS[:60]:
        batch = random_batch(seed)
        specs = [{"name": "dr_grpo"}, {"name": "standardize", "measure": measure}]
        found = assign(batch, specs).columns["advantage"]
        cut, source = cut_rows(batch)
        assert np.array_equal(assign(cut, specs).columns["advantage"], np.where(cut.channel("pg"), found[source], 0))
        own = np.flatnonzero(batch.channel("pg"))
        unit = {"token": own, "turn": batch.token_episode[own] * 1000 + batch.token_turn[own], "trajectory": batch.token_episode[own]}
        names, of, size = np.unique(unit[measure], return_inverse=True, return_counts=True)
        weight = 1 / size[of] / max(len(names), 1)
        if found.any():
            moved += 1
            assert (weight * found[own]).sum() == pytest.approx(0, abs=1e-6)
            assert (weight * found[own] ** 2).sum() == pytest.approx(1, rel=1e-5)
    assert moved > 35


@pytest.mark.defect("A3")
@pytest.mark.parametrize("measure", ["token", "turn", "trajectory"])
def test_equal_advantages_become_exactly_0(measure):
    advantage = np.where(PAIR.channel("pg"), 0.3, 0.0)
    advantage[3] = 0.1 + 0.2
    assert not Standardize(measure=measure)(advantage, PAIR).any()
    assert not assign(Batch((episode_of("a", "g", 0.0, [0, 0]),)), [{"name": "rloo"}, {"name": "standardize"}]).columns["advantage"].any()


# --------------------------------------------------------------------------------------------------------- domains


def domains(*members) -> Batch:
    """One episode of 2 own tokens for each (domain, reward)."""
    episodes = (episode_of(f"e{i}", f"{d}", r) for i, (d, r) in enumerate(members))
    return Batch(tuple(replace(e, task=Task(e.id, d, ())) for e, (d, _) in zip(episodes, members, strict=True)))


def in_domain(batch: Batch, name: str) -> Batch:
    return Batch(tuple(replace(e, task=replace(e.task, domain=name)) for e in batch.episodes))


def test_domains_come_to_one_scale():
    """A = +-1 in x and +-100 in y: rms 1 and 100, geometric mean sqrt(100) = 10."""
    batch = domains(("x", 2), ("y", 0), ("x", 0), ("y", 200))
    found = assign(batch, [{"name": "dr_grpo"}, {"name": "domain_norm"}]).columns["advantage"]
    np.testing.assert_allclose(found, [0, 10, 10, 0, -10, -10, 0, -10, -10, 0, 10, 10], rtol=1e-6)


@pytest.mark.parametrize("name", ["domain_norm", "domain_ema"])
def test_the_same_tasks_at_a_hundredfold_reward_weigh_the_same(name):
    """M79: rms of the domains within 1 %, with GRPO's mean alone as the advantage."""
    for seed in SEEDS[:30]:
        one = in_domain(random_batch(seed, demos=False), "quiet")
        twin = [replace(e, id=f"{e.id}'", group=f"{e.group}'", task=replace(e.task, domain="loud"), rewards={"outcome": 100 * e.reward})
                for e in one.episodes]  # fmt: skip
        batch = Batch((*one.episodes, *twin))
        found = assign(batch, [{"name": "dr_grpo"}, {"name": name}]).columns["advantage"]
        half = len(found) // 2
        quiet, loud = (np.sqrt(np.mean(part**2)) for part in (found[:half], found[half:]))
        assert loud == pytest.approx(quiet, rel=0.01, abs=1e-6)  # rewards that differ by 1e-9 are equal, a hundredfold not


@pytest.mark.parametrize("name", ["domain_norm", "domain_ema"])
def test_one_domain_stays_as_it_is(name):
    """M79, to the bit: demonstrations of it and groups without spread included."""
    for seed in SEEDS[:40]:
        batch = in_domain(random_batch(seed), "toy")
        without = assign(batch, [{"name": "grpo"}]).columns["advantage"]
        assert np.array_equal(assign(batch, [{"name": "grpo"}, {"name": name}]).columns["advantage"], without)


def test_a_domain_without_signal_sets_no_scale():
    batch = domains(("x", 2), ("x", 0), ("y", 1), ("y", 1))
    found = assign(batch, [{"name": "dr_grpo"}, {"name": "domain_norm"}]).columns["advantage"]
    assert found.tolist() == [0, 1, 1, 0, -1, -1] + [0] * 6
    tiny = DomainNorm()(np.where(batch.channel("pg"), 1e-13, 0.0), batch)  # rounding is not blown up
    assert np.abs(tiny).max() == 1e-13


def test_the_running_scale_by_hand():
    """Mean squares 4 and 1 with decay 1/2: m = 2, 1.5, over 1 - 1/4 gives 2. Beside it y, first seen now: 32, over 1/2 of 16.
    rms sqrt(2) and sqrt(32), geometric mean sqrt(8): x is doubled, y halved."""
    ema = DomainEma(decay=0.5)
    first, second = domains(("x", 0), ("x", 0)), domains(("x", 0), ("y", 0))
    assert ema(np.array([0, 2.0, 2, 0, -2, -2]), first).tolist() == [0, 2, 2, 0, -2, -2]
    found = ema(np.array([0, 1.0, -1, 0, np.sqrt(32), -np.sqrt(32)]), second)
    np.testing.assert_allclose(found, [0, 2, -2, 0, np.sqrt(8), -np.sqrt(8)], rtol=1e-12)


def test_the_running_scale_goes_through_a_checkpoint():
    pipeline, again = (Pipeline([{"name": "dr_grpo"}, {"name": "domain_ema"}]) for _ in range(2))
    assert isinstance(pipeline.parts[1], Stateful)
    pipeline(domains(("x", 2), ("x", 0), ("y", 30), ("y", 0)))
    again.load_state_dict(json.loads(json.dumps(pipeline.state_dict())))
    later = domains(("x", 1), ("x", 0), ("y", 1), ("y", 0))
    fresh = Pipeline([{"name": "dr_grpo"}, {"name": "domain_ema"}])
    found = [p(later)[0].columns["advantage"].tolist() for p in (pipeline, again, fresh)]
    assert found[0] == found[1] != found[2]


def test_settings_out_of_range_are_refused():
    with pytest.raises(CreditError, match="'domain_ema': decay is 1.0, but must be at least 0 and below 1"):
        registry.create("normalizer", {"name": "domain_ema", "decay": 1.0})
    with pytest.raises(registry.RegistryError, match="measure is 'row'"):
        registry.create("normalizer", {"name": "standardize", "measure": "row"})
