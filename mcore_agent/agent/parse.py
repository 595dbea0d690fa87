"""Tool calls in the Hermes format: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

The text was written by a model: it is read as JSON and never evaluated.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_agent.protocols import Action, ToolCall
from mcore_agent.registry import register

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict, "null": type(None),
}  # fmt: skip


@register("parser", "hermes")
@dataclass(frozen=True)
class HermesParser:
    """Any text gives an Action; what is wrong with a call stands in its ``error``.

    With ``tools`` (OpenAI format) a call is also held to them: name, required and unknown arguments, types. A body of
    more than ``max_chars`` characters, and every call after the first ``max_calls``, is an error.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    max_calls: int = 16
    max_chars: int = 65536

    def parse(self, text: str) -> Action:
        calls: list[ToolCall] = []
        for body in _bodies(text):
            if len(calls) == self.max_calls:
                calls.append(ToolCall(error=f"more than {self.max_calls} calls in one turn"))
                break
            calls.append(self._call(body))
        return Action(text, tuple(calls))

    def _call(self, body: str | None) -> ToolCall:
        if body is None:
            return ToolCall(error=f"{OPEN} without {CLOSE}")
        if len(body) > self.max_chars:
            return ToolCall(error=f"a call of {len(body)} characters; at most {self.max_chars}")
        try:
            value = json.loads(body)
            # JSON admits what it cannot be written back as: 1e999, NaN and half of a surrogate pair.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as e:
            return ToolCall(error=f"not valid JSON: {type(e).__name__}")
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
            return ToolCall(error='a call must be {"name": ..., "arguments": {...}}')
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return ToolCall(error="arguments must be an object")
        error = _misfit(value["name"], arguments, self.tools) if self.tools else ""
        return ToolCall(error=error) if error else ToolCall(value["name"], arguments)


def _bodies(text: str) -> Iterator[str | None]:
    """What stands between each pair of tags; None for a tag that is never closed. Linear in the text."""
    at = text.find(OPEN)
    while at >= 0:
        start = at + len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            yield None
            return
        yield text[start:end]
        at = text.find(OPEN, end + len(CLOSE))


def _misfit(name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """Why a call does not fit its tool's schema; empty when it does."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if name not in schemas:
        return f"no tool {name[:64]!r}; tools: {', '.join(sorted(schemas))}"
    properties = schemas[name].get("properties", {})
    for key in schemas[name].get("required", ()):
        if key not in arguments:
            return f"{name} needs the argument {key!r}"
    for key, value in arguments.items():
        if key not in properties:
            return f"{name} takes no argument {key[:64]!r}; it takes: {', '.join(properties) or 'none'}"
        allowed = properties[key].get("type", [])
        allowed = [allowed] if isinstance(allowed, str) else allowed
        if allowed and not any(_is(value, kind) for kind in allowed):
            return f"{name}: {key} must be of type {' or '.join(allowed)}"
        if "enum" in properties[key] and value not in properties[key]["enum"]:
            return f"{name}: {key} must be one of {', '.join(map(str, properties[key]['enum']))}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return kind in _TYPES and isinstance(value, _TYPES[kind])
