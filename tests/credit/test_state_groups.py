"""Steps held against steps from the same state: numbers worked out by hand (M120, M121, M122, M123, M124)."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.graphgpo import GOAL, distances
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import assign
from mcore_agent.credit.progpo import Progpo, fuse, merged
from mcore_agent.credit.steps import relative, steps_of
from mcore_agent.types import Batch
from tests.credit.walks import credited, turns_of, walk
from tests.strategies import SEEDS, episode_of, random_batch

NAMES = ["gigpo", "hgpo", "progpo", "g2po", "gagpo", "graphgpo"]
WIN, LOSE = walk("win", ["s0", "s1"], 1.0), walk("lose", ["s0", "s0", "s1"], 0.0)


def same(found, expected):
    assert [len(f) for f in found] == [len(e) for e in expected]
    for own, should in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, should, rtol=1e-5, atol=1e-6)


def test_what_a_step_is():
    """Rewards of a whole episode come last, those of turns at the turn; an episode without turns is one step nobody knows."""
    batch = Batch((walk("a", ["x", "y"], [0.25, 2.0]), episode_of("b", "h", 3.0), walk("c", ["x"], 1.0)))
    steps = steps_of(batch)
    assert steps.episode.tolist() == [0, 0, 1, 2] and steps.place.tolist() == [0, 1, 0, 0]
    assert steps.reward.tolist() == [0.25, 2, 3, 1] and steps.key == ("x", "y", "", "x")
    assert steps.history == ((), ("x",), (), ()) and steps.last.tolist() == [False, True, True, True]
    assert steps.token.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
    assert steps.returns(0.5).tolist() == [0.25 + 0.5 * 2, 2, 3, 1]
    assert steps.following(np.array([1.0, 2, 3, 4])).tolist() == [2, 0, 0, 0]
    x, y, unknown, again = steps.states().tolist()
    assert x == again and len({x, y, unknown}) == 3  # a and c are one group, b another
    shaped = batch.with_columns(token_reward=np.arange(12.0))
    assert steps_of(shaped).reward.tolist() == [0.25 + 0 + 1 + 2 + 3, 2 + 4 + 5, 3 + 6 + 7 + 8, 1 + 9 + 10 + 11]


def test_states_of_other_groups_and_without_a_name_are_never_the_same():
    steps = steps_of(Batch((walk("a", ["x", "", ""]), walk("b", ["x"], group="h"), walk("c", ["x"]))))
    states = steps.states().tolist()
    assert states[0] == states[4] and len(set(states)) == 4


def test_gigpo_by_hand():
    """M120. A_episode: 1 and 0 minus .5. Returns at .95: s0 has .95, 0, 0 (mean .31667), s1 has 1, 0 (mean .5).
    .5 + .63333; .5 + .5; -.5 - .31667 twice; -.5 - .5."""
    same(credited([WIN, LOSE], {"name": "gigpo", "norm": "mean"}), [[1.13333, 1.0], [-0.81667, -0.81667, -1.0]])


def test_gigpo_can_let_an_episode_vote_once_per_step():
    """Rewards by step: 1 1 0 0 0 has mean .4, so that A_episode is .6 and -.4 instead of .5 and -.5."""
    same(credited([WIN, LOSE], {"name": "gigpo", "norm": "mean", "votes": "step", "omega": 0.0}), [[0.6, 0.6], [-0.4, -0.4, -0.4]])
    same(credited([WIN, LOSE], {"name": "gigpo", "norm": "mean", "omega": 0.0}), [[0.5, 0.5], [-0.5, -0.5, -0.5]])


def test_gigpo_divides_by_the_deviation():
    """Returns 1 and 0 in one state: mean .5, deviation .5, A_step ±1, A_episode ±1, omega .5: ±1.5."""
    found = credited([walk("a", ["s"], 1.0), walk("b", ["s"], 0.0)], {"name": "gigpo", "eps": 0, "omega": 0.5})
    same(found, [[1.5], [-1.5]])


def test_gigpo_without_repeated_states_is_grpo_bit_for_bit():
    for seed in SEEDS[:60]:
        batch = random_batch(seed)
        batch = Batch(tuple(replace(e, turns=tuple(replace(t, state_key="") for t in e.turns)) for e in batch.episodes))
        ours, grpo = (assign(batch, [{"name": name}]).columns["advantage"] for name in ("gigpo", "grpo"))
        assert ours.tobytes() == grpo.tobytes()


def test_hgpo_of_depth_0_is_gigpo_bit_for_bit():
    episodes = [WIN, LOSE, walk("c", ["s0", "s2", "s1"], 0.25)]
    for norm in ("mean", "mean_std"):
        ours = credited(episodes, {"name": "hgpo", "depth": 0, "norm": norm})
        assert ours == credited(episodes, {"name": "gigpo", "norm": norm})
    assert ours != credited(episodes, {"name": "hgpo", "depth": 1})


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
def test_hgpo_weighs_longer_pasts_by_hand(alpha):
    """In c came a (a1) and b (a2) after x, and d after y, with the returns 1, 0, .5 (gamma 1). Without the past they are
    compared with .5: .5, -.5, 0. With one state of past a and b are compared with .5, d has no peer. In x the returns are
    1 and 0, in y d is alone. Weights 1 and 2 ** alpha, alone or shared. A_episode: .5, -.5, 0. Depth 1 has no
    peers in first turns, where only depth 0 counts: .5, -.5 and 0."""
    episodes = [walk("a", ["x", "c"], 1.0), walk("b", ["x", "c"], 0.0), walk("d", ["y", "c"], 0.5)]
    shared = (0.5 + 2**alpha * 0.5) / (1 + 2**alpha)
    expected = [[0.5 + 0.5, 0.5 + shared], [-0.5 - 0.5, -0.5 - shared], [0, 0]]
    same(credited(episodes, {"name": "hgpo", "depth": 1, "alpha": alpha, "norm": "mean", "gamma": 1.0}), expected)


def test_hgpo_gives_the_past_its_weight():
    """As before, but e also came to c after x, with return 0: without the past the returns 1 0 .5 0 have mean .375, with it
    1 0 0 have 1/3. For a, alpha 1: A_0 = .625, A_1 = 2/3, so (.625 + 2 * 2/3) / 3 = .65278; d, without peers at depth 1, has
    .125 alone. A_episode of rewards 1 0 .5 0: .625 and .125."""
    episodes = [walk("a", ["x", "c"], 1.0), walk("b", ["x", "c"]), walk("d", ["y", "c"], 0.5), walk("e", ["x", "c"])]
    found = credited(episodes, {"name": "hgpo", "depth": 1, "norm": "mean", "gamma": 1.0})
    np.testing.assert_allclose([found[0][1], found[2][1]], [0.625 + (0.625 + 4 / 3) / 3, 0.125 + 0.125], rtol=1e-6)


def test_g2po_by_hand():
    """M123. V(s0) = .95 / 3, V(s1) = .5: delta = .95 * .5 - .31667 = .15833, 1 - .5, .95 * .31667 - .31667 = -.01583, .15833,
    0 - .5; their mean is .06017, their deviation .32628."""
    delta = np.array([0.95 * 0.5 - 0.95 / 3, 0.5, (0.95 - 1) * 0.95 / 3, 0.95 * 0.5 - 0.95 / 3, -0.5])
    np.testing.assert_allclose(delta, [0.15833, 0.5, -0.01583, 0.15833, -0.5], atol=1e-5)
    same(credited([WIN, LOSE], {"name": "g2po", "eps": 0}), [[0.30087, 1.34803], [-0.23293, 0.30087, -1.71683]])


def test_g2po_of_doubled_trajectories_and_of_a_graph_without_shared_states():
    """Every episode twice: the same V, deltas, mean and deviation. Without a shared state V is the own return and delta 0."""
    once = credited([WIN, LOSE], {"name": "g2po"})
    twice = credited([WIN, LOSE, replace(WIN, id="win2"), replace(LOSE, id="lose2")], {"name": "g2po"})
    same(twice, [*once, *once])
    apart = [walk("a", ["p", "q"], 1.0), walk("b", ["r"], 0.0), walk("c", ["", ""], 0.5), walk("d", ["", ""], 0.0)]
    for name in ("g2po", "gagpo"):
        assert credited(apart, {"name": name}) == [[0, 0], [0], [0, 0], [0, 0]]


def test_gagpo_by_hand():
    """a → b → 1 and a → b → 0, gamma 1, lam .5: V = .5, delta = 0, ±.5, A = ±.25, ±.5. All four have mean 0 and deviation
    sqrt((2 * .0625 + 2 * .25) / 4) = .39528. lam 0 is delta alone, lam 1 is G - V."""
    episodes = [walk("a", ["a", "b"], 1.0), walk("b", ["a", "b"], 0.0)]
    spec = {"name": "gagpo", "gamma": 1.0, "lam": 0.5}
    same(credited(episodes, {**spec, "norm": "none"}), [[0.25, 0.5], [-0.25, -0.5]])
    same(credited(episodes, {**spec, "eps": 0}), [[0.25 / 0.395285, 0.5 / 0.395285], [-0.25 / 0.395285, -0.5 / 0.395285]])
    same(credited(episodes, {**spec, "lam": 1.0, "norm": "none"}), [[0.5, 0.5], [-0.5, -0.5]])
    assert credited(episodes, {"name": "gagpo", "lam": 0.0}) == credited(episodes, {"name": "g2po"})


def test_distances_by_hand():
    """0 → 1 → goal, 0 → 2 → 0, 2 → goal, 3 → 4 → 3: one step from 1 and 2, two from 0; 3 and 4 never come there."""
    state, after = np.array([0, 1, 0, 2, 2, 3, 4]), np.array([1, GOAL, 2, 0, GOAL, 4, 3])
    assert distances(state, after) == {GOAL: 0, 1: 1, 2: 1, 0: 2}


def test_graphgpo_by_hand():
    """a → b → goal and a → a → b → nothing: d(b) = 1, d(a) = 2, nothing counts 3. From a: 1, 0, 1 with mean 2/3; from b: 1, -2 with
    mean -.5. With A_episode ±.5 on top."""
    graph = [[1 / 3, 1.5], [-2 / 3, 1 / 3, -1.5]]
    episodes = [walk("win", ["a", "b"], 1.0), walk("lose", ["a", "a", "b"], 0.0)]
    found = credited(episodes, {"name": "graphgpo", "norm": "mean"})
    same(found, [[0.5 + x for x in graph[0]], [-0.5 + x for x in graph[1]]])
    # With a detour the shorter way is worth more: from a to b directly 2 - 1 = 1, over c 2 - 2 = 0.
    found = credited([walk("short", ["a", "b"], 1.0), walk("long", ["a", "c", "b"], 1.0)], {"name": "graphgpo", "norm": "mean"})
    same(found, [[0.5, 0], [-0.5, 0, 0]])


def test_graphgpo_where_the_goal_is_not_reached():
    """Nobody wins: nothing to compare but the rewards. d never comes near the goal that a finds: only its rewards count there."""
    lost = [walk("a", ["x", "y"], 0.2), walk("b", ["x", "x"], 0.0)]
    assert credited(lost, {"name": "graphgpo", "norm": "mean"}) == credited(lost, {"name": "gigpo", "norm": "mean", "omega": 0.0})
    some = [walk("a", ["x"], 1.0), walk("d", ["u", "v", "u"], 0.0), walk("e", ["u", "u"], 0.0)]
    same(credited(some, {"name": "graphgpo", "norm": "mean"}), [[2 / 3], [-1 / 3] * 3, [-1 / 3] * 2])


def test_fusion_by_hand():
    """M122: variances .16 / 8 = .02 and .04 / 2 = .02 weigh alike, (.2 + .6) / 2; .04 / 8 = .005 weighs four times as much,
    (.2 + 4 * .6) / 5 = .52. What is not there has no vote."""
    mean = np.array([[0.2, 0.2, 0.2], [0.6, 0.6, 0.6]])
    found = fuse(mean, np.array([[0.02, 0.02, 0.02], [0.02, 0.005, np.inf]]))
    np.testing.assert_allclose(found, [0.4, 0.52, 0.2], rtol=1e-12)


def test_progpo_by_hand():
    """gamma 1, depth 1, prior .1. a: x → c → 1; b: x → c → 0; d: y → c → .5. All returns 1 1 0 0 .5 .5 have variance 1/6.
    Phi(x): depth 0 alone (a first turn has no past): mean .5. Phi(y): its own return, .5.
    Phi(c) at depth 0: mean .5; after x: .5; after y: .5 (a group of one). So Phi = .5 everywhere: the potential part is 0, then
    r - .5. A_prefix: x and x→c of a and b: ±.5; d has no peers."""
    episodes = [walk("a", ["x", "c"], 1.0), walk("b", ["x", "c"], 0.0), walk("d", ["y", "c"], 0.5)]
    same(credited(episodes, {"name": "progpo", "gamma": 1.0, "depth": 1, "prior": 0.1}), [[0.5, 1.0], [-0.5, -1.0], [0, 0]])


def test_progpo_fuses_what_states_are_worth_by_hand():
    """As before with d's reward 1. Returns 1 1 0 0 1 1: variance 2/9. In c: depth 0 has 1 0 1, mean 2/3, variance 2/9, n 3:
    v = 2/27 + .1; after x 1 0: mean .5, variance .25, n 2: v = .125 + .1; after y 1 alone: v = 2/9 + .1.
    d is alone with its past: A_prefix = 0 in both turns, so that its A is the potential part alone."""
    episodes = [walk("a", ["x", "c"], 1.0), walk("b", ["x", "c"], 0.0), walk("d", ["y", "c"], 1.0)]
    v0, vx, vy = 2 / 27 + 0.1, 0.225, 2 / 9 + 0.1
    after_x = (2 / 3 / v0 + 0.5 / vx) / (1 / v0 + 1 / vx)
    after_y = (2 / 3 / v0 + 1.0 / vy) / (1 / v0 + 1 / vy)
    expected = [
        [0.5 + after_x - 0.5, 0.5 + 1 - after_x],  # Phi(x) = .5, Phi(y) = 1
        [-0.5 + after_x - 0.5, -0.5 - after_x],
        [after_y - 1, 1 - after_y],
    ]
    same(credited(episodes, {"name": "progpo", "gamma": 1.0, "depth": 1, "prior": 0.1}), expected)


def test_progpos_potential_telescopes():
    """sum_t gamma^t (r_t + gamma Phi_{t+1} - Phi_t) = G_0 - Phi_0, whatever Phi."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        episodes = [walk(f"e{i}", [str(rng.choice(list("xyz"))) for _ in range(rng.integers(1, 6))], float(rng.normal())) for i in range(5)]
        steps, gamma = steps_of(Batch(tuple(episodes))), 0.9
        value = steps.returns(gamma)
        phi = Progpo(gamma=gamma).potential(steps, value)
        discounted = gamma**steps.place * (steps.reward + gamma * steps.following(phi) - phi)
        first = np.flatnonzero(steps.place == 0)
        np.testing.assert_allclose(np.bincount(steps.episode, weights=discounted), (value - phi)[first], rtol=1e-9, atol=1e-12)


