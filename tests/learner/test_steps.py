"""What must not matter does not matter, and what must not happen does not: splits, empty ranks, bad numbers."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent.batch.microbatch import MicroBatch, filler
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner, LearnerError
from mcore_agent.loss.entropy_bonus import EntropyBonus
from mcore_agent.loss.ppo_clip import PpoClip
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import learner_of, whole_gradients
from tests.learner.models import VOCAB, config_of, cut, expected, hugging_face, micro_of, per_expert, weights_of
from tests.ranks import ranks  # noqa: F401

TERMS = [PpoClip(), SftNll(coef=0.3), EntropyBonus(coef=0.1)]


def batch(lengths: list[int], seed: int = 1) -> MicroBatch:
    micro = micro_of(lengths, seed)
    weight = micro.columns["w:0"]
    return replace(micro, columns={**micro.columns, "w:1": weight * 2, "w:2": weight})


def weightless(micro: MicroBatch) -> MicroBatch:
    return replace(micro, columns={n: v * 0 if n.startswith(("w:", "mask:")) else v for n, v in micro.columns.items()})


def make(groups: Groups, kind: str, tied: bool = True, dtype: str = "fp32", **optim: Any) -> Learner:
    return learner_of(groups, config_of(kind, tied), weights_of(kind, tied), dtype, **optim)


def values_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.parameters().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients(groups: Groups, kind: str, ways: list[list[list[MicroBatch]]]) -> list[tuple[float, dict, dict]]:
    """Loss, metrics and all gradients for several ways of dealing the same rows to ranks and micro-batches."""
    learner = make(groups, kind)
    out = []
    for slots in ways:
        done = learner.gradients(slots[groups.dp_rank], TERMS)
        out.append((done.loss, done.metrics, whole_gradients(learner)))
    return out


WHOLE = batch([7, 9, 3, 20, 5, 2])
WAYS = [[[0, 1, 2, 3, 4, 5]], [[3], [0, 5], [1, 2, 4]], [[5, 2], [4, 3, 1, 0]], [[i] for i in range(6)]]


@pytest.mark.defect("B1", "B4", "B5", "B6", "B20", "B21")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_splits_do_not_matter(ranks, kind):  # noqa: F811
    """Micro-batches of any size, in any order, on one or two ranks: the same loss, metrics and gradients.

    Also with a micro-batch without weight among them, and when the same gradients are computed twice.
    """
    alone = [cut(WHOLE, way) for way in WAYS] + [[weightless(batch([4, 6], 9)), *cut(WHOLE, WAYS[1])], [WHOLE]]
    pairs = [
        [cut(WHOLE, [[3]]), cut(WHOLE, [[0, 1, 2, 4, 5]])],
        [cut(WHOLE, [[0, 1], [2]]), cut(WHOLE, [[5], [4, 3]])],
        [[WHOLE], [filler(WHOLE.columns)]],
    ]
    [one] = ranks(gradients, Layout(), kind, [[way] for way in alone])
    layouts = [Layout(dp=2), Layout(dp=2, ep=2)] if kind == "qwen3_moe" else [Layout(dp=2)]
    found = one[1:] + [result for layout in layouts for result in ranks(gradients, layout, kind, pairs)[0]]
    loss, metrics, grads = one[0]
    assert abs(loss) > 0.1 and all(torch.any(g) for g in grads.values())
    for other_loss, other_metrics, other in found:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_metrics == pytest.approx(metrics, rel=1e-5)
        for name, grad in other.items():
            assert (grad - grads[name]).norm() <= 1e-5 * grads[name].norm(), name


@pytest.mark.defect("B7")
def test_nothing_to_learn_from(ranks):  # noqa: F811
    [[(loss, metrics, grads)]] = ranks(gradients, Layout(), "qwen3_moe", [[[weightless(WHOLE)]]])
    assert loss == 0 and set(metrics.values()) == {0.0}
    assert not any(torch.any(g) for g in grads.values())


@pytest.mark.defect("B26")
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sp=True), Layout(dp=2, ep=2, pp=2), Layout(dp=2, pp=2)], ids=str)
def test_every_rank_enters_every_collective(ranks, layout):  # noqa: F811
    """Ranks that have nothing, stages without a loss, filler beside long rows: a step ends, and all agree on it."""
    slots = [[filler(WHOLE.columns)] * 3, cut(WHOLE, WAYS[1])][-layout.dp :]
    [(loss, _, _)] = ranks(gradients, Layout(), "qwen3_moe", [[cut(WHOLE, WAYS[1])]])[0]
    results = ranks(one_step, layout, slots, deadline_s=60)
    assert [r[0] for r in results] == [results[0][0]] * layout.world
    assert results[0][0] == pytest.approx(loss, rel=1e-5)
    assert len({r[1] for r in results}) == 1 and all(r[2] for r in results)


def one_step(groups: Groups, slots: list[list[MicroBatch]]) -> tuple[float, float, bool]:
    stats = make(groups, "qwen3_moe").step(slots[groups.dp_rank], TERMS, 1e-3)
    return stats.loss, stats.grad_norm, stats.applied


def refusals(groups: Groups) -> list[str]:
    learner = make(groups, "llama")
    wrong_token = replace(WHOLE, tokens=np.where(WHOLE.tokens == WHOLE.tokens.max(), VOCAB, WHOLE.tokens))
    messages = []
    for slots in ([[WHOLE], [WHOLE, WHOLE]], [[], []], [[wrong_token], [wrong_token]]):
        with pytest.raises(LearnerError) as caught:
            learner.step(slots[groups.dp_rank], TERMS, 1e-3)
        messages.append(str(caught.value))
    with pytest.raises(LearnerError) as caught:
        learner.logprobs([WHOLE], under="reference")
    return [*messages, str(caught.value)]


def test_refuses_on_all_ranks(ranks):  # noqa: F811
    for unequal, empty, token, reference in ranks(refusals, Layout(dp=2)):
        assert "between 1 and 2 micro-batches" in unequal
        assert "no micro-batch" in empty
        assert f"vocabulary is [0, {VOCAB})" in token
        assert "snapshot('reference')" in reference


@dataclass(frozen=True)
class Spike:
    """A loss of 0 whose gradient is not a number."""

    channel: str = "pg"
    needs: tuple[str, ...] = ()
    scales_with: None = None
    coef: float = 1.0
    aggregate: str = "token_mean"

    def per_token(self, out: Any, columns: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (out.logp - out.logp.detach()).abs().sqrt(), {}


def bad_numbers(groups: Groups) -> list[Any]:
    learner = make(groups, "llama", weight_decay=0.1)
    learner.step([WHOLE], TERMS, 1e-3)
    before, state = values_of(learner), learner.optimizer.state_dict()
    poisoned = WHOLE
    if groups.dp_rank == 1:  # one rank's bad number stops all
        poisoned = replace(WHOLE, columns={**WHOLE.columns, "w:0": np.full(len(WHOLE.tokens), np.nan)})
    by_loss = learner.step([poisoned], TERMS, 1e-3)
    by_gradient = learner.step([WHOLE], [Spike()], 1e-3)
    kept = equal(before, values_of(learner)) and str(state) == str(learner.optimizer.state_dict())
    return [by_loss, by_gradient, kept, learner.step([WHOLE], TERMS, 1e-3)]


@pytest.mark.defect("B24")
def test_bad_numbers_skip_the_step(ranks):  # noqa: F811
    for by_loss, by_gradient, kept, after in ranks(bad_numbers, Layout(dp=2)):
        assert math.isnan(by_loss.loss) and not by_loss.applied and math.isnan(by_loss.grad_norm)
        assert by_gradient.loss == 0 and not by_gradient.applied and not math.isfinite(by_gradient.grad_norm)
        assert kept
        assert after.applied and math.isfinite(after.grad_norm)


def precision(groups: Groups, dtype: str) -> tuple[bool, set[torch.dtype], set[torch.dtype], float]:
    learner = make(groups, "qwen3_moe", dtype=dtype, weight_decay=0.1)
    before = values_of(learner)
    stats = learner.step([WHOLE], TERMS, 0.0)
    same = equal(before, values_of(learner))
    parameters = learner.model.parameters().values()
    main = {p.dtype for part in learner.optimizer.chained_optimizers for p in part.get_parameters()}
    return same, {p.main_grad.dtype for p in parameters}, main, stats.loss


@pytest.mark.defect("E28", "E29")
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, ep=2)], ids=str)
def test_zero_rate_moves_nothing_and_gradients_are_fp32(ranks, layout):  # noqa: F811
    exact = ranks(precision, layout, "fp32")
    rough = ranks(precision, layout, "bf16")
    for same, grads, main, _ in exact + rough:
        assert same
        assert grads == main == {torch.float32}
    assert rough[0][3] == pytest.approx(exact[0][3], rel=0.02)


def decayed(groups: Groups) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    learner = make(groups, "qwen3", weight_decay=0.1)
    before = values_of(learner)
    learner.step([weightless(WHOLE)], TERMS, 0.5)  # no gradient: only decay moves weights
    return {name: (before[name], value) for name, value in values_of(learner).items()}


def test_norms_are_not_decayed(ranks):  # noqa: F811
    [moved] = ranks(decayed, Layout())
    norms = [name for name in moved if "norm" in name]
    assert len(norms) == 2 * 4 + 1
    for name, (before, after) in moved.items():
        torch.testing.assert_close(after, before if name in norms else before * (1 - 0.5 * 0.1), msg=name)


def adam_steps(groups: Groups, kind: str, tied: bool, slots: list[list[MicroBatch]], reset: bool) -> dict[str, torch.Tensor]:
    learner = make(groups, kind, tied, weight_decay=0.02, clip_grad=0.5, betas=(0.8, 0.9), eps=1e-6)
    if reset:  # forgotten moments leave no trace
        start = values_of(learner)
        learner.step(slots[groups.dp_rank], [SftNll()], 1e-2)
        with torch.no_grad():
            for name, parameter in learner.model.parameters().items():
                parameter.copy_(start[name])
        learner.reset_optimizer()
    for rate in (1e-2, 3e-3):
        stats = learner.step(slots[groups.dp_rank], [SftNll()], rate)
        assert stats.grad_norm > 0.5, "nothing was clipped"
    family, layout = learner.model.family, groups.layout
    want = adam_reference(kind, tied, [m for slot in slots for m in slot])
    return {
        name: p.detach() - family.to_mcore(name, want.__getitem__, layout.tp, groups.tp_rank)
        for name, p in learner.model.parameters().items()
    }


def adam_reference(kind: str, tied: bool, micro: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """The same two steps by torch's AdamW on the Hugging Face model."""
    model = hugging_face(kind, tied)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    decay = [p for n, p in model.named_parameters() if "norm" not in n]
    plain = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6)
    for rate in (1e-2, 3e-3):
        for group in adam.param_groups:
            group["lr"] = rate
        expected(model, micro)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
    out = per_expert({n: p.detach().clone() for n, p in model.named_parameters()})
    for name, p in model.named_parameters():
        p.data.copy_(start[name])
    return out


