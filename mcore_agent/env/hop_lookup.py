"""Hop lookup: follow a chain of keys through a tool, one call a hop, then answer with the last key.

An episode of two hops::

    user       "kl" 2?
    assistant  <tool_call>{"name": "lookup", "arguments": {"key": "kl"}}</tool_call>
    tool       bn
    assistant  <tool_call>{"name": "lookup", "arguments": {"key": "bn"}}</tool_call>
    tool       dp
    assistant  <answer>dp</answer>
"""

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mcore_agent.protocols import Action, Observation, ToolCall
from mcore_agent.registry import register
from mcore_agent.types import Feedback, Message, Task

KEYS = tuple(a + b for a in "bcdfghjk" for b in "lmnpqrst")
ERROR = "error"

_KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
_LOOKUP = {"type": "function", "function": {"name": "lookup", "description": "The key after a key.", "parameters": _KEY}}


def _next(chain: Sequence[str], key: Any) -> str:
    """What ``lookup`` answers: the key after ``key``, or ``error`` for a key that is not in the table."""
    return chain[chain.index(key) + 1] if key in chain[:-1] else ERROR


@register("env", "hop_lookup")
class HopLookup:
    """Tasks of 1 to ``hops`` hops. Reward 1 iff the answer is the key that many hops away; a failed call is no end.

    ``task(split, index)`` depends on ``seed``, ``split`` and ``index`` alone; splits are endless. An episode ends
    without reward after ``max_turns`` turns. Raises ValueError when no task of ``hops`` hops fits in its turns.
    """

    def __init__(self, hops: int = 3, max_turns: int = 6, seed: int = 0):
        if not 1 <= hops <= len(KEYS) - 2:
            raise ValueError(f"hop_lookup: hops is {hops}, but there are {len(KEYS)} keys; give 1 to {len(KEYS) - 2}")
        if max_turns <= hops:
            raise ValueError(f"hop_lookup: max_turns is {max_turns}, but {hops} hops and the answer take {hops + 1}; raise it")
        self.hops, self.max_turns, self.seed = hops, max_turns, seed
        self.tools: Sequence[Mapping[str, Any]] = (_LOOKUP,)

    def size(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> Task:
        r = Random(f"hop_lookup/{self.seed}/{split}/{index}")
        chain, hops = tuple(r.sample(KEYS, self.hops + 2)), r.randint(1, self.hops)
        prompt = {"role": "user", "content": f'"{chain[0]}" {hops}?'}
        name = f"hop_lookup/{split}/{index}"
        return Task(name, "hop_lookup", (prompt,), {"chain": chain}, gold=chain[hops], meta={"hops": hops})

    def make(self, task: Task, seed: int) -> "HopEpisode":
        return HopEpisode(task, self.max_turns)

    def demo(self, task: Task, seed: int) -> list[Message]:
        """A lazy demonstrator, right in fewer than half of its demonstrations, so that imitation leaves room.

        After the first hop it stops early with probability .65; it goes on too far with .1; a call asks for a random
        key with .05 and is broken JSON with .05. It repeats a call that failed.
        """
        r, chain, hops = Random(f"demo/{seed}/{task.id}"), task.spec["chain"], task.meta["hops"]
        messages, at = list(task.messages), 0
        for _ in range(self.max_turns - 1):
            early, beyond = 0 < at < hops, at >= hops
            if (early and r.random() < 0.65) or (beyond and r.random() > 0.1) or at == len(chain) - 1:
                break
            key = chain[at] if r.random() > 0.05 else r.choice(KEYS)
            call, reply = json.dumps({"name": "lookup", "arguments": {"key": key}}), _next(chain, key)
            if r.random() < 0.05:
                call, reply = call[:-1], ERROR
            messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
            messages.append({"role": "tool", "content": reply})
            at = chain.index(reply) if reply != ERROR else at
        return [*messages, {"role": "assistant", "content": f"<answer>{chain[at]}</answer>"}]


class HopEpisode:
    """One live episode: a pure function of the actions. Its state is how far along the chain the agent has seen."""

    def __init__(self, task: Task, max_turns: int):
        self.chain, self.gold = task.spec["chain"], task.gold
        self.turns_left, self.seen = max_turns, 0

    async def reset(self) -> Observation:
        return Observation(state_key=self.chain[0])

    async def step(self, action: Action) -> Observation:
        self.turns_left -= 1
        if not action.calls:
            answer = re.fullmatch(r"<answer>(\w+)</answer>", action.text.strip())
            right = answer is not None and answer[1] == self.gold
            return Observation(done=True, feedback=Feedback(reward=float(right), ok=answer is not None, changed=False))
        before, replies = self.seen, [self._call(call) for call in action.calls]
        self.seen = max([before, *(self.chain.index(reply) for reply in replies if reply != ERROR)])
        failed = [call for call, reply in zip(action.calls, replies, strict=True) if reply == ERROR]
        reason = (failed[0].error or "no such key") if failed else ""
        return Observation(
            tuple({"role": "tool", "content": reply} for reply in replies),
            done=self.turns_left <= 0,
            feedback=Feedback(ok=not reason, changed=self.seen > before, error=reason),
            state_key=self.chain[self.seen],
        )

    def _call(self, call: ToolCall) -> str:
        return _next(self.chain, call.arguments.get("key")) if call.name == "lookup" and not call.error else ERROR

    async def close(self) -> None:
        pass
