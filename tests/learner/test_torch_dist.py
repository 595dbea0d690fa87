"""A checkpoint continues with the same bits under its own layout, and to rounding under any other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import learner_of, relative
from tests.learner.models import VOCAB, config_of, cut, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
RATES = (1e-2, 5e-3, 3e-3, 2e-3)
WHOLE = micro_of([7, 9, 3, 20, 5, 2], 1)
Steps = list[tuple[float, float]]  # loss and gradient norm of each step


def slots_of(groups: Groups) -> list[MicroBatch]:
    if groups.layout.dp == 1:
        return cut(WHOLE, [[3, 0], [5, 1], [2, 4]])
    return [cut(WHOLE, [[3], [0, 5]]), cut(WHOLE, [[1], [2, 4]])][groups.dp_rank]


def make(groups: Groups, kind: str, tied: bool, dtype: str, fresh: bool = False) -> Learner:
    learner = learner_of(groups, config_of(kind, tied, num_hidden_layers=4), weights_of(kind, tied, layers=4), dtype, weight_decay=0.1)
    if fresh:  # nothing of what a load must bring back is there already
        with torch.no_grad():
            for parameter in learner.model.parameters().values():
                parameter.fill_(0.5)
        learner.reset_optimizer()
    return learner


def run(learner: Learner, rates: tuple[float, ...]) -> Steps:
    done = [learner.step(slots_of(learner.groups), [SftNll()], rate) for rate in rates]
    return [(s.loss, s.grad_norm) for s in done]


def trained(groups: Groups, kind: str, tied: bool, dtype: str, folder: Path) -> Steps:
    learner = make(groups, kind, tied, dtype)
    run(learner, RATES[:2])
    learner.save(folder)
    return run(learner, RATES[2:])


def resumed(groups: Groups, kind: str, tied: bool, dtype: str, folder: Path) -> Steps:
    learner = make(groups, kind, tied, dtype, fresh=True)
    learner.load(folder)
    return run(learner, RATES[2:])


def fresh_start(groups: Groups, folder: Path) -> tuple[Steps, Steps]:
    """A checkpoint of an optimizer that has not stepped."""
    learner = make(groups, "llama", True, "fp32")
    learner.save(folder)
    went_on = run(learner, RATES)
    again = make(groups, "llama", True, "fp32", fresh=True)
    again.load(folder)
    return went_on, run(again, RATES)


@pytest.mark.defect("E18")
@pytest.mark.parametrize(("layout", "kind", "tied", "dtype"), [
    (Layout(), "llama", True, "fp32"),
    (Layout(), "qwen3", False, "bf16"),
    (Layout(dp=2), "llama", True, "bf16"),
    (Layout(dp=2, ep=2), "qwen3_moe", False, "fp32"),
    (Layout(pp=2), "llama", True, "fp32"),
    (Layout(tp=2), "qwen3", False, "fp32"),
    (Layout(tp=2, pp=2, sp=True), "qwen3_moe", True, "fp32"),
    (Layout(dp=2, pp=2), "qwen3", True, "fp32"),
    (Layout(pp=2, vpp=2), "qwen3", True, "fp32"),
    (Layout(cp=2, tp=2, sp=True), "qwen3", False, "bf16"),
    (Layout(tp=2, sp=True, ep=2, etp=1, pp=2, vpp=2), "qwen3_moe", False, "fp32"),
], ids=str)  # fmt: skip
def test_resume_gives_the_same_bits(ranks, tmp_path, layout, kind, tied, dtype):  # noqa: F811
    straight = ranks(trained, layout, kind, tied, dtype, tmp_path)
    assert ranks(resumed, layout, kind, tied, dtype, tmp_path) == straight
    assert len(set(map(str, straight))) == 1, "the ranks disagree on loss or gradient norm"


def test_resume_before_the_first_step(ranks, tmp_path):  # noqa: F811
    [(went_on, again)] = ranks(fresh_start, Layout(), tmp_path)
    assert went_on == again


@pytest.mark.defect("E16")
@pytest.mark.parametrize(("written", "read", "kind", "tied"), [
    (Layout(tp=2), Layout(), "llama", False),  # the vocabulary is padded in one and not in the other
    (Layout(), Layout(tp=2), "qwen3", True),
    (Layout(pp=2), Layout(), "qwen3", True),
    (Layout(dp=2), Layout(), "llama", True),
    (Layout(dp=2, ep=2), Layout(), "qwen3_moe", False),
    (Layout(tp=2, pp=2, sp=True), Layout(dp=2, ep=2), "qwen3_moe", True),
    (Layout(), Layout(tp=2, pp=2, sp=True), "qwen3_moe", False),
    (Layout(pp=2, vpp=2), Layout(cp=2), "qwen3", True),
    (Layout(dp=2, ep=2, etp=1), Layout(pp=2, vpp=2, tp=2, sp=True, etp=1), "qwen3_moe", True),
], ids=str)  # fmt: skip
def test_reshard(ranks, tmp_path, written, read, kind, tied):  # noqa: F811
    """The fourth step's loss depends on the moments that the load brought, so they were resharded too."""
    straight = ranks(trained, written, kind, tied, "fp32", tmp_path)[0]
    np.testing.assert_allclose(ranks(resumed, read, kind, tied, "fp32", tmp_path)[0], straight, rtol=1e-4)


