"""Loss terms get what they need of a run: log-probabilities of this very step, pairs of episodes, a teacher's distributions."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_agent.batch.pairs import preferences
from mcore_agent.config import StageConfig, load_config
from mcore_agent.loss.dpo import pairs
from mcore_agent.session import Session, open_session
from mcore_agent.types import Batch
from tests.e2e.running import QUICKSTART, ROOT, TINY, Shell, metrics, train

RL = ("stages=[{kind: rl, steps: 3, lr: 1.0e-3}]", "run.eval_tasks=0", "rollout.prompts=3")


@pytest.fixture(scope="module")
def shell():
    process = Shell()
    yield process
    process.close()


def run(shell: Shell, folder: Path, *words: str) -> list[dict]:
    code, out = shell(train(folder, *RL, *words))
    assert code == 0, out
    return metrics(folder)


@contextmanager
def collected(folder: Path, *words: str) -> Iterator[tuple[Session, StageConfig, int, Batch]]:
    """A session of one process at its first step, and the batch of that step, in every group of which rewards differ."""
    folder.mkdir()
    config = load_config(ROOT / QUICKSTART, [*RL, "run.threads=1", *words], [ROOT / TINY[1]])
    with open_session(config, folder, time.time()) as s:
        stage, step = next(s.schedule())
        played = s.reward(s.collect(step))
        yield s, stage, step, s.credit([replace(e, rewards={"outcome": i % 4 / 3}) for i, e in enumerate(played)])


def logp_of(s: Session, batch: Batch) -> np.ndarray:
    return s._with_column(batch, "found", s.policy.logp).columns["found"]


@pytest.mark.parametrize(("loss", "passes"), [("[{name: gspo}]", [0, 1, 2]), ("[{name: ppo_clip}]", []), ("[{name: gspo, coef: 0}]", [])])
def test_a_pass_before_every_step_for_terms_that_need_it(loss, passes, tmp_path, monkeypatch):
    """Three mini-batches: the first finds the weights that the batch found, each other one those of the step before it. Nothing
    is looked at before its turn."""
    with collected(tmp_path / "run", f"loss={loss}", "batch.minibatches=3", "correction.treatment=off") as (s, stage, step, batch):
        batch = batch.with_columns(found=logp_of(s, batch))
        steps, seen, parts = [], [], []
        look, act, plans = s.policy.logp, s.policy.step, s.lead.plans
        monkeypatch.setattr(s.policy, "logp", lambda plan: (seen.append(len(steps)), look(plan))[1])
        monkeypatch.setattr(s.policy, "step", lambda *a: (act(*a), steps.append(1))[0])
        monkeypatch.setattr(s.lead, "plans", lambda part, *a, **k: (parts.append(part), plans(part, *a, **k))[1])
        dealt = s.split(stage, batch)
        assert not seen and not parts
        s.update(stage, step, dealt)
        assert seen == passes and len(parts) == 3
        if passes:
            assert len(steps) == 3
            moved = [np.abs(part.columns["logp_now"] - part.columns["found"]).max() for part in parts]
            assert moved[0] < 1e-5 and min(moved[1:]) > 1e-3
            assert s.numbers["loss/sequence_kl"] != 0


def test_a_step_widens_the_margins_of_its_pairs(tmp_path):
    """M26: at first the policy is the reference, so that every margin is 0 and the loss ln 2; the step then raises their mean."""
    with collected(tmp_path / "run", "loss=[{name: dpo, beta: 0.5}]", "batch.minibatches=1") as (s, stage, step, batch):
        before, made = logp_of(s, batch), preferences(batch, "dpo")
        s.update(stage, step, s.split(stage, batch))
        assert s.numbers["optimizer_steps"] == 1 and s.numbers["grad_norm"] > 0
        assert s.numbers["loss/dpo_loss"] == pytest.approx(math.log(2), rel=1e-5) == s.numbers["loss"]
        assert s.numbers["mismatch/logp_abs_max"] < 1e-4  # measured although nothing else needs the engine's log-probabilities
        moved = np.where(made.channel("dpo"), logp_of(s, batch) - before, 0.0)
        total = np.bincount(batch.token_episode, weights=moved)
        margins = [total[chosen] - total[rejected] for chosen, rejected in pairs(made, made.channel("dpo"))]
        assert margins and np.mean(margins) > 0.1


def test_pairs_beside_a_policy_gradient_under_two_ranks(shell, tmp_path):
    """Mini-batches of whole groups; the first step, of the same episodes, is that of one process."""
    words = ("loss=[{name: ppo_clip}, {name: dpo, coef: 0.3}]", "batch.minibatches=2")
    alone, several = (run(shell, tmp_path / f"dp{n}", *words, f"learner.dp={n}") for n in (1, 2))
    assert len(several) == 3 and any("loss/dpo_margin" in m for m in several)
    for name in ("loss", "grad_norm", "loss/dpo_loss", "loss/clip_fraction"):
        assert several[0][name] == pytest.approx(alone[0][name], rel=1e-3, abs=1e-6), name


@pytest.fixture(scope="module")
def taught(shell, tmp_path_factory) -> Path:
    """A Hugging Face folder with the tiny run's tokenizer, and a model of three layers that has imitated for some steps."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    words = ("stages=[{kind: sft, steps: 30, lr: 2.0e-3, demos: 16}]", "run.export=true", "model.config.num_hidden_layers=3")
    run(shell, folder, *words)
    return folder / "export"


def test_a_policy_comes_nearer_to_its_teacher(shell, taught, tmp_path):
    """M104: on its own samples, from another random start; in mini-batches, and with what it keeps beside the policy asleep."""
    loss = "loss=[{name: distill_top_k, top_k: 384}, {name: distill, coef: 0.1, bound: 4.0}]"
    stages = "stages=[{kind: rl, steps: 8, lr: 4.0e-3}]"
    found = run(shell, tmp_path / "run", loss, f"teacher.path={taught}", "run.seed=0", "batch.minibatches=2", stages)
    assert all(m["time/teacher_s"] > 0 and m["optimizer_steps"] == 2 for m in found)
    for name in ("loss/teacher_kl", "loss/teacher_gap"):
        kl = [m[name] for m in found]
        assert kl[0] > 1 and sum(kl[-2:]) / 2 < 0.7 * kl[0], kl


def test_a_teacher_of_other_tokens_is_refused_before_anything_is_played(shell, taught, tmp_path):
    words = ("loss=[{name: distill}]", f"teacher.path={taught}", "env={name: hop_lookup, hops: 4}", "run.seed=5")
    code, out = shell(train(tmp_path / "run", *RL, *words))
    assert code == 2 and "teacher.path" in out and "is not the policy's" in out
    assert not metrics(tmp_path / "run") and not (tmp_path / "run" / "episodes").exists()
