"""Whatever a batch looks like, and whoever has nothing to do: finite, equal to one process, no rank waits for another."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent.batch.microbatch import MicroBatch, filler
from mcore_agent.learner.groups import Layout
from mcore_agent.learner.model import Setup
from tests.learner.models import Expected, config_of, expected, hugging_face, micro_of, weights_of
from tests.learner.ragged_jobs import compare_all, norms, peaks, routed
from tests.ranks import ranks  # noqa: F401

LAYERS = 4
ORDINARY = [micro_of([7, 9, 3], 1), micro_of([5, 11], 2)]


def changed(micro: MicroBatch, rows: list[int], weight: float = 0.0) -> MicroBatch:
    """Those rows' weights and masks times ``weight``."""
    factor = np.where(np.repeat(np.isin(np.arange(len(micro.lengths)), rows), micro.lengths), weight, 1.0)
    columns = {n: v * factor if n.startswith(("w:", "mask:")) else v for n, v in micro.columns.items()}
    return MicroBatch(micro.tokens, micro.lengths, micro.rows, columns)


def masked(micro: MicroBatch) -> MicroBatch:
    return changed(micro, list(range(len(micro.lengths))))


IDLE = filler(ORDINARY[0].columns)
# name -> four micro-batches; with two data-parallel ranks each has two of them
BATCHES = {
    "very different lengths": [micro_of([90, 1, 2, 33], 3), micro_of([1], 4), micro_of([2], 5), micro_of([1, 95], 6)],
    "a rank without tokens": [*ORDINARY, IDLE, IDLE],
    "a row without a sampled token": [changed(micro_of([8, 6, 4], 7), [1]), ORDINARY[0], changed(micro_of([13], 8), [0]), ORDINARY[1]],
    "rows of one token": [micro_of([1], 9), micro_of([1, 1, 1], 10), micro_of([1, 1], 11), ORDINARY[1]],
    "nothing but rows of one token": [micro_of([1], 12), micro_of([1, 1, 1], 13), micro_of([1], 14), IDLE],
    "masked micro-batches": [masked(ORDINARY[0]), ORDINARY[1], masked(micro_of([3, 17], 15)), masked(ORDINARY[1])],
    "all masked": [masked(m) for m in (*ORDINARY, micro_of([4], 16), micro_of([1, 30], 17))],
    "an ordinary one": [*ORDINARY, micro_of([4, 6], 21), micro_of([12], 22)],
}


@functools.cache
def wanted(kind: str, name: str) -> Expected:
    return expected(hugging_face(kind, True, layers=LAYERS), BATCHES[name])


