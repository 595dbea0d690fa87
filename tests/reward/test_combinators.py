"""Rewards of rewards: what they pay, what they log, what they refuse."""

import json
import math

import pytest

from mcore_agent.protocols import InfraError
from mcore_agent.registry import RegistryError
from mcore_agent.reward.composite import bounded
from mcore_agent.reward.pipeline import RewardError, Scorer, make, score
from mcore_agent.reward.vote import drawn
from tests.reward.episodes import call, played


def given(spec, episode=None, **services):
    """What one reward gives one episode."""
    episode = episode or played("x")
    return make(spec, services).ask(episode, [episode])


def part(reward, weight, **cap):
    return {"reward": reward, "weight": weight, **cap}


# ------------------------------------------------------------------------------------------------- composite (M41)


def test_components_are_weighted_and_kept(fixed):
    """1 * 1 + .2 * .5 + .1 * -1 - .05 * 3, the last one by its cap of .05: 1 + .1 - .1 - .05 = .95."""
    spec = {
        "name": "composite", "outcome": {"name": "outcome"},
        "parts": [part(fixed(0.5, "form"), 0.2), part(fixed(-1.0, "tools"), 0.1), part(fixed(3.0, "steps"), -0.05)],
    }  # fmt: skip
    (scored,), numbers = Scorer([spec])([played("x", "y", earned=1.0)])
    assert scored.rewards == pytest.approx({"outcome": 1.0, "form": 0.1, "tools": -0.1, "steps": -0.05})
    assert scored.reward == pytest.approx(0.95)
    assert {name: numbers[f"composite/raw/{name}"] for name in ("outcome", "form", "tools", "steps")} == {
        "outcome": 1.0, "form": 0.5, "tools": -1.0, "steps": 3.0,
    }  # fmt: skip
    # 1 of 1 + .1 + .1 + .05 in absolute values
    assert numbers["composite/outcome_share"] == pytest.approx(1 / 1.25)


def test_the_cap_holds_under_a_thousand_tool_calls():
    """Each call of a tool that is not there takes .3; the part's own bound is 100, the composite's .1."""
    shaping = {"name": "tool_shaping", "tools": ["search"], "cap": 100.0}
    spec = {"name": "composite", "outcome": {"name": "outcome"}, "parts": [part(shaping, 0.2, cap=0.1)]}
    episode = played(*[call("fly", to=i) for i in range(1000)], earned=1.0)
    (scored,), numbers = Scorer([spec])([episode])
    paid = scored.rewards["tool_shaping"]
    assert numbers["composite/raw/tool_shaping"] == pytest.approx(-100.0)
    assert scored.reward == pytest.approx(0.9)
    # -.06 for the first, -.04 for the second, which reaches the cap, and nothing from then on
    assert paid[:3] == pytest.approx([-0.06, -0.04, 0.0]) and not any(paid[3:])


def test_a_cap_bounds_the_running_sum_at_every_turn():
    """Sums .5 1.5 -.5 are bounded to .5 1 -.5: the turns are paid the steps between them."""
    assert bounded({"a": [1.0, 2.0, -4.0]}, 0.5, 1.0) == {"a": pytest.approx([0.5, 0.5, -1.5])}
    assert bounded({"a": [1000.0, -1000.0]}, 1.0, 0.1) == {"a": pytest.approx([0.1, -0.1])}
    assert bounded({"a": -7.0}, 0.1, 0.3) == {"a": pytest.approx(-0.3)}
    assert bounded({"a": []}, 0.1, 0.3) == {"a": []}
    # Two components of one part share its cap of .3: .2 and .1 + .3, the second bounded to .1 + .2; .5 in all is cut by .3 / .5.
    assert bounded({"a": 0.2, "b": [0.1, 0.3]}, 1.0, 0.3) == {"a": pytest.approx(0.12), "b": pytest.approx([0.06, 0.12])}


