"""A watchdog over hand-overs: says which state, rank and engine is late, so that a wait does not look like a hang."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

LOOK_S = 1.0


class Board(Protocol):
    """What all ranks can write on and read; ``torch.distributed``'s stores are such."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Post:
    """Where a rank is: its ``count``-th event, begun or done at ``since`` (seconds since the epoch)."""

    count: int
    state: str
    event: str
    done: bool
    since: float
    waits_for: str = ""


class Watchdog:
    """Entered around every event (``with watchdog(state, event)``); speaks through ``say`` once an event takes ``late_s`` seconds,
    then again after twice that time, and so on.

    Every rank posts where it is on ``board``. Rank 0 names the ranks that have not come as far as itself; each rank names the
    engine that it waits for (``with watchdog.waits("engine 1")``). ``late_s`` 0 says nothing.
    """

    def __init__(self, rank: int, world: int, late_s: float, say: Callable[[str], None], board: Board | None = None):
        self.rank, self.world, self.late_s, self.say, self.board = rank, world, late_s, say, board
        self._post: Post | None = None
        self._count, self._waits, self._next = 0, "", late_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
        if late_s > 0:
            self._thread.start()

    @contextmanager
    def __call__(self, state: str, event: str) -> Iterator[None]:
        self._count += 1
        self._set(Post(self._count, state, event, False, time.time()))
        try:
            yield
        finally:
            self._set(Post(self._count, state, event, True, time.time()))

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        before, self._waits = self._waits, what
        try:
            yield
        finally:
            self._waits = before

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _set(self, post: Post) -> None:
        with self._lock:
            self._post, self._next = post, self.late_s
        if self.board is not None and self.world > 1:
            self.board.set(f"watch/{self.rank}", json.dumps(post.__dict__))

    def _look(self) -> None:
        while not self._over.wait(min(LOOK_S, self.late_s / 4)):
            with self._lock:
                post, limit = self._post, self._next
                late = post is not None and not post.done and time.time() - post.since > limit
                self._next = limit * 2 if late else limit
            if late and post is not None:
                self.say(self.message(post))

    def message(self, post: Post) -> str:
        """What is known of an event that is late."""
        text = f"rank {self.rank}: {post.event!r} in state {post.state} has taken {time.time() - post.since:.0f} s"
        if self._waits:
            text += f", waiting for {self._waits}"
        behind = self._behind(post) if self.rank == 0 else []
        return text + (f"; not there yet: {'; '.join(behind)}" if behind else "")

    def _behind(self, post: Post) -> list[str]:
        found = []
        for rank in range(1, self.world):
            other = self._read(rank)
            if other is None:
                found.append(f"rank {rank} (never seen)")
            elif other.count < post.count:
                what = "after" if other.done else "at"
                found.append(f"rank {rank} ({what} {other.event!r} in state {other.state} for {time.time() - other.since:.0f} s)")
        return found

    def _read(self, rank: int) -> Post | None:
        key = f"watch/{rank}"
        if self.board is None or not self.board.check([key]):
            return None
        return Post(**json.loads(self.board.get(key)))