def model(kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return config_of(kind, True, num_hidden_layers=LAYERS), weights_of(kind, True, layers=LAYERS)


def dealt(micro: list[MicroBatch], layout: Layout) -> list[list[MicroBatch]]:
    each = len(micro) // layout.dp
    return [micro[r * each :][:each] for r in range(layout.dp)]


def name_of(value: object) -> str:
    if isinstance(value, Layout):
        return "".join(f"{key}{int(n)}" for key, n in vars(value).items() if n > 1 or n is True) or "alone"
    return value.dispatcher if isinstance(value, Setup) else str(value)


@pytest.mark.defect("B7", "B21", "B26")
@pytest.mark.parametrize(("layout", "kind", "setup"), [
    (Layout(), "qwen3_moe", Setup()),
    (Layout(dp=2), "qwen3", Setup()),
    (Layout(cp=2), "qwen3", Setup()),
    (Layout(tp=2, sp=True), "qwen3", Setup()),
    (Layout(tp=2, cp=2, sp=True), "qwen3", Setup("full")),
    (Layout(pp=2, vpp=2, dp=2), "qwen3", Setup()),
    (Layout(dp=2, ep=2, pp=2), "qwen3_moe", Setup()),
    (Layout(dp=2, ep=2), "qwen3_moe", Setup(dispatcher="allgather")),
    (Layout(tp=2, ep=2, etp=1, sp=True), "qwen3_moe", Setup()),
    (Layout(cp=2, ep=2), "qwen3_moe", Setup("full")),
], ids=name_of)  # fmt: skip
def test_equals_one_process(ranks, layout, kind, setup):  # noqa: F811
    config, weights = model(kind)
    batches = {name: dealt(micro, layout) for name, micro in BATCHES.items()}
    references = {name: wanted(kind, name).grads for name in BATCHES}
    for rank, found in enumerate(ranks(compare_all, layout, config, weights, batches, references, setup)):
        replica = rank // (layout.tp * layout.cp) % layout.dp
        for name, (loss, logp, distance, finite) in found.items():
            want = wanted(kind, name)
            assert finite and distance < 1e-5, (rank, name, distance)
            assert loss == pytest.approx(want.loss, rel=1e-5, abs=1e-12), (rank, name)
            for a, b in zip(logp, dealt(want.logp, layout)[replica], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6, err_msg=name)


def test_batches_are_what_they_are_called():
    for name in ("all masked", "nothing but rows of one token"):
        assert wanted("qwen3", name).loss == 0 and not any(g.any() for g in wanted("qwen3", name).grads.values())
    assert all(g.any() for g in wanted("qwen3_moe", "an ordinary one").grads.values())


def to_two_experts() -> list[MicroBatch]:
    """Every token of every layer goes to experts 0 and 1; so does padding."""
    out = []
    for lengths, seed in (([7, 9, 3], 1), ([5], 2), ([1, 1], 3), ([11, 4], 4)):
        m = micro_of(lengths, seed)
        routing = np.broadcast_to(np.arange(2, dtype=np.int32), (len(m.tokens), LAYERS, 2))
        out.append(MicroBatch(m.tokens, m.lengths, m.rows, m.columns, routing))
    return out


@pytest.mark.defect("B26")
@pytest.mark.parametrize(("layout", "setup"), [
    (Layout(dp=2, ep=2), Setup()),
    (Layout(dp=2, ep=2), Setup(dispatcher="allgather")),
    (Layout(tp=2, ep=2, etp=1, sp=True, pp=2), Setup("full")),
    (Layout(cp=2, dp=2, ep=2, etp=2), Setup()),
], ids=name_of)  # fmt: skip
def test_a_rank_whose_experts_get_no_token(ranks, layout, setup):  # noqa: F811
    config, weights = model("qwen3_moe")
    micro = to_two_experts()
    [(loss, _, grads)] = ranks(routed, Layout(), config, weights, [micro])
    idle = [name for name, grad in grads.items() if not grad.any()]
    assert len(idle) == LAYERS * 2 * 3 and all(".experts.2." in n or ".experts.3." in n for n in idle)
    results = ranks(compare_all, layout, config, weights, {"routed": dealt(micro, layout)}, {"routed": grads}, setup)
    for rank, found in enumerate(results):
        own_loss, _, distance, finite = found["routed"]
        assert finite and distance < 1e-5, (rank, distance)
        assert own_loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("layout", [
    Layout(),
    Layout(tp=2, dp=2, ep=2, etp=2, sp=True),
    Layout(tp=2, ep=2, etp=1, sp=True),
    Layout(tp=2, pp=2, ep=2, etp=1, sp=True),
    Layout(cp=2, dp=2, ep=2, etp=2),
], ids=name_of)  # fmt: skip
def test_gradient_norm_is_the_unsharded_one(ranks, layout):  # noqa: F811
    """Over all parameters, each counted once, whoever holds a part or a copy of it."""
    micro = BATCHES["an ordinary one"]
    slots = dealt(micro, layout)
    config, weights = model("qwen3_moe")
    want = []
    for chosen in (micro, [slot[0] for slot in slots]):
        grads = expected(hugging_face("qwen3_moe", True, layers=LAYERS), chosen).grads
        want.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values())))
    assert want[0] > 0.1 and want[1] != pytest.approx(want[0], rel=1e-3)
    for found in ranks(norms, layout, config, weights, slots):
        assert found == pytest.approx(want, rel=1e-5)


@pytest.mark.defect("F7")
@pytest.mark.parametrize(("layout", "kind", "setup"), [
    (Layout(), "qwen3_moe", Setup()),
    (Layout(tp=2, sp=True, cp=2), "qwen3", Setup()),
], ids=name_of)  # fmt: skip
def test_memory_does_not_grow_with_micro_batches(ranks, layout, kind, setup):  # noqa: F811
    """Of a micro-batch stay its outputs (a log-probability and an entropy per token); a token's activations are 50 times as much."""
    config, weights = model(kind)
    micro = micro_of([40, 13, 27], 23)
    few, many = 2, 8
    for (scored, trained), (scored_many, trained_many) in ranks(peaks, layout, config, weights, micro, (few, many), setup):
        kept = (many - few) * len(micro.tokens) * 2 * 8
        assert scored_many - scored <= kept and trained_many - trained <= kept
        assert min(scored, trained) > 100 * 4 * len(micro.tokens), "the pass itself is seen"
