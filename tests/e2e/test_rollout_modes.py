"""Episodes beside training, under older weights, with experts from the engine: the loop stays one loop."""

import pytest

from tests.e2e.running import QUICKSTART, TINY, cli, end, metrics, start, summary, wait_for

BESIDE = ("rollout.placement=separate", "rollout.max_lag=1", "batch.minibatches=2")
TURNS = ("rollout.max_lag=1", "rollout.over_sample=0.5", "batch.minibatches=2")
WORDS = ("stages=[{kind: sft, steps: 12, lr: 2.0e-3, demos: 16}, {kind: rl, steps: 8, lr: 1.0e-3}]",)


def rl(folder):
    return [m for m in metrics(folder) if m["stage"] == "rl"]


@pytest.mark.defect("G2", "G3", "G4")
@pytest.mark.parametrize("words", [BESIDE, TURNS], ids=["separate", "in turns"])
def test_no_token_is_older_than_the_bound(words, tmp_path):
    """Killed in the middle and resumed: every group is whole, none is too old, tasks come in the order of their source."""
    folder = tmp_path / "run"
    process = start("train", QUICKSTART, *TINY, *WORDS, f"run.dir={folder}", *words)
    try:
        wait_for(lambda: len(metrics(folder)) >= 16 or process.poll() is not None, 150, "step 16")
    finally:
        end(process)
    cli("train", QUICKSTART, *TINY, *WORDS, f"run.dir={folder}", *words)
    records = rl(folder)
    assert [m["step"] for m in records] == list(range(13, 21))
    assert all(m["rollout/lag_max"] <= 1 and m["rollout/episodes"] == 8 for m in records)
    assert any(m["rollout/lag_max"] == 1 for m in records), "nothing was played ahead"
    assert any(m["optimizer_steps"] == 2 for m in records) and records[-1]["version"] - records[0]["version"] <= 7
    assert "separate" not in words[0] or not any(m.get("rollout/dropped/stale") for m in records), "what was played ahead is thrown away"
    assert all(m["correction/weight_max"] <= 2 for m in records)
    assert summary(folder)["steps"] == 20


@pytest.mark.defect("D2", "I2")
def test_training_uses_the_experts_of_the_engine(tmp_path):
    folder = tmp_path / "run"
    words = ("learner.ep=1", "learner.dp=1", "learner.routing_replay=rollout", "correction.dump_every=4")
    cli("train", "recipes/quickstart_moe.yaml", *TINY, *WORDS, f"run.dir={folder}", *words)
    assert all(m["mismatch/logp_abs_max"] < 1e-4 and m["correction/token/outside"] == 0 for m in rl(folder))
    assert sorted(p.name for p in (folder / "mismatch").iterdir()) == ["step-000016.jsonl", "step-000020.jsonl"]


@pytest.mark.defect("F10")
def test_fifty_hand_overs_leave_memory_flat(tmp_path):
    """What learner and engine hold in each state of the table is at the end what it was after the first steps."""
    folder = tmp_path / "run"
    words = ("stages=[{kind: rl, lr: 1.0e-3, steps: 50}]", "rollout.group_size=2", "rollout.max_new=12", "batch.minibatches=1")
    cli("train", QUICKSTART, *TINY, f"run.dir={folder}", "run.save_every=0", "run.eval_tasks=0", *words)
    records = rl(folder)
    assert len(records) == 50
    for kind in ("rss_mb", "engine_rss_mb"):
        for state in ("ROLLOUT", "LEARNER_AWAKE", "LEARNER_ASLEEP"):
            held = [m[f"memory/{state}/{kind}"] for m in records if f"memory/{state}/{kind}" in m]
            early, late = min(held[10:20]), min(held[-10:])
            assert late < early * 1.02 + 4, f"{state} {kind}: {early:.0f} MB after ten hand-overs, {late:.0f} MB at the end"
