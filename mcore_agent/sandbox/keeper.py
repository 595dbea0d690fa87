"""Runs one command with limits and outlives it until nothing of it is left (M37). A script of its own: it imports only the
standard library, and is started anew for every command.

Reads one line of JSON (see ``Keeper``) and the command's input from stdin; writes one line of JSON and the command's stdout and
stderr to stdout. SIGTERM, and the end of the process that started it, end the command.
"""

import ctypes
import json
import os
import resource
import selectors
import signal
import sys
import time
from typing import Any, BinaryIO

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAGE = resource.getpagesize()
MISSING = 127  # exit status of a child that found no program
TICK_S = 0.02
STOP_S = 5.0  # for stopping all of a command's processes, before they are killed all the same
DRAIN_S = 0.5  # for output that is still in the pipes when the command has ended


class Keeper:
    """``spec``: command, cwd, env, uid (or null), parent, reports, threads, wall_s, memory_bytes, output_bytes, file_bytes, processes.

    The kernel holds the command to ``threads``, more than ``processes``, so that what is watched ends it first; a command without
    a ``uid`` of its own may start that many beside those that its user has. One that ``reports`` is held by its wrapper, who knows
    which of that user's are its own.

    A command that ``reports`` is a wrapper: it writes to file 3 that the wrapped one ended, or else it is what failed (``broken``).

    What it watches is the memory and the number of all descendants: as their subreaper it keeps those that left their parents.
    """

    def __init__(self, spec: dict[str, Any], given: BinaryIO):
        self.spec, self.given = spec, given
        self.asked = False  # to end
        self.status: int | None = None
        self.out = {"stdout": bytearray(), "stderr": bytearray()}

    def run(self) -> str:
        """Runs the command to its end and everything that it started with it. Returns the reason."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self._ask)
        pipes = {name: os.pipe() for name in self.out}
        status, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._become({name: pipe[1] for name, pipe in pipes.items()}, told)
        os.close(told)
        chooser = selectors.DefaultSelector()
        for name, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            chooser.register(read, selectors.EVENT_READ, name)
        ended = os.pidfd_open(self.pid)
        chooser.register(ended, selectors.EVENT_READ)
        try:
            reason = self._watch(chooser)
        finally:
            self._end_all()
        chooser.unregister(ended)
        deadline = time.monotonic() + DRAIN_S
        while chooser.get_map() and time.monotonic() < deadline:
            self._read(chooser, TICK_S)
        if reason == "ok" and self.spec["reports"] and b"exit-code" not in os.read(status, 1 << 12):
            return "broken"
        full = any(len(data) > self.spec["output_bytes"] for data in self.out.values())
        return "output" if full and reason == "ok" else reason

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def _watch(self, chooser: selectors.BaseSelector) -> str:
        deadline = time.monotonic() + self.spec["wall_s"]
        while True:
            left = deadline - time.monotonic()
            self._read(chooser, max(0.0, min(TICK_S, left)))
            self._reap()
            if self.status is not None:
                return "ok"
            if self.asked or os.getppid() != self.spec["parent"]:
                return "killed"
            family = descendants(os.getpid())
            if len(family) > self.spec["processes"]:
                return "processes"  # before the time limit, which a bomb that takes all cores makes this loop miss
            if left <= 0:
                return "timeout"
            if any(len(data) > self.spec["output_bytes"] for data in self.out.values()):
                return "output"
            if memory(family, "statm") > self.spec["memory_bytes"] and memory(family, "smaps_rollup") > self.spec["memory_bytes"]:
                return "memory"

    def _read(self, chooser: selectors.BaseSelector, wait_s: float) -> None:
        """What the pipes have, at most a little more than may be kept."""
        for key, _ in chooser.select(wait_s):
            if key.data is None:
                continue
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                chooser.unregister(key.fd)
            kept = self.out[key.data]
            kept += data[: self.spec["output_bytes"] + 1 - len(kept)]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code

    def _end_all(self) -> None:
        """Kills every descendant. All are stopped before any is killed: a stopped one starts no other, and still counts among those
        that its user may have, so that a bomb cannot go on in its place. With a wrapper's first process its namespace dies at once."""
        _signal_group(self.pid)
        while family := descendants(os.getpid()):
            stopped: set[int] = set()
            deadline = time.monotonic() + (0.0 if self.spec["reports"] else STOP_S)
            while (new := family - stopped) and time.monotonic() < deadline:
                _send(new, signal.SIGSTOP)
                stopped |= new
                family = descendants(os.getpid())
            _send(family | stopped, signal.SIGKILL)
            self._reap()
            time.sleep(0.001)
        self._reap()

    def _become(self, pipes: dict[str, int], told: int) -> None:
        """The child: its own session, limits and user, then the command. Never returns."""
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(self.given.fileno(), 0)
            os.dup2(pipes["stdout"], 1)
            os.dup2(pipes["stderr"], 2)
            with open("/proc/self/oom_score_adj", "w") as f:
                f.write("1000")  # when the machine runs out of memory, these processes go first
            size = self.spec["file_bytes"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            uid = self.spec["uid"]
            if uid is not None or not self.spec["reports"]:
                most = self.spec["threads"] + (owned(os.getuid()) if uid is None else 0)
                hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
                most = most if hard == resource.RLIM_INFINITY else min(most, hard)
                resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user would undo it
            os.chdir(self.spec["cwd"])
            if self.spec["reports"]:
                os.dup2(told, 3)
            os.closerange(3 + self.spec["reports"], 256)
            os.execvpe(self.spec["command"][0], self.spec["command"], self.spec["env"])
        except OSError as e:
            os.write(2, f"{self.spec['command'][0]}: {e}\n".encode())
        finally:
            os._exit(MISSING)


def descendants(root: int) -> set[int]:
    """All processes below one, by its threads' lists of children; zombies aside."""
    found: set[int] = set()
    look = [root]
    while look:
        pid = look.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as f:
                    new = {int(word) for word in f.read().split()} - found
                found |= new
                look += new
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return {pid for pid in found if not _zombie(pid)}


def owned(uid: int) -> int:
    """Threads of a user's processes."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return count


def _zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def memory(pids: set[int], file: str) -> int:
    """Bytes that processes hold: ``statm`` counts a shared page for each of them, ``smaps_rollup`` once, and takes longer."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/{file}") as f:
                text = f.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            total += memory({pid}, "statm")
            continue
        if file == "statm":
            total += int(text.split()[1]) * PAGE
        else:
            total += sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith(("Pss:", "SwapPss:")))
    return total


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _signal_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def main() -> None:
    """The command of the line on stdin."""
    spec = json.loads(sys.stdin.buffer.readline())
    given = os.fdopen(os.memfd_create("stdin"), "w+b")
    given.write(sys.stdin.buffer.read())
    given.flush()
    given.seek(0)
    started = time.monotonic()
    keeper = Keeper(spec, given)
    reason = keeper.run()
    code = 128 + signal.SIGKILL if keeper.status is None else keeper.status
    if reason == "ok" and code > 128:
        reason = "killed"
    if reason == "ok" and code == MISSING:
        reason = "missing"
    out, err = (bytes(data[: spec["output_bytes"]]) for data in keeper.out.values())
    head = {"code": code, "reason": reason, "wall_s": time.monotonic() - started, "stdout": len(out), "stderr": len(err)}
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + out + err)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
