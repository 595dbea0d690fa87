"""What parts of ``credit`` ask of a run, a run gives them: greedy siblings, a reference, scores of their own views, a memory."""

import json
from pathlib import Path

import pytest

from tests.e2e.running import QUICKSTART, TINY, Shell, metrics, start, train
from tests.e2e.test_critic import cut, facts

STAGES = "stages=[{kind: sft, steps: 2, lr: 2.0e-3, demos: 16}, {kind: rl, steps: 4, lr: 1.0e-3}]"
COMMON = (STAGES, "run.save_every=1", "run.eval_tasks=0", "batch.minibatches=1")


@pytest.fixture(scope="module")
def shell():
    process = Shell()
    yield process
    process.close()


def run(shell: Shell, folder: Path, credit: str, *words: str) -> list[dict]:
    """Metrics of the rl steps."""
    code, out = shell(train(folder, f"credit={credit}", *COMMON, *words))
    assert code == 0, out
    return [m for m in metrics(folder) if m["stage"] == "rl"]


def test_greedy_siblings_and_a_reference(shell, tmp_path):
    """M13, M7: each group has one greedy episode more, which is no part of the mean reward, under two data-parallel ranks."""
    credit = "[{name: kl_reward, beta: 0.01}, {name: remax}]"
    records = run(shell, tmp_path / "run", credit, "learner.dp=2")
    assert len(records) == 4 and all("time/reference_s" in m and m["version"] >= 2 for m in records)
    for m in records:
        lines = [json.loads(line) for line in (tmp_path / "run" / "episodes" / f"step-{m['step']:06d}.jsonl").read_text().splitlines()]
        sampled = [e for e in lines if not e["branch"]]
        assert m["rollout/episodes"] == len(lines) > len(sampled) == len(lines) - len({e["group"] for e in lines})
        assert m["reward/mean"] == pytest.approx(sum(sum(e["rewards"].values()) for e in sampled) / len(sampled))


def test_views_are_scored_by_the_reference(shell, tmp_path):
    """M119: from the same episodes a step learns something else when the answer's likelihood makes rewards of turns."""
    skilled = "stages=[{kind: sft, steps: 80, lr: 2.0e-3, demos: 16}, {kind: rl, lr: 1.0e-3, steps: 1}]"  # it calls its tool
    found = {}
    for coef in (0.0, 1.0):
        [found[coef]] = run(shell, tmp_path / f"{coef}", f"[{{name: trace_gold, coef: {coef}}}]", skilled)
    a, b = found.values()
    assert a["reward/mean"] == b["reward/mean"] and a["rollout/turns"] == b["rollout/turns"] > a["rollout/episodes"]
    assert a["time/rescore_s"] > 0 and b["grad_norm"] > 0 and a["loss"] != b["loss"]


def test_what_an_estimator_remembers_outlives_a_run(shell, tmp_path):
    """M93: the beliefs about tasks are part of every checkpoint."""
    credit = "[{name: spo}]"
    run(shell, tmp_path / "whole", credit)
    again = cut(tmp_path / "whole", tmp_path / "again", 4)
    run(shell, again, credit)
    assert facts(again) == facts(tmp_path / "whole")
    states = [json.loads((f / "checkpoints" / "step-000006" / "state.json").read_text())["credit"] for f in (again, tmp_path / "whole")]
    assert states[0] == states[1] and states[0]["0"]


def test_loss_terms_get_what_they_derive(shell, tmp_path):
    """M20, M18: sums over whole episodes, and the share of right ones, under two data-parallel ranks and mini-batches."""
    loss = "loss=[{name: gspo}, {name: positive_nll, threshold: -1.0}]"
    records = run(shell, tmp_path / "run", "[{name: grpo}]", loss, "learner.dp=2", "batch.minibatches=2", "correction.treatment=off")
    trained = [m for m in records if m["optimizer_steps"]]
    assert trained and all(abs(m["loss/sequence_kl"]) < 0.1 and m["loss/positive_nll"] > 0 for m in trained)


def test_filtered_groups_are_counted(shell, tmp_path):
    records = run(shell, tmp_path / "run", "[{name: top_spread, share: 0.5}, {name: grpo}]")
    assert all(m["credit/filtered_out"] > 0 for m in records)


def test_parts_in_the_wrong_order_are_refused():
    process = start("check", QUICKSTART, *TINY, "credit=[{name: grpo}, {name: kl_reward}]")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2 and "the order is: filter, shaping, estimator, transform, normalizer" in out + err
