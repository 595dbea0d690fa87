"""Strictly on-policy against bounded-async collection in simulated time, with tools that take 1 to 20 times a model's turn.

``python tools/simulate_async.py`` prints tokens per second of both and their ratio. Collector, buffer, episodes, environment and
tokenizer are the real ones on an event loop whose clock jumps; the engine, the tools and the learner only take their time.
A run is a function of its arguments. Timing of a step: the batch is collected, the learner works, weights are published.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from virtual_time import run as simulate

from mcore_agent.agent.episode import Agent, Limits
from mcore_agent.agent.parse import HermesParser
from mcore_agent.agent.render import ChatRenderer
from mcore_agent.agent.tokenizer import contents, train_tokenizer
from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.protocols import Action, Completion, Observation, Request
from mcore_agent.rollout.collect import Collector, CollectStats
from mcore_agent.task.source import EpochSource
from mcore_agent.types import Episode, Task

CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "bl"}}</tool_call>'
ANSWER = "<answer>bl</answer>"
LATENCY = (1.0, 20.0)  # seconds of a tool call, uniform
TARGET = 1.5


@dataclass(frozen=True)
class Case:
    """What is simulated; seconds are the model's turns where ``turn_s`` is 1."""

    max_lag: int = 0
    over_sample: float = 0.0
    steps: int = 20
    prompts: int = 8
    group_size: int = 4
    turns: tuple[int, int] = (2, 6)  # of an episode, uniform
    slots: int = 64  # requests that the engine works on at once
    turn_s: float = 1.0
    train_s: float = 30.0
    publish_s: float = 1.0
    seed: int = 0


@dataclass
class Outcome:
    """What happened. ``batches`` holds each step's episodes."""

    seconds: float = 0.0
    tokens: int = 0
    batches: list[list[Episode]] = field(default_factory=list)
    stats: list[CollectStats] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Sampled tokens that were learned from, per second."""
        return self.tokens / self.seconds


class TimedEngine:
    """Answers after ``turn_s``, ``slots`` requests at a time: between ``turns`` calls of a tool, drawn per episode, and then an answer.

    A request in flight across a publish goes on under the newer weights, and its tokens carry both versions.
    """

    def __init__(self, tokenizer: Any, turn_s: float, slots: int, turns: tuple[int, int]):
        self.version, self.turn_s, self.turns = 0, turn_s, turns
        self.answered = 0  # tokens
        self._texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (CALL, ANSWER)]
        self._slots, self._serving = asyncio.Semaphore(slots), asyncio.Event()
        self._serving.set()
        self._busy: dict[str, asyncio.Future[bool]] = {}  # by request; True: aborted
        self._aborted: set[str] = set()

    @contextmanager
    def client(self) -> Iterator[None]:
        yield

    async def generate(self, request: Request) -> Completion:
        turn, calls = int(request.id.rpartition("/")[2]), Random(request.session).randint(*self.turns)
        tokens = [*self._texts[turn >= calls], request.stop[0]]
        versions: list[int] = []
        async with self._slots:
            for share in (len(tokens) // 2, len(tokens) - len(tokens) // 2):
                await self._serving.wait()
                if request.id in self._aborted or await self._work(request.id):
                    break
                versions += [self.version] * share
        n = len(versions)
        self._aborted.discard(request.id)
        self.answered += n
        finish = "stop" if n == len(tokens) else "abort"
        return Completion(np.array(tokens[:n], dtype=np.int64), np.full(n, -0.5, np.float32), np.array(versions, np.int32), finish)

    async def _work(self, name: str) -> bool:
        """Half a turn. True when the request was aborted meanwhile."""
        loop = asyncio.get_running_loop()
        done = self._busy[name] = loop.create_future()
        timer = loop.call_later(self.turn_s / 2, lambda: done.done() or done.set_result(False))
        try:
            return await done
        finally:
            timer.cancel()
            del self._busy[name]

    async def abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            self._aborted.add(name)
            if name in self._busy and not self._busy[name].done():
                self._busy[name].set_result(True)

    async def publish(self, version: int, seconds: float) -> None:
        """New weights; who is served waits meanwhile."""
        self._serving.clear()
        await asyncio.sleep(seconds)
        self.version = version
        self._serving.set()


class SlowTools:
    """A domain whose calls take seconds, drawn from the episode's seed."""

    def __init__(self, domain: HopLookup, latency: tuple[float, float] = LATENCY):
        self._domain, self._latency, self.tools = domain, latency, domain.tools
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._domain, name)

    def make(self, task: Task, seed: int) -> "_SlowEpisode":
        return _SlowEpisode(self, self._domain.make(task, seed), Random(seed), self._latency)


