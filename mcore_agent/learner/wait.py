"""How rank 0 tells the others what it has, and how they wait for it: by polling, never inside a collective.

While rank 0 collects episodes, for minutes perhaps, a collective would time out or hide that rank 0 has died. So it
posts messages on the process group's store and beats its heart there; the others look for both.
"""

import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from mcore_agent.learner.groups import Groups

BEAT, OVER = "beat", b"over"
ONE, PARTS, ORDER = "one value", "parts", "order"  # what a message holds
BEAT_S = 1.0
DEAD_S = 60.0
PIECE = 4 << 20  # bytes; the store takes less than 8 MiB at a time
POLL_S = (0.001, 0.1)  # first and longest pause between two looks


class RankZeroLost(RuntimeError):
    """Rank 0 has stopped: its heart did not beat, or the store is gone."""


class Line:
    """Messages from rank 0, in order. All ranks call ``share`` and ``scatter`` alike.

    ``orders`` are what rank 0 may ask the others to do while they wait for something else: see ``order``.
    """

    def __init__(self, store: dist.Store | None, groups: Groups, dead_s: float):
        self.store, self._groups, self._dead_s = store, groups, dead_s
        self.orders: dict[str, Callable[..., Any]] = {}
        self._sent = 0

    def order(self, name: str, *arguments: Any) -> Any:
        """Rank 0, while the others wait: all ranks run ``orders[name]``, which may enter collectives. Its result here.

        Raises ValueError on another rank: nobody would listen.
        """
        if self._groups.rank != 0:
            raise ValueError(f"rank {self._groups.rank} gave the order {name!r}; only rank 0 may")
        if self.store is not None:
            self._sent += 1
            self._write(f"{self._sent}", (ORDER, (name, arguments)), self._groups.layout.world - 1)
        return self.orders[name](*arguments)

    def share(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank (what the others pass is ignored). Raises RankZeroLost."""
        return self._pass(value if self._groups.rank == 0 else None, None)

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """Rank 0 gives one part for each data-parallel rank; each rank gets that of its replica. Raises RankZeroLost.

        Raises ValueError on rank 0 when the number of parts is not that of the data-parallel ranks.
        """
        if self._groups.rank == 0 and (parts is None or len(parts) != self._groups.layout.dp):
            raise ValueError(f"scatter got {parts if parts is None else len(parts)} parts for {self._groups.layout.dp} data-parallel ranks")
        return self._pass(None, parts)

    def _pass(self, value: Any, parts: Sequence[Any] | None) -> Any:
        """A message is one value for all, or one for each replica: those carry the replica's number in their key."""
        layout, mine = self._groups.layout, self._groups.dp_rank
        if self.store is None:
            return value if parts is None else parts[mine]
        if self._groups.rank == 0:
            self._sent += 1
            replica = layout.replica
            for number, part in enumerate(parts or ()):
                self._write(f"{self._sent}/{number}", part, replica - (number == 0))
            self._write(f"{self._sent}", (ONE if parts is None else PARTS, value), layout.world - 1)
            return value if parts is None else parts[mine]
        while True:
            self._sent += 1
            kind, value = self._read(f"{self._sent}")
            if kind != ORDER:
                return self._read(f"{self._sent}/{mine}") if kind == PARTS else value
            name, arguments = value
            self.orders[name](*arguments)

    def _write(self, key: str, value: Any, readers: int) -> None:
        if self.store is None or readers == 0:
            return
        data = pickle.dumps(value)
        pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}:{number}", piece)
        self.store.set(key, pickle.dumps((len(pieces), readers)))

    def _read(self, key: str) -> Any:
        """Waits for a message; its last reader deletes it."""
        store = self.store
        assert store is not None
        try:
            self._await(key)
            count, readers = pickle.loads(store.get(key))
            keys = [f"{key}:{number}" for number in range(count)]
            value = pickle.loads(b"".join(store.get(k) for k in keys))
            if store.add(f"{key}:read", 1) == readers:
                for k in (*keys, f"{key}:read", key):
                    store.delete_key(k)
        except (dist.DistError, ConnectionError) as e:
            raise RankZeroLost(f"rank {self._groups.rank} cannot reach the store: rank 0 or its host is gone ({e})") from e
        return value

    def _await(self, key: str) -> None:
        assert self.store is not None
        pause, seen, since = POLL_S[0], b"", time.monotonic()
        while not self.store.check([key]):
            beat = self.store.get(BEAT)
            if beat == OVER:
                raise RankZeroLost(f"rank {self._groups.rank} waits for rank 0, which has left; see rank 0's log")
            if beat != seen:
                seen, since = beat, time.monotonic()
            elif time.monotonic() - since > self._dead_s:
                raise RankZeroLost(
                    f"rank {self._groups.rank} waited for rank 0, whose heart has not beaten for {self._dead_s:g} s; see rank 0's log"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_S[1])


@contextmanager
def open_line(groups: Groups, dead_s: float = DEAD_S) -> Iterator[Line]:
    """The line of a run. Rank 0's heart beats until the block ends. Collective."""
    if groups.layout.world == 1:
        yield Line(None, groups, dead_s)
        return
    boxed = [uuid.uuid4().hex]
    dist.broadcast_object_list(boxed)  # a name of its own, so that no line reads the messages of an earlier one
    store = dist.PrefixStore(boxed[0], dist.distributed_c10d._get_default_store())
    if groups.rank != 0:
        yield Line(store, groups, dead_s)
        return
    store.set(BEAT, "0")
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(store, over), name="heartbeat", daemon=True)
    heart.start()
    try:
        yield Line(store, groups, dead_s)
    finally:
        over.set()
        heart.join()
        with suppress(dist.DistError, ConnectionError):  # the store may be gone already
            store.set(BEAT, OVER)


def _beat(store: dist.Store, over: threading.Event) -> None:
    count = 0
    while not over.wait(BEAT_S):
        count += 1
        store.set(BEAT, str(count))
