"""Single-turn sums with a graded reward, for models that chat but do not yet keep to what was asked."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mcore_agent.protocols import Action, Observation
from mcore_agent.registry import register
from mcore_agent.types import Feedback, Message, Task

SYSTEM = {"role": "system", "content": "You are a calculator."}


def brevity(reply: str, answer: str, slack: int = 12) -> float:
    """1 for the bare answer, down to .5 for the answer among ``slack`` or more further characters, 0 without it.

    >>> brevity("7", "7"), brevity("It is 7", "7"), brevity("17", "7")
    (1.0, 0.75, 0.0)
    """
    text = reply.strip()
    if not re.search(rf"\b{re.escape(answer)}\b", text):
        return 0.0
    return 0.5 + 0.5 * max(0.0, 1 - (len(text) - len(answer)) / slack)


@register("env", "sum_reply")
class SumReply:
    """``Reply with only a number. 3 + 4 =`` with addends of 1 to ``largest``; the reward is ``brevity``.

    ``shots`` worked examples stand before the question. ``task(split, index)`` depends on ``seed``, ``split`` and
    ``index`` alone; splits are endless. Raises ValueError for arguments out of range.
    """

    def __init__(self, largest: int = 9, shots: int = 0, seed: int = 0):
        if largest < 1:
            raise ValueError(f"sum_reply: largest is {largest}, but addends start at 1; raise it")
        if shots < 0:
            raise ValueError(f"sum_reply: shots is {shots}; give 0 or more")
        self.largest, self.shots, self.seed = largest, shots, seed
        self.tools: Sequence[Mapping[str, Any]] = ()

    def size(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> Task:
        r = Random(f"sum_reply/{self.seed}/{split}/{index}")
        x, y = r.randint(1, self.largest), r.randint(1, self.largest)
        examples = [m for n in range(2, 2 + self.shots) for m in (_ask(n, n), {"role": "assistant", "content": str(n + n)})]
        return Task(f"sum_reply/{split}/{index}", "sum_reply", (SYSTEM, *examples, _ask(x, y)), gold=str(x + y))

    def make(self, task: Task, seed: int) -> "SumEpisode":
        return SumEpisode(task.gold)

    def demo(self, task: Task, seed: int) -> list[Message]:
        return [*task.messages, {"role": "assistant", "content": task.gold}]


def _ask(x: int, y: int) -> Message:
    return {"role": "user", "content": f"Reply with only a number. {x} + {y} ="}


class SumEpisode:
    """One reply, then the end."""

    def __init__(self, answer: str):
        self.answer = answer

    async def reset(self) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Observation:
        return Observation(done=True, feedback=Feedback(reward=brevity(action.text, self.answer), changed=False))

    async def close(self) -> None:
        pass
