"""Loss, log-probabilities and every gradient equal Hugging Face's, under every layout (I4)."""

import numpy as np
import pytest

from mcore_agent.learner.groups import Layout
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import compare
from tests.learner.models import KINDS, config_of, expected, hugging_face, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

LAYOUTS = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(dp=2, ep=2), Layout(tp=2, pp=2)]
CASES = [
    (layout, kind, tied)
    for layout in LAYOUTS  # in this order, because a new layout costs new process groups
    for kind in KINDS
    for tied in (False, True)
    if layout.ep == 1 or kind == "qwen3_moe"
]
# uneven on purpose: row lengths, row counts and token counts differ between micro-batches and ranks
SLOTS = [
    [micro_of([7, 9, 3, 20], 1), micro_of([5], 2), micro_of([6, 6], 3)],
    [micro_of([2], 4), micro_of([11, 4, 10], 5), micro_of([1, 8], 6)],
]


def slots_for(layout: Layout):
    return SLOTS if layout.dp == 2 else [SLOTS[0]]


@pytest.mark.defect("E18")
@pytest.mark.parametrize(("layout", "kind", "tied"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_equals_hugging_face(ranks, layout, kind, tied):  # noqa: F811
    slots = slots_for(layout)
    want = expected(hugging_face(kind, tied), [m for rank in slots for m in rank])
    results = ranks(compare, layout, config_of(kind, tied), weights_of(kind, tied), slots, [SftNll()], want.grads, 1.0)
    for rank, (loss, logp, distances) in enumerate(results):
        assert loss == pytest.approx(want.loss, rel=1e-5)
        replica = rank // layout.tp % layout.dp
        for found, column in zip(logp, want.logp[replica * 3 : replica * 3 + 3], strict=True):
            np.testing.assert_allclose(found, column, rtol=1e-5, atol=2e-6)
        worst = max(distances, key=distances.__getitem__)
        assert distances[worst] < 1e-5, (rank, worst, distances[worst])


def test_routing_without_renormalization(ranks):  # noqa: F811
    """``norm_topk_prob`` false: the chosen experts keep the weights of the softmax over all experts."""
    want = expected(hugging_face("qwen3_moe", False, norm_topk=False), SLOTS[0])
    config, weights = config_of("qwen3_moe", False, norm_topk_prob=False), weights_of("qwen3_moe", False, norm_topk=False)
    [(loss, _, distances)] = ranks(compare, Layout(), config, weights, SLOTS[:1], [SftNll()], want.grads, 1.0)
    assert loss == pytest.approx(want.loss, rel=1e-5)
    assert max(distances.values()) < 1e-5
