"""Where numbers go: ``metrics.jsonl``, the console's live line, and Weights & Biases."""

import json
import os
import secrets
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def bars(values: list[float], top: float = 1.0) -> str:
    """One block character per value between 0 and ``top``."""
    levels = " ▁▂▃▄▅▆▇█"
    return "".join(levels[min(8, max(0, round(8 * v / top)))] if top > 0 else levels[0] for v in values)


class Console:
    """A live line on a terminal, one line per step elsewhere; silent for ranks other than the first."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.live = sys.stderr.isatty() and not quiet
        self._started = time.monotonic()
        self._drawn = False

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.quiet:
            self._clear()
            print(text, flush=True)

    def progress(self, label: str, done: int, total: int, note: str = "", seconds_left: float | None = None) -> None:
        """The live line; nothing where there is no terminal."""
        if not self.live:
            return
        width = 24
        filled = width * done // max(total, 1)
        eta = f"  {_clock(seconds_left)} left" if seconds_left is not None else ""
        sys.stderr.write(f"\r\x1b[2K{label} [{'=' * filled}{' ' * (width - filled)}] {done}/{total}{eta}  {note}")
        sys.stderr.flush()
        self._drawn = True

    def _clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._drawn = False

    def close(self) -> None:
        self._clear()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class TrackingError(ValueError):
    """Weights & Biases refuses or cannot be reached; the message says which key turns it off."""


class Metrics:
    """Appends one record per step. On a resume, records after ``resume_step`` are dropped first, so steps always rise.

    Weights & Biases cannot forget a step: those it has had before an interruption, which come again with the same
    numbers, are not given to it twice.
    """

    def __init__(self, folder: Path, *, resume_step: int, wandb: str = "disabled", project: str = "", name: str = "", config: Any = None):
        self.path = folder / "metrics.jsonl"
        records = self._records()
        last = max((record["step"] for record in records), default=0)
        self._wandb: Any = None
        self._given = 0  # steps up to this one
        if wandb != "disabled":
            self._wandb, self._given = _start_wandb(folder, wandb, project, name, config, last)
        _replace(self.path, "".join(json.dumps(record) + "\n" for record in records if record["step"] <= resume_step))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()

    def _records(self) -> list[dict[str, Any]]:
        found = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else ():
            with suppress(json.JSONDecodeError):  # the last line of a killed run may be cut
                found.append(json.loads(line))
        return found

    def log(self, step: int, values: dict[str, Any]) -> None:
        """One line of JSON and one wandb step; values are numbers, strings or None."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._wandb is not None and step > self._given:
            self._wandb.log({k: v for k, v in values.items() if isinstance(v, (int, float))}, step=step)

    def close(self, exit_code: int = 0) -> None:
        try:
            self._file.close()
        finally:  # closing flushes, and the disk may be full
            if self._wandb is not None:
                self._wandb.finish(exit_code=exit_code)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _start_wandb(folder: Path, mode: str, project: str, name: str, config: Any, last: int) -> tuple[Any, int]:
    """The wandb run, that of an earlier start if there was one, and the last step that it has been given."""
    import wandb

    kept = folder / "wandb.json"
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"id": secrets.token_hex(4), "step": 0}
    known["step"] = max(known["step"], last)
    _replace(kept, json.dumps(known))
    try:
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=project,
            name=name or folder.name,
            id=known["id"],
            resume="allow",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, quiet=True, console="off"),
            config_exclude_keys=None,
            allow_val_change=True,
        )
        return run, known["step"]
    except wandb.errors.Error as e:
        way = "run `wandb login`, or use tracking.wandb=offline"
        raise TrackingError(f"tracking.wandb = {mode!r}: Weights & Biases cannot start ({e}); {way}") from e
