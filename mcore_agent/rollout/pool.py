"""Several engines as one, for the code that plays episodes: it survives the loss of an engine and the pause of all.

A request is asked of the engine that the router picks. When that engine is lost, it is asked again of another one, with
the same tokens and seed; when it is aborted to be kept, it goes on later from the tokens it has. Its caller gets one
answer, in which no token is lost or doubled.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from mcore_agent.protocols import Completion, Engine, EngineDown, InfraError, Request
from mcore_agent.rollout.errors import EngineStateError
from mcore_agent.rollout.flight import Flight, flaw
from mcore_agent.rollout.router import Router
from mcore_agent.rollout.watch import Watch

log = logging.getLogger(__name__)

WAVES = "waves"  # the capability of an engine that waits for every open client before it forms a batch


@dataclass(eq=False)
class Slot:
    """A place for an engine. A restarted engine gets a new one, so that what the lost one still says reaches nobody."""

    index: int
    engine: Engine
    heard: float | None = None  # loop time of its last sign of life
    version: int | None = None  # of the weights that its cached prefixes belong to
    alive: bool = True
    flights: dict[Flight, asyncio.Task[Completion]] = field(default_factory=dict)


class Pool:
    """Engines behind one ``generate``. Calls belong to one event loop.

    ``retries``: times that a request may lose its engine and is asked again. ``back_s``: seconds that a request waits for
    ``engine_back`` when no engine is left. ``on_down(index, reason)`` is called at once when an engine is lost; it must
    not block. ``stall_s``, ``probe_s`` and ``dead_s`` are those of Watch, and count inside ``watching()`` only.

    An engine with the capability ``waves`` must be alone: it would wait for clients whose requests went elsewhere.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        router: Router,
        *,
        stall_s: float = 60.0,
        probe_s: float = 1.0,
        dead_s: float = 10.0,
        retries: int = 3,
        back_s: float = 600.0,
        on_down: Callable[[int, str], None] | None = None,
    ):
        if not engines:
            raise ValueError("engines is empty; a pool needs at least one")
        self._waves = any(WAVES in engine.capabilities() for engine in engines)
        if self._waves and len(engines) > 1:
            raise ValueError(f"engines are {len(engines)}, but one forms its batches by open clients and must be alone; give it only")
        if retries < 0 or back_s <= 0:
            raise ValueError(f"retries is {retries} (at least 0), back_s is {back_s} (above 0)")
        self.router = router
        self.retries, self.back_s, self.on_down = retries, back_s, on_down
        self.watch = Watch(stall_s, dead_s, probe_s)  # its limits; each engine is watched by a copy
        self._slots = [Slot(i, engine) for i, engine in enumerate(engines)]
        self._loads: list[int | None] = [0] * len(engines)  # requests in flight; None: not there
        self._left = len(engines)
        self._served = max(engine.version for engine in engines)  # newest version that was ever here
        self._held = False
        self._ending = 0  # abort and drain calls that wait for engines
        self._clients = 0
        self._flights: dict[str, Flight] = {}  # by the caller's id
        self._waiting: dict[asyncio.Future[None], None] = {}  # woken, in order, by every change of what a request waits for
        self._lost_at: dict[int, float | None] = {}  # last sign of life of engines that are down
        self._count: Counter[str] = Counter()
        self._worst = {"detect_s": 0.0, "recover_s": 0.0}

    # ----------------------------------------------------------------------------------------------- episodes

    @property
    def version(self) -> int:
        """The newest weights that any of the engines has served."""
        return max(self._served, *(slot.engine.version for slot in self._slots if slot.alive), -1)

    @property
    def alive(self) -> list[int]:
        """Indices of the engines that serve."""
        return [slot.index for slot in self._slots if slot.alive]

    @property
    def running(self) -> int:
        """Requests that have not been answered."""
        return len(self._flights)

    def capabilities(self) -> frozenset[str]:
        """What every engine can do."""
        return frozenset.intersection(*(slot.engine.capabilities() for slot in self._slots))

    @contextmanager
    def client(self) -> Iterator[None]:
        """One episode, at every engine."""
        with ExitStack() as stack:
            for slot in self._slots:
                if slot.alive:
                    stack.enter_context(slot.engine.client())
            self._clients += 1
            try:
                yield
            finally:
                self._clients -= 1

    async def generate(self, request: Request) -> Completion:
        """Waits while the pool is held. Raises InfraError when no engine comes back in time, or too many were lost under it."""
        if request.id in self._flights:
            raise ValueError(f"request {request.id!r}: a request with this id is in flight; give each its own")
        flight = self._flights[request.id] = Flight(request)
        try:
            while True:
                if self._held or not self._left:
                    await self._admitted(flight)
                if flight.dropped:
                    self._count["aborted"] += 1
                    return flight.abort()
                if (done := await self._attempt(flight)) is not None:
                    self._count["aborted"] += done.finish == "abort"
                    return done
        finally:
            del self._flights[request.id]

    async def _admitted(self, flight: Flight) -> None:
        """Until the pool is not held and has an engine, or the request is dropped. Only the wait for an engine has a limit."""
        limit: float | None = None
        while not flight.dropped and (self._held or not self._left):
            limit = None if self._held else limit or asyncio.get_running_loop().time() + self.back_s
            try:
                async with asyncio.timeout_at(limit):
                    await self._change()
            except TimeoutError as e:
                reason = f"request {flight.request.id}: no engine is left, and none came back within {self.back_s} s"
                raise InfraError(reason) from e

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def _attempt(self, flight: Flight) -> Completion | None:
        """Asks one engine. The whole answer, or None when the request is to go on: later, or elsewhere."""
        ask = flight.rest()
        slot = self._slots[self.router.pick(ask, self._loads)]
        if slot.version != slot.engine.version:
            self.router.forget(slot.index)
            slot.version = slot.engine.version
        try:
            answer = await self._ask(slot, flight, ask)
        except EngineDown as e:
            self._lost(slot, str(e))
            flight.repeat(e, self.retries)
            self._count["repeated"] += 1
            return None
        done = flight.take(ask, answer)
        if done is None:
            self._count["continued"] += 1
            self._count["kept_tokens"] += len(answer.tokens)
        return done

    async def _ask(self, slot: Slot, flight: Flight, ask: Request) -> Completion:
        """Raises EngineDown also for a garbage answer, and when the engine is found lost meanwhile."""
        loop = asyncio.get_running_loop()
        flight.answer = answer = loop.create_future()
        if slot.heard is None:
            slot.heard = loop.time()
        # Its own task, so that a frozen engine cannot keep the caller; started here, so that the engine has the request
        # in the same turn of the loop as if it were called directly.
        task = asyncio.Task(slot.engine.generate(ask), loop=loop, eager_start=True)
        task.add_done_callback(lambda task: _settle(answer, task))
        slot.flights[flight] = task
        self._loads[slot.index] = len(slot.flights)
        self._count[f"requests/{slot.index}"] += 1
        self.router.started(slot.index, ask)
        completion: Completion | None = None
        try:
            completion = await answer
            if wrong := flaw(ask, completion):
                completion = None
                raise EngineDown(f"garbage answer to request {ask.id}: {wrong}")
        finally:
            task.cancel()  # the caller is gone, or the engine is; else it is done
            del slot.flights[flight]
            if slot.alive:
                self._loads[slot.index] = len(slot.flights)
            self.router.finished(slot.index, ask, completion)
        slot.heard = loop.time()
        if len(completion.tokens):
            self._count["cached_tokens"] += completion.cached
            self._count["recomputed_tokens"] += len(ask.tokens) - completion.cached
        return completion

    # ---------------------------------------------------------------------------------- abort, hold and drain

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Requests end as ``abort`` to their callers, with the tokens they have; ids that are not in flight are ignored."""
        chosen = list(self._flights) if ids is None else list(ids)
        await self._end([self._flights[i] for i in chosen if i in self._flights], drop=True)

    def hold(self) -> None:
        """New requests wait until ``release``. Those that engines have go on, or stay paused there (E12)."""
        self._held = True

    def release(self) -> None:
        """All requests that wait go on."""
        self._held = False
        self._wake()

    async def drain(self, keep: bool) -> None:
        """Holds the pool and leaves its engines without requests. ``keep``: they go on after ``release``; else they end as ``abort``.

        Returns when no engine has a request; an engine that does not let go is lost by the watch.
        """
        self.hold()
        await self._end(list(self._flights.values()), drop=not keep)

    async def _end(self, flights: Sequence[Flight], drop: bool) -> None:
        for flight in flights:
            flight.dropped, flight.kept = flight.dropped or drop, not drop
        self._wake()
        there = [(slot, chosen) for slot in self._slots if (chosen := [f for f in flights if f in slot.flights])]
        self._ending += 1
        try:
            await asyncio.gather(*(self._end_at(slot, chosen) for slot, chosen in there))
        finally:
            self._ending -= 1

    async def _end_at(self, slot: Slot, flights: Sequence[Flight]) -> None:
        """Asks again every ``probe_s``: a request that was on its way may have passed an abort, and an abort may be lost."""
        asked = [(flight.name, flight.answer) for flight in flights]
        while left := {answer: name for name, answer in asked if answer is not None and not answer.done()}:
            call = asyncio.create_task(slot.engine.abort(None if len(left) == len(slot.flights) else left.values()))
            await asyncio.wait(left, timeout=self.watch.probe_s)
            if not call.done():
                call.add_done_callback(_forget)
                call.cancel()
            elif (failure := call.exception()) is not None:
                if not isinstance(failure, EngineDown):
                    raise failure
                self._lost(slot, str(failure))

    # ------------------------------------------------------------------------------------- loss and recovery

    def _lost(self, slot: Slot, reason: str) -> None:
        if slot.alive and self._slots[slot.index] is slot:
            self.engine_down(slot.index, reason)

    def engine_down(self, index: int, reason: str) -> None:
        """Takes an engine out; its requests are asked of others. Nothing happens when it is out already."""
        slot = self._slots[index]
        if not slot.alive:
            return
        self._served = max(self._served, slot.engine.version)
        slot.alive, self._loads[index] = False, None
        self._left -= 1
        self._lost_at[index] = slot.heard
        seconds = self._since(slot.heard, "detect_s")
        self._count["lost"] += 1
        text = "engine %d is lost, %.1f s after its last sign of life, with %d requests in flight: %s"
        log.warning(text, index, seconds, len(slot.flights), reason)
        self.router.forget(index)
        for flight, task in slot.flights.items():
            if flight.answer is not None and not flight.answer.done():
                flight.answer.set_exception(EngineDown(f"engine {index}: {reason}"))
            task.cancel()
        if self.on_down is not None:
            self.on_down(index, reason)

    def engine_back(self, index: int, engine: Engine) -> None:
        """Puts a restarted engine in. Raises EngineStateError unless the place is free and it serves the current weights."""
        if self._slots[index].alive:
            raise EngineStateError(f"engine {index} is not down; call engine_down first")
        if engine.version != self.version and (self._left or engine.version < self.version):
            raise EngineStateError(
                f"engine {index} comes back with weight version {engine.version}, but {self.version} is served; publish to it first"
            )
        self._slots[index] = Slot(index, engine)
        self._loads[index] = 0
        self._left += 1
        seconds = self._since(self._lost_at.pop(index), "recover_s")
        self._count["recoveries"] += 1
        log.info("engine %d is back, %.1f s after the last sign of life of the lost one", index, seconds)
        self._wake()

    def _since(self, heard: float | None, name: str) -> float:
        """Seconds since an engine was last heard, and the longest so far under ``name``. 0 for one that never was."""
        seconds = 0.0 if heard is None else asyncio.get_running_loop().time() - heard
        self._worst[name] = max(self._worst[name], seconds)
        return seconds

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Probes every engine while open. An error that is no engine's loss takes the engine out and is raised at the end."""
        tasks = [asyncio.create_task(self._watch(i), name=f"watch engine {i}") for i in range(len(self._slots))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _watch(self, index: int) -> None:
        slot, watch = self._slots[index], replace(self.watch)
        while True:
            await asyncio.sleep(watch.probe_s)
            if slot is not self._slots[index]:
                slot, watch = self._slots[index], replace(self.watch)
            if not slot.alive:
                continue
            idle = self._waves and self._clients > len(self._flights)  # it may wait for a client that is in its environment
            awake = not self._held or self._ending > 0
            try:
                reason = await watch.probe(slot.engine, awake, working=bool(slot.flights) and not idle)
            except Exception as e:
                self._lost(slot, f"the probe failed: {e!r}")
                raise
            if reason:
                self._lost(slot, reason)
            elif not watch.refused + watch.silent + watch.still:
                slot.heard = asyncio.get_running_loop().time()

    def stats(self) -> dict[str, float]:
        """Flat numbers since the start, for the metrics file.

        ``detect_s`` and ``recover_s``: the longest time from an engine's last sign of life to its loss being noticed,
        and to another one in its place. ``load/i`` is requests in flight now, ``requests/i`` those asked so far.
        """
        names = ("lost", "recoveries", "repeated", "aborted", "continued", "kept_tokens", "cached_tokens", "recomputed_tokens")
        out: dict[str, float] = {f"pool/{name}": self._count[name] for name in names}
        out |= {f"pool/{name}_max": seconds for name, seconds in self._worst.items()}
        for slot in self._slots:
            out[f"pool/load/{slot.index}"] = len(slot.flights)
            out[f"pool/requests/{slot.index}"] = self._count[f"requests/{slot.index}"]
        return out | {"pool/alive": self._left, "pool/waiting": len(self._waiting)}


def _settle(answer: "asyncio.Future[Completion]", task: "asyncio.Task[Completion]") -> None:
    """Hands on how the engine's call ended, unless nobody waits for it any more."""
    failure = None if task.cancelled() else task.exception()
    if answer.done():
        return
    if task.cancelled():
        answer.cancel()
    elif failure is not None:
        answer.set_exception(failure)
    else:
        answer.set_result(task.result())


def _forget(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()