class _SlowEpisode:
    def __init__(self, domain: SlowTools, env: Any, random: Random, latency: tuple[float, float]):
        self._domain, self._env, self._random, self._latency = domain, env, random, latency
        domain.open += 1

    async def reset(self) -> Observation:
        return await self._env.reset()

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self._random.uniform(*self._latency))
        return await self._env.step(action)

    async def close(self) -> None:
        self._domain.open -= 1


@cache
def tokenizer() -> Any:
    domain = HopLookup()
    return train_tokenizer(contents(domain.demo(domain.task("train", i), i) for i in range(300)), 384)


def agent_for(domain: Any, max_turns: int) -> Agent:
    return Agent(ChatRenderer(tokenizer(), domain.tools), HermesParser(tuple(domain.tools)), Limits(max_turns, 60, 4000))


async def play(case: Case) -> Outcome:
    """The steps of a run, one after another."""
    domain = SlowTools(HopLookup(max_turns=case.turns[1] + 2))
    engine = TimedEngine(tokenizer(), case.turn_s, case.slots, case.turns)
    collector = Collector(
        engine, domain, agent_for(domain, case.turns[1] + 2), EpochSource(domain, seed=case.seed), run_seed=case.seed,  # type: ignore[arg-type]
        prompts=case.prompts, group_size=case.group_size, max_lag=case.max_lag, over_sample=case.over_sample,
    )  # fmt: skip
    outcome, clock = Outcome(), asyncio.get_running_loop().time
    for step in range(case.steps):
        episodes, stats = await collector.collect(step, step)
        outcome.batches.append(episodes)
        outcome.stats.append(stats)
        outcome.tokens += stats.sampled_tokens
        await asyncio.sleep(case.train_s)
        await engine.publish(step + 1, case.publish_s)
        collector.advance(step + 1)
    outcome.seconds = clock()
    await collector.stop()
    assert domain.open == 0, "an environment was left open"
    return outcome


def run(case: Case) -> Outcome:
    return simulate(play(case))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    args = parser.parse_args()
    shape = {"steps": args.steps, "prompts": args.prompts, "group_size": args.group_size}
    print("learner  max_lag  over_sample  tokens/s  ratio  lag mean max  dropped")
    ratios = []
    for train_s in (15.0, 30.0, 60.0):
        sync = run(Case(train_s=train_s, **shape))
        for max_lag, over_sample in ((0, 0.0), (0, 0.25), (1, 0.0), (1, 0.25), (2, 0.0)):
            found = run(Case(train_s=train_s, max_lag=max_lag, over_sample=over_sample, **shape))
            ratio, lags = found.rate / sync.rate, [s.lag_mean for s in found.stats]
            dropped = sum(sum(s.dropped.values()) for s in found.stats)
            print(f"{train_s:5.0f} s  {max_lag:7}  {over_sample:11.2f}  {found.rate:8.1f}  {ratio:5.2f}  {np.mean(lags):8.2f} "
                  f"{max(s.lag_max for s in found.stats):3}  {dropped:7}")  # fmt: skip
            if (max_lag, over_sample) == (1, 0.0):
                ratios.append(ratio)
    print(f"max_lag 1 against 0: {min(ratios):.2f} to {max(ratios):.2f} (target {TARGET})")


if __name__ == "__main__":
    main()
