"""Loss, log-probabilities and every gradient equal one process's, by another implementation, under every layout (I4)."""

import functools
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_agent.learner.groups import Layout
from mcore_agent.learner.model import Setup
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import alone, compare
from tests.learner.matrix import Case, cases, padded, sample
from tests.learner.models import Expected, config_of, expected, hugging_face, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

# uneven on purpose: row lengths, row counts and token counts differ between micro-batches and ranks
MICRO = [
    *(micro_of([7, 9, 3, 20], 1), micro_of([5], 2), micro_of([6, 6], 3)),
    *(micro_of([2], 4), micro_of([11, 4, 10], 5), micro_of([1, 8], 6)),
]
LAYERS = 4


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


WHOLE = cases()
SAMPLE = WHOLE if os.environ.get("MCORE_AGENT_LAYOUTS") == "all" else sample(WHOLE, commit())


@functools.cache
def wanted(kind: str, tied: bool) -> Expected:
    return expected(hugging_face(kind, tied, layers=LAYERS), MICRO)


def check(ranks, case: Case, want: Expected, dtype: str, tolerance: float) -> None:  # noqa: F811
    layout = case.layout
    each = len(MICRO) // layout.dp
    slots = [[padded(m) if case.padded else m for m in MICRO[r * each :][:each]] for r in range(layout.dp)]
    config, weights = config_of(case.kind, case.tied, num_hidden_layers=LAYERS), weights_of(case.kind, case.tied, layers=LAYERS)
    results = ranks(compare, layout, config, weights, slots, [SftNll()], want.grads, 1.0, dtype, case.setup)
    for rank, (loss, logp, distances) in enumerate(results):
        assert loss == pytest.approx(want.loss, rel=tolerance)
        replica = rank // (layout.tp * layout.cp) % layout.dp
        for i, (found, column) in enumerate(zip(logp, want.logp[replica * each :][:each], strict=True)):
            own = np.arange(len(column))
            if case.padded:
                lengths = MICRO[replica * each + i].lengths
                own = (np.arange(lengths.max())[None, :] < lengths[:, None]).ravel().nonzero()[0]
            np.testing.assert_allclose(found[own], column, rtol=tolerance, atol=tolerance / 5)
        worst = max(distances, key=distances.__getitem__)
        assert distances[worst] < tolerance, (rank, worst, distances[worst])


@pytest.mark.defect("B3", "B18", "E18")
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equals_one_process(ranks, case):  # noqa: F811
    check(ranks, case, wanted(case.kind, case.tied), "fp32", 1e-5)


@pytest.mark.parametrize("case", [
    Case(Layout(tp=2, pp=2, cp=2, sp=True), False, True, False, Setup()),
    Case(Layout(pp=2, vpp=2, dp=2), True, False, False, Setup("full")),
    Case(Layout(tp=2, dp=2, ep=2, etp=2, sp=True), True, True, False, Setup()),
    Case(Layout(cp=2, dp=2, ep=2, etp=1), True, False, True, Setup("selective", "allgather")),
], ids=str)  # fmt: skip
def test_equals_one_process_in_double_precision(ranks, case):  # noqa: F811
    """Against this learner alone: transformers' norms and angles are float32 in any precision."""
    config, weights = config_of(case.kind, case.tied, num_hidden_layers=LAYERS), weights_of(case.kind, case.tied, layers=LAYERS)
    [(loss, logp, grads)] = ranks(alone, Layout(), config, weights, MICRO, [SftNll()], "fp64")
    assert logp[0].dtype == np.float64 and {g.dtype for g in grads.values()} == {torch.float64}
    check(ranks, case, Expected(loss, logp, grads), "fp64", 1e-10)


def test_routing_without_renormalization(ranks):  # noqa: F811
    """``norm_topk_prob`` false: the chosen experts keep the weights of the softmax over all experts."""
    want = expected(hugging_face("qwen3_moe", False, norm_topk=False), MICRO)
    config, weights = config_of("qwen3_moe", False, norm_topk_prob=False), weights_of("qwen3_moe", False, norm_topk=False)
    [(loss, _, distances)] = ranks(compare, Layout(), config, weights, [MICRO], [SftNll()], want.grads, 1.0)
    assert loss == pytest.approx(want.loss, rel=1e-5)
    assert max(distances.values()) < 1e-5


def test_the_sample_covers_every_pair():
    everything = set().union(*(c.pairs() for c in WHOLE))
    for seed in "abc":
        chosen = sample(WHOLE, seed)
        assert len(chosen) >= 40 and len(set(chosen)) == len(chosen)
        assert set().union(*(c.pairs() for c in chosen)) == everything
