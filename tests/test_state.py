"""Atomic files, complete-or-absent folders, checkpoints, and the store."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mcore_agent.state import COMPLETE, Checkpoints, StateError, StateStore, write_atomic


class Counter:
    def __init__(self, n=0):
        self.n = n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_store_round_trip(tmp_path):
    a, b = StateStore(), StateStore()
    a.add("x", Counter(3))
    a.save(tmp_path / "s.json")
    fresh = Counter()
    b.add("x", fresh)
    b.load(tmp_path / "s.json")
    assert fresh.n == 3


def test_store_refuses_other_parts_and_damage(tmp_path):
    a, b = StateStore(), StateStore()
    a.add("x", Counter())
    a.save(tmp_path / "s.json")
    b.add("y", Counter())
    with pytest.raises(StateError, match=r"holds \['x'\], this run needs \['y'\]"):
        b.load(tmp_path / "s.json")
    (tmp_path / "s.json").write_text('{"x": {"n"')
    with pytest.raises(StateError, match="cannot be read"):
        a.load(tmp_path / "s.json")
    with pytest.raises(StateError, match="two parts"):
        a.add("x", Counter())


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomic(path, b"old")

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def checkpoint(c: Checkpoints, step: int) -> None:
    (c.partial(step) / "data").write_text(str(step))
    c.commit(step)


@pytest.mark.defect("G12")
def test_a_half_written_checkpoint_is_never_the_latest(tmp_path):
    c = Checkpoints(tmp_path, keep=2)
    assert c.latest() is None
    for step in (1, 2, 3):
        checkpoint(c, step)
    (c.partial(4) / "data").write_text("half")  # killed here
    assert c.latest() == c.folder(3)
    assert [p.name for p in c.complete()] == ["step-000002", "step-000003"]  # keep=2
    (c.folder(3) / COMPLETE).unlink()  # as if the folder had been copied in part
    assert c.latest() == c.folder(2)


@pytest.mark.defect("G12")
def test_kill_while_saving(tmp_path):
    """SIGKILL at random moments of a save loop: the latest checkpoint is always whole."""
    code = (
        "import sys; from pathlib import Path; from mcore_agent.state import Checkpoints\n"
        "c = Checkpoints(Path(sys.argv[1]), keep=3); step = int(sys.argv[2])\n"
        "while True:\n"
        "    step += 1; p = c.partial(step)\n"
        "    for i in range(20): (p / str(i)).write_text('x' * 1000)\n"
        "    c.commit(step); print(step, flush=True)\n"
    )
    newest = 0
    for delay in (0.0, 0.01, 0.03, 0.05):
        p = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(newest)], stdout=subprocess.PIPE, text=True)
        assert p.stdout is not None
        p.stdout.readline()
        time.sleep(delay)
        p.send_signal(signal.SIGKILL)
        p.wait()
        latest = Checkpoints(tmp_path, keep=3).latest()
        assert latest is not None and len(list(latest.iterdir())) == 21
        assert int(latest.name[-6:]) > newest
        newest = int(latest.name[-6:])
