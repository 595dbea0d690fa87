"""Packed attention, rotary position and norm against their definitions, row by row, in fp64."""

import math

import numpy as np
import pytest
import torch

from mcore_agent.learner.attention import _causal, _RmsNorm, _Rotate, _ToSlots, _ToTokens
from mcore_agent.learner.packing import PackedRows, buckets_of, pack, rotary_frequencies

CPU = torch.device("cpu")
HEADS, GROUPS, DIM = 6, 2, 10


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: PackedRows) -> torch.Tensor:
    """What PackedAttention.forward does, without a Megatron config."""
    from mcore_agent.learner.attention import PackedAttention

    module = torch.nn.Module()
    module.scale = None  # type: ignore[assignment]
    return PackedAttention.forward(module, q, k, v, None, packed_seq_params=p)  # type: ignore[arg-type]


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], theta: float) -> torch.Tensor:
    """Softmax attention of each row by itself; pair (i, i + d/2) turned by position * theta^(-2i/d)."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for t in range(len(x)):
            for i in range(DIM // 2):
                angle = t * theta ** (-2 * i / DIM)
                a, b = x[t, :, i], x[t, :, i + DIM // 2]
                out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, :, i + DIM // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    rows, at = [], 0
    for n in lengths:
        rq, rk, rv = (x[at : at + n] for x in (q, k, v))
        rq, rk = turned(rq), turned(rk)
        heads = []
        for h in range(HEADS):
            g = h // (HEADS // GROUPS)
            scores = rq[:, h] @ rk[:, g].T / math.sqrt(DIM)
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ rv[:, g])
        rows.append(torch.cat(heads, -1))
        at += n
    return torch.cat(rows)


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 9, 4, 1, 7], [1, 1], [2, 30, 29, 6, 6]], ids=str)
def test_attention(lengths):
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    inputs = [torch.randn(total, n, DIM, generator=generator, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS)]
    weight = torch.randn(total, HEADS * DIM, generator=generator, dtype=torch.float64)
    found_in, want_in = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    p = pack(np.array(lengths), rotary_frequencies(DIM, 100.0).double(), torch.float64, CPU)
    p.cos, p.sin = exact_angles(lengths, 100.0)
    found, want = attend(*found_in, p), by_definition(*want_in, lengths, 100.0)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    (found * weight).sum().backward()
    (want * weight).sum().backward()
    for a, b in zip(found_in, want_in, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


def exact_angles(lengths: list[int], theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.cat([torch.arange(n, dtype=torch.float64) for n in lengths])
    angles = position[:, None] * theta ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    return angles.cos()[:, None], angles.sin()[:, None]


def test_angles_are_those_of_the_position_in_the_row():
    lengths = [3, 9, 4]
    p = pack(np.array(lengths), rotary_frequencies(DIM, 100.0), torch.float32, CPU)
    cos, sin = exact_angles(lengths, 100.0)
    torch.testing.assert_close(p.cos, cos.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(p.sin, sin.float(), rtol=1e-5, atol=1e-6)


def test_buckets():
    """Rows of 3, 9 and 4 tokens: 9 alone, then 4 and 3 (at least 3/4 of 4) padded to 4."""
    b = buckets_of(np.array([3, 9, 4]), CPU)
    assert b is not None and b.shapes == ((1, 9), (2, 4))
    assert b.token_of.tolist() == [*range(3, 12), 12, 13, 14, 15, 0, 1, 2, 2]
    assert b.slot_of.tolist() == [13, 14, 15, *range(9), 9, 10, 11, 12]
    assert buckets_of(np.array([6, 6]), CPU) is None


def test_functions_have_the_gradients_of_their_values():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    b = buckets_of(np.array([3, 7, 4]), CPU)
    assert torch.autograd.gradcheck(lambda x, w: _RmsNorm.apply(x, w, 1e-5), (draw(5, 2, 6), draw(6)))
    cos, sin = exact_angles([5], 100.0)
    assert torch.autograd.gradcheck(lambda x: _Rotate.apply(x, cos, sin), (draw(5, 3, DIM),))
    assert torch.autograd.gradcheck(lambda x: _ToTokens.apply(_ToSlots.apply(x, b), b) * 2, (draw(14, 2),))
    assert torch.autograd.gradcheck(lambda q, k, v: _causal(q, k, v, 2, None), (draw(6, 4, 3), draw(6, 2, 3), draw(6, 2, 3)))
