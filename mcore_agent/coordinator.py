"""The coordinator: a child process of rank 0 that plays episodes, so that no environment runs inside a learner rank.

``Coordinator`` is rank 0's handle; ``Host`` is what runs in the child, an asyncio program. They exchange messages over a pipe:
``(number, name, arguments)`` one way, ``(number, kind, value)`` the other, kind being ``done``, ``raised``, ``progress`` or ``event``.
"""

import asyncio
import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

from mcore_agent.config import Config, threads_per_rank
from mcore_agent.parcel import Parcel
from mcore_agent.processes import die_with_parent, end_tree

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
LOOK_S = 0.2  # between two looks at whether the child lives
LEAVE_S = 2.0  # how long the child may take to close environments and engines
PROGRESS_S = 0.1  # between two reports of progress


class CoordinatorError(RuntimeError):
    """The process that plays episodes has ended or failed; the message says how."""


class Coordinator:
    """Rank 0's handle. ``on_event`` takes what the child reports unasked while a call waits: a name and a value."""

    def __init__(self, config: Config):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._parcel = Parcel()
        self._process = context.Process(target=_child, args=(theirs, config, DupFd(self._parcel.descriptor)), name="coordinator")
        self._process.start()
        theirs.close()
        self._calls = 0
        self._late_s, self._heard = config.run.late_s, time.monotonic()
        self._answers: dict[int, tuple[str, Any]] = {}
        self.events: list[tuple[str, Any]] = []
        self.on_event: Callable[[str, Any], None] | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def call(self, name: str, *arguments: Any, progress: Callable[[int, int], None] | None = None, serve: bool = False) -> Any:
        """What the method ``name`` of Host returns; raises what it raises. With ``serve``, ``on_event`` runs meanwhile.

        Raises CoordinatorError when the child has ended.
        """
        self._calls += 1
        mine, self._heard = self._calls, time.monotonic()
        self._send((mine, name, arguments))
        while mine not in self._answers:
            if serve and self.events and self.on_event:
                self.on_event(*self.events.pop(0))
                continue
            number, kind, value = self._receive()
            if kind == "event":
                self.events.append(value)
            elif kind != "progress":
                self._answers[number] = (kind, value)
            elif progress is not None and number == mine:
                progress(*value)
        kind, value = self._answers.pop(mine)
        if kind == "raised":
            raise value
        return value

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except (BrokenPipeError, ConnectionError) as e:
            raise self._ended() from e

    def _receive(self) -> tuple[int, str, Any]:
        try:
            told = self._late_s
            while not self._pipe.poll(LOOK_S):
                if not self._process.is_alive():
                    raise self._ended()
                silent = time.monotonic() - self._heard
                if self._late_s and silent > told:
                    told *= 2
                    log.warning(
                        "nothing heard from the coordinator (process %d) for %.0f s: an episode is long, or it hangs", self.pid, silent
                    )
            self._heard = time.monotonic()
            return self._pipe.recv()
        except (EOFError, ConnectionError) as e:
            raise self._ended() from e

    def _ended(self) -> CoordinatorError:
        self._process.join(1)
        code = self._process.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        hint = " (the system does so when memory is short)" if code == -signal.SIGKILL else ""
        text = f"the coordinator, which plays the episodes, {how}{hint}; the same command goes on from the last checkpoint"
        return CoordinatorError(text)

    def update(self, bucket: Iterable[tuple[str, "Tensor"]]) -> None:
        """A bucket of weights for the engine that lives in the child; its memory is the caller's again on return."""
        self.call("update", self._parcel.pack(list(bucket)))

    def close(self) -> None:
        """The child closes what it has open, or is killed with all that it started. Closing again does nothing."""
        if self._pipe.closed:
            return
        with suppress(OSError):
            self._pipe.send((0, "leave", ()))
        self._process.join(LEAVE_S + 1)
        if self._process.is_alive():
            end_tree(self.pid)
            self._process.join(1)
        self._pipe.close()
        self._parcel.close()


