"""Requests in flight: those that wait, and the wave that runs. Knows no clock, no model and no thread."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from mcore_agent.protocols import Completion
from mcore_agent.rollout.decode import Chunk, Client, Row


@dataclass(eq=False)
class Waiter:
    """A request and who waits for its answer."""

    row: Row
    future: asyncio.Future[Completion]

    @property
    def key(self) -> tuple[tuple[int, ...], str]:
        return self.row.request.order, self.row.request.id


class Waves:
    """A wave forms when every open client has a request that waits, is away, or has open clients inside it."""

    def __init__(self, max_batch: int):
        self.max_batch = max_batch
        self.clients: set[Client] = set()
        self.waiters: dict[str, Waiter] = {}  # every request in flight
        self.pending: list[Waiter] = []  # those whose wave has not formed
        self.chunks: deque[Chunk] = deque()  # the wave
        self._current: ContextVar[Client | None] = ContextVar("client", default=None)

    def current(self) -> Client | None:
        """The client of the running task, if it is open."""
        client = self._current.get()
        return client if client is not None and client.open else None

    @contextmanager
    def client(self) -> Iterator[None]:
        outer = self._current.get()
        client = Client()
        self.clients.add(client)
        if outer is not None:
            outer.inner += 1
        self._current.set(client)
        try:
            yield
        finally:
            self._current.set(outer)
            if outer is not None:
                outer.inner -= 1
            client.open, client.past = False, None
            self.clients.discard(client)

    def add(self, waiter: Waiter) -> None:
        self.waiters[waiter.row.request.id] = waiter
        self.pending.append(waiter)
        if waiter.row.client is not None:
            waiter.row.client.waiting += 1

    def form(self) -> bool:
        """Forms a wave of all that waits, sorted and cut into batches; False while a client is waited for."""
        if not self.pending or any(not (c.waiting or c.inner or c.away) for c in self.clients):
            return False
        waiting, self.pending = sorted(self.pending, key=lambda w: w.key), []
        for waiter in waiting:
            if waiter.row.client is not None:
                waiter.row.client.waiting -= 1
        rows = [waiter.row for waiter in waiting]
        self.chunks.extend(Chunk(rows[i : i + self.max_batch]) for i in range(0, len(rows), self.max_batch))
        return True

    def withdraw(self, waiter: Waiter) -> bool:
        """Answers a request whose wave has not formed as aborted; False if it has formed."""
        if waiter not in self.pending:
            return False
        self.pending.remove(waiter)
        if waiter.row.client is not None:
            waiter.row.client.waiting -= 1
        self.answer(waiter.row, waiter.row.completion("abort"))
        return True

    def drop_aborted(self) -> None:
        for chunk in self.chunks:
            gone = [i for i, row in enumerate(chunk.rows) if row.aborted]
            for i in gone:
                self.answer(chunk.rows[i], chunk.completion(i, "abort"))
            chunk.remove(gone)
        self.chunks = deque(chunk for chunk in self.chunks if chunk.rows)

    def drop_caches(self) -> None:
        for client in self.clients:
            client.past = None
        for chunk in self.chunks:
            chunk.drop_cache()

    def fail(self, failure: BaseException | None) -> None:
        """Answers every request of the wave: with the exception, or as aborted (None)."""
        for row in [row for chunk in self.chunks for row in chunk.rows]:
            self.answer(row, failure or row.completion("abort"))
        self.chunks.clear()

    def answer(self, row: Row, result: Completion | BaseException) -> None:
        waiter = self.waiters.get(row.request.id)
        if waiter is None or waiter.row is not row:
            return
        del self.waiters[row.request.id]
        if waiter.future.done():
            return
        if isinstance(result, Completion):
            waiter.future.set_result(result)
        else:
            waiter.future.set_exception(result)

    def cache_bytes(self) -> int:
        """Keys and values of the wave, and of clients between two turns."""
        running = sum(chunk.kv.nbytes for chunk in list(self.chunks) if chunk.kv is not None)
        return running + sum(past.nbytes for client in list(self.clients) if (past := client.past) is not None)
