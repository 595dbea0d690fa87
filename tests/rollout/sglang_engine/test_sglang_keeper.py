"""Processes of a server end with whoever started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from mcore_agent.rollout.sglang import keeper

# A server: it starts a child that starts one of its own, in another session and deaf to SIGTERM, and tells the ids.
SERVER = """
import os, signal, subprocess, sys, time
path, depth = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(path, "a") as f:
    f.write(f"{os.getpid()}\\n")
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[3], path, str(depth - 1), sys.argv[3]], start_new_session=True)
time.sleep(600)
"""
# Whoever starts it: from a thread that ends, which must not matter.
STARTER = """
import os, subprocess, sys, threading, time
keeper, server, path = sys.argv[1:]
command = [sys.executable, "-I", keeper, str(os.getpid()), sys.executable, "-c", server, path, "2", server]
thread = threading.Thread(target=lambda: subprocess.Popen(command, stdout=subprocess.DEVNULL))
thread.start()
thread.join()
time.sleep(600)
"""


def started(path: Path) -> tuple[subprocess.Popen, list[psutil.Process]]:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, keeper.__file__, SERVER, str(path)])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().count("\n") == 3):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found = [psutil.Process(int(pid)) for pid in path.read_text().split()]
    return starter, [*found, found[0].parent()]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    out = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                out.append(process)
        except psutil.NoSuchProcess:
            continue
    return out


def gone(processes: list[psutil.Process], within: float = 30) -> bool:
    deadline = time.monotonic() + within
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(processes)


@pytest.mark.defect("H1")
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_starter(tmp_path: Path, sig: signal.Signals):
    starter, processes = started(tmp_path / "pids")
    time.sleep(0.3)
    assert len(alive(processes)) == 4  # also after the thread that started it is gone
    os.kill(starter.pid, sig)
    starter.wait()
    assert gone(processes)


@pytest.mark.defect("H1")
@pytest.mark.parametrize("victim, sig", [(-1, signal.SIGTERM), (0, signal.SIGKILL), (1, signal.SIGKILL)])
def test_the_rest_follows(tmp_path: Path, victim: int, sig: signal.Signals):
    """The keeper is asked to end; the server is killed; a child of the server is killed, which is the server's own business."""
    starter, processes = started(tmp_path / "pids")
    os.kill(processes[victim].pid, sig)
    if victim == 1:
        assert not gone(processes, within=0.5)
        os.kill(processes[0].pid, signal.SIGKILL)
    assert gone(processes)
    starter.kill()
    starter.wait()


def test_the_exit_status_is_the_commands():
    for code, expected in (("raise SystemExit(7)", 7), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137)):
        command = [sys.executable, "-I", keeper.__file__, str(os.getpid()), sys.executable, "-c", code]
        assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == expected


WAITS = "import time; time.sleep(600)"
FORKS = """
import os, time
while True:
    if (child := os.fork()) == 0:
        time.sleep(1.5)
        os._exit(0)
    os.waitpid(child, 0)
"""
PARTED = """
import subprocess, sys, time
part = subprocess.Popen(["sglang::scheduler", "-c", sys.argv[2]], executable=sys.executable)
with open(sys.argv[1], "w") as f:
    f.write(f"{part.pid}\\n")
time.sleep(600)
"""


@contextmanager
def parted(path: Path, code: str) -> Iterator[tuple[subprocess.Popen, psutil.Process, psutil.Process]]:
    """A keeper, its server, and the server's scheduler, which runs ``code``; the keeper has seen them."""
    command = [sys.executable, "-I", keeper.__file__, str(os.getpid()), sys.executable, "-c", PARTED, str(path), code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    server = psutil.Process(int(process.stdout.readline()))
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2.5)
    yield process, server, psutil.Process(int(path.read_text()))
    process.terminate()
    process.wait(30)
    process.stdout.close()
    process.stderr.close()


@pytest.mark.defect("H1")
def test_a_server_that_lost_a_part_is_ended(tmp_path: Path):
    """It would wait for dumps of its dead scheduler for a minute, and its clients with it."""
    with parted(tmp_path / "pid", WAITS) as (process, server, part):
        assert alive([server, part]) == [server, part]
        part.kill()
        assert gone([server, part], within=10)
        assert process.wait(10) != 0
        assert "sglang::scheduler ended, so the server is ended" in process.stderr.read()


def test_children_that_a_part_forks_are_no_parts(tmp_path: Path):
    """Before it becomes another program a child has its parent's name; on a busy machine for long enough to be seen."""
    with parted(tmp_path / "pid", FORKS) as (process, server, part):
        time.sleep(4)
        assert process.poll() is None and alive([server, part]) == [server, part]


def test_what_a_server_shares_goes_with_it():
    """SGLang leaves the file in which a scheduler tells its load, however it ends."""
    path = Path(f"/dev/shm/sglang_loads_test_{os.getpid()}.shm")
    code = ("import mmap, os, sys, time; f = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR); os.ftruncate(f, 99); "
            "m = mmap.mmap(f, 99); print('there', file=sys.stderr, flush=True); time.sleep(600)")  # fmt: skip
    command = [sys.executable, "-I", keeper.__file__, str(os.getpid()), sys.executable, "-c", code, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stderr.readline() == "there\n"
    process.terminate()
    process.wait(30)
    process.stderr.close()
    assert not path.exists()
