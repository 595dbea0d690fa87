"""What turns earned from them on: DiscoPO (M110) and TRACE's change of the gold answer's probability (M119)."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.credit.steps import steps_of
from mcore_agent.credit.trace_gold import boundaries
from mcore_agent.protocols import Rescoring
from mcore_agent.types import Batch, Episode, Segment, Task
from tests.credit.walks import credited, turns_of, walk

GOLD = 900  # the token ids of gold answers: 900 and up, which no row has


def encode(text: str) -> list[int]:
    return [GOLD + ord(c) for c in text]


def asked(id: str, turns: int, reward: float = 0.0, gold="42", ends_seen: bool = False, group: str = "g") -> Episode:
    """Turns of 2 sampled tokens, an observation between them; ``ends_seen``: and one behind the last."""
    episode = walk(id, [""] * turns, reward, group, task=Task(f"task/{group}", "toy", (), gold=gold))
    if not ends_seen:
        return episode
    row = episode.rows[0]
    fills = (("tokens", 77), ("sampled", False), ("logp", 0), ("version", -1))
    longer = {name: np.append(getattr(row, name), fill) for name, fill in fills}
    seen = Segment(len(row), len(row) + 1, turns - 1, "obs")
    return replace(episode, rows=(replace(row, **longer, segments=(*row.segments, seen)),))


def traced(episodes, levels, **settings) -> list[list[float]]:
    """The advantages of turns when the gold answer of each episode has these mean log-probabilities at its boundaries."""
    pipeline = Pipeline([{"name": "trace_gold", **settings}])
    batch = Batch(tuple(episodes))
    views = pipeline.views(batch, encode)
    scores = [np.array([level - 0.5, level + 0.5]) for own in levels for level in own]  # two tokens with that mean
    assert len(views) == len(scores)
    batch, _ = pipeline(batch, scores)
    return turns_of(batch, batch.columns["advantage"])


def test_discopo_by_hand():
    """Rewards 1 0 1 and 0 0: returns 2 1 1 and 0 0, mean .8, variance (1.44 + .04 + .04 + .64 + .64) / 5 = .56."""
    episodes = [walk("a", [""] * 3, [1.0, 0.0, 1.0]), walk("b", [""] * 2, [0.0, 0.0])]
    found = credited(episodes, {"name": "discopo", "norm": "mean"})
    np.testing.assert_allclose(found[0] + found[1], [1.2, 0.2, 0.2, -0.8, -0.8], rtol=1e-6)
    found = credited(episodes, {"name": "discopo", "eps": 0})
    np.testing.assert_allclose(found[0] + found[1], np.array([1.2, 0.2, 0.2, -0.8, -0.8]) / math.sqrt(0.56), rtol=1e-6)


def test_discopo_sees_the_final_claim_and_discounts():
    """Turn rewards 1 0 and a final claim of 2, gamma .5: returns 1 + .5 * 2 = 2 and 2; the other episode has 0. Mean 4/3."""
    claimed = replace(walk("a", [""] * 2, [1.0, 0.0]), rewards={"step": [1.0, 0.0], "claim": 2.0})
    found = credited([claimed, walk("b", [""], 0.0)], {"name": "discopo", "gamma": 0.5, "norm": "mean"})
    np.testing.assert_allclose(found[0] + found[1], [2 / 3, 2 / 3, -4 / 3], rtol=1e-6)


def test_discopo_pays_new_evidence_where_it_came_up():
    """Evidence in the second of three turns only: the first two turns lead to it, the third adds nothing. The sibling found none.
    Returns 1 1 0 0 0 0, mean 1/3."""
    found = credited([walk("a", [""] * 3, [0.0, 1.0, 0.0]), walk("b", [""] * 3, [0.0] * 3)], {"name": "discopo", "norm": "mean"})
    np.testing.assert_allclose(found[0] + found[1], [2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_trace_by_hand():
    """l = -4 -2 -2 -1: rewards 2 0 1, from each turn on 3 1 1. The sibling stays at -4: 0 0 0. Mean 5/6."""
    found = traced([asked("a", 3, ends_seen=True), asked("b", 3, ends_seen=True)], [[-4, -2, -2, -1], [-4] * 4], norm="mean")
    np.testing.assert_allclose(found[0] + found[1], np.array([3, 1, 1, 0, 0, 0]) - 5 / 6, rtol=1e-6)


def test_trace_weighs_progress_against_the_outcome():
    """coef .5 and an outcome of 1: .5 * (2 0 1) and 1 more at the end: 2.5 1.5 1.5; the sibling 0 0. Mean 5.5 / 5 = 1.1."""
    found = traced([asked("a", 3, 1.0, ends_seen=True), asked("b", 2, ends_seen=True)], [[-4, -2, -2, -1], [-3] * 3], norm="mean", coef=0.5)
    np.testing.assert_allclose(found[0] + found[1], np.array([2.5, 1.5, 1.5, 0, 0]) - 1.1, rtol=1e-6)


def test_what_the_last_word_adds_is_the_outcome_alone():
    """An episode that ends with an answer has no boundary behind it: three turns, l = -4 -2 -1, rewards 2 1 and the outcome 1:
    4 2 1. The sibling, wrong and without progress, 0 0 0. Mean 7/6."""
    found = traced([asked("a", 3, 1.0), asked("b", 3, 0.0)], [[-4, -2, -1], [-4, -4, -4]], norm="mean")
    np.testing.assert_allclose(found[0] + found[1], np.array([4, 2, 1, 0, 0, 0]) - 7 / 6, rtol=1e-6)


def test_redundant_calls_add_nothing():
    """One call that brings 3, and the same with two useless calls behind it, in which l does not move: the sums are equal."""
    estimator = registry.create("estimator", {"name": "trace_gold"})
    batch = Batch((asked("a", 1, ends_seen=True), asked("b", 3, ends_seen=True)))
    scores = [np.array([level]) for level in (-4.0, -1.0, -4.0, -1.0, -1.0, -1.0)]
    assert estimator.gained(batch, steps_of(batch), scores).tolist() == [3, 3, 0, 0]


def test_a_failure_with_progress_is_credited_for_it():
    """Everybody failed (outcome 0); a came nearer by 3 in its first turn: its first turn is above 0, its useless second one is not."""
    found = traced([asked("a", 2, ends_seen=True), asked("b", 2, ends_seen=True)], [[-4, -1, -1], [-4, -4, -4]])
    assert found[0][0] > 0 > found[0][1] == pytest.approx(found[1][0])


def test_views_hold_what_was_said_before_and_then_the_gold_answer():
    """Prompt 1, turns 2 3 and 5 6 with 4 observed between them, 77 at the end. Gold "42" is two tokens."""
    batch = Batch((asked("t7/1", 2, ends_seen=True),))
    gold = encode("42")
    plain = registry.create("estimator", {"name": "trace_gold"}).views(batch, encode)
    assert [v.tokens.tolist() for v in plain] == [[1, *gold], [1, 2, 3, 4, *gold], [1, 2, 3, 4, 5, 6, 77, *gold]]
    assert [v.scored.tolist() for v in plain] == [[1, 2], [4, 5], [7, 8]]
    assert {v.under for v in plain} == {"reference"} and {v.row for v in plain} == {"t7/1/0"}
    assert len({v.name for v in plain}) == 3  # scores are kept by row and name
    led = registry.create("estimator", {"name": "trace_gold", "lead": "=>"}).views(batch, encode)
    assert led[1].tokens.tolist() == [1, 2, 3, 4, *encode("=>"), *gold] and led[1].scored.tolist() == [6, 7]


def test_a_turn_is_scored_in_the_row_that_said_it():
    """A rewritten context: turn 1 was said in the second row, after other tokens."""
    one = asked("e", 2)
    row = one.rows[0]
    said = np.array([False] * 5 + [True] * 2)
    second = replace(row, tokens=np.array([50, 51, 52, 53, 54, 5, 6]), sampled=said, logp=np.where(said, -1, 0),
                     version=np.where(said, 0, -1), segments=(Segment(0, 5, -1, "prompt"), Segment(5, 7, 1, "action")))  # fmt: skip
    first = replace(row, **{name: getattr(row, name)[:4] for name in ("tokens", "sampled", "logp", "version")}, segments=row.segments[:3])
    views = registry.create("estimator", {"name": "trace_gold"}).views(Batch((replace(one, rows=(first, second)),)), encode)
    assert [(v.row, v.tokens.tolist()[:-2]) for v in views] == [("e/0", [1]), ("e/1", [50, 51, 52, 53, 54])]


def test_no_row_of_the_policy_ever_holds_the_gold_answer():
    """I7: views are sequences of their own; the rows stay as the engine saw them, and so does what is trained."""
    batch = Batch((asked("a", 3, 1.0), asked("b", 2)))
    before = [row.tokens.tolist() for row in batch.rows]
    pipeline = Pipeline([{"name": "trace_gold"}])
    views = pipeline.views(batch, encode)
    assert all((view.tokens >= GOLD).any() for view in views) and isinstance(pipeline.estimator, Rescoring)
    done, _ = pipeline(batch, [np.array([-1.0, -2.0]) for _ in views])
    assert [row.tokens.tolist() for row in done.rows] == before
    assert not np.isin(done.tokens("tokens"), encode("42")).any() and done.columns.keys() == {"advantage"}


def test_tasks_without_a_gold_text_have_their_rewards_alone():
    """No gold, or one that is not a text or a number: no view. Numbers are written out."""
    for gold in (None, {"file": "x"}, True):
        batch = Batch((asked("a", 2, 1.0, gold), asked("b", 1, 0.0, gold)))
        assert not list(boundaries(batch))
    found = traced([asked("a", 2, 1.0, None), asked("b", 1, 0.0, None)], [[], []], norm="mean")
    np.testing.assert_allclose(found[0] + found[1], [1 / 3, 1 / 3, -2 / 3], rtol=1e-6)
    views = registry.create("estimator", {"name": "trace_gold"}).views(Batch((asked("a", 1, gold=42),)), encode)
    assert [v.tokens.tolist() for v in views] == [[1, *encode("42")]]


def test_an_answer_of_no_tokens_adds_nothing():
    """An empty gold has nothing to score: the outcomes 1 and 0 alone, from every turn on."""
    pipeline, batch = Pipeline([{"name": "trace_gold", "norm": "mean"}]), Batch((asked("a", 2, 1.0, ""), asked("b", 2, 0.0, "")))
    done, _ = pipeline(batch, [np.zeros(0) for _ in pipeline.views(batch, encode)])
    assert turns_of(done, done.columns["advantage"]) == [[0.5, 0.5], [-0.5, -0.5]]


def test_a_silent_turn_hides_no_progress():
    """Turn 1 of three sampled nothing: there is no boundary before it. What l gained from turn 0 to turn 2 is the reward of the
    turn before that, 3, which turn 0 leads to: returns 3 3 0, of which the tokens of turns 0 and 2 see 3 and 0. Sibling 0; mean 1.5."""
    full = asked("a", 3, ends_seen=False)
    row = full.rows[0]  # tokens: prompt, 2 + 1 of turn 0, 2 + 1 of turn 1, 2 of turn 2
    said = row.sampled & ~np.isin(np.arange(len(row)), [4, 5])
    mute = replace(row, sampled=said, logp=np.where(said, row.logp, 0), version=np.where(said, 0, -1))
    pipeline, batch = Pipeline([{"name": "trace_gold", "norm": "mean"}]), Batch((replace(full, rows=(mute,)), asked("b", 3)))
    assert [(at.episode, at.turn) for at in boundaries(batch)] == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    done, _ = pipeline(batch, [np.array([level]) for level in (-4.0, -1.0, -2.0, -2.0, -2.0)])
    column = done.columns["advantage"][batch.token_episode == 0]
    assert column[[1, 2]].tolist() == [3 - 1] * 2 and column[[7, 8]].tolist() == [0 - 1] * 2 and not column[[4, 5]].any()


def test_wrong_numbers_are_refused():
    estimator = registry.create("estimator", {"name": "trace_gold"})
    with pytest.raises(CreditError, match="1 scores for 3 boundaries"):
        estimator(Batch((asked("a", 2, ends_seen=True),)), [np.zeros(2)])
    for name in ("trace_gold", "discopo"):
        with pytest.raises(CreditError, match=f"'{name}': gamma is -1"):
            registry.create("estimator", {"name": name, "gamma": -1})
    with pytest.raises(CreditError, match="coef is -1"):
        registry.create("estimator", {"name": "trace_gold", "coef": -1})