def test_progpo_merges_similar_states_only_when_told():
    """The names "you are in the kitchen." and "you are in the kitchen!" share 22 of 23 signs: 2 * 22 / 46 = .957."""
    keys = ["you are in the kitchen.", "you are in the kitchen!", "you are in the hall."]
    steps = steps_of(Batch((*(walk(f"e{i}", [key], float(i == 0)) for i, key in enumerate(keys)), walk("o", [keys[0]], group="other"))))
    names = merged(steps, 0.95)
    group, other = int(steps.group[0]), int(steps.group[3])
    assert names == {(group, keys[0]): keys[1], (group, keys[1]): keys[1], (group, keys[2]): keys[2], (other, keys[0]): keys[0]}
    episodes = [walk("a", [keys[0]], 1.0), walk("b", [keys[1]], 0.0)]
    assert credited(episodes, {"name": "progpo"}) == [[0], [0]]  # each state is worth what its own episode returned
    same(credited(episodes, {"name": "progpo", "similarity": 0.95}), [[0.5], [-0.5]])


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_in_equal_steps_teach_nothing(name):
    """The same way and the same reward, thirds included: exactly 0."""
    episodes = [walk(f"e{i}", ["x", "y", "z"], 1 / 3) for i in range(3)]
    assert credited(episodes, {"name": name}) == [[0.0] * 3] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one_and_episodes_without_turns_stay_finite(name):
    batch = Batch((walk("a", ["x", "x", ""], 1.0), episode_of("b", "h", 1.0), episode_of("c", "h", 0.0), episode_of("d", "i", 2.0)))
    column = assign(batch, [{"name": name}]).columns["advantage"]
    assert np.isfinite(column).all() and not column[batch.token_episode == 3].any()


