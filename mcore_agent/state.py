"""State that outlives a process: atomic files, complete-or-absent folders, and the store of everything resumable."""

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_agent.protocols import Stateful

COMPLETE = "COMPLETE"


class StateError(RuntimeError):
    """A saved state cannot be used; the message names the file and the way out."""


def write_atomic(path: Path, data: bytes) -> None:
    """The file holds either its old content or all of ``data``, whatever happens. Raises OSError (disk full)."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, made if need be, which says who has it; the system frees it when the process ends.

    Raises StateError, naming the holder, when another process has it.
    """
    with open(path, "a+", encoding="utf-8") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks: go without
                yield
                return
            f.seek(0)
            raise StateError(f"is in use by {f.read().strip() or 'another process'}") from e
        f.truncate(0)
        f.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        f.flush()
        yield


def is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).is_file()


def finish_folder(partial: Path, final: Path) -> None:
    """Marks a filled folder complete and gives it its name, replacing an older one of that name."""
    write_atomic(partial / COMPLETE, b"")
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)


class StateStore:
    """Everything outside the tensors that a resumed run needs, by name; JSON, so that a person can read it.

    The states of torch's, numpy's and Python's global generators are not among it: no training step draws from them
    (there is no dropout), and a run's own draws are functions of its seed, the step and the task.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def add(self, name: str, part: Stateful) -> None:
        if name in self._parts:
            raise StateError(f"two parts of the state are called {name!r}")
        self._parts[name] = part

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps({n: p.state_dict() for n, p in self._parts.items()}, indent=1).encode())

    def read(self, path: Path) -> dict[str, Any]:
        """The saved states by name. Raises StateError when the file is damaged or holds other parts than this run has."""
        try:
            saved = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise StateError(f"{path} cannot be read ({e}); delete its folder to resume from the checkpoint before") from e
        if not isinstance(saved, dict) or saved.keys() != self._parts.keys():
            raise StateError(f"{path} holds {sorted(saved)}, this run needs {sorted(self._parts)}: another version wrote it")
        return saved

    def load(self, path: Path) -> None:
        """Raises StateError as ``read`` does."""
        saved = self.read(path)
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])


class Checkpoints:
    """Numbered folders ``step-000012`` and the pointer ``latest``; only complete folders count."""

    def __init__(self, root: Path, keep: int):
        self.root, self.keep = root, keep

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def partial(self, step: int) -> Path:
        """An empty folder to fill; what a killed save has left goes. Call on one rank, before the others write."""
        for old in self.root.glob("step-*.partial"):
            shutil.rmtree(old, ignore_errors=True)
        folder = self.root / f"step-{step:06d}.partial"
        folder.mkdir(parents=True)
        return folder

    def commit(self, step: int) -> Path:
        """Makes the filled folder the latest one and drops old ones. Call on one rank, after all have written and said so."""
        final = self.folder(step)
        finish_folder(self.root / f"{final.name}.partial", final)
        write_atomic(self.root / "latest", final.name.encode())
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def complete(self) -> list[Path]:
        """Complete folders, oldest first."""
        return sorted(p for p in self.root.glob("step-??????") if is_complete(p)) if self.root.is_dir() else []

    def latest(self) -> Path | None:
        """The folder that ``latest`` names if it is complete, else the newest complete one, else None."""
        return next(iter(self._candidates()), None)

    def _candidates(self) -> list[Path]:
        """Complete folders, the one that ``latest`` names first, then from new to old."""
        pointer, whole = self.root / "latest", self.complete()
        named = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
        return sorted(reversed(whole), key=lambda folder: folder.name != named)

    def usable(self, damage: Callable[[Path], str | None]) -> tuple[Path | None, list[str]]:
        """The first candidate in which ``damage`` finds none, and what is wrong with those passed over.

        None when nothing was ever saved. Raises StateError when something was, but nothing is whole: a run must not
        start over in silence.
        """
        wrong: list[str] = []
        for folder in self._candidates():
            if (found := damage(folder)) is None:
                return folder, wrong
            wrong.append(found)
        cut = [p for p in sorted(self.root.glob("step-??????")) if not is_complete(p)]
        wrong += [f"{folder} has no {COMPLETE}" for folder in cut]
        if wrong or (self.root / "latest").is_file():
            raise StateError(f"no checkpoint in {self.root} is whole: {'; '.join(wrong) or 'all were removed'}")
        return None, []
