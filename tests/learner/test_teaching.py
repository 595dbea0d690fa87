"""A student comes nearer to a teacher of another family on fixed episodes, and every layout of ranks computes the same (M104)."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mcore_agent.batch.plan import plan
from mcore_agent.config import Config, LearnerConfig, RolloutConfig, TeacherConfig
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.model import PLAIN
from mcore_agent.learner.wait import open_line
from mcore_agent.loss.distill import Distill
from mcore_agent.loss.distill_top_k import DistillTopK
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.teacher import Teacher
from mcore_agent.types import Batch, Episode
from tests.learner.jobs import learner_of
from tests.learner.models import VOCAB, config_of, hugging_face, weights_of
from tests.ranks import ranks  # noqa: F401
from tests.strategies import row_of, task_of

STUDENT, TEACHER = ("qwen3", True), ("llama", False)
LAYERS, TEMPERATURE, STEPS = 3, 0.7, 12
COMPARED = 7  # likeliest tokens whose order is compared: further down some are nearly alike
TERMS = (DistillTopK(top_k=VOCAB), Distill(coef=0.5), DistillTopK(top_k=2 * VOCAB, coef=0.0))


def episodes() -> Batch:
    """Rows of 7, 12, 5, 9 and 3 tokens of which all but the first two were sampled, two in one episode."""
    rng = np.random.default_rng(11)
    rows = [row_of(np.arange(n) > 1, rng.integers(0, VOCAB, n)) for n in (7, 12, 5, 9, 3)]
    parts = [rows[:2], *([row] for row in rows[2:])]
    return Batch(tuple(Episode(f"e{i}", task_of("group 1"), "g", tuple(part)) for i, part in enumerate(parts)))


def distilled(groups: Groups, folder: str):
    """Rank 0: the teacher's columns, metrics of each step, and the state of its memory."""
    layout = groups.layout
    config = Config(
        teacher=TeacherConfig(folder), learner=LearnerConfig(tp=layout.tp, dp=layout.dp), rollout=RolloutConfig(temperature=TEMPERATURE)
    )
    student = learner_of(groups, config_of(*STUDENT), weights_of(*STUDENT), betas=(0.8, 0.9))
    student.temperature = TEMPERATURE
    with open_line(groups) as line:
        awake = []
        policy = SimpleNamespace(setup=PLAIN, groups=groups, line=line, train_mode=lambda: awake.append(1))
        teacher = Teacher(config, policy)
        batch = episodes() if groups.rank == 0 else None
        assert teacher.columns(batch, [PpoClip(), Distill(coef=0.0)]) is batch and not awake
        if batch is not None:  # experts that the policy is to replay are nothing to the teacher
            batch = batch.with_columns(routing=np.zeros((len(batch.token_row), 2, 1), dtype=np.int32))
        batch = teacher.columns(batch, TERMS)
        if batch is not None:
            batch = Batch(batch.episodes, {name: values for name, values in batch.columns.items() if name != "routing"})
        state = teacher.learner.offload.state
        slots = plan(batch, TERMS, token_budget=13, dp=layout.dp).slots if batch else None
        micro = line.scatter(slots)
        steps = [student.step(micro, TERMS, 3e-3) for _ in range(STEPS)]
        gradient = steps[0].grad_norm
    return (batch.columns if batch else None, [{**s.metrics, "loss": s.loss} for s in steps], gradient, state)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("teacher")
    (path / "config.json").write_text(json.dumps(config_of(*TEACHER, num_hidden_layers=LAYERS)))
    save_file({name: t.contiguous() for name, t in weights_of(*TEACHER, layers=LAYERS).items()}, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def alone(folder):
    from tests.ranks import pool

    return pool()(distilled, Layout(), folder)[0]


@pytest.mark.defect("C16")
def test_columns_are_the_teachers_own_at_the_temperature_of_sampling(alone):
    columns, _, _, state = alone
    batch, model = episodes(), hugging_face(*TEACHER, layers=LAYERS)
    start = 0
    for row in batch.rows:
        table = torch.log_softmax(model(input_ids=torch.from_numpy(row.tokens)[None]).logits[0].detach() / TEMPERATURE, -1)[:-1]
        place = slice(start + 1, start + len(row))
        start += len(row)
        np.testing.assert_allclose(columns["logp_teacher"][place], table.gather(1, torch.from_numpy(row.tokens)[1:, None])[:, 0], atol=1e-5)
        best = table.topk(COMPARED)
        for i in range(COMPARED):
            assert columns[f"teacher_id:{i}"][place].tolist() == best.indices[:, i].tolist()
            np.testing.assert_allclose(columns[f"teacher_logp:{i}"][place], best.values[:, i], atol=1e-5)
    assert f"teacher_id:{VOCAB - 1}" in columns and f"teacher_id:{VOCAB}" not in columns  # a term that is off asks for nothing
    assert state == "ASLEEP"


def test_the_distance_falls(alone):
    _, steps, gradient, _ = alone
    assert gradient > 0.1 and steps[-1]["teacher_kl"] < 0.5 * steps[0]["teacher_kl"] and steps[0]["teacher_kl"] > 0.05
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2)], ids=str)
def test_layouts_agree(ranks, alone, folder, layout):  # noqa: F811
    columns, steps, gradient, state = ranks(distilled, layout, folder)[0]
    assert state == "ASLEEP" and gradient == pytest.approx(alone[2], rel=1e-4)
    assert columns.keys() == alone[0].keys()
    for name, values in alone[0].items():
        if not name.startswith("teacher_id") or int(name.split(":")[1]) < COMPARED:
            np.testing.assert_allclose(columns[name], values, atol=1e-5)
    for ours, theirs in zip(steps, alone[1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
