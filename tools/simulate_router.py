"""What a router is worth: simulated engines replay multi-turn episodes under each router; prints a table.

    python tools/simulate_router.py [--episodes 200] [--engines 4] [--seed 0]

Every engine has a prefix cache of bounded size that forgets token by token what was not used for longest, and is slower
the more requests it runs. Prompts are shared within a group, turns grow, tools take a while.
"""

import argparse
import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from mcore_agent.protocols import Completion, Request
from mcore_agent.rollout.router import CacheRouter, RoundRobin, Router

PREFILL_S, DECODE_S, CROWD_S = 2e-5, 4e-3, 2e-4  # a prompt token; a new token; more for each other request


class PrefixCache:
    """Token counts of chains, each a group's prompt or an episode's own row behind it; a row needs the whole prompt.

    Tokens leave from the end of the chain that was not used for longest. A prompt is used whenever a row behind it is.
    """

    def __init__(self, size: int):
        self.size, self.used = size, 0
        self.chains: OrderedDict[str, int] = OrderedDict()  # -> tokens held

    def match(self, group: str, prompt: int, episode: str) -> int:
        """Tokens of the row that need not be computed."""
        held = self.chains.get(group, 0)
        return held + self.chains.get(episode, 0) if held >= prompt else held

    def store(self, group: str, prompt: int, episode: str, own: int) -> None:
        for chain, tokens in ((episode, own), (group, prompt)):
            self.used += tokens - self.chains.get(chain, 0)
            self.chains[chain] = tokens
            self.chains.move_to_end(chain)
        while self.used > self.size:
            oldest = next(iter(self.chains))
            gone = min(self.chains[oldest], self.used - self.size)
            self.chains[oldest] -= gone
            self.used -= gone
            if not self.chains[oldest]:
                del self.chains[oldest]


@dataclass
class Script:
    """What happens in one episode, whichever engines it is played on."""

    name: str
    group: str
    prompt: np.ndarray  # [P] int64, shared by its group
    answers: list[np.ndarray]  # each turn's new tokens
    observations: list[np.ndarray]
    tools_s: list[float]


def scripts(episodes: int, group_size: int, seed: int) -> list[Script]:
    draw = np.random.default_rng(seed)

    def some(low: int, high: int) -> np.ndarray:
        return draw.integers(0, 50000, draw.integers(low, high))

    found: list[Script] = []
    while len(found) < episodes:
        group, prompt = f"g{len(found)}", some(300, 900)
        for _ in range(min(group_size, episodes - len(found))):
            turns = int(draw.integers(3, 11))
            answers, seen = [some(20, 160) for _ in range(turns)], [some(30, 300) for _ in range(turns)]
            found.append(Script(f"e{len(found)}", group, prompt, answers, seen, draw.exponential(1.0, turns).tolist()))
    return found


@dataclass
class Result:
    """``recomputed``: prompt tokens that were computed although an engine had computed them before. Lists are by engine."""

    recomputed: int = 0
    uncached: int = 0  # with those that are new to every engine
    wall_s: float = 0.0
    tokens: list[int] = field(default_factory=list)  # computed, prompt and new
    busy: list[float] = field(default_factory=list)  # mean requests in flight

    def spread(self, of: str) -> float:
        values = np.array(self.tokens if of == "tokens" else self.busy, dtype=float)
        return float(values.max() / values.mean())


class Replay:
    """``width`` episodes at once; an event is the start of a turn or the end of an answer."""

    def __init__(self, router: Router, played: list[Script], engines: int, cache_tokens: int, width: int):
        self.router, self.width = router, width
        self.caches = [PrefixCache(cache_tokens) for _ in range(engines)]
        self.loads: list[int | None] = [0] * engines
        self.result = Result(tokens=[0] * engines, busy=[0.0] * engines)
        self.known: dict[str, int] = {}  # tokens of a prompt or of an episode's row that some engine has computed
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()
        self.left = iter(played)

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def run(self) -> Result:
        for _ in range(self.width):
            self.begin(0.0)
        while self.events:
            now, _, what = heapq.heappop(self.events)
            for i, load in enumerate(self.loads):
                self.result.busy[i] += (load or 0) * (now - self.result.wall_s)
            self.result.wall_s = now
            what(now)
        self.result.busy = [b / self.result.wall_s for b in self.result.busy]
        return self.result

    def begin(self, now: float) -> None:
        script = next(self.left, None)
        if script is not None:
            self.at(now, lambda now: self.turn(now, script, 0, script.prompt))

    def turn(self, now: float, script: Script, index: int, row: np.ndarray) -> None:
        request = Request(f"{script.name}/{index}", row, len(script.answers[index]), session=script.name)
        engine = self.router.pick(request, self.loads)
        self.router.started(engine, request)
        prompt, result = len(script.prompt), self.result
        cached = min(self.caches[engine].match(script.group, prompt, script.name), len(row) - 1)
        before = self.known.get(script.name, self.known.get(script.group, 0))
        result.recomputed += max(0, before - cached)
        result.uncached += len(row) - cached
        result.tokens[engine] += len(row) - cached + request.max_new
        self.known[script.name], self.known[script.group] = len(row) + request.max_new, prompt
        self.caches[engine].store(script.group, prompt, script.name, len(row) - prompt)
        load = self.loads[engine] or 0
        self.loads[engine] = load + 1
        took = (len(row) - cached) * PREFILL_S + request.max_new * (DECODE_S + CROWD_S * load)
        self.at(now + took, lambda now: self.answered(now, script, index, request, engine))

    def answered(self, now: float, script: Script, index: int, request: Request, engine: int) -> None:
        self.loads[engine] = (self.loads[engine] or 0) - 1
        new = script.answers[index]
        self.router.finished(engine, request, Completion(new, np.zeros(len(new)), np.zeros(len(new)), "stop"))
        prompt = len(script.prompt)
        self.caches[engine].store(script.group, prompt, script.name, len(request.tokens) + len(new) - prompt)
        if index + 1 == len(script.answers):
            self.begin(now)
            return
        row = np.concatenate([request.tokens, new, script.observations[index]])
        self.at(now + script.tools_s[index], lambda now: self.turn(now, script, index + 1, row))


def compare(
    episodes: int = 200, engines: int = 4, seed: int = 0, group_size: int = 8, cache_tokens: int = 60_000, width: int = 64
) -> Mapping[str, Result]:
    """The same episodes under each router. ``width`` of them run at once; caches are tokens of one engine."""
    routers: Mapping[str, Router] = {"round robin": RoundRobin(), "cache": CacheRouter(cache_tokens=cache_tokens)}
    played = scripts(episodes, group_size, seed)
    return {name: Replay(router, played, engines, cache_tokens, width).run() for name, router in routers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 200), ("engines", 4), ("seed", 0), ("group-size", 8), ("cache-tokens", 60_000), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    found = compare(**vars(parser.parse_args()))
    base = found["round robin"]
    heads = "recomputed  ratio   uncached  ratio  tokens max/mean  load max/mean  wall s"
    print(f"{'router':12}  {heads}")
    for name, r in found.items():
        print(
            f"{name:12} {r.recomputed:11d} {r.recomputed / base.recomputed:6.3f} {r.uncached:10d} {r.uncached / base.uncached:6.3f} "
            f"{r.spread('tokens'):16.3f} {r.spread('busy'):14.3f} {r.wall_s:7.1f}"
        )


if __name__ == "__main__":
    main()