def whole_tensors(groups: Groups, folder: Path) -> dict[str, torch.Tensor]:
    """Weights, master weights and moments of a checkpoint, by their names in the whole model; of a vocabulary the true rows."""
    from megatron.core import dist_checkpointing  # after the learner's adaptation of it

    found = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: value[:VOCAB] if name.endswith(VOCABULARY) else value for name, value in found.items() if torch.is_tensor(value)}


def resharded(groups: Groups, kind: str, dtype: str, folder: Path, again: Path) -> Steps:
    """Loads, writes what it has to ``again``, and takes the next step."""
    learner = make(groups, kind, False, dtype, fresh=True)
    learner.load(folder)
    learner.save(again)
    return run(learner, RATES[2:3])


@pytest.mark.parametrize(("written", "read", "kind"), [
    (Layout(tp=2), Layout(), "qwen3"),
    (Layout(pp=2), Layout(), "qwen3"),
    (Layout(dp=2), Layout(), "qwen3"),
    (Layout(dp=2, ep=2), Layout(), "qwen3_moe"),
    (Layout(), Layout(tp=2, pp=2, sp=True), "qwen3"),
], ids=str)  # fmt: skip
def test_the_next_step_after_a_change_of_layout(ranks, tmp_path, written, read, kind):  # noqa: F811
    """Every weight and moment has the same bits in the other layout, and the step after it the loss that it would have had."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    [(loss, norm), _] = ranks(trained, written, kind, False, "fp32", first)[0]
    for [(found, found_norm)] in ranks(resharded, read, kind, "fp32", first, second):
        assert found == pytest.approx(loss, rel=1e-6, abs=0) and found_norm == pytest.approx(norm, rel=1e-5)
    [a], [b] = ranks(whole_tensors, Layout(), first), ranks(whole_tensors, Layout(), second)
    assert a.keys() == b.keys() and {name for name in a if not torch.equal(a[name], b[name])} == set()
    kinds = {name.removeprefix("optimizer.state.").partition(".")[0] for name in a if name.startswith("optimizer.")}
    assert kinds == {"param", "exp_avg", "exp_avg_sq"} and all(value.any() for value in a.values())


def saved_weights(groups: Groups, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    learner_of(groups, config_of("qwen3_moe", True, num_hidden_layers=4), weights).save(folder, weights_only=True)


def loaded_weights(groups: Groups, folder: Path, weights: dict[str, torch.Tensor]) -> tuple[dict[str, float], set[Any]]:
    learner = make(groups, "qwen3_moe", True, "fp32", fresh=True)
    learner.load(folder, weights_only=True)
    same = relative(learner, {n: p.detach() for n, p in learner.model.parameters().items()}, weights)
    learner.step(slots_of(groups), [SftNll()], 0.0)
    after = relative(learner, {n: p.detach() for n, p in learner.model.parameters().items()}, weights)
    return same, set(after.values())


@pytest.mark.defect("E28")
def test_weights_only(ranks, tmp_path):  # noqa: F811
    weights = weights_of("qwen3_moe", True, layers=4)
    ranks(saved_weights, Layout(tp=2, pp=2, sp=True), tmp_path, weights)
    for same, after in ranks(loaded_weights, Layout(dp=2, ep=2), tmp_path, weights):
        assert set(same.values()) == after == {0.0}
