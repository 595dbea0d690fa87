"""tools/verifier_density.py: when credit that is aimed at single turns helps, and when it harms (M90)."""

import numpy as np
import pytest

from mcore_agent.rollout.records import save_episodes
from tests.credit.walks import walk
from tools.verifier_density import ARMS, credit, main, study

CHAIN, SEEDS = 6, 10


@pytest.fixture(scope="module")
def found():
    return study(CHAIN, (1, 3, 5, 6), SEEDS)


def test_every_arm_has_the_same_mass_of_advantage():
    """Groups in which decisions differ: sum |A| equal to 1e-9. All arms but ``sparse`` have one reward."""
    rng = np.random.default_rng(0)
    right = rng.random((40, 8, CHAIN)) < 0.5
    for k in (1, 2, 5, 6):
        made = {arm: credit(arm, right, k, np.random.default_rng(1)) for arm in ARMS}
        mass = {arm: abs(c).sum(axis=(1, 2)) for arm, c in made.items()}
        live = (right[..., CHAIN - k :].std(axis=1) > 0).any(axis=-1) & (right.mean(axis=-1).std(axis=1) > 0)
        assert live.sum() > 30
        for arm in ("target", "random", "to_go", "own"):
            np.testing.assert_allclose(mass[arm][live], mass["uniform"][live], rtol=1e-9)
        assert not made["target"][..., : CHAIN - k].any() and not made["own"][..., : CHAIN - k].any()
        assert ((made["random"] != 0).sum(axis=-1) <= k).all()


def test_credit_of_one_group_by_hand():
    """Two episodes of two decisions, right right and right wrong. Rewards 1 and .5, advantages ±1. Evenly: ±.5 each. Only the last is
    shown: ±1 there. Each by itself: the first decision does not differ, the second has ±.5, scaled to mass 2: ±1."""
    right = np.array([[[True, True], [True, False]]])
    assert np.round(credit("uniform", right, 1, np.random.default_rng(0)), 6).tolist() == [[[0.5, 0.5], [-0.5, -0.5]]]
    assert np.round(credit("target", right, 1, np.random.default_rng(0)), 6).tolist() == [[[0, 1], [0, -1]]]
    assert np.round(credit("own", right, 2, np.random.default_rng(0)), 6).tolist() == [[[0, 1], [0, -1]]]
    # from the first decision on 2 and 1 are right, from the second 1 and 0: ±.5 in all four places, scaled to mass 2
    assert np.round(credit("to_go", right, 2, np.random.default_rng(0)), 6).tolist() == [[[0.5, 0.5], [-0.5, -0.5]]]
    assert np.round(credit("sparse", right, 1, np.random.default_rng(0)), 6).tolist() == [[[0.5, 0.5], [-0.5, -0.5]]]


def test_a_sparse_verifier_makes_targets_worse_than_nothing(found):
    """With k of 6 shown the decisions that get no credit stay at 1/3: success is near (1/3)^(6 - k), at .83 one in three."""
    base = found["uniform", CHAIN]
    assert base.mean() == pytest.approx(0.971, abs=0.01)
    for k in (1, 3, 5):
        for arm in ("target", "own", "to_go"):
            assert (base > found[arm, k]).all()
            assert found[arm, k].mean() == pytest.approx((1 / 3) ** (CHAIN - k), abs=0.03)


def test_when_all_is_shown_targets_are_the_same_and_own_correctness_is_better(found):
    base = found["uniform", CHAIN]
    assert np.array_equal(found["target", CHAIN], base) or np.allclose(found["target", CHAIN], base, rtol=1e-9)
    assert (found["own", CHAIN] > base).all() and found["own", CHAIN].mean() == pytest.approx(0.996, abs=0.003)


def test_the_outcome_alone_is_the_hardest_and_random_targets_do_not_harm_a_table(found):
    assert found["sparse", CHAIN].mean() == pytest.approx(0.17, abs=0.1)
    assert (found["sparse", CHAIN] < found["uniform", CHAIN]).sum() >= 9
    for k in (1, 3, 5):
        assert found["random", k].mean() == pytest.approx(0.965, abs=0.02)


def test_the_command_prints_the_table_and_measures_files(capsys, tmp_path):
    main(["--chain", "3", "--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("(2 seeds)") and [line[:9] for line in lines[4:7]] == ["| 1 | 0.3", "| 2 | 0.6", "| 3 | 1.0"]
    save_episodes(tmp_path / "e.npz", [walk("a", [""] * 4, [0, 0, 0, 1.0]), walk("b", [""], 0.0, "h")])
    main(["--episodes", str(tmp_path / "e.npz")])
    assert capsys.readouterr().out.splitlines() == ["g: k = 1, C = 4, V_d = 0.250", "1 groups with a success, mean V_d 0.250"]