def test_tokens_without_a_turn_belong_to_the_step_before():
    """A row of an episode with turns in which no segment names the last token: it is the second turn's."""
    episode = walk("a", ["x", "y"], 1.0)
    row = episode.rows[0]
    cut = replace(row, segments=(*row.segments[:-1], replace(row.segments[-1], end=row.segments[-1].end - 1)))
    batch = Batch((replace(episode, rows=(cut,)), walk("b", ["x"], 0.0)))
    assert steps_of(batch).token.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    column = assign(batch, [{"name": "gigpo", "norm": "mean", "gamma": 1.0}]).columns["advantage"]
    assert column.tolist() == [0, 1, 1, 0, 0.5, 0.5, 0, -1, -1]  # x: ±.5 and ±.5; y: .5 alone


def test_relative_values_by_hand():
    found = relative(np.array([1.0, 3, 0.1 + 0.2, 0.3]), np.array([0, 0, 1, 1]), True, 0.0)
    assert found.tolist() == [-1, 1, 0, 0]
    assert relative(np.zeros(0), np.zeros(0, dtype=int), True, 0.0).shape == (0,)


def test_turns_are_compared_over_rows():
    """A rewritten context: the second turn is in a row of its own."""
    one = walk("a", ["x", "y"], 1.0)
    row = one.rows[0]
    columns = {name: getattr(row, name)[:4] for name in ("tokens", "sampled", "logp", "version")}
    first = replace(row, **columns, segments=row.segments[:3])
    mask = row.sampled & (np.arange(len(row)) >= 4)
    second = replace(row, sampled=mask, logp=np.where(mask, row.logp, 0), version=np.where(mask, 0, -1))
    batch = assign(Batch((replace(one, rows=(first, second)), walk("b", ["x", "y"], 0.0))), [{"name": "gigpo", "norm": "mean"}])
    assert turns_of(batch, batch.columns["advantage"]) == credited([one, walk("b", ["x", "y"], 0.0)], {"name": "gigpo", "norm": "mean"})


@pytest.mark.parametrize(("spec", "says"), [
    ({"name": "gigpo", "omega": -1.0}, "'gigpo': omega is -1.0"), ({"name": "g2po", "gamma": 1.5}, "'g2po': gamma is 1.5"),
    ({"name": "hgpo", "depth": -1}, "depth is -1"), ({"name": "gagpo", "lam": 2.0}, "lam is 2.0"),
    ({"name": "progpo", "prior": 0.0}, "prior is 0.0, but must be above 0"), ({"name": "progpo", "similarity": 0.0}, "similarity is 0.0"),
    ({"name": "progpo", "depth": -2}, "depth is -2"), ({"name": "graphgpo", "eps": -1.0}, "'graphgpo': eps is -1.0"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(spec, says):
    with pytest.raises(CreditError, match=says):
        registry.create("estimator", spec)
