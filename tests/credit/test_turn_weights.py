"""Transforms that weigh turns: EFCA (M106), roles (M126) and the shuffled control (M91)."""

from dataclasses import dataclass, replace
from itertools import permutations
from typing import ClassVar

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.efca import circle
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import Pipeline, assign
from mcore_agent.credit.triage import ROLES, role_means, roles_of
from mcore_agent.types import Batch, Feedback
from tests.credit.test_assign import planted  # noqa: F401
from tests.credit.walks import credited, turns_of, walk
from tests.strategies import SEEDS, random_batch

GRPO = {"name": "grpo", "eps": 0}
DONE, FAILED, IDLE = Feedback(), Feedback(ok=False, error="no such file"), Feedback(changed=False)


def turns_with(advantage: list[float], sizes: list[int], transform: dict, id: str = "a") -> list[float]:
    """The sums of turns after a transform that finds an advantage for each token, turn by turn."""
    batch = Batch((walk(id, [""] * len(sizes), sizes=sizes),))
    column = np.zeros(len(batch.token_row))
    column[batch.channel("pg")] = advantage
    after = registry.create("transform", transform)(column, batch)
    return np.bincount(batch.token_turn[batch.channel("pg")], weights=after[batch.channel("pg")]).tolist()


# --------------------------------------------------------------------------------------------------- efca


def test_efca_by_hand():
    """A = 1, alpha .3, beta .4. Turns: done in a new state 1.3; a failed call .7; back in the first state, done: 1.3 - .2 = 1.1."""
    win = walk("a", ["x", "y", "x"], 1.0, feedback=[DONE, FAILED, DONE])
    found = credited([win, walk("b", ["x"], 0.0)], GRPO, {"name": "efca", "alpha": 0.3, "beta": 0.4})
    np.testing.assert_allclose(found[0], [1.3, 0.7, 1.1], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-1 * (1 - 0.3)], rtol=1e-6)


def test_efca_gives_a_turn_that_did_nothing_less_of_a_success_and_more_of_a_failure():
    win, lose = (walk(i, ["x", "y", "z"], r, feedback=[DONE, IDLE, DONE]) for i, r in (("a", 1.0), ("b", 0.0)))
    up, down = credited([win, lose], GRPO, {"name": "efca"})
    assert up[1] < up[0] == up[2] and down[1] < down[0] == down[2] < 0 < up[1]


def test_circles_by_hand():
    """a b a b goes round with period 2, a b c does not; back in a state of the window is less than going round; far back is new."""
    assert [circle("abab"[: i + 1], window=4, cycle=2) for i in range(4)] == [0, 0, -0.5, -1]
    assert [circle("abc"[: i + 1], window=4, cycle=2) for i in range(3)] == [0, 0, 0]
    assert [circle("aaa"[: i + 1], window=4, cycle=2) for i in range(3)] == [0, -1, -1]  # the period 1
    assert [circle("abcabc"[: i + 1], window=4, cycle=2) for i in range(6)] == [0, 0, 0, -0.5, -0.5, -0.5]
    assert circle("abcabc", window=4, cycle=3) == -1
    assert circle("abcda", window=3, cycle=2) == 0 and circle("abcda", window=4, cycle=2) == -0.5
    assert circle(["", ""], window=4, cycle=2) == 0


def test_efca_flags_a_loop():
    loop, way = walk("a", list("abab"), 1.0), walk("b", list("abc"), 0.0)
    up, down = credited([loop, way], GRPO, {"name": "efca", "alpha": 0.0, "beta": 0.4})
    np.testing.assert_allclose(up, [1, 1, 0.8, 0.6], rtol=1e-6)
    assert down == [-1, -1, -1]


def test_efca_without_weights_changes_no_bit():
    for seed in SEEDS[:50]:
        batch = random_batch(seed)
        plain = assign(batch, [{"name": "grpo"}]).columns["advantage"]
        off = assign(batch, [{"name": "grpo"}, {"name": "efca", "alpha": 0.0, "beta": 0.0}]).columns["advantage"]
        assert off.tobytes() == plain.tobytes()


def test_efca_turns_no_sign_whatever_the_weights():
    """alpha 3: 1 - 3 is cut at 0."""
    win = walk("a", ["x", "x"], 1.0, feedback=[FAILED, FAILED])
    up, down = credited([win, walk("b", ["x"], 0.0, feedback=[DONE])], GRPO, {"name": "efca", "alpha": 3.0, "beta": 3.0})
    assert up == [0, 0] and down == [0]


# --------------------------------------------------------------------------------------------------- triage


def test_triage_by_hand():
    """lam .5: 1 + .5 * .5 = 1.25 decisive, 1 + .5 * .2 = 1.1 exploration, 1 - .05 no progress, 1 - .25 regression; the last turn of
    an episode, behind which nothing is known, keeps its A."""
    paid = Feedback(reward=1.0)
    keys = ["x", "y", "z", "z", "x", "u"]  # decisive, exploration, no progress, regression (to x), exploration, abstain
    win = walk("a", keys, 1.0, feedback=[paid, DONE, IDLE, DONE, DONE, DONE])
    up, down = credited([win, walk("b", ["x", "y"], 0.0)], GRPO, {"name": "triage"})
    np.testing.assert_allclose(up, [1.25, 1.1, 0.95, 0.75, 1.1, 1.0], rtol=1e-6)
    np.testing.assert_allclose(down, [-0.9, -1.0], rtol=1e-6)  # exploration inside a failure is blamed less


