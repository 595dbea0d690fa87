"""The head's outputs and gradients equal those of torch's log_softmax over all logits, on every layout; logits live one chunk at a time."""

import functools
import weakref
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_agent.learner import logprob
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.logprob import Head, head_output
from mcore_agent.protocols import ModelOut
from tests.ranks import ranks  # noqa: F401

TOKENS, PADDED, WIDTH = 11, 12, 6
STARTS = (0, 4, 5)  # first tokens of rows; one row has a single token
POSITIONS = (7, 0, 10, 7)
ORDER = (9, 2, 0, 11, 5, 7, 1, 10, 3, 8, 4, 6)
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
NAMES = ("logp", "entropy", "log_sum", "top_logp", "hidden")


@dataclass(frozen=True)
class Case:
    vocab: int = 13
    width: int = 7  # columns of a rank of two
    dtype: torch.dtype = torch.float64
    temperature: float = 0.7
    chunk: int = 5  # does not divide 12, nor 6
    order: tuple[int, ...] | None = None
    outputs: tuple[str, ...] = NAMES


def data(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    inner = torch.ones(TOKENS, dtype=torch.bool)
    inner[list(STARTS)] = False
    coefficients = [draw(TOKENS), draw(TOKENS), draw(TOKENS), draw(TOKENS, 3), draw(len(POSITIONS), WIDTH)]
    out = {f"d {name}": c for name, c in zip(NAMES, coefficients, strict=True)}
    out |= {"hidden": draw(PADDED, WIDTH), "weight": draw(case.vocab, WIDTH)}
    out = {name: value.to(case.dtype) for name, value in out.items()}
    return out | {"inner": inner, "targets": torch.randint(0, case.vocab, (PADDED,), generator=generator)}


def loss_of(found: dict[str, Any], given: dict[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
    return sum((given[f"d {name}"] * found[name]).sum() for name in names)


def by_definition(case: Case) -> dict[str, torch.Tensor]:
    """One process, all logits at once, autograd."""
    given = data(case)
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    logits = (hidden @ weight.t()).to(torch.promote_types(case.dtype, torch.float32)) / case.temperature
    table = torch.log_softmax(logits, -1)
    top, ids = table.topk(3)
    before = {
        "logp": table[torch.arange(PADDED), given["targets"]],
        "entropy": -(table.exp() * table).sum(-1),
        "log_sum": torch.logsumexp(logits, -1),
        "top_logp": top,
        "top_ids": ids,
    }
    out = {}
    for name, values in before.items():  # token t was drawn from the distribution at t - 1
        spoken = [values[t - 1] if given["inner"][t] else torch.zeros_like(values[0]) for t in range(TOKENS)]
        out[name] = torch.stack(spoken)
    out["hidden"] = hidden[list(POSITIONS)]
    loss_of(out, given, case.outputs).backward()
    found = {name: value.detach() for name, value in out.items()}
    return found | {"grad_hidden": hidden.grad, "grad_weight": weight.grad}


def head_of(case: Case, groups: Any, first: int, valid: int) -> Head:
    given = data(case)
    return Head(
        targets=given["targets"],
        inner=given["inner"],
        temperature=case.temperature,
        entropy="entropy" in case.outputs,
        first=first,
        valid=valid,
        tp=groups.tp,
        log_sum="log_sum" in case.outputs,
        top_k=3 if "top_logp" in case.outputs else 0,
        positions=torch.tensor(POSITIONS) if "hidden" in case.outputs else None,
        cp=groups.cp,
        order=None if case.order is None else torch.tensor(case.order),
        chunk=case.chunk,
    )


def in_parallel(groups: Groups, *fields: Any) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """(outputs, gradient of this rank's hidden states, gradient of its rows of the weight). Ranks cannot import Case: its fields."""
    case = Case(*fields)
    given, layout = data(case), groups.layout
    width = case.width if layout.tp == 2 else 2 * case.width
    first = width * groups.tp_rank
    valid = max(0, min(width, case.vocab - first))
    weight = torch.full((width, WIDTH), 1e4, dtype=case.dtype)  # what the padding rows hold must not matter
    weight[:valid] = given["weight"][first : first + valid]
    hidden = given["hidden"][list(case.order or range(PADDED))].chunk(layout.cp)[groups.cp_rank]
    hidden = hidden.chunk(layout.tp)[groups.tp_rank] if layout.sp else hidden
    hidden, weight = hidden.clone().requires_grad_(), weight.requires_grad_()
    logprob.PIECE = 8
    layer = SimpleNamespace(weight=None, sequence_parallel=layout.sp)
    out = vars(head_output(hidden[:, None] * 1, layer, weight, context=head_of(case, groups, first, valid)))
    loss_of(out, given, case.outputs).backward()
    found = {name: None if value is None else value.detach() for name, value in out.items()}
    return found, hidden.grad, weight.grad


def whole(results: list[Any], layout: Layout, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of all hidden states and of the true and the padding rows of the weight, as a training step sums them."""
    parts = [[results[tp + layout.tp * cp] for tp in range(layout.tp)] for cp in range(layout.cp)]
    if not layout.sp:
        for row in parts:
            for part in row[1:]:
                torch.testing.assert_close(part[1], row[0][1], rtol=0, atol=0)
    dealt = torch.cat([part[1] for row in parts for part in (row if layout.sp else row[:1])])
    hidden = torch.empty_like(dealt)
    hidden[list(case.order or range(PADDED))] = dealt
    weight = sum(torch.cat([part[2] for part in row]) for row in parts)
    return hidden, weight[: case.vocab], weight[case.vocab :]


LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(cp=2), Layout(tp=2, cp=2), Layout(tp=2, sp=True, cp=2)]
CASES = {
    "all": Case(),
    "fp32": Case(dtype=torch.float32, temperature=1.0, chunk=256),
    "order": Case(order=ORDER, temperature=1.3),
    "logp only": Case(outputs=("logp",)),
    "entropy only": Case(outputs=("entropy",), order=ORDER),
    "a rank without true columns": Case(vocab=5),
}


@pytest.mark.defect("E16")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tp}{'sp' * x.sp}cp{x.cp}")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_log_softmax(ranks, layout, case):  # noqa: F811
    near = {"rtol": 1e-10, "atol": 1e-12} if case.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    want = by_definition(case)
    results = ranks(in_parallel, layout, *astuple(case))
    asked = (*case.outputs, "top_ids") if "top_logp" in case.outputs else case.outputs
    for found, _, _ in results:
        for name in asked:
            torch.testing.assert_close(found[name], want[name], **near, msg=lambda m, n=name: f"{n}: {m}")
        assert all(found[name] is None for name in set(found) - set(asked) - {"logp"}), "something that was not asked for"
    hidden, weight, padding = whole(results, layout, case)
    torch.testing.assert_close(hidden, want["grad_hidden"], **near)
    torch.testing.assert_close(weight, want["grad_weight"], **near)
    assert not padding.any()


def alone(hidden: torch.Tensor, weight: torch.Tensor, **changes: Any) -> ModelOut:
    """One process; every token is inside one row."""
    size, vocab = len(hidden), len(weight)
    targets = torch.randint(0, vocab, (size,), generator=torch.Generator().manual_seed(4))
    given: dict[str, Any] = {"targets": targets, "temperature": 0.8, "entropy": False, "first": 0, "valid": vocab} | changes
    head = Head(inner=torch.arange(size) > 0, tp=ALONE, **given)
    return head_output(hidden[:, None], SimpleNamespace(weight=weight, sequence_parallel=False), None, head)


def draw(size: int, vocab: int, width: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (size, vocab))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def test_gradients_by_finite_differences():
    def outputs(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = vars(alone(hidden, weight, entropy=True, log_sum=True, top_k=2, positions=torch.tensor([2, 0]), chunk=3))
        return tuple(out[name] for name in NAMES)

    assert torch.autograd.gradcheck(outputs, draw(5, 7, 3))


def test_backward_twice_gives_the_same():
    leaves = draw(8, 7, 3)
    loss = alone(*leaves, entropy=True, chunk=5).logp.sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), first)


def test_frozen_weight_and_no_gradients():
    hidden, weight = draw(7, 9, 3)
    want = alone(hidden, weight, entropy=True)
    gradient = torch.autograd.grad(want.logp.sum(), hidden)[0]
    frozen = alone(hidden, weight.detach(), entropy=True)
    torch.testing.assert_close(torch.autograd.grad(frozen.logp.sum(), hidden)[0], gradient)
    with torch.no_grad():
        without = alone(hidden, weight, entropy=True, top_k=2)
    assert not without.logp.requires_grad and not without.top_logp.requires_grad
    torch.testing.assert_close(without.logp, want.logp.detach())


def test_bf16_is_that_of_its_rounded_logits():
    """Products in bf16, as Megatron's output layer has them; the softmax of the rounded logits in fp32."""
    case = Case(dtype=torch.bfloat16, order=None, chunk=5)
    want = by_definition(case)
    found, hidden, weight = in_parallel(SimpleNamespace(layout=Layout(), tp=ALONE, cp=None, tp_rank=0, cp_rank=0), *astuple(case))
    for name in ("logp", "entropy", "log_sum", "top_logp"):
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], want[name], rtol=1e-5, atol=1e-5)
    assert hidden.dtype == weight.dtype == torch.bfloat16
    for value, name in ((hidden, "grad_hidden"), (weight[: case.vocab], "grad_weight")):
        distance = (value.float() - want[name].float()).norm() / want[name].float().norm()
        assert distance < 0.01, name  # bf16 rounds to 1 part in 256


def test_bf16_weight_gradient_is_summed_over_chunks_in_fp32():
    """600 equal contributions: a bf16 sum stands still once an addend is below 1/256 of it."""
    hidden = torch.full((601, 4), 0.5, dtype=torch.bfloat16)
    weight = torch.zeros(6, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(601, dtype=torch.int64)
    alone(hidden, weight, targets=targets, temperature=1.0, chunk=1).logp.sum().backward()
    want = 600 * 0.5 * (torch.eye(6)[0] - 1 / 6)
    torch.testing.assert_close(weight.grad[:, 0].float(), want, rtol=0.01, atol=0)


class Watch(TorchDispatchMode):
    """The most bytes of tensors alive that an operation left in the block, and the rows of the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.rows = 0, []
        self._seen: list[weakref.ref] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._seen += [weakref.ref(t) for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (ref() for ref in self._seen) if t is not None}
        self._seen = [ref for ref in self._seen if ref() is not None]
        self.most = max(self.most, sum(alive.values()))
        if func.overloadpacket is torch.ops.aten.mm:
            self.rows.append(len(args[0]))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_one_chunk_at_a_time(monkeypatch, dtype):
    """9 chunks of 16 tokens at vocabulary 5,000: at most 3.5 chunks of fp32 logits beside hidden states, weight and gradients."""
    monkeypatch.setattr(logprob, "PIECE", 8 * 5000)
    hidden, weight = draw(16 * 9 - 3, 5000, 2, dtype)
    with Watch() as watch:
        out = alone(hidden, weight, entropy=True, log_sum=True, top_k=2, chunk=16)
        (out.logp + out.entropy + out.log_sum + out.top_logp.sum(1)).sum().backward()
    gradients = 3 * 4 * weight.numel() + 2 * 4 * hidden.numel()  # bf16: an fp32 sum, a chunk's product and the result
    assert watch.most - gradients <= 3.5 * 4 * 16 * 5000
    assert watch.most > 2 * 16 * 5000, "it sees at least a chunk's logits"


def test_tokens_without_gradient_cost_nothing_in_backward():
    hidden, weight = draw(40, 9, 2)
    mask = torch.zeros(40)
    mask[[3, 17, 18]] = 1
    loss = (mask * alone(hidden, weight, chunk=8).logp).sum()
    with Watch() as watch:
        loss.backward()
    assert watch.rows == [3, 3]  # logits and the hidden states' gradient
    assert hidden.grad.abs().sum(1).nonzero().squeeze(1).tolist() == [2, 16, 17]  # position t - 1 speaks of t


def test_a_pack_of_the_wrong_size_is_refused():
    hidden, weight = draw(6, 9, 2)
    with pytest.raises(ValueError, match="1 context-parallel ranks with 6 hidden states each, but 8 targets; pad the pack"):
        alone(hidden, weight, targets=torch.zeros(8, dtype=torch.int64))
