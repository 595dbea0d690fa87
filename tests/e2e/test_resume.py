"""A run that is killed or interrupted at any moment goes on as if nothing had happened (I10)."""

import os
import random
import signal

import psutil
import pytest

from tests.e2e.running import QUICKSTART, SLACK, TINY, cli, end, metrics, start, summary, tree, wait_for

COMPARED = ("lr", "loss", "grad_norm", "reward/mean", "mismatch/logp_abs_max", "rollout/sampled_tokens", "eval/sampled_success")


def facts(folder):
    return [{k: record.get(k) for k in ("step", "stage", *COMPARED)} for record in metrics(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    cli("train", QUICKSTART, *TINY, f"run.dir={folder}")
    assert sum(m.get("optimizer_steps", 0) for m in metrics(folder) if m["stage"] == "rl") >= 8  # rl steps do move the weights
    return folder


WATCH = """
import os, sys

if os.environ.get("RANK", "0") != "0":
    log, folder = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), os.environ["WATCHED"]
    os.write(log, b"watching\\n")

    def note(event, arguments):
        path = str(arguments[0]) if arguments else ""
        if not path.startswith(folder):
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changes = event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree") or event == "os.mkdir" and not os.path.isdir(path)
        if writes or changes:
            os.write(log, f"{event} {path}\\n".encode())

    sys.addaudithook(note)
"""


def killed_at(step, folder, *words):
    process = start("train", QUICKSTART, *TINY, f"run.dir={folder}", *words)
    wait_for(lambda: len(metrics(folder)) >= step or process.poll() is not None, 120, f"step {step}")
    assert process.poll() is None, process.communicate()
    end_by_kill(process)


def end_by_kill(process):
    """SIGKILL to the command alone: what it started must go with it."""
    children = tree(process.pid)[1:]
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=SLACK * 5)
    assert not alive, f"orphans: {alive}"


@pytest.mark.defect("B25")
@pytest.mark.defect("G3")
@pytest.mark.parametrize("words", [(), ("run.async_save=true",)], ids=["at once", "in the background"])
def test_killed_twice_and_resumed_gives_the_same_bits(uninterrupted, words, tmp_path):
    folder, seed = tmp_path / "run", int.from_bytes(os.urandom(2), "little")
    first, second = sorted(random.Random(seed).sample(range(1, 20), 2))
    killed_at(first, folder, *words)
    killed_at(second, folder, *words)
    out = cli("train", QUICKSTART, *TINY, f"run.dir={folder}", *words)
    assert facts(folder) == facts(uninterrupted), f"seed {seed}: killed at {first} and {second}\n{out}"
    mine, theirs = summary(folder), summary(uninterrupted)
    assert {k: v for k, v in mine.items() if k != "wall_s"} == {k: v for k, v in theirs.items() if k != "wall_s"}


@pytest.mark.defect("G8", "G9")
def test_a_reference_policy_survives_a_resume(uninterrupted, tmp_path):
    """With a KL term the reference is the stage's start, in the resumed run too; reading it changes nothing of the run.

    The run's own checkpoint goes before the weights that model.path names.
    """
    start_from = (f"model.path={uninterrupted}/checkpoints/step-000020", "model.config={}", "model.vocab=0")
    words = ("loss=[{name: ppo_clip}, {name: k3_kl, coef: 0.1}]", "batch.minibatches=1", *start_from)
    cli("train", QUICKSTART, *TINY, f"run.dir={tmp_path / 'whole'}", *words)
    killed_at(17, tmp_path / "killed", *words)
    written = (tmp_path / "killed" / "config.yaml").read_bytes()
    cli("train", QUICKSTART, *TINY, f"run.dir={tmp_path / 'killed'}", *words)
    assert (tmp_path / "killed" / "config.yaml").read_bytes() == written
    assert facts(tmp_path / "killed") == facts(tmp_path / "whole")
    kl = [m["loss/k3"] for m in metrics(tmp_path / "whole") if m["stage"] == "rl"]
    assert kl[0] == pytest.approx(0, abs=1e-5) and kl[-1] > 1e-6


def test_a_finished_run_is_not_repeated(uninterrupted):
    before = facts(uninterrupted)
    assert "resumed after step 20" in cli("train", QUICKSTART, *TINY, f"run.dir={uninterrupted}")
    assert facts(uninterrupted) == before


def test_another_configuration_is_refused(uninterrupted):
    out = cli("train", QUICKSTART, *TINY, f"run.dir={uninterrupted}", "rollout.group_size=8", code=2)
    assert "holds a run of another configuration (rollout.group_size: 4 -> 8)" in out


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "is not empty and holds no run" in cli("train", QUICKSTART, *TINY, f"run.dir={tmp_path}", code=2)


@pytest.mark.defect("H2", "G14")
@pytest.mark.parametrize("words", [(), ("learner.dp=2", "run.async_save=true")], ids=["alone", "two ranks"])
def test_interrupt_leaves_nothing_behind(words, tmp_path):
    """Ctrl-C: ranks gone within 5 s, exit code 130, the last checkpoint whole, and the same command goes on.

    A rank without tensors of its own makes no folder and writes no file of the run's.
    """
    folder = tmp_path / "run"
    process = start("train", QUICKSTART, *TINY, f"run.dir={folder}", *words)
    try:
        wait_for(lambda: len(metrics(folder)) >= 13 or process.poll() is not None, 150, "step 13")
        processes = tree(process.pid)
        os.kill(process.pid, signal.SIGINT)
        gone, alive = psutil.wait_procs(processes, timeout=SLACK * 5)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]  # who reaps orphans is not ours
        assert not alive, f"{alive} outlived Ctrl-C"
        assert next(p.returncode for p in gone if p.pid == process.pid) == 130  # type: ignore[attr-defined]
    finally:
        if process.poll() is None:
            end(process)
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    log = tmp_path / "log"
    watch = {"PYTHONPATH": str(tmp_path), "WATCH_LOG": str(log), "WATCHED": str(folder)}
    out = cli("train", QUICKSTART, *TINY, f"run.dir={folder}", *words, **watch)
    assert "resumed after step" in out
    assert not words or log.read_text() == "watching\n"
    assert [m["step"] for m in metrics(folder)] == list(range(1, 21))