@pytest.mark.parametrize(("parts", "says"), [
    ([(0.6, None), (0.5, None)], r"the outcome can be 0.476 of what is earned \(weight 1.0 beside caps of 1.1\), but must be at least 0.5"),
    ([(0.1, 1.5)], r"the outcome can be 0.4"),
    ([(-2.0, None)], r"the outcome can be 0.333"),
    ([(0.0, None)], r"parts\[0\] has weight 0.0 and cap none"),
    ([(0.1, 0.0)], r"parts\[0\] has weight 0.1 and cap 0.0"),
    ([(math.nan, None)], r"parts\[0\].weight is nan, but must be a finite number"),
    ([("1", None)], r"parts\[0\].weight is '1'"),
])  # fmt: skip
def test_shaping_that_could_outweigh_the_outcome_is_refused(fixed, parts, says):
    specs = [part(fixed(1.0, f"f{i}"), w, **({} if c is None else {"cap": c})) for i, (w, c) in enumerate(parts)]
    with pytest.raises(RewardError, match=says):
        make({"name": "composite", "outcome": {"name": "outcome"}, "parts": specs})


def test_equal_halves_are_just_allowed_and_more_can_be_asked_for(fixed):
    halves = {"name": "composite", "outcome": {"name": "outcome"}, "parts": [part(fixed(1.0), 1.0)]}
    make(halves)
    with pytest.raises(RewardError, match="must be at least 0.75"):
        make({**halves, "share": 0.75})
    with pytest.raises(RewardError, match=r"share is 0.2, but must be in \[0.5, 1\]"):
        make({**halves, "share": 0.2})
    with pytest.raises(RewardError, match="weight is 0.0, but must be above 0"):
        make({**halves, "weight": 0.0})


def test_a_part_that_abstains_is_left_out_and_an_outcome_that_does_is_a_failure(fixed):
    style = part(fixed({"a": 1.0, "c": 1.0}, "style"), 0.25)
    spec = {"name": "composite", "outcome": fixed({"a": 1.0, "b": 0.0}, "right"), "parts": [style]}
    (a, b, c), numbers = Scorer([spec])([played("x", id=i) for i in "abc"])
    assert a.rewards == {"right": 1.0, "style": 0.25} and b.rewards == {"right": 0.0}
    assert (c.status, c.reason) == ("infra_fail", "reward 'composite': the outcome 'right' abstains")
    assert numbers["style"] == 0.25 and numbers["composite/abstains/style"] == 0.5


def test_names_within_a_composite_must_differ(fixed):
    with pytest.raises(RewardError, match="two rewards are called 'tone'"):
        make({"name": "composite", "outcome": {"name": "outcome"}, "parts": [part(fixed(1.0, "tone"), 0.1), part(fixed(2.0, "tone"), 0.1)]})
    with pytest.raises(RewardError, match="'outcome' is the outcome and a part"):
        make({"name": "composite", "outcome": {"name": "outcome"}, "parts": [part({"name": "outcome"}, 0.1)]})
    spec = {"name": "composite", "outcome": {"name": "outcome"}, "parts": [part(fixed(1.0, "outcome"), 0.1)]}
    with pytest.raises(RewardError, match="'fixed' gives 'outcome', which it already has"):
        score([played("x")], [spec])


@pytest.mark.parametrize("entry", [{"weight": 0.1}, {"reward": {"name": "outcome"}}, {"reward": {}, "weight": 0.1, "scale": 2}])
def test_a_part_of_another_form_is_refused(entry):
    with pytest.raises(RewardError, match=r"parts\[0\] is .* must have the keys reward, weight and, if wanted, cap"):
        make({"name": "composite", "outcome": {"name": "outcome"}, "parts": [entry]})


def test_unknown_rewards_inside_others_are_refused_when_they_are_made():
    wrong = {"name": "outcom"}
    for spec in (
        {"name": "composite", "outcome": wrong, "parts": []},
        {"name": "composite", "outcome": {"name": "outcome"}, "parts": [part(wrong, 0.1)]},
        {"name": "gate", "of": wrong, "by": {"name": "outcome"}},
        {"name": "ensemble", "of": [wrong, wrong]},
        {"name": "vote", "of": [wrong]},
        {"name": "vote", "of": [{"name": "outcome"}], "rule": wrong},
        {"name": "length_sigmoid", "of": wrong, "target": 1, "tau": 1.0},
    ):
        with pytest.raises(RegistryError, match="did you mean 'outcome'"):
            make(spec)


