"""Form, length and tools, each against numbers derived from its definition."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mcore_agent.registry import RegistryError
from mcore_agent.reward.form import Format
from mcore_agent.reward.length import LengthLinear, LengthSigmoid
from mcore_agent.reward.pipeline import RewardError, Scorer, make
from mcore_agent.reward.tool_diversity import ToolDiversity
from mcore_agent.reward.tool_shaping import ToolShaping
from mcore_agent.types import Segment
from tests.reward.episodes import call, played
from tests.strategies import random_batch

GOOD, BROKEN, THOUGHT, BOX = call("search", q="x"), "<tool_call>{oops</tool_call>", "<think>why</think>", r"\boxed{4}"


# ---------------------------------------------------------------------------------------------------- format (M40)


@pytest.mark.parametrize(("text", "value"), [
    (THOUGHT + GOOD + BOX, 0.6),  # .3 + .1 + .2
    (THOUGHT + "4", 0.3),
    (BROKEN + GOOD, 0.0),  # .1 - .2 is below 0
    (THOUGHT + GOOD * 6 + BOX, 1.0),  # .3 + .6 + .2 is above 1
    (THOUGHT + BROKEN, 0.1),  # .3 - .2
    (GOOD, 0.1),
    ("", 0.0),
    (BOX, 0.2),
])  # fmt: skip
def test_format_by_hand(text, value):
    assert Format().score(played(text)) == {"form": pytest.approx(value)}


@pytest.mark.parametrize("text", [
    "<think> \n</think>4",  # empty
    "<think>why",  # never closed
    "4 <think>why</think>",  # not first
    "<think>a</think><think>b</think>4",  # twice
    "<think>a<think>b</think>4",
    "<think>a</think>4</think>",
])  # fmt: skip
def test_what_is_no_block_of_thoughts(text):
    assert Format().score(played(text)) == {"form": 0.0}


def test_calls_and_boxes_among_thoughts_do_not_count():
    assert Format().score(played(f"<think>{GOOD}{BROKEN}{BOX}</think>4")) == {"form": pytest.approx(0.3)}


def test_every_turn_needs_thoughts_and_only_the_last_a_box():
    """.3 + .1 + .2 for a call and then a box; a box in the first turn, or a turn without thoughts, gives none for it."""
    assert Format().score(played(THOUGHT + GOOD, THOUGHT + BOX)) == {"form": pytest.approx(0.6)}
    assert Format().score(played(THOUGHT + GOOD + BOX, THOUGHT)) == {"form": pytest.approx(0.4)}
    assert Format().score(played(GOOD, THOUGHT + BOX)) == {"form": pytest.approx(0.3)}
    assert Format().score(played()) == {"form": 0.0}


@pytest.mark.parametrize(("text", "there"), [
    (r"\boxed{\frac{1}{2}}", True), (r"\boxed{}", False), (r"\boxed{ }", False), (r"\boxed{1", False), (r"\boxed{\frac{1}{2}", False),
    (r"\boxed{} no, \boxed{3}", True), ("boxed{3}", False),
])  # fmt: skip
def test_a_box_is_closed_and_filled(text, there):
    assert Format().score(played(text))["form"] == pytest.approx(0.2 * there)


def test_format_stays_in_its_bounds():
    rng = np.random.default_rng(7)
    for _ in range(300):
        text = "".join(rng.choice([GOOD, BROKEN, THOUGHT, BOX, "<think>", "</think>", "}", "x"], int(rng.integers(0, 9))))
        assert 0.0 <= Format(think=0.7, call=0.9, bad_call=1.3).score(played(text))["form"] <= 1.0


# ---------------------------------------------------------------------------------------------------- length (M42)


def test_f26_linear_and_sigmoid():
    """A reward of 1 and 8 turns at a target of 5: 1 - .1 * 3 = .7, and sigmoid(-3 / 2) = 1 / (1 + e^1.5) = .18243."""
    episode = played(*"abcdefgh", earned=1.0)
    (scored,), _ = Scorer([{"name": "outcome"}, {"name": "length_linear", "target": 5, "rate": 0.1}])([episode])
    assert scored.rewards == pytest.approx({"outcome": 1.0, "length": -0.3}) and scored.reward == pytest.approx(0.7)
    (scored,), _ = Scorer([{"name": "length_sigmoid", "of": {"name": "outcome"}, "target": 5, "tau": 2.0}])([episode])
    assert scored.rewards["outcome"] == 1.0 and scored.reward == pytest.approx(1 / (1 + math.exp(1.5)), rel=1e-12)
    assert scored.reward == pytest.approx(0.18243, abs=5e-6)


def test_length_is_free_up_to_the_target_and_counts_turns_or_sampled_tokens():
    assert [LengthLinear(3, 0.5).score(played(*"abcde"[:n]))["length"] for n in (0, 3, 4, 5)] == [0.0, 0.0, -0.5, -1.0]
    assert LengthLinear(3, 0.5, unit="tokens").score(played(*"abcde")) == {"length": -1.0}  # one sampled token a turn


def test_the_sigmoid_scales_a_loss_too_and_stays_finite(fixed):
    """At the target half of -2 is left; far above it nothing; a part that abstains makes it abstain."""
    spec = {"name": "length_sigmoid", "of": fixed({"e": -2.0}), "target": 2, "tau": 1.0}
    found = make(spec).ask(played("a", "b"), ()).rewards
    assert found == {"fixed": -2.0, "length": pytest.approx(1.0)}
    far = make({**spec, "target": -1e6, "tau": 1e-3}).ask(played("a"), ()).rewards
    assert sum(far.values()) == pytest.approx(0.0)
    assert make(spec).ask(played("a", id="other"), ()).rewards == {}
    with pytest.raises(RewardError, match="reward 'fixed' gives 'length', which length_sigmoid gives itself"):
        make({**spec, "of": fixed(1.0, "length")}).ask(played("a"), ())


@pytest.mark.parametrize(("make_it", "says"), [
    (lambda: LengthLinear(-1), "target is -1"),
    (lambda: LengthLinear(1, 0.0), "rate is 0.0"),
    (lambda: LengthSigmoid({"name": "outcome"}, 1, 0.0), "tau is 0.0"),
    (lambda: LengthSigmoid({"name": "outcome"}, math.inf, 1.0), "target is inf"),
    (lambda: Format(call=-0.1), "call is -0.1"),
    (lambda: Format(think=math.nan), "think is nan"),
    (lambda: ToolShaping([]), "tools is empty"),
    (lambda: ToolShaping(["a"], needed=["b"]), "needed has 'b', which is not among tools: a"),
    (lambda: ToolShaping(["a"], unknown=-1.0), "unknown is -1.0"),
    (lambda: ToolShaping(["a"], cap=0.0), "cap is 0.0"),
    (lambda: ToolDiversity(rate=0.0), "rate is 0.0"),
    (lambda: ToolDiversity(cap=math.inf), "cap is inf"),
])  # fmt: skip
def test_settings_out_of_range_are_refused(make_it, says):
    with pytest.raises(RewardError, match=says):
        make_it()


def test_an_unknown_parser_is_refused():
    for variant in (Format, ToolDiversity, lambda parser: ToolShaping(["a"], parser=parser)):
        with pytest.raises(RegistryError, match="no parser 'hermess'; did you mean 'hermes'"):
            variant(parser="hermess")


# ---------------------------------------------------------------------------------------------- tool shaping (M43)


def test_needed_repeated_and_unknown_tools():
    """search, search, search, fly: .1, -.05, -.05, -.3; in all .1 - .1 - .3 = -.3."""
    shaping = ToolShaping(["search", "read"], needed=["search"])
    paid = shaping.score(played(GOOD, GOOD, GOOD, call("fly")))["tool_shaping"]
    assert paid == pytest.approx([0.1, -0.05, -0.05, -0.3]) and sum(paid) == pytest.approx(-0.3)


def test_the_same_calls_in_one_turn_or_in_several_earn_the_same():
    shaping = ToolShaping(["search", "read"], needed=["search", "read"], cap=1.0)
    calls = [GOOD, GOOD, call("read"), BROKEN, GOOD]
    # .1 - .05 + .1 - .3 + 0: the last search is needed no more, and does not repeat the call before it.
    assert sum(shaping.score(played(*calls))["tool_shaping"]) == pytest.approx(-0.15)
    assert shaping.score(played("".join(calls)))["tool_shaping"] == pytest.approx([-0.15])


def test_other_arguments_are_no_repetition_and_needed_tools_may_be_the_tasks():
    shaping = ToolShaping(["search"])
    assert shaping.score(played(GOOD, call("search", q="y"), GOOD))["tool_shaping"] == [0.0, 0.0, 0.0]
    task = played(GOOD, GOOD, meta={"needed_tools": ["search"]})
    assert shaping.score(task)["tool_shaping"] == pytest.approx([0.1, -0.05])


def test_the_cap_bounds_a_thousand_calls_both_ways():
    spoiled = ToolShaping(["search"], cap=0.5).score(played(*[BROKEN] * 1000))["tool_shaping"]
    assert spoiled[:3] == pytest.approx([-0.3, -0.2, 0.0]) and sum(spoiled) == pytest.approx(-0.5)
    names = [f"t{i}" for i in range(1000)]
    farmed = ToolShaping(names, needed=names, cap=0.25).score(played(*map(call, names)))["tool_shaping"]
    assert farmed[:4] == pytest.approx([0.1, 0.1, 0.05, 0.0]) and sum(farmed) == pytest.approx(0.25)


# -------------------------------------------------------------------------------------------- tool diversity (M54)


def bonuses(reward, *episodes):
    return [reward.score_among(e, episodes)["tool_diversity"] for e in episodes]


def with_tools(*names):
    return played(*map(call, names), id="".join(names))


@pytest.mark.parametrize("how", ["overlap", "divergence"])
def test_equal_siblings_and_one_alone_earn_nothing(how):
    reward = ToolDiversity(how=how)
    assert bonuses(reward, *(with_tools("a", "b") for _ in range(3))) == pytest.approx([0.0] * 3)
    assert bonuses(reward, with_tools("a")) == [0.0]
    assert bonuses(reward, played("4"), played("5")) == pytest.approx([0.0, 0.0])
    # The order of the calls is no difference, nor is their number.
    assert bonuses(reward, with_tools("a", "b"), with_tools("b", "a", "a", "b")) == pytest.approx([0.0, 0.0])


def test_overlap_by_hand():
    """aab and acc: min(2/3, 1/3) = 1/3 is shared, 2/3 is not; rate .3 gives .2. A third without calls shares nothing:
    the first has (2/3 + 1) / 2 = 5/6, so .25; the third (1 + 1) / 2, so .3; a cap of .28 bounds it."""
    two = with_tools("a", "a", "b"), with_tools("a", "c", "c")
    assert bonuses(ToolDiversity(rate=0.3, cap=1.0), *two) == pytest.approx([0.2, 0.2])
    assert bonuses(ToolDiversity(rate=0.3, cap=0.28), *two, played("4")) == pytest.approx([0.25, 0.25, 0.28])


def test_divergence_by_hand():
    """Shares a 1, a 1, b 1; mean a 2/3, b 1/3: KL is ln(3/2), ln(3/2), ln 3, over ln 3; the group's mean is the entropy of
    its mixture over ln 3, since each member's own is 0."""
    found = bonuses(ToolDiversity(rate=1.0, cap=9.0, how="divergence"), with_tools("a"), with_tools("a", "a"), with_tools("b"))
    assert found == pytest.approx([math.log(1.5) / math.log(3), math.log(1.5) / math.log(3), 1.0], rel=1e-12)
    mixture = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert sum(found) / 3 == pytest.approx(mixture / math.log(3), rel=1e-12)


