"""An engine without a model: it answers from a function, keeps every request, and forms batches as the real one does.

``agent_for`` makes the renderer, parser and limits for a domain on a small trained tokenizer.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from random import Random

import numpy as np

from mcore_agent.agent.episode import Agent, Limits
from mcore_agent.agent.parse import HermesParser
from mcore_agent.agent.render import ChatRenderer
from mcore_agent.agent.tokenizer import contents, train_tokenizer
from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.protocols import Completion, Domain, InfraError, Request

Policy = Callable[[Request], Completion]


def completion(request: Request, tokens: Iterable[int], version: int = 0) -> Completion:
    """``tokens`` up to the first stop token or ``max_new``, each with a log-probability that tells it from others."""
    kept: list[int] = []
    for token in tokens:
        kept.append(int(token))
        if token in request.stop or len(kept) == request.max_new:
            break
    logp = [-(1 + (request.seed + 7 * i + token) % 997) / 100 for i, token in enumerate(kept)]
    finish = "stop" if kept[-1] in request.stop else "length"
    return Completion(np.array(kept), np.array(logp, dtype=np.float32), np.full(len(kept), version, dtype=np.int32), finish)


def scripted(tokenizer, texts: Iterable[str]) -> Policy:
    """Says the texts one after another, each with its end token."""
    rest = iter(texts)
    return lambda request: completion(request, [*tokenizer(next(rest), add_special_tokens=False)["input_ids"], request.stop[0]])


class FakeEngine:
    """Answers a request by ``policy(request)``, which may raise InfraError.

    A wave starts when every open client has a request that waits; its requests are sorted by ``order`` and ``id``.
    Answers come back in an order drawn from ``shuffle``, one loop turn or more apart. ``waves`` holds the ids of each
    wave, ``requests`` and ``answers`` everything by request id.
    """

    def __init__(self, policy: Policy, shuffle: int = 0):
        self.version = 0
        self.policy = policy
        self.requests: dict[str, list[Request]] = {}
        self.answers: dict[str, list[Completion]] = {}
        self.waves: list[list[str]] = []
        self.open = 0
        self._random = Random(shuffle)
        self._pending: list[tuple[Request, asyncio.Future]] = []
        self._paused = self._updating = self._closed = False
        self._names: list[str] = []
        self._progress = 0  # tokens answered

    @contextmanager
    def client(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self._look()

    async def generate(self, request: Request) -> Completion:
        if self._closed or self._updating:
            raise RuntimeError(f"request {request.id} to an engine that is {'closed' if self._closed else 'being updated'}")
        future = asyncio.get_running_loop().create_future()
        self.requests.setdefault(request.id, []).append(request)
        self._pending.append((request, future))
        self._look()
        return await future

    def _look(self) -> None:
        self._pending = [(r, f) for r, f in self._pending if not f.done()]
        if self._pending and len(self._pending) >= self.open and not self._paused:
            wave, self._pending = sorted(self._pending, key=lambda item: (item[0].order, item[0].id)), []
            self.waves.append([request.id for request, _ in wave])
            self._random.shuffle(wave)
            for request, future in wave:
                self._later(self._random.randint(0, 5), request, future)

    def _later(self, turns: int, request: Request, future: asyncio.Future) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._later, turns - 1, request, future)
        elif not future.done():
            try:
                answer = self.policy(request)
            except InfraError as e:
                future.set_exception(e)
            else:
                self.answers.setdefault(request.id, []).append(answer)
                self._progress += len(answer.tokens)
                future.set_result(answer)

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        chosen = None if ids is None else set(ids)
        for request, future in self._pending:
            if (chosen is None or request.id in chosen) and not future.done():
                none = np.array([])
                future.set_result(Completion(none, none, none, "abort"))
        self._pending = [(r, f) for r, f in self._pending if not f.done()]

    async def pause(self, mode: str = "in_place") -> None:
        self._paused = True
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._paused = False
        self._look()

    async def sleep(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        if self._pending:
            raise RuntimeError("sleep while requests wait")

    async def wake(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        pass

    async def begin_update(self) -> None:
        self._updating, self._names = True, []

    async def update(self, bucket) -> None:
        if not self._updating:
            raise RuntimeError("update outside begin_update and end_update")
        self._names += [name for name, _ in bucket]

    async def end_update(self, version: int) -> None:
        if not self._updating or len(set(self._names)) != len(self._names):
            raise RuntimeError("no update was begun, or a parameter was given twice")
        self._updating, self.version = False, version

    async def flush(self) -> None:
        pass

    async def checksum(self) -> dict[str, str]:
        return {"version": str(self.version)}

    async def progress(self) -> int:
        return self._progress

    async def memory(self) -> dict[str, int]:
        return {"weights": 0, "kv_cache": 0}

    async def close(self) -> None:
        await self.abort()
        self._closed = True

    def capabilities(self) -> frozenset[str]:
        return frozenset({"abort", "pause", "waves"})


@cache
def hop_tokenizer():
    """A tokenizer of at most 384 tokens trained on 300 hop-lookup demonstrations. Copy it before changing it."""
    domain = HopLookup()
    return train_tokenizer(contents(domain.demo(domain.task("train", i), i) for i in range(300)), 384)


def agent_for(domain: Domain, tokenizer=None, **limits) -> Agent:
    renderer = ChatRenderer(tokenizer or hop_tokenizer(), domain.tools)
    return Agent(renderer, HermesParser(tuple(domain.tools)), Limits(**{"max_turns": 8, "max_new": 60, "max_tokens": 600, **limits}))