# ---------------------------------------------------------------------------------------------------------- gate


def test_a_gate_lets_through_where_the_other_holds(fixed):
    spec = {"name": "gate", "of": fixed({"a": 0.7, "b": [0.5, 0.25], "c": 1.0}, "won"), "by": fixed({"a": 1.0, "b": 0.5, "d": 1.0}, "form")}
    assert given(spec, played("x", id="a")).rewards == {"won": 0.7}
    shut = given(spec, played("x", "y", id="b"))
    assert shut.rewards == {"won": [0.0, 0.0]} and shut.numbers == {"open": 0.0}
    assert given({**spec, "least": 0.5}, played("x", "y", id="b")).rewards == {"won": [0.5, 0.25]}
    assert given(spec, played("x", id="c")).rewards == {} == given(spec, played("x", id="d")).rewards


# ------------------------------------------------------------------------------------------------ ensemble (M77)


def members(fixed, *values):
    return [fixed(value, f"m{i}") for i, value in enumerate(values)]


def test_the_ways_to_agree(fixed):
    """.9 .5 .7: deviations .2 -.2 0, variance .08 / 3 = .026667, so that the deviation is .1633 and .7 - .1633 = .5367."""
    for how, value in (("min", 0.5), ("mean", 0.7), ("mean_std", 0.7 - math.sqrt(0.08 / 3)), ("mean_var", 0.7 - 0.08 / 3)):
        found = given({"name": "ensemble", "of": members(fixed, 0.9, 0.5, 0.7), "how": how})
        assert found.rewards == {"ensemble": pytest.approx(value, rel=1e-12)}
    assert 0.7 - math.sqrt(0.08 / 3) == pytest.approx(0.5367, abs=5e-5)
    # k = 2 takes two deviations.
    found = given({"name": "ensemble", "of": members(fixed, 0.9, 0.5, 0.7), "k": 2.0})
    assert found.rewards["ensemble"] == pytest.approx(0.7 - 2 * math.sqrt(0.08 / 3), rel=1e-12)


def test_a_missing_member_is_left_out_and_not_a_zero(fixed):
    """One abstains and one is down: .9 and .5 are left, mean .7 and deviation .2. With nobody left the ensemble abstains."""
    found = given({"name": "ensemble", "of": members(fixed, 0.9, None, 0.5, InfraError("down"))})
    assert found.rewards["ensemble"] == pytest.approx(0.5) and found.numbers == pytest.approx({"absent": 2.0, "std": 0.2})
    assert given({"name": "ensemble", "of": members(fixed, None, InfraError("down"))}).rewards == {}


@pytest.mark.parametrize(("fields", "says"), [({"of": [{"name": "outcome"}]}, "of has 1 members"), ({"k": -1.0}, "k is -1.0")])
def test_an_ensemble_out_of_range_is_refused(fields, says):
    with pytest.raises(RewardError, match=says):
        make({"name": "ensemble", "of": [{"name": "outcome"}, {"name": "outcome"}], **fields})


# ---------------------------------------------------------------------------------------------------- vote (M45)


@pytest.mark.parametrize(("votes", "verdict", "agreement"), [
    ((1.0, 1.0, 0.0), 1.0, 2 / 3),
    ((0.2, 0.5, 0.4), 0.0, 2 / 3),  # .5 is a 1
    ((1.0, 0.0, None), None, None),  # a tie
    ((1.0, None, InfraError("down")), 1.0, 1.0),
    ((None, None), None, None),
])  # fmt: skip
def test_the_majority_decides_and_a_tie_abstains(fixed, votes, verdict, agreement):
    found = given({"name": "vote", "of": members(fixed, *votes)})
    assert found.rewards == ({} if verdict is None else {"vote": verdict})
    assert found.numbers.get("agreement") == (agreement and pytest.approx(agreement))


