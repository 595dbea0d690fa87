"""The quickstart with real SGLang servers: it learns, publishes are verified, and a server that is killed is missed by nobody."""

import os
import random
import signal

import psutil
import pytest

from tests.e2e.running import QUICKSTART, TINY, end, metrics, start, wait_for
from tests.e2e.test_learning import learned
from tests.required import need

SGLANG = "rollout.engine=sglang"


@pytest.fixture(autouse=True)
def installed():
    need("sglang")


def served(root: int) -> list[psutil.Process]:
    """Servers among the descendants of a process."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if any(word.endswith("sglang/serve.py") for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def finish(process, limit_s: float) -> str:
    out, err = process.communicate(timeout=limit_s)
    assert process.returncode == 0, out[-3000:] + err[-6000:]
    return out + err


def test_quickstart_learns(tmp_path):
    """From the run's start to its end no log-probability differs from the learner's by more than 1e-4, in fp32."""
    folder = tmp_path / "run"
    finish(start("train", QUICKSTART, SGLANG, f"run.dir={folder}", "run.eval_tasks=60"), 1500)
    learned(folder)
    assert (folder / "engines" / "0" / "server.log").stat().st_size > 0


@pytest.mark.defect("H1")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_server_is_replaced(kills, tmp_path):
    """kill -9 at random moments of the rl stage, in every other step: no step and no episode is lost, no server stays."""
    folder, seed = tmp_path / "run", int.from_bytes(os.urandom(2), "little")
    draws = random.Random(seed)
    steps = 2 * kills + 2
    words = (f"stages=[{{kind: rl, lr: 1.0e-3, steps: {steps}}}]", "run.eval_tasks=0", "run.save_every=0", "batch.minibatches=1")
    process = start("train", QUICKSTART, *TINY, SGLANG, f"run.dir={folder}", "rollout.max_new=40", *words)
    killed: list[psutil.Process] = []
    try:
        for step in range(1, 2 * kills, 2):
            wait_for(lambda step=step: len(metrics(folder)) >= step or process.poll() is not None, 200, f"step {step}")
            assert process.poll() is None, process.communicate()
            wait_for(lambda: served(process.pid), 60, "a server")
            victim = served(process.pid)[-1]
            wait_for(lambda: draws.random() < 0.1, 60, "the moment")
            victim.send_signal(signal.SIGKILL)
            killed.append(victim)
        out = finish(process, 400)
    finally:
        if process.poll() is None:
            end(process)
    records = metrics(folder)
    assert [m["step"] for m in records] == list(range(1, steps + 1)), f"seed {seed}\n{out}"
    assert all(m["rollout/episodes"] == 8 for m in records) and not any(k.startswith("rollout/dropped") for m in records for k in m)
    left = [p for p in psutil.process_iter(["name", "cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    assert not left, f"seed {seed}: {left}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_experts_arrive_one_by_one(tmp_path, kind):
    folder = tmp_path / "run"
    words = ("learner.ep=1", "learner.dp=1", "stages=[{kind: sft, steps: 4, lr: 2.0e-3, demos: 8}, {kind: rl, lr: 1.0e-3, steps: 3}]")
    finish(start("train", "recipes/quickstart_moe.yaml", *TINY, SGLANG, f"run.dir={folder}", *words), 600)
    assert all(m["mismatch/logp_abs_max"] <= 1e-4 for m in metrics(folder) if m["stage"] == "rl")


def test_a_server_that_cannot_start_says_why(tmp_path):
    folder = tmp_path / "run"
    process = start("train", QUICKSTART, *TINY, SGLANG, f"run.dir={folder}", "rollout.options={server: {max_total_tokenz: 5}}")
    out, err = process.communicate(timeout=400)
    assert process.returncode == 2 and "max_total_tokens" in out + err, out + err
    assert "Traceback" not in err and not (folder / "engines").is_dir()