def test_roles_by_rule():
    names = [ROLES[r] for r in roles_of(walk("a", ["x", "y", "x", "", "w"], feedback=[DONE, FAILED, DONE, DONE, Feedback(reward=-1.0)]))]
    # y → x is a way back, though the call failed; behind x nothing is known; from nowhere to w; a negative reward at the end
    assert names == ["exploration", "regression", "abstain", "exploration", "regression"]


def test_a_judge_that_abstains_changes_nothing():
    """States without a key: the rule cannot tell."""
    episodes = [walk("a", ["", ""], 1.0), walk("b", [""], 0.0)]
    assert credited(episodes, GRPO, {"name": "triage"}) == credited(episodes, GRPO)


def test_triage_of_weight_0_changes_no_bit():
    for seed in SEEDS[:50]:
        batch = random_batch(seed)
        plain = assign(batch, [{"name": "grpo"}]).columns["advantage"]
        assert assign(batch, [{"name": "grpo"}, {"name": "triage", "lam": 0.0}]).columns["advantage"].tobytes() == plain.tobytes()


def test_a_judges_column_is_asked_for_and_read():
    """Roles 4 and 0 in turns of 2 tokens, 2 in the sibling: -.25, 0 and +.1."""
    spec = {"name": "triage", "judge": "column"}
    batch = Batch((walk("a", ["x", "y"], 1.0), walk("b", ["x"], 0.0)))
    assert Pipeline([GRPO, spec]).needs == ("role",) and Pipeline([GRPO, {"name": "triage"}]).needs == ()
    role = np.array([0, 4, 4, 0, 0, 0, 0, 2, 2])
    done = assign(batch.with_columns(role=role), [GRPO, spec])
    np.testing.assert_allclose(turns_of(done, done.columns["advantage"])[0], [0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(turns_of(done, done.columns["advantage"])[1], [-0.9], rtol=1e-6)
    with pytest.raises(CreditError, match="needs the batch column 'role'"):
        assign(batch, [GRPO, spec])
    with pytest.raises(CreditError, match="holds 7, but must hold numbers from 0 to 4"):
        assign(batch.with_columns(role=np.where(role == 2, 7, role)), [GRPO, spec])


def test_role_means_are_nearest_to_the_residual():
    """M126: no constants near them have a smaller mean square error; 1 1 2 with .4 .6 -.1 by hand."""
    np.testing.assert_allclose(role_means(np.array([1, 1, 2]), np.array([0.4, 0.6, -0.1])), [0, 0.5, -0.1, 0, 0], rtol=1e-12)
    rng = np.random.default_rng(0)
    role = rng.integers(1, 5, 3001)
    residual = np.array([0, 0.6, 0.2, -0.1, -0.7])[role] + 0.3 * rng.standard_normal(3001)
    best = role_means(role, residual)
    np.testing.assert_allclose(best, [0, 0.6, 0.2, -0.1, -0.7], atol=0.05)
    error = np.mean((residual - best[role]) ** 2)
    for change in rng.normal(0, 0.05, (50, 5)):
        assert np.mean((residual - (best + change)[role]) ** 2) > error


# --------------------------------------------------------------------------------------------------- shuffled


def test_shuffled_sums_are_the_same_numbers_in_another_order():
    """M91: weights 0 0 3 0 0 0 keep their sum 3 and their concentration 1, wherever the 3 comes to lie."""
    places = set()
    for seed in range(40):
        found = turns_with([0, 0, 3, 0, 0, 0], [1] * 6, {"name": "shuffled", "seed": seed})
        assert sorted(found) == [0, 0, 0, 0, 0, 3]
        places.add(found.index(3))
    assert places == set(range(6))


def test_shuffled_keeps_sum_concentration_and_mass_for_turns_of_any_size():
    """Turns of 2, 1 and 3 tokens with .5 .5 | -3 | 1 1 1 carry 1, -3 and 3. Mass of tokens 1 + 3 + 3, before and after."""
    seen = set()
    for seed in range(60):
        batch = Batch((walk("a", [""] * 3, sizes=[2, 1, 3]),))
        column = np.zeros(len(batch.token_row))
        column[batch.channel("pg")] = [0.5, 0.5, -3, 1, 1, 1]
        after = registry.create("transform", {"name": "shuffled", "seed": seed})(column, batch)
        sums = [sum(own) for own in (after[1:3], after[4:5], after[6:9])]
        assert sorted(np.round(sums, 9)) == [-3, 1, 3] and len(set(after[6:9])) == len(set(after[1:3])) == 1
        assert abs(after).sum() == pytest.approx(7, rel=1e-6) and after.sum() == pytest.approx(1, rel=1e-6)
        seen.add(tuple(np.round(sums, 9)))
    assert seen == set(permutations([1.0, -3.0, 3.0]))


def test_shuffled_orders_are_uniform():
    """6000 episodes of three turns: each of the 6 orders 1000 times; chi square with 5 degrees of freedom is below 20.5 with
    probability .999."""
    count = {order: 0 for order in permutations([1.0, 2.0, 3.0])}
    batch = Batch(tuple(walk(f"e{i}", [""] * 3, sizes=[1] * 3) for i in range(6000)))
    column = np.zeros(len(batch.token_row))
    column[batch.channel("pg")] = np.tile([1.0, 2.0, 3.0], 6000)
    after = registry.create("transform", {"name": "shuffled"})(column, batch)[batch.channel("pg")].reshape(-1, 3)
    for order in after:
        count[tuple(order)] += 1
    assert sum((n - 1000) ** 2 / 1000 for n in count.values()) < 20.5


def test_shuffled_depends_on_the_seed_and_on_nothing_else():
    batch = Batch(tuple(walk(f"e{i}", [""] * 4, sizes=[1, 2, 1, 3]) for i in range(5)))
    column = np.where(batch.channel("pg"), np.random.default_rng(0).normal(size=len(batch.token_row)), 0.0)
    first, again, other = (registry.create("transform", {"name": "shuffled", "seed": s})(column, batch) for s in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    alone = Batch(batch.episodes[3:4])
    own = batch.token_episode == 3
    assert np.array_equal(registry.create("transform", {"name": "shuffled", "seed": 7})(column[own], alone), first[own])


def test_shuffled_wraps_any_transform(planted):  # noqa: F811
    """It applies the other with that one's arguments, then deals; it needs and preserves what that one does."""

    @planted("transform", "by_turn")
    @dataclass(frozen=True)
    class ByTurn:
        factor: float = 1.0

        needs: ClassVar[tuple[str, ...]] = ("extra",)
        preserves: ClassVar[frozenset[str]] = frozenset({"sign"})

        def __call__(self, advantage, batch):
            return advantage * self.factor * (1 + np.maximum(batch.token_turn - batch.token_turn[0] - 1, 0))

    spec = {"name": "shuffled", "seed": 3, "of": {"name": "by_turn", "factor": 10.0}}
    assert Pipeline([GRPO, spec]).needs == ("extra",)
    made = registry.create("transform", spec)
    assert made.preserves == frozenset() and registry.create("transform", {"name": "shuffled"}).preserves == {"sum"}
    assert sorted(turns_with([1, 1, 1, 1], [1, 2, 1], spec)) == [10, 30, 40]  # 1 * 10, 2 * 20 and 1 * 30, of turns 0 1 2
    for name in ("efca", "triage"):
        assert np.isfinite(assign(random_batch(3), [GRPO, {"name": "shuffled", "of": {"name": name}}]).columns["advantage"]).all()
    with pytest.raises(registry.RegistryError, match="no transform 'by_trun'; did you mean 'by_turn'"):
        registry.create("transform", {"name": "shuffled", "of": {"name": "by_trun"}})


def test_shuffled_leaves_a_turn_without_tokens_of_its_own_out():
    """Turn 1 said nothing: 5 and 7 change places or stay, and nothing is lost."""
    for seed in range(8):
        assert turns_with([5, 7], [1, 0, 1], {"name": "shuffled", "seed": seed}) in ([5, 0, 7], [7, 0, 5])


# --------------------------------------------------------------------------------------------------- all


@pytest.mark.parametrize("name", ["efca", "triage", "shuffled"])
def test_what_a_transform_says_that_it_preserves(name):
    part = registry.create("transform", {"name": name})
    for seed in SEEDS[:80]:
        batch = random_batch(seed)
        rng = np.random.default_rng(seed)
        episodes = []
        for e in batch.episodes:
            said = [(str(rng.choice(["p", "q", ""])), (DONE, FAILED, IDLE)[rng.integers(3)]) for _ in e.turns]
            turns = tuple(replace(t, state_key=key, feedback=back) for t, (key, back) in zip(e.turns, said, strict=True))
            episodes.append(replace(e, turns=turns))
        batch = Batch(tuple(episodes))
        before = np.where(batch.channel("pg"), rng.normal(size=len(batch.token_row)), 0.0)
        after = np.where(batch.channel("pg"), part(before, batch), 0.0)
        if "sign" in part.preserves:
            assert np.array_equal(np.sign(before), np.sign(after))
        if "sum" in part.preserves:
            sums = [np.bincount(batch.token_episode, weights=column, minlength=len(batch.episodes)) for column in (before, after)]
            np.testing.assert_allclose(sums[1], sums[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("spec", "says"), [
    ({"name": "efca", "alpha": -1.0}, "alpha is -1.0"), ({"name": "efca", "window": 0}, "window is 0"),
    ({"name": "efca", "cycle": 0}, "cycle is 0"), ({"name": "triage", "lam": -1.0}, "lam is -1.0"),
    ({"name": "triage", "regression": -2.0}, r"regression is -2.0, but must be in \[-1, 1\]"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(spec, says):
    with pytest.raises(CreditError, match=says):
        registry.create("transform", spec)
