"""Context-parallel ranks each hold a part of a row, yet what is said of the row's tokens is said once, by all of them alike."""

from dataclasses import replace

import numpy as np
import pytest

from mcore_agent.batch.microbatch import MicroBatch, filler
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.loss.ppo_clip import PpoClip
from tests.learner.jobs import learner_of
from tests.learner.models import config_of, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

LENGTHS = [[30, 7, 11], [5, 2, 64]]


def terminal(lengths: list[int], seed: int) -> MicroBatch:
    """Rows whose last token alone has an advantage, as where a terminal reward is spread by no one."""
    micro = micro_of(lengths, seed)
    last = np.zeros(len(micro.tokens), dtype=np.float32)
    last[np.cumsum(lengths) - 1] = [1.0, -2.0, 0.5]
    return replace(micro, columns={**micro.columns, "mask:pg": np.abs(last) > 0, "w:0": (np.abs(last) > 0) / 6, "advantage": last})


MICRO = [terminal(lengths, i) for i, lengths in enumerate(LENGTHS)]


def step(groups: Groups, kind: str) -> tuple[float, float, dict[str, float]]:
    """(loss, gradient norm, metrics); the ranks beyond the first replica have nothing."""
    learner = learner_of(groups, config_of(kind, True), weights_of(kind, True))
    micro = MICRO if groups.dp_rank == 0 else [filler(list(MICRO[0].columns))] * len(MICRO)
    stats = learner.step(micro, [PpoClip()], 0.0)
    return stats.loss, stats.grad_norm, stats.metrics


@pytest.mark.defect("A9", "A10", "B3")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_terminal_reward_lands_once(ranks, kind):  # noqa: F811
    [(loss, norm, metrics)] = ranks(step, Layout(), kind)
    assert abs(loss) > 0.01
    for layout in (Layout(cp=2), Layout(cp=4), Layout(cp=2, dp=2), Layout(cp=2, tp=2, sp=True)):
        for found, own_norm, own_metrics in ranks(step, layout, kind):
            assert found == pytest.approx(loss, rel=1e-5) and own_norm == pytest.approx(norm, rel=1e-5)
            assert own_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-7)
