"""Log-probabilities and entropies from vocabulary-parallel logits equal those of torch's log_softmax, gradients too."""

import numpy as np
import pytest
import torch

from mcore_agent.learner import logprob
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.logprob import Head, _Columns
from tests.ranks import ranks  # noqa: F401

VOCAB = 11  # padded to 12 on two ranks
SIZE = 7


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(SIZE, VOCAB, generator=generator)
    targets = torch.randint(0, VOCAB, (SIZE,), generator=generator)
    return logits, targets, torch.randn(SIZE, generator=generator), torch.randn(SIZE, generator=generator)


def by_definition(temperature: float, entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, targets, a, b = data()
    logits.requires_grad_()
    table = torch.log_softmax(logits / temperature, -1)
    logp = table[torch.arange(SIZE), targets]
    spread = -(table.exp() * table).sum(-1)
    ((a * logp).sum() + (b * spread).sum() * entropy).backward()
    return logp.detach(), spread.detach(), logits.grad


def in_parallel(groups: Groups, temperature: float, entropy: bool, part: int) -> tuple[torch.Tensor, ...]:
    logits, targets, a, b = data()
    width = -(-VOCAB // groups.layout.tp)
    first = width * groups.tp_rank
    mine = torch.full((SIZE, width), 1e4)  # what the padding columns hold must not matter
    valid = min(width, VOCAB - first)
    mine[:, :valid] = logits[:, first : first + valid]
    mine.requires_grad_()
    head = Head(targets, torch.ones(SIZE, dtype=torch.bool), temperature, entropy, first, valid, groups.tp)
    logprob.PART = part
    logp, spread = _Columns.apply(mine * 1, head)
    ((a * logp).sum() + (b * spread).sum()).backward()
    return logp.detach(), spread.detach(), mine.grad[:, :valid], mine.grad[:, valid:]


@pytest.mark.defect("E16")
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
@pytest.mark.parametrize(("temperature", "entropy", "part"), [(1.0, False, 1 << 19), (0.7, True, 1 << 19), (1.3, True, 8)])
def test_equals_log_softmax(ranks, layout, temperature, entropy, part):  # noqa: F811
    logp, spread, grad = by_definition(temperature, entropy)
    results = ranks(in_parallel, layout, temperature, entropy, part)
    for found, found_spread, _, padding in results:
        np.testing.assert_allclose(found, logp, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found_spread, spread if entropy else torch.zeros(SIZE), rtol=1e-5, atol=1e-6)
        assert not padding.any()
    np.testing.assert_allclose(torch.cat([r[2] for r in results], 1), grad, rtol=1e-5, atol=1e-6)