def test_diversity_is_measured_within_each_group_through_the_pipeline():
    """Group g: a and b, nothing shared, so .1 each; group h: b and b, so 0. Also inside another reward."""
    episodes = [played(call(t), id=f"{g}{i}", group=g) for i, (g, t) in enumerate([("g", "a"), ("h", "b"), ("g", "b"), ("h", "b")])]
    plain = {"name": "tool_diversity", "rate": 0.1}
    scored, _ = Scorer([plain])(episodes)
    assert [e.reward for e in scored] == pytest.approx([0.1, 0.0, 0.1, 0.0])
    nested = {"name": "composite", "outcome": {"name": "outcome"}, "parts": [{"reward": plain, "weight": 0.5}]}
    scored, _ = Scorer([nested])(episodes)
    assert [e.rewards["tool_diversity"] for e in scored] == pytest.approx([0.05, 0.0, 0.05, 0.0])


# ------------------------------------------------------------------------------------------------- any episode at all


SPECS = [
    {"name": "form"}, {"name": "length_linear", "target": 1},
    {"name": "length_sigmoid", "of": {"name": "outcome"}, "target": 1, "tau": 2.0},
    {"name": "tool_shaping", "tools": ["search"]}, {"name": "tool_diversity"}, {"name": "tool_diversity", "how": "divergence"},
    {"name": "subgoals", "goals": [{"name": "one", "action": "act 1"}]},
    {"name": "gate", "of": {"name": "tool_shaping", "tools": ["x"]}, "by": {"name": "outcome"}},
    {"name": "composite", "outcome": {"name": "outcome"}, "parts": [{"reward": {"name": "subgoals"}, "weight": 0.1}]},
    {"name": "ensemble", "of": [{"name": "outcome"}, {"name": "form"}]},
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: "-".join(map(str, [s["name"], s.get("how", "")])).strip("-"))
def test_any_episode_gets_finite_numbers(spec):
    """Also demonstrations, episodes without turns, of several rows, and alone in their group."""
    for seed in range(40):
        bare = [replace(e, rewards={}) for e in random_batch(seed).episodes]
        for e in Scorer([spec], workers=1)(bare)[0]:
            assert e.status != "infra_fail" and e.rewards and math.isfinite(e.reward)


def test_the_helper_makes_what_it_says():
    """Two actions: prompt, action, observation, action; the first and the third are not sampled."""
    (row,) = played("a", "b").rows
    assert row.sampled.tolist() == [False, True, False, True]
    assert row.segments[2] == Segment(2, 3, 0, "obs")
    assert all(x.end == y.start for x, y in pairwise(row.segments))
