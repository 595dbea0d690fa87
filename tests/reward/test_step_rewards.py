"""Rewards of single steps: continuations, subgoals, evidence; and verdicts with citations."""

from random import Random

import pytest

from mcore_agent.protocols import InfraError
from mcore_agent.reward.cited import CitedEvidence, f1, ids_of
from mcore_agent.reward.evidence import EvidenceDag
from mcore_agent.reward.goals import goals_of
from mcore_agent.reward.pipeline import RewardError, Scorer, make
from mcore_agent.reward.process import ProcessMonteCarlo, prefix_of
from mcore_agent.reward.subgoals import Subgoals
from mcore_agent.types import Feedback, Turn
from tests.reward.episodes import call, played

# ------------------------------------------------------------------------------------------ continuations (M46)


class Steps:
    """A toy environment: after a wrong step nothing succeeds; else a continuation succeeds with probability 1/4."""

    def __init__(self):
        self.random, self.prefixes = Random("steps"), []

    def __call__(self, prefix, n):
        self.prefixes.append(prefix)
        lost = any(turn.action == "wrong" for turn in prefix.turns)
        return [float(not lost and self.random.random() < 0.25) for _ in range(n)]


def test_the_share_of_continuations_that_succeed():
    """Probability .25 and n = 200: the deviation of the share is sqrt(.25 * .75 / 200) = .031, so .08 is 2.6 of them."""
    soft = ProcessMonteCarlo(n=200, complete=Steps()).score(played("right", "right", "wrong", "right"))["process"]
    assert soft[:2] == pytest.approx([0.25, 0.25], abs=0.08) and soft[2:] == [0.0, 0.0]
    hard = ProcessMonteCarlo(n=200, label="hard", complete=Steps()).score(played("right", "right", "wrong", "right"))["process"]
    assert hard == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("label", "how", "value"), [
    ("soft", "turns", [0.5, 0.0, 0.75]), ("hard", "turns", [1.0, 0.0, 1.0]),
    ("soft", "min", 0.0), ("soft", "mean", 1.25 / 3), ("hard", "mean", 2 / 3), ("soft", "last", 0.75),
])  # fmt: skip
def test_labels_and_reductions_by_hand(label, how, value):
    """Of four outcomes 2, 0 and 3 are at least .5."""
    outcomes = iter([[1.0, 0.0, 0.5, 0.4], [0.0, 0.0, 0.49, 0.0], [1.0, 1.0, 1.0, 0.0]])
    reward = ProcessMonteCarlo(n=4, label=label, reduce=how, complete=lambda prefix, n: next(outcomes))
    assert reward.score(played("a", "b", "c")) == {"process": pytest.approx(value)}


def test_a_prefix_ends_with_what_came_back_from_its_last_turn():
    """Tokens 100 prompt, 101 action, 102 observation, 103 action, …; the last turn has no observation."""
    episode = played("a", "b", "c")
    assert [prefix_of(episode, i).tokens.tolist() for i in range(3)] == [[*range(100, 103)], [*range(100, 105)], [*range(100, 106)]]
    assert [t.action for t in prefix_of(episode, 1).turns] == ["a", "b"] and prefix_of(episode, 1).task is episode.task
    bare = played("a")
    assert prefix_of(type(bare)(bare.id, bare.task, bare.group, (type(bare.rows[0])([1], [0], [0], [-1]),), bare.turns), 0).tokens.size == 0


def test_continuations_are_a_service_and_all_must_come_back():
    steps = Steps()
    _, numbers = Scorer([{"name": "process_mc", "n": 3}], {"complete": steps})([played("a", "wrong")])
    assert len(steps.prefixes) == 2 and 0 <= numbers["process"] <= 1
    with pytest.raises(RewardError, match="make the Scorer with the service 'complete'"):
        make({"name": "process_mc"}).ask(played("a"), ())
    with pytest.raises(InfraError, match="2 continuations of turn 0 came back, 8 were asked for"):
        ProcessMonteCarlo(complete=lambda prefix, n: [1.0, 1.0]).score(played("a"))
    with pytest.raises(RewardError, match="n is 0"):
        ProcessMonteCarlo(n=0)
    assert ProcessMonteCarlo(reduce="min", complete=steps).score(played()) == {"process": 0.0}


