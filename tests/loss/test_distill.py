"""Distances to a reference (M7) and to a teacher (M104), against the divergences that they stand for."""

import math

import pytest
import torch

from mcore_agent.loss.common import LossError
from mcore_agent.loss.distill import Distill
from mcore_agent.loss.distill_top_k import DistillTopK
from mcore_agent.loss.k1_kl import K1Kl
from mcore_agent.loss.total import outputs_needed, total_loss
from mcore_agent.protocols import ModelOut
from tests.loss.columns import columns_of, out_of

STUDENT = torch.tensor([0.9, -0.3, 0.4, 0.0, -1.1], dtype=torch.float64)
TEACHER = torch.tensor([-0.2, 0.7, 0.1, 0.5, -0.4], dtype=torch.float64).log_softmax(-1)
SAMPLED = [(K1Kl(coef=1.0), "logp_ref", "k1"), (Distill(), "logp_teacher", "teacher_gap")]


def exact_kl(logits: torch.Tensor, forward: bool = False) -> torch.Tensor:
    logp = logits.log_softmax(-1)
    return (TEACHER.exp() * (TEACHER - logp)).sum() if forward else (logp.exp() * (logp - TEACHER)).sum()


@pytest.mark.parametrize(("term", "name", "metric"), SAMPLED, ids=["k1_kl", "distill"])
def test_a_gap_is_its_own_slope(term, name, metric):
    """Log-probs -1 and -2 over -1.5 and -1.2, beside an observed one: gaps .5 and -.8, loss (.5 - .8) / 2, gradients .25 and -.4."""
    out = out_of([-7, -1, -2])
    loss, metrics = total_loss(out, columns_of([0, 1, 1], **{name: [math.nan, -1.5, -1.2]}), [term])
    loss.backward()
    assert loss.item() == pytest.approx(-0.15, rel=1e-13) and metrics[metric].item() == pytest.approx(-0.15, rel=1e-13)
    torch.testing.assert_close(out.logp.grad, torch.tensor([0, 0.25, -0.4], dtype=torch.float64), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("term", "name", "metric"), SAMPLED, ids=["k1_kl", "distill"])
def test_equal_policies_give_exactly_nothing(term, name, metric):
    out = out_of([0, -1.3, -0.2])
    loss, _ = total_loss(out, columns_of([0, 1, 1], **{name: [0, -1.3, -0.2]}), [term])
    loss.backward()
    assert loss.item() == 0 and not out.logp.grad.any()


@pytest.mark.defect("B9")
@pytest.mark.parametrize(("term", "name", "metric"), SAMPLED, ids=["k1_kl", "distill"])
def test_over_all_samples_it_is_the_divergence_and_its_gradient(term, name, metric):
    """Five tokens, each weighed with its probability: value and gradient by the logits are those of KL(student | teacher). The slope
    1 of the plain difference has mean 0 instead."""
    logits = STUDENT.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    columns = columns_of([1] * 5, **{name: TEACHER}) | {"w:0": logp.detach().exp()}
    loss, _ = total_loss(ModelOut(logp), columns, [term])
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    exact = STUDENT.clone().requires_grad_()
    (expected,) = torch.autograd.grad(exact_kl(exact), exact)
    assert loss.item() == pytest.approx(exact_kl(STUDENT).item(), rel=1e-13)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    (plain,) = torch.autograd.grad((columns["w:0"] * (logp - TEACHER)).sum(), logits)
    assert plain.abs().max() < 1e-15 < found.abs().max()


def test_a_bound_holds_the_slope_and_not_the_value():
    """A student of .8 and a teacher of .4: the gap ln 2 = .693 is .5 as a slope."""
    out = out_of([math.log(0.8)])
    loss, _ = total_loss(out, columns_of([1], logp_teacher=[math.log(0.4)]), [Distill(bound=0.5)])
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-14) and out.logp.grad.item() == 0.5
    with pytest.raises(LossError, match="'distill': bound is 0"):
        Distill(bound=0)


def test_a_student_comes_to_its_teacher_on_its_own_samples():
    """A table of five logits, 32 samples a step: the divergence falls from above .2 to below .01."""
    generator = torch.Generator().manual_seed(3)
    logits = STUDENT.clone()
    first = exact_kl(logits).item()
    for _ in range(400):
        logits.requires_grad_()
        logp = logits.log_softmax(-1)
        drawn = torch.multinomial(logp.detach().exp(), 32, replacement=True, generator=generator)
        loss, _ = total_loss(ModelOut(logp[drawn]), columns_of([1] * 32, logp_teacher=TEACHER[drawn]), [Distill()])
        (slope,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.3 * slope).detach()
    assert first > 0.2 and exact_kl(logits).item() < 0.01


# ------------------------------------------------------------------------------------------ distributions


