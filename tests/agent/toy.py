"""A domain for tests: its environments answer, fail and end as a script says, and remember whether they were closed."""

import asyncio
from collections.abc import Callable
from random import Random

from mcore_agent.protocols import Action, Observation
from mcore_agent.types import Feedback, Task

TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"key": {"type": "string"}}, "required": ["key"]}}}
Script = Callable[[int, Action], Observation]  # the number of the turn and its action


def told(*texts: str, done: bool = False, **feedback) -> Observation:
    return Observation(tuple({"role": "tool", "content": t} for t in texts), done, Feedback(**feedback), state_key="/".join(texts))


class ToyEnv:
    def __init__(self, script: Script, fail_close: Exception | None):
        self.script, self.fail_close = script, fail_close
        self.actions: list[Action] = []
        self.replies: list[Observation] = []
        self.closed = 0

    async def reset(self) -> Observation:
        return Observation(state_key="start")

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(0)
        self.actions.append(action)
        self.replies.append(self.script(len(self.actions) - 1, action))
        return self.replies[-1]

    async def close(self) -> None:
        self.closed += 1
        if self.fail_close:
            raise self.fail_close


class Toy:
    """``script(task)`` is called once per episode. ``envs`` holds every environment made, ``seeds`` its seed."""

    def __init__(self, script: Callable[[Task], Script], n: int | None = 5, fail_close: Exception | None = None):
        self.tools = (TOOL,)
        self.script, self.n, self.fail_close = script, n, fail_close
        self.envs: list[ToyEnv] = []
        self.seeds: list[int] = []

    def size(self, split: str) -> int | None:
        return self.n

    def task(self, split: str, index: int) -> Task:
        return Task(f"toy/{split}/{index}", "toy", ({"role": "user", "content": f"task {index}"},), {"index": index}, gold="GOLD")

    def make(self, task: Task, seed: int) -> ToyEnv:
        self.envs.append(ToyEnv(self.script(task), self.fail_close))
        self.seeds.append(seed)
        return self.envs[-1]

    def demo(self, task: Task, seed: int) -> None:
        return None


def random_script(r: Random) -> Script:
    """Answers of all kinds of text, one to three messages a turn, ending at a random turn."""
    texts = ["bm", "error", "", "é 🙂", "a\nb", "<|im_end|>", "<answer>bl</answer>", "x\ud800", "0123456789" * 3]

    def step(turn: int, action: Action) -> Observation:
        messages = [r.choice(texts) for _ in range(r.randint(1, 3))]
        return told(*messages, done=r.random() < 0.2, reward=r.choice([0.0, 1.0]), ok=bool(action.calls))

    return step
