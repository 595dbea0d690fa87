"""Context parallelism: ranks that share a pack's attention find what one process does, outputs and gradients."""

import types
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent.learner import attention
from mcore_agent.learner.attention import PackedAttention, _attend, blocked_keys, flex_keys
from mcore_agent.learner.context import BLOCK, context_mode, deal, gather_keys
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.packing import Segments, blocks_of, pack, rotary_frequencies, segments_of
from tests.ranks import ranks  # noqa: F401

CPU = torch.device("cpu")
DIM = 10


def drawn(lengths: list[int], heads: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and the weight of each output, in pack order; the same on every rank."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(sum(lengths), n, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in (heads, groups, groups, heads)]


def attended(lengths: list[int], heads: int, groups: int, dtype: torch.dtype, mode: str, cp: int, rank: int, group: Any) -> Any:
    """(places of this rank's tokens in the pack, [output, dq, dk, dv] at those places)."""
    p = pack(np.array(lengths), rotary_frequencies(DIM, 100.0), dtype, CPU, cp, rank, mode)
    *qkv, weight = (t[p.own] for t in drawn(lengths, heads, groups, dtype))
    for t in qkv:
        t.requires_grad_()
    config = attention.TransformerConfig(num_layers=1, hidden_size=heads * DIM, num_attention_heads=heads)
    module = PackedAttention(config, 1, pg_collection=types.SimpleNamespace(cp=group))
    out = module(*qkv, None, packed_seq_params=p)
    (out * weight.flatten(1)).sum().backward()
    return p.own, [t.numpy() for t in (out.detach(), *(t.grad for t in qkv))]


def shared(groups: Groups, packs: list[list[int]], *arguments: Any) -> list[Any]:
    return [attended(lengths, *arguments, groups.layout.cp, groups.cp_rank, groups.cp) for lengths in packs]


PACKS = [
    [1, 2, 1],
    [3, 200, 1, 1, 70, 64, 65, 4],  # rows of one token, and of one token more than is dealt together
    [332],
    [9, 3] + [1] * 16,  # the last ranks hold nothing but padding, which comes as rows of one token
]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("cp, heads, groups, mode", [(2, 6, 2, "heads"), (4, 8, 4, "heads"), (2, 3, 1, "keys"), (4, 6, 2, "keys")])
def test_equals_one_process(ranks, cp, heads, groups, mode, dtype, limit):  # noqa: F811
    assert context_mode(groups, heads, cp) == mode
    by_rank = ranks(shared, Layout(cp=cp), PACKS, heads, groups, dtype, mode)
    for lengths, *found in zip(PACKS, *by_rank, strict=True):
        _, want = attended(lengths, heads, groups, dtype, mode, 1, 0, None)
        assert sorted(np.concatenate([own for own, _ in found])) == list(range(sum(lengths)))
        for own, values in found:
            assert len(own) == sum(lengths) // cp
            for value, whole in zip(values, want, strict=True):
                np.testing.assert_allclose(value, whole[own], rtol=limit, atol=limit * np.abs(whole).max())


def test_context_mode():
    assert context_mode(4, 8, 2) == context_mode(4, 12, 4) == "heads"
    assert context_mode(1, 8, 2) == context_mode(2, 8, 4) == context_mode(3, 9, 2) == "keys"


def summed(groups: Groups) -> list[float]:
    """The gradient of this rank's key: of every rank's loss 256 times (rank 0) or once (others) the sum of the parts."""
    key = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    parts = [slice(0, 2), torch.tensor([2, 3, 3])]
    (a, _), (b, _) = gather_keys(key, key.detach(), torch.arange(4), parts, groups.cp)
    ((256.0 if groups.cp_rank == 0 else 1.0) * (a.sum() + b.sum())).backward()
    assert key.grad is not None
    return key.grad.flatten().tolist()


def test_key_gradients_are_summed_in_fp32(ranks):  # noqa: F811
    """256 + 1 is 256 in bf16; 256 + 1 + 1 + 1, rounded once, is 260, and twice that where a key is used twice."""
    assert ranks(summed, Layout(cp=4)) == [[260.0], [260.0], [260.0], [520.0]]


def by_flex(groups: Groups, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    p = pack(np.array(lengths), rotary_frequencies(DIM, 100.0), torch.float64, CPU, groups.layout.cp, groups.cp_rank, "keys")
    q, k, v, _ = (t[p.own] for t in drawn(lengths, 6, 1, torch.float64))
    with torch.no_grad():
        return tuple(keys(q, k, v, p, None, groups.cp) for keys in (blocked_keys, flex_keys))  # type: ignore[return-value]


def test_flex_keys(ranks):  # noqa: F811
    for want, found in ranks(by_flex, Layout(cp=2), [3, 70, 1]):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------------------------- planning


def loads(lengths: np.ndarray, cp: int) -> list[int]:
    """Keys that each rank's queries see."""
    position = np.concatenate([np.arange(n) for n in lengths])
    return [int((position[own] + 1).sum()) for own in deal(lengths, cp).reshape(cp, -1)]


@pytest.mark.parametrize("cp", [2, 4])
def test_deal_is_even(cp):
    rng = np.random.default_rng(cp)
    for rows in (1, 3, 20):
        lengths = rng.integers(500, 4000, rows)
        lengths = np.append(lengths, np.ones(-lengths.sum() % cp, dtype=np.int64))
        order = deal(lengths, cp)
        assert sorted(order) == list(range(lengths.sum()))
        assert np.array_equal(order, deal(lengths, cp))
        assert all((np.diff(own) > 0).all() for own in order.reshape(cp, -1))
        assert max(loads(lengths, cp)) <= 1.07 * np.mean(loads(lengths, cp))


def test_deal_by_hand():
    """A row of 128 and one of 64: the second half of the first is dearest, then the first half, level with the other row."""
    assert BLOCK == 64
    # rank 0 has 64 queries of 65..128 keys; rank 1, with room for 96, takes 64 of 1..64 keys and half of the next block
    order = deal(np.array([128, 64]), 2).reshape(2, -1)
    assert order[0].tolist() == [*range(64, 128), *range(160, 192)]
    assert order[1].tolist() == [*range(64), *range(128, 160)]


def test_pack_says_when_it_cannot_be_split():
    with pytest.raises(ValueError, match="5 tokens cannot be split over 2 context-parallel ranks"):
        pack(np.array([5]), rotary_frequencies(DIM, 100.0), torch.float32, CPU, 2, 0, "heads")


def test_segments():
    """Rows of 3, 4 and 2 tokens; a rank that holds places 1, 2, 3, 5 and 6."""
    found = segments_of(np.array([1, 2, 3, 5, 6]), np.array([3, 4, 2]))
    assert found.queries.tolist() == [[0, 2], [2, 3], [3, 5]]
    assert found.keys.tolist() == [[0, 3], [3, 4], [3, 7]]
    assert found.sizes.tolist() == [[2, 3], [1, 1], [2, 4]]


def by_segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, int]:
    """(attention through blocks_of, number of calls)."""
    blocks = blocks_of(segments, q.dtype, CPU)
    queries = attention._ToSlots.apply(q, blocks).split(blocks.sizes)
    done = [_attend(x, k[b.key_of], v[b.key_of], b.count, None, b.mask) for x, b in zip(queries, blocks.parts, strict=True)]
    return attention._ToTokens.apply(torch.cat(done), blocks), len(blocks.parts)


def test_rows_may_share_a_prefix():
    """A prefix of 5 tokens with continuations of 3 and 4: packed once, attended as two rows of 8 and 9."""
    q, k, v = (torch.randn(12, n, DIM, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (6, 2, 2))
    tree = Segments(np.array([[0, 5], [5, 8], [8, 12]]), np.array([[0, 5], [0, 5], [5, 8], [0, 5], [8, 12]]), np.array([0, 1, 1, 2, 2]))
    found, _ = by_segments(q, k, v, tree)
    for row in (torch.arange(8), torch.cat([torch.arange(5), torch.arange(8, 12)])):
        torch.testing.assert_close(found[row], _attend(q[row], k[row], v[row], 1, None), rtol=1e-12, atol=1e-12)


def test_small_segments_share_calls():
    """40 rows of 1 to 40 tokens, the later half of each: a few calls; 3 long ones: one each, without copies of keys."""
    lengths = np.concatenate([np.arange(1, 41), [2048] * 3])
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    own = np.flatnonzero(position >= np.repeat(lengths // 2, lengths))
    blocks = blocks_of(segments_of(own, lengths), torch.float32, CPU)
    assert [isinstance(b.key_of, slice) for b in blocks.parts[:4]] == [True, True, True, False]
    assert len(blocks.parts) <= 9
    assert sum(b.count * b.queries * b.keys for b in blocks.parts[3:]) <= 40 * 2048