# ------------------------------------------------------------------------------------------------ subgoals (M47)


FIVE = [{"name": f"s{i}", "state": f"^room {i}$"} for i in range(1, 6)]


def walked(*rooms, **fields):
    """An episode through these rooms: turn i is taken in room i and leads to room i + 1; the last leads nowhere known."""
    return played(*["go"] * len(rooms), states=[f"room {r}" for r in rooms], **fields)


def test_five_subgoals_of_a_hundred():
    """From room 0 to 1, 2, 3, 4, 5 and an end: 20 for each, 100 in all."""
    paid = Subgoals(FIVE, total=100.0).score(walked(0, 1, 2, 3, 4, 5))["subgoals"]
    assert paid == pytest.approx([20, 20, 20, 20, 20, 0]) and sum(paid) == pytest.approx(100)


def test_a_loop_pays_once():
    """Rooms 1 and 2 in turn, a hundred times: 20 + 20, and nothing from then on. The room it starts in pays nothing."""
    paid = Subgoals(FIVE, total=100.0).score(walked(0, *[1, 2] * 100))["subgoals"]
    assert paid[:3] == pytest.approx([20, 20, 0]) and sum(paid) == pytest.approx(40)
    assert sum(Subgoals(FIVE, total=100.0).score(walked(1, 0, 1, 0))["subgoals"]) == 0


def test_an_order_may_be_asked_for():
    """Rooms 2, 1, 2, 3: in any order 20 for each at once; in the given one room 2 pays when it comes again, after room 1."""
    free, strict = (Subgoals(FIVE, total=100.0, order=order).score(walked(0, 2, 1, 2, 3, 0))["subgoals"] for order in ("any", "given"))
    assert free == pytest.approx([20, 20, 0, 20, 0, 0])
    assert strict == pytest.approx([0, 20, 20, 20, 0, 0])


def test_weights_actions_failed_calls_and_the_tasks_own_goals():
    """Weights 1 and 3 of a total of 1: .25 and .75. An action counts when its call did not fail, also in the last turn."""
    goals = [{"name": "open", "action": r"open\(door\)"}, {"name": "leave", "action": "leave", "weight": 3, "after": ["open"]}]
    for reward, meta in ((Subgoals(goals), None), (Subgoals(), {"subgoals": goals})):
        episode = played("leave", "open(door)", "open(door)", "leave", ok=[True, False, True, True], meta=meta)
        assert reward.score(episode) == {"subgoals": pytest.approx([0, 0, 0.25, 0.75])}
    assert Subgoals().score(played("leave")) == {"subgoals": [0.0]}
    assert Subgoals(goals).score(played()) == {"subgoals": []}


@pytest.mark.parametrize(("goals", "says"), [
    ([{"name": "a"}], r"goals\[0\]: goal 'a' needs a state or an action"),
    ([{"action": "x"}], r"goals\[0\] is .* must be a mapping with a name"),
    ([{"name": "a", "action": "x", "pays": 2}], "keys among action, after, name, state, weight"),
    ([{"name": "a", "action": "("}], "no regular expression"),
    ([{"name": "a", "action": 3}], "no regular expression"),
    ([{"name": "a", "action": "x", "weight": 0}], "weight of goal 'a' is 0"),
    ([{"name": "a", "action": "x"}, {"name": "a", "state": "y"}], "two goals of one name"),
    ([{"name": "a", "action": "x", "after": ["b"]}], "goal 'a' comes after 'b', which is no goal"),
    ([{"name": n, "action": "x", "after": [m]} for n, m in ("ab", "ba")], "wait for one another: (a, b, a|b, a, b)"),
])  # fmt: skip
def test_what_is_no_goal_is_refused(goals, says):
    with pytest.raises(RewardError, match=says):
        Subgoals(goals)
    with pytest.raises(RewardError, match=says.removeprefix("goals")):
        Subgoals().score(played("x", meta={"subgoals": goals}))


