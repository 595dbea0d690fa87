"""The Hermes parser: whatever a model writes gives an Action, and nothing in it is run."""

import json
import time
from random import Random

import pytest

from mcore_agent.agent.parse import CLOSE, OPEN, HermesParser
from mcore_agent.protocols import ToolCall
from mcore_agent.registry import create, variants

PROPERTIES = {"key": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"}, "unit": {"type": "string", "enum": ["m", "s"]}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["key"]}}}


def wrap(body: str) -> str:
    return f"{OPEN}{body}{CLOSE}"


def call(name="find", **arguments) -> str:
    return wrap(json.dumps({"name": name, "arguments": arguments}))


def only(text: str, tools=()) -> ToolCall:
    calls = HermesParser(tools).parse(text).calls
    assert len(calls) == 1
    return calls[0]


def test_a_call_and_the_text_around_it():
    text = "I look.\n" + wrap('\n{"name": "find", "arguments": {"key": "a}b", "n": 3}}\n') + "done"
    action = HermesParser().parse(text)
    assert action.text == text
    assert action.calls == (ToolCall("find", {"key": "a}b", "n": 3}),)


def test_no_call_is_an_answer():
    assert HermesParser().parse("<answer>4</answer>").calls == ()
    assert HermesParser().parse("").calls == ()
    assert only(wrap('{"name": "now"}')) == ToolCall("now", {})


def test_several_calls_keep_their_order_and_one_bad_call_spoils_no_other():
    calls = HermesParser().parse(call(key="a") + " then " + wrap("{") + call(key="b")).calls
    assert [c.arguments.get("key") for c in calls] == ["a", None, "b"]
    assert [bool(c.error) for c in calls] == [False, True, False]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "JSON"),
        ("find(key='a')", "JSON"),
        ('{"name": "find", "arguments": {"key": "a"}', "JSON"),
        ("[" * 60000, "JSON"),
        ('{"name": "find", "arguments": {"x": 1e999}}', "JSON"),
        ('{"name": "find", "arguments": {"x": NaN}}', "JSON"),
        ('{"name": "find", "arguments": {"n": ' + "9" * 5000 + "}}", "JSON"),
        ('{"name": "find", "arguments": {"key": "\\ud800"}}', "JSON"),
        ('{"name": "find", "arguments": {"\\udfff": 1}}', "JSON"),
        ('{"name": "find", "arguments": {"key": "\n"}}', "JSON"),
        ('{"name": "find", "arguments": {"key": "\x00"}}', "JSON"),
        ('["find"]', "must be"),
        ("3", "must be"),
        ('{"name": "", "arguments": {}}', "must be"),
        ('{"name": 3, "arguments": {}}', "must be"),
        ('{"arguments": {}}', "must be"),
        ('{"name": "find", "arguments": "key"}', "arguments must be an object"),
        ('{"name": "find", "arguments": null}', "arguments must be an object"),
        ("x" * 70000, "70000 characters; at most 65536"),
    ],
)
def test_a_malformed_call_becomes_an_error(body: str, reason: str):
    found = only(wrap(body))
    assert reason in found.error
    assert (found.name, found.arguments) == ("", {})


def test_an_open_tag_is_an_error():
    assert "without" in only(f"{OPEN}{{").error
    assert len(HermesParser().parse(CLOSE + OPEN).calls) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call("delete", key="a"), "no tool 'delete'; tools: find"),
        (call(), "find needs the argument 'key'"),
        (call(key=3), "key must be of type string"),
        (call(key="a", n=2.5), "n must be of type integer"),
        (call(key="a", n=True), "n must be of type integer"),
        (call(key="a", x="2"), "x must be of type number"),
        (call(key="a", unit="kg"), "unit must be one of m, s"),
        (call(key="a", depth=1), "takes no argument 'depth'; it takes: key, n, x, unit"),
    ],
)
def test_a_call_is_held_to_its_tool(text: str, reason: str):
    assert reason in only(text, (TOOL,)).error


def test_a_fitting_call_passes():
    assert only(call(key="a", n=2, x=1, unit="m"), (TOOL,)).error == ""


@pytest.mark.defect("C13")
def test_nothing_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "__import__('pathlib').Path('owned').touch()"
    bodies = [evil, f"[{evil}]", f"{{'name': 'find', 'arguments': {{'key': {evil}}}}}", f"!!python/object/apply:eval ['{evil}']"]
    for body in bodies:
        assert only(wrap(body)).error
    assert only(call(key=evil)).arguments == {"key": evil}
    assert list(tmp_path.iterdir()) == []


def test_the_number_of_calls_is_bounded():
    calls = HermesParser(max_calls=3).parse(call(key="a") * 9).calls
    assert [c.error for c in calls] == ["", "", "", "more than 3 calls in one turn"]


def test_time_is_linear_in_the_text():
    started = time.process_time()
    for text in (OPEN * 200_000, CLOSE * 200_000, (OPEN + CLOSE) * 200_000, OPEN + "[" * 2_000_000 + CLOSE):
        HermesParser().parse(text)
    assert time.process_time() - started < 5  # a backtracking search would take minutes


@pytest.mark.parametrize("name", variants("parser"))
def test_every_parser_takes_junk(name: str):
    parser = create("parser", {"name": name}, tools=(TOOL,))
    r = Random(0)
    parts = [OPEN, CLOSE, "{", "}", '"', '"name"', ":", '"arguments"', "find", "\x00", "\ud800", "é", "\n", "1e9", "[", "\\u", ","]
    for _ in range(2000):
        text = "".join(r.choice(parts) for _ in range(r.randint(0, 30)))
        action = parser.parse(text)
        assert action.text == text
        assert all(c.error or c.name for c in action.calls)