def test_a_rule_overrides_all_judges_where_it_speaks(fixed):
    def spec(*votes):
        return {"name": "vote", "of": members(fixed, *votes), "rule": fixed({"known": 0.0}, "rule")}

    found = given(spec(1.0, 1.0, 1.0), played("x", id="known"))
    assert found.rewards == {"vote": 0.0} and found.numbers == {"absent": 0.0, "agreement": 1.0, "rule_agrees": 0.0}
    assert given(spec(0.0, 0.0, 1.0), played("x", id="known")).numbers["rule_agrees"] == 1.0
    assert given(spec(1.0, 0.0), played("x", id="known")).rewards == {"vote": 0.0}  # a tie of the judges
    open_to_judges = given(spec(1.0, 1.0, 1.0), played("x", id="open"))
    assert open_to_judges.rewards == {"vote": 1.0} and "rule_agrees" not in open_to_judges.numbers


def test_a_rule_that_fails_is_a_failure(fixed):
    spec = {"name": "vote", "of": members(fixed, 1.0), "rule": fixed({"e": InfraError("no sandbox")}, "rule")}
    (scored,) = score([played("x")], [spec])
    assert (scored.status, scored.reason) == ("infra_fail", "reward 'vote': no sandbox")


def test_the_agreement_is_logged_as_a_rate(fixed):
    """Three of three, then two of three agree: 5/6. The rule is right about the first alone: 1/2."""
    votes = [fixed({"a": 1.0, "b": 1.0}, "m0"), fixed({"a": 1.0, "b": 1.0}, "m1"), fixed({"a": 1.0, "b": 0.0}, "m2")]
    _, numbers = Scorer([{"name": "vote", "of": votes, "rule": fixed({"a": 1.0, "b": 0.0}, "rule")}])([played("x", id=i) for i in "ab"])
    assert numbers == pytest.approx({"vote": 0.5, "vote/agreement": 5 / 6, "vote/rule_agrees": 0.5, "vote/absent": 0.0})


def test_a_sample_goes_to_people(fixed, tmp_path):
    """Every episode at rate 1, from many threads, each on one line of its own; none at rate 0."""
    spec = {"name": "vote", "of": members(fixed, 1.0, None), "review": str(tmp_path / "new" / "review.jsonl"), "rate": 1.0}
    score([played("line\nbreak", "b", id=str(i)) for i in range(23)], [spec])
    lines = [json.loads(line) for line in (tmp_path / "new" / "review.jsonl").read_text().splitlines()]
    assert sorted(int(line["episode"]) for line in lines) == list(range(23))
    assert lines[0]["votes"] == [1.0, None] and lines[0]["verdict"] is True and lines[0]["actions"] == ["line\nbreak", "b"]
    score([played("x")], [{**spec, "review": str(tmp_path / "none.jsonl"), "rate": 0.0}])
    assert not (tmp_path / "none.jsonl").exists()


def test_the_sample_is_a_share_of_all_names_and_always_the_same():
    """2,000 names at rate .05: 100 expected, deviation sqrt(2000 * .05 * .95) = 9.7; within five of them."""
    chosen = [i for i in range(2000) if drawn(f"step/{i}", 0.05)]
    assert 51 <= len(chosen) <= 149
    assert chosen == [i for i in range(2000) if drawn(f"step/{i}", 0.05)]
    assert set(chosen) <= {i for i in range(2000) if drawn(f"step/{i}", 0.1)}


@pytest.mark.parametrize(("fields", "says"), [({"of": []}, "of is empty"), ({"rate": 1.5}, r"rate is 1.5, but must be in \[0, 1\]")])
def test_a_vote_out_of_range_is_refused(fields, says):
    with pytest.raises(RewardError, match=says):
        make({"name": "vote", "of": [{"name": "outcome"}], **fields})
