"""A real checkpoint: unpacked, trained, exported, and the same in transformers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, cli, metrics, summary

RECIPE = "recipes/smollm2.yaml"
MODEL = ROOT / "runs" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def model() -> Path:
    subprocess.run([sys.executable, "tools/smollm2.py", str(MODEL)], cwd=ROOT, check=True)
    return MODEL


def exported_equals_learner(run: Path) -> None:
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    words = ["-m", "ckpt_convert", "verify", "--hf", str(run / "export"), "--mcore", str(latest), "--tolerance", "1e-4"]
    out = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_one_step_and_export(model, tmp_path):
    """Two small groups, one optimizer step: the export loads in transformers and has the learner's logits."""
    run = tmp_path / "run"
    cli("train", RECIPE, f"run.dir={run}", "run.steps=1", "rollout.prompts=2", "rollout.group_size=4", timeout=400)
    (record,) = metrics(run)
    assert 0 <= record["reward/mean"] <= 1 and record["mismatch/logp_abs_max"] <= 1e-4
    exported_equals_learner(run)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ten_steps_raise_the_reward(model, seed, tmp_path):
    run = tmp_path / "run"
    cli("train", RECIPE, f"run.dir={run}", f"run.seed={seed}", timeout=1700, OMP_NUM_THREADS="2")
    s = summary(run)
    assert s["reward_first"] >= 0.05 and s["reward_last"] >= s["reward_first"] + 0.2, s["rewards"]
    assert s["mismatch_logp_abs_max"] <= 1e-4
    exported_equals_learner(run)