@contextmanager
def open_coordinator(config: Config) -> Iterator[Coordinator]:
    coordinator = Coordinator(config)
    try:
        yield coordinator
    finally:
        coordinator.close()


class RemoteEngine:
    """The weight side of the engine that lives in the coordinator, as an Engine; episodes are played there."""

    own_process = False

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator
        self.version = -1

    async def update(self, bucket: Iterable[tuple[str, "Tensor"]]) -> None:
        self._coordinator.update(bucket)

    async def end_update(self, version: int) -> None:
        self._coordinator.call("engine", "end_update", version)
        self.version = version

    async def begin_update(self) -> None:
        self._coordinator.call("engine", "begin_update")

    async def pause(self, mode: str = "in_place") -> None:
        self._coordinator.call("engine", "pause", mode)

    async def resume(self) -> None:
        self._coordinator.call("engine", "resume")

    async def sleep(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        self._coordinator.call("engine", "sleep", tuple(tags))

    async def wake(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        self._coordinator.call("engine", "wake", tuple(tags))

    async def flush(self) -> None:
        self._coordinator.call("engine", "flush")

    async def checksum(self) -> dict[str, str]:
        return self._coordinator.call("engine", "checksum")

    async def progress(self) -> int:
        return self._coordinator.call("engine", "progress")

    async def memory(self) -> dict[str, int]:
        return self._coordinator.call("engine", "memory")

    async def close(self) -> None:
        """Closed with the coordinator."""


class Remote:
    """State that lives in the coordinator, as a part of a checkpoint."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    def state_dict(self) -> dict[str, Any]:
        return self._coordinator.call("state")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coordinator.call("load_state", state)


# ------------------------------------------------------------------------------------------------- in the child


def _child(pipe: Connection, config: Config, parcel: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 gets it too, and closes this process
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(config))
    import torch
    import transformers  # noqa: F401  (slow to import: while rank 0 imports Megatron)

    torch.set_num_threads(threads_per_rank(config))
    from mcore_agent.host import Host

    asyncio.run(_serve(pipe, Host(config, Parcel(parcel.detach()))))


async def _serve(pipe: Connection, host: Any) -> None:
    """Runs each message as a task until told to leave or rank 0 is gone."""
    loop, leave, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def look() -> None:
        try:
            while pipe.poll():
                number, name, arguments = pipe.recv()
                if name == "leave":
                    leave.set()
                    return
                task = loop.create_task(_answer(pipe, host, number, name, arguments))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, ConnectionError):
            leave.set()

    host.report = lambda name, value: pipe.send((0, "event", (name, value)))
    loop.add_reader(pipe.fileno(), look)
    loop.add_signal_handler(signal.SIGTERM, leave.set)
    await leave.wait()
    loop.remove_reader(pipe.fileno())
    for task in tasks:
        task.cancel()
    with suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await asyncio.gather(*tasks, return_exceptions=True)
            await host.close()


async def _answer(pipe: Connection, host: Any, number: int, name: str, arguments: tuple[Any, ...]) -> None:
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            pipe.send((number, "progress", (done, total)))

    if name not in host.calls:
        pipe.send((number, "raised", KeyError(name)))
        return
    work = asyncio.ensure_future(host.calls[name](*arguments, **({"progress": progress} if name in host.reports else {})))
    try:
        await asyncio.wait({work})
    finally:
        work.cancel()
    failure = work.exception()
    message = (number, "done", work.result()) if failure is None else (number, "raised", _portable(failure))
    with suppress(OSError):  # rank 0 has gone: nobody asks any more
        pipe.send(message)


def _portable(e: BaseException) -> BaseException:
    """The exception itself if it survives the pipe; else one that says the same. Faults bring their stack along."""
    text = "".join(traceback.format_exception(e))
    try:
        copy = pickle.loads(pickle.dumps(e))
        if type(copy) is type(e) and str(copy) == str(e):
            e.add_note(f"In the coordinator:\n{text}")
            return e
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        pass
    return CoordinatorError(f"the coordinator failed:\n{text}")
