"""What attends packed rows on a GPU, against torch's own attention row by row in fp32."""

import importlib.util

import numpy as np
import pytest
import torch

from mcore_agent.learner import attention
from mcore_agent.learner.packing import PackedRows, pack, rotary_frequencies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HEADS, GROUPS, DIM = 6, 2, 64
PACKS = ([5], [128] * 3, [1, 300, 129, 1, 64, 700], [1] * 7)


def packed(lengths: list[int], dtype: torch.dtype) -> PackedRows:
    return pack(np.array(lengths), rotary_frequencies(DIM, 100.0), dtype, torch.device("cuda"))


def by_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    rows = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
    return torch.cat([attention._attend(*row, 1, None) for row in rows])


def compare(rows, lengths: list[int], dtype: torch.dtype, limit: float) -> None:
    """Output and gradients of one way to attend, each within ``limit`` of the largest value."""
    torch.manual_seed(sum(lengths))
    drawn = [torch.randn(sum(lengths), n, DIM, device="cuda").to(dtype) for n in (HEADS, GROUPS, GROUPS, HEADS)]
    found_in, want_in = [t.clone().requires_grad_() for t in drawn[:3]], [t.float().requires_grad_() for t in drawn[:3]]
    p = packed(lengths, dtype)
    found, want = rows(*found_in, p, None), by_row(*want_in, lengths)
    (found * drawn[3]).sum().backward()
    (want * drawn[3]).sum().backward()
    pairs = [(found, want), *((a.grad, b.grad) for a, b in zip(found_in, want_in, strict=True))]
    for a, b in pairs:
        assert a.shape == b.shape
        assert (a.float() - b).abs().max() <= limit * b.abs().max()


@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_buckets(lengths):
    compare(attention.bucketed_rows, lengths, torch.float32, 1e-4)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_flex(lengths, dtype, limit):
    compare(attention.flex_rows, lengths, dtype, limit)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_flash(lengths):
    compare(attention.flash_rows, lengths, torch.bfloat16, 2e-2)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_engine(lengths):
    compare(attention.engine_rows, lengths, torch.bfloat16, 2e-2)


def test_flex_for_some_queries():
    """The mask of a rank that holds every third token, against the whole pack's attention at those tokens."""
    lengths = [1, 300, 129, 64, 700]
    q, k, v = (torch.randn(sum(lengths), n, DIM, device="cuda") for n in (HEADS, GROUPS, GROUPS))
    p = packed(lengths, torch.float32)
    p.own = np.arange(0, sum(lengths), 3)
    found = attention._flex(q[p.place], k, v, attention._flex_mask(p, p.place, p.first), None)
    torch.testing.assert_close(found, by_row(q, k, v, lengths)[p.place], rtol=5e-3, atol=5e-3)


def test_attention_chooses_a_kernel_that_is_there():
    rows, keys = attention.kernels(torch.bfloat16, True, attention._installed)
    assert keys is attention.flex_keys
    compare(rows, PACKS[2], torch.bfloat16, 2e-2)
