"""The engines that a rank looks after: it starts them, gives them weights, and starts them again when they die."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mcore_agent.config import Config
from mcore_agent.coordinator import Coordinator, RemoteEngine
from mcore_agent.protocols import Engine, EngineDown
from mcore_agent.registry import create, get
from mcore_agent.rollout.watchdog import Watchdog
from mcore_agent.weights.publish import publish

AT_ONCE = ("progress", "memory")  # calls that also a busy engine answers
ANSWER_S = 900.0  # for any call; the first one waits for a server to start (rollout.options.start_s)


def numbers_of(config: Config) -> int:
    """How many engines a run has: as asked, or what the learner's GPUs hold."""
    c = config.rollout
    if c.engines:
        return c.engines
    own = get("engine", c.engine).own_process
    return max(1, config.world // c.tp) if own and c.placement == "colocated" and torch.cuda.is_available() else 1


def owners(config: Config) -> dict[int, int]:
    """Engine -> the rank that looks after it: the lowest of those whose GPUs it has, rank 0 where there are no GPUs."""
    shares = get("engine", config.rollout.engine).own_process and torch.cuda.is_available() and config.rollout.placement == "colocated"
    return {number: number * config.rollout.tp if shares else 0 for number in range(numbers_of(config))}


class Engines:
    """By number. Most ranks look after none; calls then do nothing. Not collective.

    ``down`` are those that died, with the reason; calls leave them out until ``revive``. ``generation`` counts the starts of each.
    """

    def __init__(
        self, config: Config, hf_config: dict[str, Any], rank: int, coordinator: Coordinator | None, watchdog: Watchdog, stack: ExitStack
    ):
        self._config, self._hf_config, self._watchdog = config, hf_config, watchdog
        self._runner = stack.enter_context(asyncio.Runner())
        self.engines: dict[int, Engine] = {}
        self.down: dict[int, str] = {}
        self.generation: dict[int, int] = {}
        stack.callback(self.close)
        for number, owner in owners(config).items():
            if owner == rank:
                self.engines[number] = self._start(number, coordinator)
                self.generation[number] = 0

    def _start(self, number: int, coordinator: Coordinator | None = None) -> Engine:
        c = self._config
        if not get("engine", c.rollout.engine).own_process:
            assert coordinator is not None
            return RemoteEngine(coordinator)  # type: ignore[return-value]
        spec = {"name": c.rollout.engine, "dtype": c.precision.dtype, "max_batch": c.rollout.max_batch, **c.rollout.options}
        gpus = self._gpus() if torch.cuda.is_available() else ()
        return create("engine", spec, hf_config=self._hf_config, tp=c.rollout.tp, gpus=gpus, folder=self._folder(number))

    def _gpus(self) -> tuple[int, ...]:
        first = int(os.environ.get("LOCAL_RANK", "0"))
        return tuple(range(first, first + self._config.rollout.tp))

    def _folder(self, number: int) -> str:
        return os.path.join(self._config.run.dir, "engines", str(number)) if self._config.run.dir else ""

    @property
    def alive(self) -> dict[int, Engine]:
        return {number: engine for number, engine in self.engines.items() if number not in self.down}

    def addresses(self) -> dict[int, tuple[int, Any]]:
        """Engine -> (generation, address), for those that have one."""
        return {n: (self.generation[n], e.address) for n, e in self.alive.items() if not isinstance(e, RemoteEngine)}  # type: ignore[attr-defined]

    def each(self, call: Callable[[Engine], Awaitable[Any]], what: str) -> dict[int, Any]:
        """The same call to every engine that lives, at once; one that dies of it is down from then on.

        So is one that does not answer: for ``rollout.stall_s`` a call that is answered at once, ANSWER_S another one.
        """
        limit = self._config.rollout.stall_s if what in AT_ONCE else ANSWER_S

        async def one(number: int, engine: Engine) -> Any:
            try:
                with self._watchdog.waits(f"engine {number} ({what})"):
                    async with asyncio.timeout(limit):
                        return await call(engine)
            except TimeoutError:
                self.down[number] = f"no answer to {what} for {limit:.0f} s"
                return None
            except EngineDown as e:
                self.down[number] = str(e)
                return None

        async def every() -> dict[int, Any]:
            alive = self.alive
            answers = await asyncio.gather(*(one(n, e) for n, e in alive.items()))
            return {n: a for n, a in zip(alive, answers, strict=True) if n not in self.down}

        return self._runner.run(every())

    def check(self) -> None:
        """Finds out which engines live."""
        self.each(lambda engine: engine.progress(), "progress")

    def lost(self, number: int, generation: int, reason: str) -> None:
        """Others have found an engine dead or frozen; no news of one that was started again since."""
        if number in self.engines and generation == self.generation[number]:
            self.down[number] = reason

    def revive(self) -> list[int]:
        """Starts those that are down again, without weights; returns their numbers."""
        dead = sorted(self.down)
        for number in dead:
            self._runner.run(self.engines[number].close())
            self.engines[number] = self._start(number)
            self.generation[number] += 1
            del self.down[number]
        return dead

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int, chosen: Iterable[int] | None = None) -> None:
        """Gives weights to the chosen engines, or all; those that die of it are down. Exhausts ``tensors`` in any case."""
        alive = {n: e for n, e in self.alive.items() if chosen is None or n in set(chosen)}
        if not self.engines:
            for _ in tensors:
                pass
            return
        with self._watchdog.waits(f"engines {', '.join(map(str, alive)) or 'none'} (publish)"):
            self.down |= self._runner.run(publish(alive, tensors, version)).down

    def memory(self) -> Mapping[str, int]:
        """Bytes by kind, of all that live, each kind with the prefix ``engine_``."""
        found: dict[str, int] = {}
        for memory in self.each(lambda engine: engine.memory(), "memory").values():
            for kind, size in memory.items():
                found[f"engine_{kind}"] = found.get(f"engine_{kind}", 0) + size
        return found

    def close(self) -> None:
        for engine in self.engines.values():
            self._runner.run(engine.close())
