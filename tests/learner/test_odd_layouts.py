"""Sizes that are no powers of two, rows longer than the budget, repeated steps and spoiled files."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_convert.families import family_of
from ckpt_convert.source import RandomSource
from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet
from mcore_agent.learner.checkpoint import CheckpointError
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.model import Setup
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import Weights, alone, compare, learner_of
from tests.learner.models import config_of, cut, micro_of, weights_of
from tests.learner.test_async_save import tensor_bytes
from tests.learner.test_torch_dist import RATES, make, run, slots_of
from tests.ranks import ranks  # noqa: F401

LENGTHS = [1, 13, 1, 40, 7, 2, 1, 5]
BUDGETS = (4, 1000)  # less than most rows have, and more than all together


def model(kind: str) -> tuple[dict[str, Any], Weights]:
    """Six layers, and where there are experts six of them: three ranks can share either."""
    moe = {"num_experts": 6, "moe_intermediate_size": 30} if kind == "qwen3_moe" else {}
    config = config_of(kind, False, num_hidden_layers=6, initializer_range=0.1, **moe)
    source = RandomSource(family_of(config), 3)
    return config, {name: source.get(name) for name in source.names()}


def dealt(budget: int, dp: int) -> list[list[MicroBatch]]:
    rows = micro_of(LENGTHS, 4)
    return split(RowSet(rows.tokens, rows.lengths, rows.rows, len(rows.rows), rows.columns), budget, dp).slots


@pytest.mark.defect("B26")
@pytest.mark.parametrize(("layout", "kind"), [
    (Layout(cp=3), "qwen3"),
    (Layout(pp=3, vpp=2), "qwen3"),
    (Layout(dp=3, ep=3), "qwen3_moe"),
    (Layout(dp=3, etp=3), "qwen3_moe"),
    (Layout(pp=3, dp=2, ep=2), "qwen3_moe"),
], ids=str)  # fmt: skip
def test_three_ranks_share_what_one_computes(ranks, layout, kind):  # noqa: F811
    """However the budget cuts the batch, with slots that have no row and rows of one token; in bf16 to its rounding."""
    config, weights = model(kind)
    [(loss, _, grads)] = ranks(alone, Layout(), config, weights, [micro_of(LENGTHS, 4)], [SftNll()], "fp32")
    assert all(grad.any() for grad in grads.values())
    for budget in BUDGETS:
        slots = dealt(budget, layout.dp)
        for found, _, distances in ranks(compare, layout, config, weights, slots, [SftNll()], grads, 1.0):
            assert found == pytest.approx(loss, rel=1e-5), budget
            assert max(distances.values()) < 1e-5, (budget, max(distances, key=distances.__getitem__))
    for found, _, distances in ranks(compare, layout, config, weights, dealt(BUDGETS[0], layout.dp), [SftNll()], grads, 1.0, "bf16"):
        # a router whose scores are close may choose otherwise, so that an expert's gradient is far off
        assert found == pytest.approx(loss, rel=0.02) and np.median([*distances.values()]) < 0.2


def test_a_budget_below_a_row_gives_each_row_a_slot():
    assert [m.lengths.tolist() for m in dealt(4, 1)[0]][:4] == [[40], [13], [7], [5]]
    assert sum(m.rows[0] < 0 for rank in dealt(4, 3) for m in rank) + len(dealt(4, 1)[0]) == 3 * len(dealt(4, 3)[0])


# --------------------------------------------------------------------------------------------------- many steps


def repeated(groups: Groups, kind: str, setup: Setup, few: int, many: int) -> list[int]:
    """Bytes of all tensors after some steps, and after many more, each with a pass for log-probabilities before it."""
    config, weights = config_of(kind, True, num_hidden_layers=4), weights_of(kind, True, layers=4)
    learner: Learner = learner_of(groups, config, weights, setup=setup)
    rows, found = micro_of([7, 9, 3, 20, 5, 2], 1), []
    for count in (few, many):
        for step in range(count):
            own = cut(rows, [[step % 6, (step + 1) % 6], [(step + 2) % 6]])
            learner.outputs(own, ["entropy"])
            learner.step(own, [SftNll()], 1e-3)
        found.append(tensor_bytes())
    return found


@pytest.mark.defect("F7")
@pytest.mark.parametrize(("layout", "kind", "setup"), [
    (Layout(), "qwen3_moe", Setup()),
    (Layout(pp=2, vpp=2), "qwen3", Setup("full")),
], ids=["alone", "interleaved"])  # fmt: skip
def test_thirty_steps_leave_no_more_than_three(ranks, layout, kind, setup):  # noqa: F811
    for few, many in ranks(repeated, layout, kind, setup, 3, 27):
        assert many == few


# ------------------------------------------------------------------------------------------------- spoiled files


def cut_off(name: str):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size * 2 // 3)


def overwritten(name: str):
    return lambda folder: (folder / name).write_bytes(b"\x00" * (folder / name).stat().st_size)


SPOILED = {
    "cut shard of rank 0": cut_off("__0_0.distcp"),
    "cut shard of rank 1": cut_off("__1_0.distcp"),
    "no shard of rank 1": lambda folder: (folder / "__1_0.distcp").unlink(),
    "zeros for rank 1": overwritten("__1_0.distcp"),
    "cut index": cut_off(".metadata"),
    "no index": lambda folder: (folder / ".metadata").unlink(),
    "zeros for the index": overwritten(".metadata"),
    "cut description": cut_off("metadata.json"),
    "no description": lambda folder: (folder / "metadata.json").unlink(),
}


def saved(groups: Groups, folder: Path) -> None:
    learner = make(groups, "qwen3", False, "fp32")
    run(learner, RATES[:1])
    learner.save(folder)


def reads(groups: Groups, whole: Path, spoiled: list[Path]) -> tuple[list[str], bool]:
    """(what is said of each spoiled folder; the ranks are still in step: they load a whole one and train)"""
    learner = make(groups, "qwen3", False, "fp32")
    said = []
    for folder in spoiled:
        try:
            learner.load(folder)
            said.append("no error")
        except CheckpointError as e:
            said.append(str(e))
    learner.load(whole)
    stats = learner.step(slots_of(groups), [SftNll()], 1e-3)
    return said, bool(np.isfinite(stats.loss)) and all(bool(torch.isfinite(p).all()) for p in learner.model.parameters().values())


@pytest.mark.defect("G12", "B26")
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=["same layout", "another layout"])
def test_spoiled_files_are_named_on_every_rank(ranks, tmp_path, layout):  # noqa: F811
    whole = tmp_path / "whole"
    whole.mkdir()
    ranks(saved, Layout(tp=2), whole)
    folders = []
    for name, spoil in SPOILED.items():
        folders.append(tmp_path / name.replace(" ", "_"))
        shutil.copytree(whole, folders[-1])
        spoil(folders[-1])
    for said, works in ranks(reads, layout, whole, folders):
        for name, folder, text in zip(SPOILED, folders, said, strict=True):
            assert f"{folder}: the tensors cannot be read" in text and "go on from the one before" in text, (name, text)
        assert works