def test_other_settings_of_subgoals_are_refused():
    with pytest.raises(RewardError, match="total is 0.0"):
        Subgoals(total=0.0)
    with pytest.raises(RewardError, match=r"task 'task of e': meta\['subgoals'\] is 'x', but must be a list of goals"):
        Subgoals().score(played("a", meta={"subgoals": "x"}))


def test_goals_come_after_what_they_need():
    goals = goals_of([{"name": n, "action": n, "after": list(m)} for n, m in (("c", "b"), ("b", "a"), ("a", ""))], "")
    assert [g.name for g in goals] == ["a", "b", "c"]
    assert not goals[0].holds(Turn(0, "a", feedback=Feedback(ok=False)), None)


# ------------------------------------------------------------------------------------------------ evidence (M110)


#      a   b      a needs nothing, b nothing, c both, d c, e a
def dag(**claim):
    parents = {"a": [], "b": [], "c": ["a", "b"], "d": ["c"], "e": ["a"]}
    weights = {"a": 1, "b": 2, "c": 4, "d": 8, "e": 16}
    return {"nodes": [{"name": n, "action": f"^{n}", "weight": weights[n], "after": p} for n, p in parents.items()], **claim}


def evidence(*actions, gold=None, **fields):
    return EvidenceDag().score(played(*actions, gold=gold or dag(), **fields))["evidence"]


def test_a_child_before_its_parent_pays_nothing_and_later_once():
    """c before a and b: 0; then a 1, b 2, c 4, c again 0, d 8, e 16: all 31 in the end."""
    paid = evidence("c", "a", "b", "c", "c", "d", "e")
    assert paid == [0, 1, 2, 4, 0, 8, 16] and sum(paid) == 31


def test_duplicates_and_orphans_pay_nothing():
    assert evidence("a", "a", "a", "d", "e") == [1, 0, 0, 0, 16]
    assert evidence("nothing", "of it") == [0, 0]
    assert EvidenceDag().score(played(gold=dag())) == {"evidence": []}


def test_what_is_verified_at_one_turn_counts_in_the_order_of_the_graph():
    """One turn leads to a state that shows a, b and c: 1 + 2 + 4, in whatever order the graph lists them."""
    nodes = [{"name": n, "state": n, "weight": w, "after": p} for n, w, p in (("c", 4, ["a", "b"]), ("a", 1, []), ("b", 2, []))]
    assert evidence("look", "go", states=["", "abc"], gold={"nodes": nodes}) == [7, 0]
    # What is there from the start was found by nobody; c is only found where it shows.
    assert evidence("look", "go", states=["ab", "abc"], gold={"nodes": nodes}) == [4, 0]


def test_the_last_turn_earns_the_claim():
    gold = dag(claim="verdict: yes", claim_weight=5)
    assert evidence("a", "verdict: yes", gold=gold) == [1, 5]
    assert evidence("verdict: yes", "a", gold=gold) == [0, 1]
    assert evidence("a verdict: yes", gold=dag(claim="yes")) == [1 + 1]


@pytest.mark.parametrize(("gold", "says"), [
    ("x", "task 'task of e': gold is 'x', but must have nodes"),
    ({"nodes": [], "weight": 1}, "must have nodes and, if wanted, claim and claim_weight"),
    ({"nodes": [{"name": "a", "action": "a", "after": ["a"]}]}, "wait for one another: a, a"),
    ({"nodes": [], "claim": "("}, r"gold\['claim'\]\[0\]: action of goal 'the final claim' is '\(', no regular expression"),
])  # fmt: skip
def test_gold_that_is_no_graph_of_evidence_is_refused(gold, says):
    with pytest.raises(RewardError, match=says):
        EvidenceDag().score(played("a", gold=gold))


