"""Packed attention, rotary position and norm against their definitions, row by row, in fp64."""

import math

import numpy as np
import pytest
import torch

from mcore_agent.learner import attention
from mcore_agent.learner.attention import _attend, _RmsNorm, _Rotate, _ToSlots, _ToTokens
from mcore_agent.learner.packing import PackedRows, buckets_of, pack, rotary_frequencies

CPU = torch.device("cpu")
HEADS, GROUPS, DIM = 6, 2, 10


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: PackedRows, rows=attention.bucketed_rows) -> torch.Tensor:
    module = attention.PackedAttention(attention.TransformerConfig(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS), 1)
    module.rows = rows
    return module(q, k, v, None, packed_seq_params=p)


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


ROWS = ([5], [4, 4, 4], [3, 9, 4, 1, 7], [1, 1], [2, 90, 30, 29, 6, 6])


def drawn(total: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total)
    return [torch.randn(total, n, DIM, generator=generator, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS)]


def packed(lengths: list[int]) -> PackedRows:
    p = pack(np.array(lengths), rotary_frequencies(DIM, 100.0).double(), torch.float64, CPU)
    p.cos, p.sin = exact_angles(lengths, 100.0)
    return p


@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_attention(lengths):
    inputs = drawn(sum(lengths))
    weight = torch.randn(sum(lengths), HEADS * DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found_in, want_in = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    found, want = attend(*found_in, packed(lengths)), by_definition(*want_in, lengths, 100.0)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    (found * weight).sum().backward()
    (want * weight).sum().backward()
    for a, b in zip(found_in, want_in, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("lengths", ROWS[1:3], ids=str)
def test_flex_attention(lengths):
    """What a GPU without other kernels runs; off the GPU torch has no backward for it."""
    inputs = drawn(sum(lengths))
    found = attend(*inputs, packed(lengths), attention.flex_rows)
    torch.testing.assert_close(found, by_definition(*inputs, lengths, 100.0), rtol=1e-12, atol=1e-12)


def test_kernels():
    def names(dtype: torch.dtype, cuda: bool, *packages: str) -> list[str]:
        return [f.__name__ for f in attention.kernels(dtype, cuda, lambda package: package in packages)]

    both = ("transformer_engine", "flash_attn")
    assert names(torch.bfloat16, False, *both) == names(torch.float64, True, *both) == ["bucketed_rows", "blocked_keys"]
    assert names(torch.bfloat16, True, *both) == ["engine_rows", "flex_keys"]
    assert names(torch.bfloat16, True, "flash_attn") == ["flash_rows", "flex_keys"]
    assert names(torch.float32, True, *both) == names(torch.bfloat16, True) == ["flex_rows", "flex_keys"]


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
    """Rows of 30, 90 and 40 tokens: 90 alone, as 90^2 - 40^2 is more than two calls' pairs, then 40 and 30 padded to 40."""
    b = buckets_of(np.array([30, 90, 40]), CPU)
    assert b is not None and b.shapes == ((1, 90), (2, 40))
    assert b.token_of.tolist() == [*range(30, 120), *range(120, 160), *range(30), *[29] * 10]
    assert b.slot_of.tolist() == [*range(130, 160), *range(90), *range(90, 130)]
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
    assert torch.autograd.gradcheck(lambda q, k, v: _attend(q, k, v, 2, None).flatten(1), (draw(6, 4, 3), draw(6, 2, 3), draw(6, 2, 3)))
