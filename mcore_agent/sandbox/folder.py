"""The folder of a sandbox and the keeper of its commands: what all backends share (M37)."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mcore_agent.processes import end_tree
from mcore_agent.protocols import ExecLimits, Ran, SandboxError

KEEPER = Path(__file__).with_name("keeper.py")
GRACE_S = 10.0  # after a command's time limit, for a busy machine's keeper to start and to report
UIDS = range(50_000, 60_000)  # users without a name, one for each sandbox of root's
PATH = "/usr/local/bin:/usr/bin:/bin"
LIMITS = ExecLimits()
NO_ENV: Mapping[str, str] = {}


@dataclass
class Folder:
    """Runs commands below ``root`` (the system's folder for temporary files unless given), one user per sandbox where it can.

    A process of root's gives each sandbox a user of its own, who owns its folder and nothing else; others share theirs. Beside
    ``limits.processes``, which ends a command, the kernel starts no more than twice that and 16 threads, so that a fork bomb has an end.
    """

    root: str = ""
    _home: Path | None = field(default=None, init=False)
    _uid: int | None = field(default=None, init=False)
    _claim: socket.socket | None = field(default=None, init=False)
    _running: set[int] = field(default_factory=set, init=False)  # keepers
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def start(self) -> None:
        """Makes the folder. Raises SandboxError when it cannot."""
        if self._home is not None:
            raise SandboxError("started", "start was called twice")
        if os.geteuid() == 0:
            self._uid, self._claim = _claim_uid()
        try:
            self._home = Path(tempfile.mkdtemp(prefix="sandbox-", dir=self.root or None))
            for name in ("work", "tmp"):
                self._owned(self._home / name)
            self._home.chmod(0o711)  # its user may not move what is in it: put and get trust that
        except OSError as e:
            self.kill()
            raise SandboxError("folder", f"cannot make a folder in {self.root or tempfile.gettempdir()}: {e}") from e

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def home(self) -> Path:
        """The folder, with ``work`` and ``tmp`` in it. Raises SandboxError before start and after kill."""
        if self._home is None:
            raise SandboxError("gone", "it was not started, or is killed")
        return self._home

    def put(self, path: str, data: bytes) -> None:
        """Writes a file, and the folders that it needs."""
        at = self._inside(path)
        try:
            for folder in reversed([p for p in at.parents if p.is_relative_to(self.home / "work") and not p.exists()]):
                self._owned(folder)
            at.write_bytes(data)
            if self._uid is not None:
                os.chown(at, self._uid, self._uid)
        except OSError as e:
            raise SandboxError("put", f"{path!r}: {e}") from e

    def get(self, path: str) -> bytes:
        """A file's content."""
        at = self._inside(path)
        if not at.is_file():
            raise SandboxError("get", f"{path!r} is no file")
        return at.read_bytes()

    def kill(self) -> None:
        """Ends what runs and removes the folder."""
        with self._lock:
            home, self._home = self._home, None
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)
        if self._claim is not None:
            self._claim.close()

    def keep(
        self, command: Sequence[str], cwd: str, limits: ExecLimits, stdin: bytes, env: Mapping[str, str], reports: bool = False
    ) -> Ran:
        """The command under a keeper; ``reports``: see there. Raises SandboxError when the keeper or a wrapper fails."""
        spec = {"command": list(command), "cwd": cwd, "env": dict(env), "uid": self._uid, "parent": os.getpid(), "reports": reports}
        spec |= asdict(limits) | {"threads": threads(limits)}
        words = [sys.executable, "-I", "-S", str(KEEPER)]
        pipe = subprocess.PIPE
        with self._lock:
            if self._home is None:
                raise SandboxError("gone", "it was not started, or is killed")
            keeper = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", start_new_session=True)
            self._running.add(keeper.pid)
        try:
            said, error = keeper.communicate(json.dumps(spec).encode() + b"\n" + stdin, timeout=limits.wall_s + GRACE_S)
        except subprocess.TimeoutExpired as e:
            raise SandboxError("keeper", f"no report {GRACE_S:g} s after the time limit of {limits.wall_s:g} s") from e
        finally:
            with self._lock:
                self._running.discard(keeper.pid)
            if keeper.poll() is None:
                end_tree(keeper.pid)
                keeper.communicate()
        if self._home is None:
            raise SandboxError("gone", "it was killed")
        return _report(said, error)

    def _inside(self, path: str) -> Path:
        """The file of a path. A link that leads out of the folder, which a command may have made, is refused."""
        work = (self.home / "work").resolve()
        at = (work / path).resolve()
        if self._running:
            raise SandboxError("busy", f"{path!r} while a command runs, which could move it meanwhile")
        if at == work or not at.is_relative_to(work):
            raise SandboxError("path", f"{path!r} is not below the sandbox's folder")
        return at

    def _owned(self, folder: Path) -> None:
        folder.mkdir()
        if self._uid is not None:
            os.chown(folder, self._uid, self._uid)


def threads(limits: ExecLimits) -> int:
    """The most threads, of all its processes together, that the kernel starts for a command. 13 processes: 42."""
    return 2 * limits.processes + 16


def _report(said: bytes, error: bytes) -> Ran:
    head, newline, body = said.partition(b"\n")
    if not newline:
        raise SandboxError("keeper", f"it ended without a report: {error.decode(errors='replace')[-500:]}")
    made: dict[str, Any] = json.loads(head)
    out, err = body[: made["stdout"]], body[made["stdout"] :]
    if made["reason"] == "broken":
        raise SandboxError("wrapper", err.decode(errors="replace")[-500:].strip())
    return Ran(made["code"], out, err, made["reason"], made["wall_s"])


def _claim_uid() -> tuple[int, socket.socket]:
    """A user that no other sandbox of this machine has: as long as the socket of that name is open."""
    for uid in UIDS:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0mcore-agent-sandbox-{uid}")
        except OSError:  # taken
            claim.close()
            continue
        return uid, claim
    raise SandboxError("users", f"more than {len(UIDS)} sandboxes at once")
