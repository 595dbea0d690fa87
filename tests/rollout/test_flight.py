"""A request that is cut off and goes on: its parts become one answer. Expected values are written out."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent.protocols import Completion, EngineDown, InfraError, Request
from mcore_agent.rollout.flight import Flight, flaw, merged_routing

PROMPT = np.array([11, 12, 13])


def request(**fields) -> Request:
    return Request("r", PROMPT, **{"max_new": 7, "stop": (2,), "seed": 40, **fields})


def part(tokens: list[int], finish: str, version: int = 0, cached: int = 0, routing: np.ndarray | None = None) -> Completion:
    n = len(tokens)
    logp = np.array([-t / 10 for t in tokens], np.float32)
    return Completion(np.array(tokens, np.int64), logp, np.full(n, version, np.int32), finish, cached, routing=routing)


def cut(flight: Flight, answer: Completion) -> Completion | None:
    ask = flight.rest()
    flight.kept = True
    return flight.take(ask, answer)


def test_an_answer_in_one_part_is_handed_on_as_it_is():
    flight, answer = Flight(request()), part([5, 2], "stop")
    ask = flight.rest()
    assert ask is flight.request
    assert flight.take(ask, answer) is answer


@pytest.mark.defect("C8")
def test_parts_become_one_answer_with_columns_of_one_length():
    flight = Flight(request())
    assert cut(flight, part([5, 6, 7], "abort", version=3, cached=2)) is None
    assert cut(flight, part([], "abort", version=3)) is None
    ask = flight.rest()
    assert ask.tokens.tolist() == [11, 12, 13, 5, 6, 7] and ask.max_new == 4 and ask.stop == (2,)
    whole = flight.take(ask, part([8, 2], "stop", version=4, cached=5))
    assert whole is not None and whole.finish == "stop"
    assert whole.tokens.tolist() == [5, 6, 7, 8, 2] and whole.tokens.dtype == np.int64
    assert whole.version.tolist() == [3, 3, 3, 4, 4] and whole.version.dtype == np.int32
    np.testing.assert_array_equal(whole.logp, np.array([-0.5, -0.6, -0.7, -0.8, -0.2], np.float32))
    assert whole.cached == 2  # of the prompt, by the engine that read it first


def test_every_part_has_its_own_id_and_draws():
    flight = Flight(request())
    asks = [flight.rest()]
    for tokens in ([], [5], [6, 7]):
        flight.kept = True
        assert flight.take(asks[-1], part(tokens, "abort")) is None
        asks.append(flight.rest())
    assert len({ask.id for ask in asks}) == 4 and asks[0].id == "r"
    seeds = [ask.seed for ask in asks]
    assert seeds[0] == seeds[1] == 40, "nothing was drawn yet: the draws are the first ones"
    assert len(set(seeds[1:])) == 3
    again = Flight(request())
    cut(again, part([5], "abort"))
    assert again.rest().seed == seeds[2], "the same cut gives the same draws"


@pytest.mark.parametrize(("tokens", "finish"), [([5, 2], "stop"), ([3, 4, 5, 6, 7, 8, 9], "length"), ([5], None)])
def test_an_abort_that_came_after_the_end(tokens: list[int], finish: str | None):
    done = cut(Flight(request()), part(tokens, "abort"))
    assert (done.finish if done else None) == finish


@pytest.mark.defect("C7")
def test_a_lost_engine_leaves_nothing_behind_and_a_limit_is_kept():
    flight = Flight(request())
    cut(flight, part([5, 6], "abort"))
    first = flight.rest()
    for _ in range(2):
        flight.repeat(EngineDown("gone"), 2)
        again = flight.rest()
        assert replace(again, id=first.id, tokens=first.tokens) == replace(first, tokens=first.tokens)
        assert again.tokens.tolist() == [11, 12, 13, 5, 6]
    with pytest.raises(InfraError, match="request r: 3 engines were lost.*gone.*retries is 2"):
        flight.repeat(EngineDown("gone"), 2)


def test_a_dropped_request_ends_with_what_it_has():
    flight = Flight(request())
    cut(flight, part([5, 6], "abort", version=3))
    flight.dropped = True
    end = flight.abort()
    assert (end.finish, end.tokens.tolist(), end.version.tolist()) == ("abort", [5, 6], [3, 3])
    assert len(Flight(request()).abort().tokens) == 0


def rows(length: int, mark: int) -> np.ndarray:
    """[length, 2 layers, 1 expert]; ``mark`` says which part, the number which token."""
    return (mark * 100 + np.arange(length, dtype=np.int32))[:, None, None] * np.ones((1, 2, 1), np.int32)


@pytest.mark.defect("D2")
def test_routing_has_an_entry_for_all_tokens_but_the_last_and_old_entries_stay():
    """Three tokens of prompt, two and then one cut off, one to the end: 3 + 4 - 1 entries."""
    parts = [part([5, 6], "abort", routing=rows(4, 1)), part([7], "abort", routing=rows(5, 2)), part([2], "stop", routing=rows(6, 3))]
    merged = merged_routing(3, parts)
    assert merged is not None and merged.shape == (6, 2, 1)
    assert merged[:, 0, 0].tolist() == [100, 101, 102, 103, 204, 305]
    flight = Flight(request(routing=True))
    cut(flight, parts[0])
    cut(flight, parts[1])
    whole = flight.take(flight.rest(), parts[2])
    np.testing.assert_array_equal(whole.routing, merged)


@pytest.mark.defect("D2")
@pytest.mark.parametrize("given", [None, rows(3, 1), rows(5, 1)], ids=["missing", "short", "long"])
def test_routing_of_a_part_that_was_cut_off_may_be_missing(given):
    merged = merged_routing(3, [part([5, 6], "abort", routing=given), part([2], "stop", routing=rows(5, 2))])
    assert merged is not None and merged[:, 0, 0].tolist() == [200, 201, 202, 203, 204]
    assert merged_routing(3, [part([5, 6], "abort", routing=rows(4, 1)), part([2], "stop")]) is None


SOUND = part([5, 2], "stop")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (SOUND, ""),
        (part([], "abort"), ""),
        (part([], "error"), ""),
        (replace(SOUND, logp=SOUND.logp[:1]), "2 tokens, 1 logp"),
        (replace(SOUND, version=np.zeros(3, np.int32)), "3 versions"),
        (replace(SOUND, finish="done"), "finish is 'done'"),
        (replace(SOUND, logp=np.array([0.0, np.nan], np.float32)), "no number"),
        (replace(SOUND, tokens=np.array([-1, 2])), "below 0"),
        (part([], "stop"), "no token"),
        (part([5, 6], "stop"), "no stop token"),
        (part(list(range(3, 11)), "length"), "8 tokens, 7 were asked"),
        (replace(SOUND, routing=rows(5, 1)), "routing of 5 tokens, 4 were read"),
    ],
)
def test_garbage_is_told_from_answers(answer: Completion, says: str):
    assert (says in flaw(request(), answer)) if says else flaw(request(), answer) == ""
