"""The table of the hand-overs: nothing outside it is possible, and time round it ends where it began."""

import itertools

import pytest

from mcore_agent.rollout.states import COLOCATED, PLACEMENTS, StateError, TimeSlicer, Turns, residual_memory, table_markdown

CYCLE, STATES, TABLE = COLOCATED.cycle, COLOCATED.states, COLOCATED.table
PAIRS = [(turns, *pair) for turns in PLACEMENTS.values() for pair in itertools.product(turns.states, turns.events)]


@pytest.mark.parametrize(("turns", "state", "event"), PAIRS, ids=lambda x: x.name if isinstance(x, Turns) else x)
def test_every_pair(turns: Turns, state: str, event: str):
    """Legal pairs lead where the table says; all others raise and leave everything as it was, except what is deferred."""
    seen: list[str] = []
    slicer = TimeSlicer({event: lambda: seen.append(event)}, start=state, measure=dict, turns=turns)
    if (state, event) in turns.table:
        slicer.fire(event)
        assert slicer.state == turns.table[state, event] and seen == [event]
    elif event in turns.deferred:
        slicer.fire(event)
        assert slicer.state == state and seen == [] and slicer.log == []
    else:
        with pytest.raises(StateError, match=f"{event}.*{state}.*legal events: .*save") as error:
            slicer.fire(event)
        assert slicer.state == state and seen == [] and slicer.log == []
        assert all(legal in str(error.value) for legal in slicer.legal())


def test_the_table_holds_what_the_architecture_says():
    assert all(TABLE[state, "save"] == state for state in STATES)
    assert [state for state, event in TABLE if event == "evaluate"] == ["ROLLOUT"]
    # Engine and learner are never awake together, but for the weights that are handed over.
    order = " ".join(STATES)
    assert order == (
        "ROLLOUT DRAIN ENGINE_ASLEEP LEARNER_AWAKE UPDATE LEARNER_TRIMMED ENGINE_WEIGHTS_AWAKE PUBLISH LEARNER_ASLEEP ENGINE_AWAKE"
    )


def test_round_the_cycle():
    """Hooks run in the cycle's order, once each, before the state changes; values come back; memory is logged."""
    seen: list[tuple[str, str]] = []
    hooks = {event: (lambda e=event: seen.append((slicer.state, e)) or e.upper()) for _, event, _ in CYCLE}
    slicer = TimeSlicer(hooks, start="ROLLOUT", measure=lambda: {"rss": 100 + len(seen)})
    for _ in range(2):
        for _, event, _ in CYCLE:
            assert slicer.fire(event) == event.upper()
        assert slicer.state == "ROLLOUT"
    assert seen == [(state, event) for state, event, _ in CYCLE] * 2
    assert [(h.before, h.event) for h in slicer.log] == seen
    assert [h.memory["rss"] for h in slicer.log] == list(range(101, 101 + len(seen)))
    assert all(h.seconds >= 0 for h in slicer.log)


def test_the_first_publish_needs_no_step():
    slicer = TimeSlicer({})
    for event in ("trim", "wake_weights", "publish", "sleep_learner", "wake_engine", "rollout"):
        slicer.fire(event)
    assert slicer.state == "ROLLOUT"


def test_an_evaluation_waits_for_rollout():
    """Asked twice in UPDATE it runs once, at the next ROLLOUT, with the newest arguments."""
    seen: list[tuple[str, int]] = []
    slicer = TimeSlicer({"evaluate": lambda step: seen.append((slicer.state, step))}, start="UPDATE")
    assert slicer.fire("evaluate", 1) is None
    assert slicer.fire("evaluate", step=2) is None
    for event in ("trim", "wake_weights", "publish", "sleep_learner", "wake_engine"):
        slicer.fire(event)
    assert seen == []
    slicer.fire("rollout")
    assert seen == [("ROLLOUT", 2)] and slicer.state == "ROLLOUT"
    slicer.fire("evaluate", 3)
    assert seen == [("ROLLOUT", 2), ("ROLLOUT", 3)]


def test_a_hook_that_raises_leaves_the_state():
    def fail() -> None:
        raise OSError("disk full")

    slicer = TimeSlicer({"save": fail, "trim": fail}, start="UPDATE")
    for event in ("save", "trim"):
        with pytest.raises(OSError, match="disk full"):
            slicer.fire(event)
    assert slicer.state == "UPDATE" and slicer.log == []


def test_bad_construction():
    with pytest.raises(StateError, match=r"publsh.*publish"):
        TimeSlicer({"publsh": print})
    with pytest.raises(StateError, match=r"'SLEEP'.*ROLLOUT"):
        TimeSlicer({}, start="SLEEP")


def test_residual_memory_sees_this_process():
    before = residual_memory()["rss"]
    held = bytearray(b"x") * 80_000_000
    assert residual_memory()["rss"] - before > 60_000_000
    del held


def test_the_printed_table_names_every_transition():
    text = table_markdown().splitlines()
    assert len(text) == 2 + len(STATES)
    for (state, event), after in TABLE.items():
        line = next(row for row in text if row.startswith(f"| {state} |"))
        assert (f"{event} → {after}" if state != after else f"{event} (stays)") in line


def test_the_documentation_has_the_tables_of_the_code():
    from tools.state_table import PAGE, filled

    assert PAGE.read_text() == filled(PAGE.read_text())
    for turns in PLACEMENTS.values():
        assert table_markdown(turns) in PAGE.read_text()