def top(logp: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = logp.topk(k)
    return found.values[None], found.indices[None]


def teacher_columns(teacher: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    values, ids = top(teacher, k)
    return {f"teacher_id:{i}": ids[:, i].double() for i in range(k)} | {f"teacher_logp:{i}": values[:, i] for i in range(k)}


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_three_tokens_by_hand(direction):
    """(.5, .25, .25) and (.25, .5, .25): .5 ln 2 - .25 ln 2 = .25 ln 2 either way."""
    student, teacher = (torch.tensor(p, dtype=torch.float64).log() for p in ((0.5, 0.25, 0.25), (0.25, 0.5, 0.25)))
    values, ids = top(student, 3)
    loss, metrics = total_loss(ModelOut(torch.zeros(1), top_logp=values, top_ids=ids), columns_of([1], **teacher_columns(teacher, 3)),
                               [DistillTopK(top_k=3, direction=direction)])  # fmt: skip
    assert loss.item() == pytest.approx(0.25 * math.log(2), rel=1e-12) == metrics["teacher_kl"].item()


@pytest.mark.parametrize(("direction", "expected"), [
    # they share token 1, of .25 and .5; all else is .75 and .5
    ("reverse", 0.25 * math.log(0.5) + 0.75 * math.log(1.5)), ("forward", 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
])  # fmt: skip
def test_what_is_not_among_both_is_one_event(direction, expected):
    """Students' two likeliest tokens 0 and 1 of four, (.5, .25, .15, .1), and teachers' 1 and 2, (.1, .5, .3, .1)."""
    student, teacher = (torch.tensor(p, dtype=torch.float64).log() for p in ((0.5, 0.25, 0.15, 0.1), (0.1, 0.5, 0.3, 0.1)))
    values, ids = top(student, 2)
    loss, _ = total_loss(ModelOut(torch.zeros(1), top_logp=values, top_ids=ids), columns_of([1], **teacher_columns(teacher, 2)),
                         [DistillTopK(top_k=2, direction=direction)])  # fmt: skip
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    whole = (student.exp() * (student - teacher)).sum() if direction == "reverse" else (teacher.exp() * (teacher - student)).sum()
    assert 0 < loss.item() < whole.item()


@pytest.mark.defect("B9")
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_whole_vocabulary_gives_the_divergence_and_its_gradient(direction):
    logits = STUDENT.clone().requires_grad_()
    values, ids = top(logits.log_softmax(-1), 5)
    out = ModelOut(torch.zeros(1), top_logp=values, top_ids=ids)
    loss, _ = total_loss(out, columns_of([1], **teacher_columns(TEACHER, 5)), [DistillTopK(top_k=5, direction=direction)])
    (found,) = torch.autograd.grad(loss, logits)
    exact = STUDENT.clone().requires_grad_()
    kl = exact_kl(exact, forward=direction == "forward")
    (expected,) = torch.autograd.grad(kl, exact)
    assert loss.item() == pytest.approx(kl.item(), rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_a_student_that_is_its_teacher_has_no_loss_and_no_slope(k, direction):
    logits = TEACHER.clone().requires_grad_()
    values, ids = top(logits.log_softmax(-1), k)
    out = ModelOut(torch.zeros(1), top_logp=values, top_ids=ids)
    loss, _ = total_loss(out, columns_of([1], **teacher_columns(TEACHER, k)), [DistillTopK(top_k=k, direction=direction)])
    (found,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-12 and found.abs().max() < 1e-12


@pytest.mark.parametrize("k", [1, 3])
def test_the_mass_of_the_rest_has_a_gradient(k):
    """By finite differences of the loss, with fewer tokens than there are."""

    def loss_of(logits):
        values, ids = top(logits.log_softmax(-1), k)
        out = ModelOut(torch.zeros(1), top_logp=values, top_ids=ids)
        return total_loss(out, columns_of([1], **teacher_columns(TEACHER, k)), [DistillTopK(top_k=k)])[0]

    near = TEACHER + torch.tensor([0.1, 0.2, -0.1, 0.05, 0.0]).double()  # the same order of tokens, so that some are shared
    logits = near.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(logits), logits)
    step = torch.eye(5).double() * 1e-6
    expected = torch.stack([(loss_of(near + s) - loss_of(near - s)) / 2e-6 for s in step])
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-9)
    assert found.abs().max() > 1e-4


def test_what_the_learner_must_give_is_named():
    term = DistillTopK(top_k=2)
    assert term.needs == ("top_logp", "top_ids", "teacher_id:0", "teacher_id:1", "teacher_logp:0", "teacher_logp:1")
    assert outputs_needed([term]) == {"top_logp", "top_ids"}
    with pytest.raises(LossError, match="needs the model outputs 'top_logp' and 'top_ids' of 2 tokens"):
        term.per_token(out_of([0, -1]), columns_of([0, 1]))
    for fields, says in (({"top_k": 0}, "top_k is 0"), ({"direction": "both"}, "direction is 'both'; known: reverse, forward")):
        with pytest.raises(LossError, match=f"'distill_top_k': {says}"):
            DistillTopK(**fields)