@pytest.mark.defect("E18")
@pytest.mark.parametrize(("layout", "kind", "tied", "reset"), [
    (Layout(), "qwen3", True, False),
    (Layout(), "qwen3_moe", False, True),
    (Layout(tp=2), "llama", False, False),
    (Layout(dp=2, ep=2), "qwen3_moe", False, False),
    (Layout(dp=2, pp=2), "llama", True, True),
    (Layout(tp=2, pp=2, sp=True), "qwen3_moe", True, False),
], ids=str)  # fmt: skip
def test_two_steps_are_those_of_adamw(ranks, layout, kind, tied, reset):  # noqa: F811
    slots = [cut(WHOLE, [[0, 1], [2]]), cut(WHOLE, [[5], [4, 3]])]
    slots = slots if layout.dp == 2 else [slots[0] + slots[1]]
    for rank, differences in enumerate(ranks(adam_steps, layout, kind, tied, slots, reset)):
        for name, difference in differences.items():
            # a step moves a weight by about 1e-2; where a gradient is near 0 its rounding decides the direction
            assert difference.abs().mean() < 1e-5, (rank, name, difference.abs().max())


def reference_policy(groups: Groups) -> tuple[list[np.ndarray], ...]:
    learner = make(groups, "qwen3")
    micro = cut(WHOLE, WAYS[1])
    first = learner.logprobs(micro)
    learner.snapshot("reference")
    stats = learner.step(micro, TERMS, 1e-2)
    return first, stats.logp, learner.logprobs(micro, under="reference"), learner.logprobs(micro), [np.array(learner.loss(micro, TERMS))]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_reference_policy_stays(ranks, layout):  # noqa: F811
    for first, stepped, reference, now, [loss] in ranks(reference_policy, layout):
        for a, b, c, d in zip(first, stepped, reference, now, strict=True):
            assert np.array_equal(a, b) and np.array_equal(a, c)
            assert not np.array_equal(a, d)
            assert a.dtype == np.float32
        assert np.isfinite(loss)


def test_temperature(ranks):  # noqa: F811
    from tests.learner.models import logp_of

    [found] = ranks(warm, Layout(), 0.7)
    np.testing.assert_allclose(found, logp_of(hugging_face("llama", True), WHOLE, 0.7).detach(), rtol=1e-5, atol=2e-6)


def warm(groups: Groups, temperature: float) -> np.ndarray:
    learner = make(groups, "llama")
    learner.temperature = temperature
    return learner.logprobs([WHOLE])[0]
