"""Processes that end with whoever started them."""

import contextlib
import ctypes
import signal
import sys
import time
from collections.abc import Sequence

import psutil

GRACE_S = 3.0  # between asking processes to end and killing them


def die_with_parent() -> None:
    """This process gets SIGKILL when the thread that started it ends, however that ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def end_tree(pid: int) -> None:
    """Ends a process and all its descendants: asked first, killed after GRACE_S seconds.

    Asked by SIGTERM, which a process that is still importing obeys without a traceback.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        tree = [*root.children(recursive=True), root]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        alive = left(tree, GRACE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        left(alive, 1.0)


def left(processes: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still run after ``limit_s`` seconds; a zombie, which may have lost whoever would reap it, does not."""
    deadline = time.monotonic() + limit_s
    while True:
        found = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        if not found or time.monotonic() > deadline:
            return found
        psutil.wait_procs(found, timeout=0.05)


def tree_rss(pid: int) -> int:
    """Bytes of memory that a process and its descendants hold; 0 when it is gone."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def own_memory() -> int:
    """Bytes of memory that this process holds."""
    return psutil.Process().memory_info().rss
