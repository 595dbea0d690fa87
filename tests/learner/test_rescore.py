"""Sampled tokens scored under another context equal a pass over that context alone; nothing is computed twice."""

import numpy as np
import pytest
import torch

from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.rescore import Outputs, Rescorer
from mcore_agent.learner.wait import open_line
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.types import RecordError, View
from tests.learner.jobs import learner_of
from tests.learner.models import VOCAB, config_of, hugging_face, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

RNG = np.random.default_rng(3)
LENGTHS = [(5, 4), (9, 1), (2, 12), (7, 3)]  # context and sampled tokens
SAMPLED = [RNG.integers(0, VOCAB, n) for _, n in LENGTHS]
VIEWS = [
    View(f"row{i}", name, np.concatenate([RNG.integers(0, VOCAB, context + more), SAMPLED[i]]), context + more + np.arange(n))
    for i, (context, n) in enumerate(LENGTHS)
    for name, more in (("own", 0), ("hint", 6))
]
TOP = 3


def scored(groups: Groups) -> dict[str, list[Outputs]] | None:
    learner = learner_of(groups, config_of("qwen3", True), weights_of("qwen3", True))
    first = groups.rank == 0
    with open_line(groups) as line:
        rescorer = Rescorer(learner, line, token_budget=24)

        def ask(views, version, **how):
            return rescorer.score(views if first else None, version, **how)

        found = {"all": ask(VIEWS, 0, report=["log_sum", "top_logp", "top_ids"], top_k=TOP)}
        counts = [rescorer.forwarded]
        found["again"] = ask(VIEWS[::-1], 0)
        counts.append(rescorer.forwarded)
        learner.snapshot("old")
        learner.step([micro_of([6, 5], 1)], [SftNll()], 1e-2)
        found["new"] = ask(VIEWS[:3], 1)
        found["old"] = ask(VIEWS[:3], 1, under="old")
        counts.append(rescorer.forwarded)
        found["none"] = ask([], 1)
        learner.snapshot("old")
        found["newer"] = ask(VIEWS[:3], 1, under="old")
        counts.append(rescorer.forwarded)
    return {**found, "counts": counts} if first else None


def alone(view: View) -> torch.Tensor:
    """[n, V] log-probabilities before each scored token, by transformers."""
    logits = hugging_face("qwen3", True)(input_ids=torch.from_numpy(view.tokens)[None]).logits[0].detach()
    return torch.log_softmax(logits, -1)[torch.from_numpy(view.scored) - 1]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(tp=2, sp=True, pp=2), Layout(cp=2, tp=2)], ids=str)
def test_equals_a_pass_over_each_context(ranks, layout):  # noqa: F811
    found, *others = ranks(scored, layout)
    assert not any(others)
    for view, out in zip(VIEWS, found["all"], strict=True):
        table = alone(view)
        want = table[torch.arange(len(table)), torch.from_numpy(view.tokens[view.scored])]
        np.testing.assert_allclose(out["logp"], want, rtol=1e-5, atol=2e-6)
        best = table.topk(TOP)
        np.testing.assert_allclose(out["top_logp"], best.values, rtol=1e-5, atol=2e-6)
        assert np.array_equal(out["top_ids"], best.indices)
        assert out["log_sum"].shape == out["logp"].shape
    for one, other in zip(found["all"], found["again"][::-1], strict=True):
        assert np.array_equal(one["logp"], other["logp"])
    for before, old, new, newer in zip(found["all"], found["old"], found["new"], found["newer"], strict=False):
        assert np.array_equal(before["logp"], old["logp"]) and np.array_equal(new["logp"], newer["logp"])
        assert not np.array_equal(old["logp"], new["logp"])
    assert found["none"] == []
    assert found["counts"] == [8, 8, 14, 17]


def test_what_cannot_be_scored():
    for scored_at in ([0], [3], [-1]):
        with pytest.raises(RecordError, match=r"view 'v' of row 'r' scores places .* nothing predicts the first token"):
            View("r", "v", np.array([1, 2, 3]), np.array(scored_at))
