"""Which of several engines gets a request: where its prefix is cached, where its episode has got on, where there is room.

A router is told of every start and end and decides from these alone, so that equal histories give equal choices.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mcore_agent.protocols import Completion, Request

BLOCK = 32  # tokens of a shared prompt that are remembered as one


@runtime_checkable
class Router(Protocol):
    """``loads``: requests in flight by engine, None for an engine that is not there; ``pick`` raises ValueError if all are.

    ``finished`` comes once for each ``started``; its completion is None when the request was lost.
    """

    def pick(self, request: Request, loads: Sequence[int | None]) -> int: ...

    def started(self, index: int, request: Request) -> None: ...

    def finished(self, index: int, request: Request, completion: Completion | None) -> None: ...

    def forget(self, index: int) -> None: ...

    def forget_all(self) -> None: ...


def _present(loads: Sequence[int | None]) -> list[int]:
    here = [i for i, load in enumerate(loads) if load is not None]
    if not here:
        raise ValueError("no engine is there to be picked; wait until one is")
    return here


class RoundRobin:
    """The next engine that is there; what others are compared with."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: Request, loads: Sequence[int | None]) -> int:
        here = _present(loads)
        found = next((i for i in here if i >= self._next), here[0])
        self._next = found + 1
        return found

    def started(self, index: int, request: Request) -> None:
        pass

    def finished(self, index: int, request: Request, completion: Completion | None) -> None:
        pass

    def forget(self, index: int) -> None:
        pass

    def forget_all(self) -> None:
        pass


@dataclass(eq=False)
class _Held:
    """What one engine's cache is thought to hold. Both tables forget what was not used for longest."""

    sessions: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)  # -> tokens held, turns answered
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # hash of a block and all blocks before it
    tokens: int = 0  # of all sessions


class CacheRouter:
    """Scores each engine with ``a * cached prefix tokens + b * progress - c * load``; equal scores go to the lowest index (M115).

    *Cached* is an estimate: a session's last prompt and answer, or the blocks of a prompt that others had too (samples of
    one group). *Progress* is the number of turns that the engine has answered of this session: an episode that is far on
    has a group waiting for it and stays. *Load* is requests in flight above those of the idlest engine.
    ``cache_tokens`` is about what one engine can keep.
    """

    def __init__(self, a: float = 1.0, b: float = 16.0, c: float = 128.0, cache_tokens: int = 1 << 20):
        if min(a, b, c) < 0 or cache_tokens < BLOCK:
            raise ValueError(f"a, b, c are {a}, {b}, {c} (at least 0), cache_tokens is {cache_tokens} (at least {BLOCK})")
        self.a, self.b, self.c, self.cache_tokens = a, b, c, cache_tokens
        self._held: dict[int, _Held] = {}

    def pick(self, request: Request, loads: Sequence[int | None]) -> int:
        here = _present(loads)
        least = min(load for load in loads if load is not None)
        best, best_score = here[0], -float("inf")
        chain: list[int] | None = None
        for i in here:
            held = self._held.get(i)
            cached, turns = 0, 0
            if held is not None:
                cached, turns = held.sessions.get(request.session, (0, 0)) if request.session else (0, 0)
                if not turns and held.blocks:
                    chain = _chain(request) if chain is None else chain
                    cached = BLOCK * next((n for n, block in enumerate(chain) if block not in held.blocks), len(chain))
            load = loads[i]
            assert load is not None
            score = self.a * min(cached, len(request.tokens) - 1) + self.b * turns - self.c * (load - least)
            if score > best_score:
                best, best_score = i, score
        return best

    def started(self, index: int, request: Request) -> None:
        """The prompt of a session's first request is soon cached, and may be shared."""
        held = self._held.setdefault(index, _Held())
        if request.session in held.sessions:
            held.sessions.move_to_end(request.session)
            return
        for block in _chain(request):
            held.blocks[block] = None
            held.blocks.move_to_end(block)
        while len(held.blocks) * BLOCK > self.cache_tokens:
            held.blocks.popitem(last=False)

    def finished(self, index: int, request: Request, completion: Completion | None) -> None:
        if completion is None or not request.session:
            return
        held = self._held.setdefault(index, _Held())
        before, turns = held.sessions.pop(request.session, (0, 0))
        now = len(request.tokens) + len(completion.tokens)
        held.sessions[request.session] = now, turns + 1
        held.tokens += now - before
        while held.tokens > self.cache_tokens and len(held.sessions) > 1:
            held.tokens -= held.sessions.popitem(last=False)[1][0]

    def forget(self, index: int) -> None:
        """The engine's cache is gone: it was lost, or has new weights."""
        self._held.pop(index, None)

    def forget_all(self) -> None:
        self._held.clear()


def _chain(request: Request) -> list[int]:
    """One number for every full block of the prompt, different whenever any token up to its end is."""
    data, width = request.tokens.tobytes(), request.tokens.itemsize * BLOCK
    found, so_far = [], request.tokens.itemsize
    for at in range(0, len(data) - width + 1, width):
        so_far = hash((so_far, data[at : at + width]))
        found.append(so_far)
    return found
