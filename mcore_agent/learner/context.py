"""Context parallelism: which rank holds which tokens of a pack, and what ranks exchange to attend.

Two schemes. ``heads``: each rank holds a stretch of the pack; queries, keys and values are exchanged so that each rank
has some heads of all tokens (2309.14509), attends whole rows, and sends the results back. ``keys``, where there are
too few key-value heads for that: keys and values are gathered, queries stay (2407.21783, section 3.3.2).
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

BLOCK = 64  # most consecutive tokens that are dealt together


def context_mode(groups: int, heads: int, cp: int) -> str:
    """``heads`` while this rank's ``groups`` key-value heads and ``heads`` query heads can be dealt to cp ranks, else ``keys``."""
    return "heads" if groups % cp == 0 and heads % cp == 0 else "keys"


def deal(lengths: np.ndarray, cp: int) -> np.ndarray:
    """[T] int64: the tokens of a pack by owner, T / cp for each of ``cp`` ranks, in pack order within a rank.

    Rows are cut into blocks of 64 tokens. The one whose queries have most keys goes to the rank that has fewest so
    far, until a rank is full; a block that does not fit is cut. ``cp`` divides T.
    """
    starts = np.cumsum(lengths) - lengths
    heap: list[tuple[float, int, int, int]] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        for at in range(0, length, BLOCK):
            size = min(BLOCK, length - at)
            heap.append((-_pairs(at, size), start + at, at, size))
    heapq.heapify(heap)
    room = [int(lengths.sum()) // cp] * cp
    load = [0.0] * cp
    owned: list[list[np.ndarray]] = [[] for _ in range(cp)]
    while heap:
        _, place, at, size = heapq.heappop(heap)
        rank = min((r for r in range(cp) if room[r]), key=lambda r: (load[r], r))
        fits = min(size, room[rank])
        owned[rank].append(np.arange(place, place + fits))
        room[rank] -= fits
        load[rank] += _pairs(at, fits)
        if fits < size:
            heapq.heappush(heap, (-_pairs(at + fits, size - fits), place + fits, at + fits, size - fits))
    return np.concatenate([np.sort(np.concatenate(blocks)) for blocks in owned])


def _pairs(at: int, size: int) -> float:
    """Keys seen by ``size`` queries that begin at position ``at`` of their row, summed."""
    return size * (at + (size + 1) / 2)


class _ToHeads(torch.autograd.Function):
    """``[L, cp * n, d]`` (this rank's tokens, n heads for each rank) -> ``[cp * L, n, d]`` (all tokens, this rank's heads)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(grad, ctx.group), None


class _ToTokens(torch.autograd.Function):
    """The way back of ``_ToHeads``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(grad, ctx.group), None


def _to_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    return _swapped(parts, group).flatten(0, 1)


def _to_tokens(x: torch.Tensor, group: Any) -> torch.Tensor:
    parts = x.contiguous().unflatten(0, (group.size(), -1))
    return _swapped(parts, group).transpose(0, 1).flatten(1, 2)


def _swapped(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Part r ``[cp, ...]`` goes to rank r; the result holds what each rank sent."""
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out


def heads_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query ``[L, heads, d]``, key and value ``[L, groups, d]`` -> ``[T, heads / cp, d]`` and ``[T, groups / cp, d]``.

    Token order is rank 0's, rank 1's, and so on. One all-to-all over ``group``, forward and backward.
    """
    cp = group.size()
    counts = [t.shape[1] // cp for t in (q, k, v)]
    by_rank = torch.cat([t.unflatten(1, (cp, -1)) for t in (q, k, v)], 2).flatten(1, 2)
    whole: Sequence[torch.Tensor] = _ToHeads.apply(by_rank, group).split(counts, 1)
    return whole[0], whole[1], whole[2]


def tokens_of(out: torch.Tensor, group: Any) -> torch.Tensor:
    """``[T, heads / cp, d]`` -> ``[L, heads, d]``. One all-to-all over ``group``, forward and backward."""
    return _ToTokens.apply(out, group)


class _Gather(torch.autograd.Function):
    """``[L, n, d]`` of every rank -> the parts of ``[T, n, d]`` that are asked for, in pack order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, parts: Sequence[slice | torch.Tensor], group: Any) -> Any:
        ctx.order, ctx.parts, ctx.group, ctx.dtype = order, parts, group, x.dtype
        by_owner = x.new_empty((len(order), *x.shape[1:]))
        dist.all_gather_single(by_owner, x.contiguous(), group=group)
        whole = torch.empty_like(by_owner).index_copy_(0, order, by_owner)
        return tuple(whole[part] for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros((len(ctx.order), *grads[0].shape[1:]), dtype=wide, device=grads[0].device)
        for part, grad in zip(ctx.parts, grads, strict=True):
            if isinstance(part, slice):
                total[part] += grad
            else:
                total.index_add_(0, part, grad.to(wide))
        own = total.new_empty((len(ctx.order) // ctx.group.size(), *total.shape[1:]))
        dist.reduce_scatter_single(own, total.index_select(0, ctx.order), group=ctx.group)
        return own.to(ctx.dtype), None, None, None


def gather_keys(
    k: torch.Tensor, v: torch.Tensor, order: torch.Tensor, parts: Sequence[slice | torch.Tensor], group: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Key and value ``[L, groups, d]`` of this rank -> those at the places in the pack that each of ``parts`` names.

    ``order`` [T] is ``deal``'s. One all-gather over ``group`` forward, one reduce-scatter backward: gradients are
    summed over parts and ranks in fp32 at least.
    """
    return [tuple(t.chunk(2, 1)) for t in _Gather.apply(torch.cat([k, v], 1), order, parts, group)]  # type: ignore[misc]
