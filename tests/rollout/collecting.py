"""A collector on fakes: a source that reads a domain from its start, policies that draw from the request's seed, episodes that compare."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from mcore_agent.protocols import Completion, Request
from mcore_agent.rollout.collect import Collected, Collector
from mcore_agent.types import Episode, Task
from tests.agent.toy import Toy, random_script
from tests.fakes import agent_for, completion, hop_tokenizer

TOKENIZER = hop_tokenizer()
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "bl"}}</tool_call>'


class Listed:
    """Tasks ``indices`` of a domain one after another, then on from the last; all of them if none are given."""

    def __init__(self, domain: Any, indices: Sequence[int] = ()):
        self.domain, self.indices, self.position = domain, list(indices), 0
        self.observed: list[Episode] = []

    def next(self, k: int) -> list[Task]:
        while len(self.indices) < self.position + k:
            self.indices.append(self.indices[-1] + 1 if self.indices else 0)
        self.position += k
        return [self.domain.task("train", i) for i in self.indices[self.position - k : self.position]]

    def observe(self, episodes: Sequence[Episode]) -> None:
        self.observed += episodes

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


def say(request: Request, text: str, version: int = 0) -> Completion:
    return completion(request, [*TOKENIZER(text, add_special_tokens=False)["input_ids"], request.stop[0]], version)


def random_policy(request: Request) -> Completion:
    r = Random(request.seed)
    return say(request, r.choice([CALL, CALL, CALL[:-13], "<answer>bl</answer>", f"<answer>{r.choice('bcdf')}l</answer>"]))


def random_domain() -> Toy:
    return Toy(lambda task: random_script(Random(task.id)), n=9)


def collector(
    engine, domain, n=4, group_size=3, retries=2, run_seed=11, source=None, max_lag=0, over_sample=0.0, on_turn=None, branches=(), **limits
):
    return Collector(
        engine, domain, agent_for(domain, **limits), source or Listed(domain), run_seed=run_seed, prompts=n, group_size=group_size,
        max_retries=retries, max_lag=max_lag, over_sample=over_sample, on_turn=on_turn, branches=branches,
    )  # fmt: skip


def collect(engine, domain, step=5, progress=None, **kwargs) -> Collected:
    return asyncio.run(collector(engine, domain, **kwargs).collect(step, 0, progress))


def same(a: Episode, b: Episode) -> bool:
    fields = ("tokens", "sampled", "logp", "version")
    return all(np.array_equal(getattr(x, f), getattr(y, f)) for x, y in zip(a.rows, b.rows, strict=True) for f in fields) and (
        (a.id, a.group, a.seed, a.turns, a.status, a.reason) == (b.id, b.group, b.seed, b.turns, b.status, b.reason)
    )
