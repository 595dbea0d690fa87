"""Rows packed one after another: what every layer needs to know about them, worked out once per micro-batch."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

WASTE = 3 / 4  # rows share a bucket while the shortest is at least this part of the longest


@dataclass(frozen=True)
class Buckets:
    """Rows of similar length, padded to their longest, so that one attention call serves many rows.

    Rows of 3, 9 and 4 tokens make two buckets: (1 row of 9) and (2 rows of 4), with the slots
    ``9 + 2 * 4 = 17`` of which 16 hold a token.
    """

    shapes: tuple[tuple[int, int], ...]  # (rows, padded length) of each bucket
    token_of: torch.Tensor  # [slots] index of the packed token in each slot; a padding slot repeats its row's last
    slot_of: torch.Tensor  # [T] slot of each packed token

    @property
    def sizes(self) -> list[int]:
        return [rows * length for rows, length in self.shapes]


def buckets_of(lengths: np.ndarray, device: torch.device) -> Buckets | None:
    """Buckets for rows of these lengths; None when all are equal: then the pack is a rectangle as it lies."""
    if np.all(lengths == lengths[0]):
        return None
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    token_of, shapes = [], []
    at = 0
    while at < len(order):
        longest = int(lengths[order[at]])
        end = at + int(np.searchsorted(-lengths[order[at:]], -longest * WASTE, side="right"))
        rows = order[at:end]
        within = np.minimum(np.arange(longest)[None, :], lengths[rows, None] - 1)
        token_of.append((starts[rows, None] + within).ravel())
        shapes.append((len(rows), longest))
        at = end
    flat = np.concatenate(token_of)
    slot_of = np.empty(int(lengths.sum()), dtype=np.int64)
    slot_of[flat[::-1]] = np.arange(len(flat))[::-1]  # the first slot of a token wins over its repetitions
    return Buckets(tuple(shapes), torch.from_numpy(flat).to(device), torch.from_numpy(slot_of).to(device))


@dataclass
class PackedRows(PackedSeqParams):
    """What Megatron hands to the attention of every layer. Megatron itself sees one sequence ``[0, T]``.

    The rotary angles are looked up here by position within the row, so no layer loops over rows.
    """

    rows: int = 0
    buckets: Buckets | None = None
    cos: torch.Tensor | None = None  # [T, 1, head_dim / 2]
    sin: torch.Tensor | None = None


def rotary_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """[head_dim / 2] angle per position (2104.09864): ``theta ** (-2 i / head_dim)``."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def pack(lengths: np.ndarray, frequencies: torch.Tensor, dtype: torch.dtype, device: torch.device) -> PackedRows:
    """The layout of a pack with rows of these lengths; angles in fp32, their cosine and sine in ``dtype``."""
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    position = torch.from_numpy(np.arange(total) - np.repeat(starts, lengths)).to(device)
    angles = (position.float()[:, None] * frequencies.to(device))[:, None, :]
    bounds = torch.tensor([0, total], dtype=torch.int32, device=device)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=total,
        max_seqlen_kv=total,
        rows=len(lengths),
        buckets=buckets_of(lengths, device),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
    )
