"""Running the command line for real, as a user does."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = "recipes/quickstart.yaml"
SLACK = 4  # times what a quiet machine takes: tests run beside others
TINY = ("--overlay", "tests/e2e/tiny.yaml")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore"}


def start(*words: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "mcore_agent.cli", *map(str, words)],
        cwd=ROOT, env=ENVIRONMENT | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test runner in the background ignores it
    )  # fmt: skip


def cli(*words: str, timeout: float = 300, code: int = 0, **environment: str) -> str:
    """Output of a command that must end with ``code``."""
    process = start(*words, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        raise
    assert process.returncode == code, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-6000:]}"
    return out + err


def end(process: subprocess.Popen) -> None:
    for p in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        p.send_signal(signal.SIGKILL)
    process.wait()


def tree(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def wait_for(condition, seconds: float, what: str):
    deadline = time.monotonic() + SLACK * seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {SLACK} x {seconds} s")


def metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@dataclass(frozen=True)
class Command:
    """Words of a command line, and what surrounds it."""

    words: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    file_limit: int | None = None  # bytes that a file may have: a write beyond fails as on a full disk


def train(folder: Path, *words: str, **more: Any) -> Command:
    """A tiny run in ``folder``."""
    return Command(("train", QUICKSTART, *TINY, f"run.dir={folder}", *words), **more)


class Shell:
    """One process that runs commands one after another, and the environment ``breakable``; see ``several.py``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.several"], cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, command: Command) -> tuple[int, str]:
        """Exit code and output."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps(asdict(command)), file=self.process.stdin, flush=True)
        code, out = json.loads(self.process.stdout.readline())
        return code, out

    def close(self) -> None:
        self.process.communicate(timeout=30)
