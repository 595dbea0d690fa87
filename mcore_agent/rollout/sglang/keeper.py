"""Runs a command that ends with whoever started it: ``keeper.py PARENT COMMAND …``, on its own, with nothing but the library.

However the parent ends, also by SIGKILL, the command and all its descendants are killed; orphans among them come back
to this process, so none escapes. A server whose scheduler has died would wait a minute for dumps of it; it is ended at once.
Ends with the command's exit status.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 0.1
PART = b"sglang::"  # how the parts of a server call themselves, once they work
LOADS = "/dev/shm/sglang_loads_"
PARTS_TURNS = 10  # looks between two at the parts
GRACE_S = 2.0  # between asking the processes to end and killing them


def prctl(what: int, value: int) -> None:
    ctypes.CDLL(None).prctl(what, value)


def parts(family: dict[int, int]) -> dict[int, str]:
    """Those of a ``family`` (process id -> parent) that are parts of a server, and what they call themselves.

    A child that a part has just forked still has its name, until it becomes another program: it is no part.
    """
    found = {}
    for pid in family:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                name = f.read(64)
        except OSError:
            continue  # it ended
        if name.startswith(PART):
            found[pid] = name.split(b"\0")[0].decode(errors="replace").strip()
    return {pid: name for pid, name in found.items() if found.get(family[pid]) != name}


def shared(pids: Iterable[int]) -> set[str]:
    """Files in which schedulers tell how busy they are. SGLang never removes them."""
    found = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as f:
                found |= {path for line in f if (path := line.rstrip().rpartition(" ")[2]).startswith(LOADS)}
        except OSError:
            continue  # it ended
    return found


def descendants() -> dict[int, int]:
    """Process ids below this one, each with its parent's, from /proc, without zombies."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as f:
                    state, parent = f.read().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended
            if state != "Z":
                parents[int(entry)] = int(parent)
    found: dict[int, int] = {}
    level = {os.getpid(): 0}
    while level:
        level = {pid: parent for pid, parent in parents.items() if parent in level}
        found |= level
    return found


def end(sig: int) -> None:
    for pid in descendants():
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def end_all() -> None:
    """Asks first, then kills until nobody is left."""
    end(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
    while descendants():
        end(signal.SIGKILL)
        time.sleep(0.05)


def main(parent: int, command: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    asked: list[int] = []
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, lambda number, frame: asked.append(number))
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    print(process.pid, flush=True)
    known: dict[int, str] = {}
    files: set[str] = set()
    turn = 0
    while process.poll() is None and not asked and os.getppid() == parent:
        time.sleep(LOOK_S)
        turn += 1
        if turn % PARTS_TURNS:
            continue
        alive = descendants()
        lost = [name for pid, name in known.items() if pid not in alive]
        if lost:
            print(f"keeper: {', '.join(lost)} ended, so the server is ended", file=sys.stderr, flush=True)
            break
        known = parts(alive)
        files |= shared(known)
    files |= shared(descendants())
    end_all()
    for path in files:
        try:
            os.unlink(path)
        except OSError:
            continue  # it is gone
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
