"""Real gloo ranks that stay alive, so that a test session imports Megatron once per rank.

``ranks(function, layout, *arguments)`` runs ``function(groups, *arguments)`` on ``layout.world`` processes and returns
the results in rank order; the function must be importable (a module's top level). A rank that raises fails the call
with its traceback, a call that takes longer than its deadline fails too, and either way the processes are replaced.
They die with this process, however it ends.

    def total(groups, x):
        ...

    def test_total(ranks):
        assert ranks(total, Layout(tp=2), 3) == [6, 6]
"""

import atexit
import ctypes
import functools
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
START_S = 120.0
OTHERS_S = 2.0  # how long the ranks beside a failed one may still answer
COLLECTIVE_S = 60.0


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


class Ranks:
    """Processes, started when first needed; world sizes up to ``most`` use the first of them."""

    def __init__(self, most: int = 8):
        self.most = most
        self._processes: list[subprocess.Popen] = []
        self._lines: list[Connection] = []
        self._port = 0
        self._layout: Any = None
        self._joined = 0

    def __call__(self, function: Callable[..., Any], layout: Any, *arguments: Any, deadline_s: float = 90.0) -> list[Any]:
        self._grow(layout.world)
        if layout != self._layout:
            self._layout, self._joined = layout, self._joined + 1
        # not __module__: pytest imports a test file under its bare name
        module = ".".join(Path(inspect.getfile(function)).relative_to(ROOT).with_suffix("").parts)
        lines = self._lines[: layout.world]
        for rank, line in enumerate(lines):
            _send(line, (module, function.__qualname__, layout, self._joined, rank, arguments))
        end = time.monotonic() + deadline_s
        results: dict[int, Any] = {}
        failures: list[str] = []
        while len(results) < len(lines) and time.monotonic() < end:
            for rank, line in enumerate(lines):
                if rank in results or not line.poll(0.002):
                    continue
                try:
                    ok, results[rank] = _receive(line)
                except (EOFError, ConnectionError) as e:
                    ok, results[rank] = False, f"died ({e!r}, exit code {self._processes[rank].poll()})"
                if not ok:
                    failures.append(f"rank {rank}: {results[rank]}")
                    end = min(end, time.monotonic() + OTHERS_S)  # they may sit in a collective with it
        silent = sorted(set(range(len(lines))) - set(results))
        if silent or failures:
            self.close()
            failures.append(f"no answer from ranks {silent}" if silent else "all ranks answered")
            raise RankError(f"{function.__qualname__} on {layout}\n" + "\n".join(failures))
        return [results[rank] for rank in range(len(lines))]

    def _grow(self, world: int) -> None:
        assert world <= self.most, f"{world} ranks asked for, {self.most} allowed"
        if not self._processes:  # the first one holds the store that the others join
            self._take(self._start())
            self._port = _receive(self._lines[0])
        listeners = [self._start() for _ in range(len(self._processes), world)]
        for listener in listeners:
            self._take(listener)
            _receive(self._lines[-1])

    def _start(self) -> Listener:
        listener = Listener()
        listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        words = [sys.executable, "-m", "tests.ranks", str(listener.address), str(self._port)]
        self._processes.append(subprocess.Popen(words, cwd=ROOT, env=environment, preexec_fn=_die_with_parent))
        return listener

    def _take(self, listener: Listener) -> None:
        with listener:
            self._lines.append(listener.accept())

    def close(self) -> None:
        """Kills the processes; the next call starts new ones."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._lines, self._port, self._layout = [], [], 0, None


@functools.cache
def pool() -> Ranks:
    made = Ranks()
    atexit.register(made.close)
    return made


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """The session's ranks; import it into a test module to use it."""
    yield pool()


def _send(line: Connection, message: Any) -> None:
    line.send_bytes(pickle.dumps(message))  # by value: Connection.send would pass tensors as shared memory


def _receive(line: Connection) -> Any:
    return pickle.loads(line.recv_bytes())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def serve(address: str, port: int) -> None:
    """The life of one rank: jobs come over the line, results go back, a closed line ends it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False, timeout=timedelta(seconds=COLLECTIVE_S))
    with Client(address) as line:
        _send(line, store.port)
        from mcore_agent.learner import groups as learner_groups  # seconds, in which the others start too

        groups, joined = None, -1
        while True:
            try:
                module, name, layout, number, rank, arguments = _receive(line)
            except EOFError:
                os._exit(0)
            try:
                if number != joined:
                    learner_groups.destroy()
                    groups = None
                    gc.collect()  # models of earlier jobs, and the groups that they hold
                    fresh = dist.PrefixStore(str(number), store)
                    groups, joined = learner_groups.initialize(layout, store=fresh, rank=rank, timeout_s=COLLECTIVE_S), number
                function = functools.reduce(getattr, name.split("."), __import__(module, fromlist=["_"]))
                _send(line, (True, function(groups, *arguments)))
            except BaseException:  # noqa: BLE001  whatever a test raises is the caller's to see
                _send(line, (False, traceback.format_exc()))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
