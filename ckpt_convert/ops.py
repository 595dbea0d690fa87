"""Two-way operators between Hugging Face tensors and the tensor-parallel shards of one Megatron parameter.

Each operator is one correspondence with two directions: ``shard`` makes the shard of one tensor-parallel rank
and reads no more of the sources than that shard needs; ``whole`` is its inverse on all the shards. Both only
move elements, so a round trip is bit-exact.

>>> merge = Rows(parts=2)                                  # gate [2, 1] and up [2, 1] -> linear_fc1 [4, 1]
>>> gate, up = torch.tensor([[1], [2]]), torch.tensor([[3], [4]])
>>> merge.shard([gate, up], tp=2, rank=1).flatten().tolist()
[2, 4]
>>> [t.flatten().tolist() for t in merge.whole([merge.shard([gate, up], 2, r) for r in (0, 1)])]
[[1, 2], [3, 4]]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ckpt_convert.errors import ConvertError


class Op(Protocol):
    """``split`` is the dimension of the Megatron parameter that tensor parallelism splits, None for a copy."""

    @property
    def split(self) -> int | None: ...

    def shard(self, sources: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        """The shard of rank ``rank`` of ``tp`` from the Hugging Face tensors. Raises ConvertError if tp does not divide."""
        ...

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors from the shards of all ``tp`` ranks, in rank order."""
        ...


def _part(t: Tensor, dim: int, tp: int, rank: int) -> Tensor:
    if t.shape[dim] % tp:
        raise ConvertError(f"tensor parallel size {tp} does not divide dimension {dim} of {tuple(t.shape)}; use a tp that does")
    width = t.shape[dim] // tp
    return t.narrow(dim, rank * width, width)


@dataclass(frozen=True)
class Copy:
    """One tensor, the same on every rank. ``whole`` refuses copies that differ."""

    split: int | None = None

    def shard(self, sources: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return sources[0]

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        for rank, other in enumerate(shards[1:], start=1):
            if not torch.equal(shards[0], other):
                raise ConvertError(f"a replicated parameter differs between tensor parallel ranks 0 and {rank}")
        return [shards[0]]


@dataclass(frozen=True)
class Columns:
    """One matrix ``[out, in]``, split along ``in`` (a row-parallel linear layer)."""

    split: int | None = 1

    def shard(self, sources: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return _part(sources[0], 1, tp, rank)

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), 1)]


@dataclass(frozen=True)
class Rows:
    """``parts`` equal matrices ``[out, in]``, each split along ``out``; a rank holds its rows of part 0, then of part 1 …"""

    parts: int = 1
    split: int | None = 0

    def shard(self, sources: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return torch.cat([_part(t, 0, tp, rank) for t in sources]) if self.parts > 1 else _part(sources[0], 0, tp, rank)

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        pieces = [s.chunk(self.parts) for s in shards]
        return [torch.cat([p[i] for p in pieces]) for i in range(self.parts)]


@dataclass(frozen=True)
class Qkv:
    """Query, key and value interleaved by key-value group: ``[groups, (q q … k v) * head_dim, in]``, split by group.

    With 2 groups of 2 query heads, Megatron's rows are q0 q1 k0 v0 | q2 q3 k1 v1.
    """

    groups: int
    head_dim: int
    split: int | None = 0

    def shard(self, sources: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        inputs = sources[0].shape[1]
        grouped = [_part(t.reshape(self.groups, -1, inputs), 0, tp, rank) for t in sources]
        return torch.cat(grouped, 1).reshape(-1, inputs)

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        inputs = shards[0].shape[1]
        grouped = torch.cat([s.reshape(self.groups // len(shards), -1, inputs) for s in shards])
        query = grouped.shape[1] - 2 * self.head_dim
        return [t.reshape(-1, inputs) for t in grouped.split([query, self.head_dim, self.head_dim], 1)]


def padded_vocabulary(size: int, tp: int) -> int:
    """Rows of Megatron's embedding: the smallest multiple of ``tp`` that holds ``size``."""
    return -(-size // tp) * tp


@dataclass(frozen=True)
class Vocabulary:
    """An embedding or output matrix ``[size, in]``, split by rows after padding with zero rows to a multiple of tp."""

    size: int
    split: int | None = 0

    def shard(self, sources: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        rows = padded_vocabulary(self.size, tp) // tp
        mine = sources[0][rank * rows : (rank + 1) * rows]
        missing = rows - mine.shape[0]
        return torch.cat([mine, mine.new_zeros(missing, mine.shape[1])]) if missing else mine

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.size]]