# ------------------------------------------------------------------------------------------ cited evidence (M111)


GOLD = {"verdict": "vulnerable", "evidence": [3, 17]}


def verdict(word="vulnerable", cited: str | None = "3, 17"):
    return f"<verdict> {word} </verdict>" + ("" if cited is None else f"<evidence>{cited}</evidence>")


@pytest.mark.parametrize(("text", "cited"), [
    (verdict(), 1.0),
    (verdict(cited="17 3 3"), 1.0),  # a set
    (verdict(cited="3"), 2 / 3),  # 2 * 1 / (1 + 2)
    (verdict(cited="3, 8"), 0.5),  # 2 * 1 / (2 + 2)
    (verdict(cited="3, 17, 999"), 0.8),  # 2 * 2 / (3 + 2): 999 is in no graph
    (verdict(cited="3, 17, node 17"), 0.8),  # the word is a third citation
    (verdict(cited=""), 0.0), (verdict(cited=None), 0.0),
    (verdict(cited="317"), 0.0), (verdict(cited="3.0, 17.0"), 0.0), (verdict(cited="-3"), 0.0), (verdict(cited="٣"), 0.0),
    (verdict(cited="3") + "<evidence>17</evidence>", 0.0),  # two lists
    (verdict("safe"), 0.0), (verdict("Vulnerable"), 0.0), (verdict() + verdict(), 0.0), ("vulnerable 3 17", 0.0), ("", 0.0),
    (verdict(cited="9" * 5000 + ", 3"), 0.5),
])  # fmt: skip
def test_a_verdict_is_paid_by_its_citations(text, cited):
    assert CitedEvidence().score(played(text, gold=GOLD)).rewards == {"cited": pytest.approx(cited), "queries": 0.0}


def test_better_citations_earn_more_and_a_wrong_verdict_never_more_than_nothing():
    def total(text):
        return sum(CitedEvidence().score(played(call("search"), text, gold=GOLD)).rewards.values())

    assert total(verdict(cited=None)) < total(verdict(cited="3, 8")) < total(verdict())
    assert total(verdict("safe")) <= 0 and total(verdict("safe")) == total(verdict("safe", "1"))


def test_queries_have_a_price_up_to_a_cap():
    """Four queries at .01; a hundred stop at .1. Half the evidence: .5 - .04 = .46."""
    found = CitedEvidence().score(played(*[call("search")] * 4, verdict(cited="3, 8"), gold=GOLD))
    assert found.rewards == pytest.approx({"cited": 0.5, "queries": -0.04}) and found.numbers == {"right": 1.0, "support": 0.5}
    assert CitedEvidence().score(played(*[call("search")] * 100, verdict(), gold=GOLD)).rewards["queries"] == pytest.approx(-0.1)


def test_a_task_without_evidence_is_right_without_citations():
    safe = {"verdict": "safe", "evidence": []}
    assert CitedEvidence().score(played(verdict("safe", ""), gold=safe)).rewards["cited"] == 1.0
    for cited in ("3", "3</evidence><evidence>4"):
        assert CitedEvidence().score(played(verdict("safe", cited), gold=safe)).rewards["cited"] == 0.0


def test_ids_and_f1_by_hand():
    assert ids_of("1, 2 02,x") == {1, 2, "x"}
    assert f1({1, 2, 5}, {2, 3}) == pytest.approx(2 / 5) and f1(set(), set()) == 1.0 and f1(set(), {1}) == 0.0


@pytest.mark.parametrize("gold", [None, {"verdict": "x"}, "x"])
def test_other_gold_and_settings_are_refused(gold):
    with pytest.raises(RewardError, match="task 'task of e': gold is .* but must have verdict and evidence"):
        CitedEvidence().score(played("x", gold=gold))
    with pytest.raises(RewardError, match="per_query is -0.1"):
        CitedEvidence(per_query=-0.1)
