"""Engines that are killed, whenever: the run ends with all its steps and episodes, and nothing stays behind."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from mcore_agent.rollout.states import COLOCATED, SEPARATE
from tests.e2e.running import ENVIRONMENT, QUICKSTART, ROOT, TINY, metrics

STEPS = 11
WORDS = (
    "rollout.engine=killable", "rollout.engines=2", f"stages=[{{kind: rl, lr: 1.0e-3, steps: {STEPS}}}]", "rollout.max_new=12",
    "run.eval_tasks=0", "run.save_every=0", "rollout.options={delay: 0.01}", "batch.minibatches=1", "rollout.stall_s=3",
)  # fmt: skip


def play(folder, *words: str, **variables: str) -> tuple[list[dict], list[dict], str]:
    """Metrics of the rl steps, what was killed and started, and the output; everything that was started is gone."""
    log = folder.with_name("kills.jsonl")
    command = [sys.executable, "-m", "tests.e2e.killable", "train", QUICKSTART, *TINY, f"run.dir={folder}", *WORDS, *words]
    environment = ENVIRONMENT | variables | {"KILL_LOG": str(log)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert not [e["started"] for e in events if "started" in e and psutil.pid_exists(e["started"])], "orphans"
    return metrics(folder), [e for e in events if "killed" in e], done.stdout + done.stderr


def whole(records: list[dict]) -> None:
    """Every step is there with every group and episode, whatever was killed."""
    assert [m["step"] for m in records] == list(range(1, STEPS + 1))
    assert all(m["rollout/episodes"] == 8 and m["rollout/ok"] + sum(v for k, v in m.items() if k.startswith("rollout/truncated")) == 8
               for m in records)  # fmt: skip
    assert not any(k.startswith("rollout/dropped/engine") for m in records for k in m)


@pytest.mark.defect("H1")
@pytest.mark.defect("G1")
@pytest.mark.parametrize("turns", [COLOCATED, SEPARATE], ids=lambda t: t.name)
def test_killed_in_every_state(turns, tmp_path):
    """In each cycle of hand-overs one engine of two is killed, in another state each time."""
    plan = ",".join(f"{cycle + 1}:{state}" for cycle, state in enumerate(turns.states))
    records, kills, _ = play(tmp_path / "run", f"rollout.placement={turns.name}", KILL_IN=plan)
    whole(records)
    assert {kill["at"].split(":")[1] for kill in kills} == set(turns.states)
    assert records[-1]["pool/alive"] == 2


@pytest.mark.defect("H1")
@pytest.mark.parametrize("words", [
    pytest.param((), id="on policy"),
    pytest.param(("rollout.max_lag=1", "rollout.placement=separate"), id="separate", marks=pytest.mark.slow),
    pytest.param(("rollout.max_lag=1", "rollout.over_sample=0.5"), id="over-sampled", marks=pytest.mark.slow),
])  # fmt: skip
def test_killed_at_random_times(words, tmp_path):
    seed = int.from_bytes(os.urandom(2), "little")
    records, kills, out = play(tmp_path / "run", *words, KILL_EVERY=f"0.7:20:{seed}")
    whole(records)
    assert kills, f"seed {seed}"
    found = [m for m in records if m.get("pool/recoveries")]
    assert not found or found[-1]["pool/recover_s_max"] > 0, f"seed {seed}\n{out}"


def test_all_engines_at_once(tmp_path):
    plan = ",".join(f"{cycle}:ROLLOUT" for cycle in (2, 4))
    records, kills, _ = play(tmp_path / "run", "rollout.engines=1", KILL_IN=plan)
    whole(records)
    assert len(kills) == 2


