"""Keys and values: of a running batch, and of an episode between two turns."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Past:
    """What one row leaves behind for the next turn."""

    tokens: np.ndarray  # [P] int64
    keys: Tensor  # [layers, heads, P, dim]
    values: Tensor  # [layers, heads, P, dim]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class KV:
    """The cache of a batch, written in place. It speaks the part of transformers' ``Cache`` that decoders call.

    Rows end at the same column, ``length``; a row of n tokens fills the n columns before it. Buffers are
    ``[layers, rows, heads, columns, dim]`` and grow by half; columns before ``first`` are used by no row.
    """

    def __init__(self, layers: int, rows: int, capacity: int, length: int = 0):
        self.layers, self.rows, self.capacity, self.length, self.first = layers, rows, capacity, length, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Buffers for keys and values like these ([..., heads, any, dim]). Zero: padding is masked but must be finite."""
        for name, like in (("keys", key), ("values", value)):
            shape = (self.layers, self.rows, like.shape[-3], self.capacity, like.shape[-1])
            setattr(self, name, torch.zeros(shape, dtype=like.dtype, device=like.device))

    def buffers(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None, "no forward pass has filled this cache"
        return self.keys, self.values

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Appends ``[rows, heads, q, dim]`` behind ``length`` (which ``advance`` moves) and returns all columns."""
        if self.keys is None:
            self.allocate(key, value)
        end = self.length + key.shape[-2]
        if end > self.capacity:
            self._grow(end)
        keys, values = self.buffers()
        keys[layer, : self.rows, :, self.length : end] = key
        values[layer, : self.rows, :, self.length : end] = value
        return keys[layer, : self.rows, :, self.first : end], values[layer, : self.rows, :, self.first : end]

    def advance(self, columns: int) -> None:
        self.length += columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - self.first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length - self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length - self.first + query_length, 0

    def _grow(self, needed: int) -> None:
        self.capacity = max(needed, self.capacity + self.capacity // 2)
        old = self.buffers()
        self.allocate(*old)
        for new, full in zip(self.buffers(), old, strict=True):
            new[:, :, :, : self.length] = full[:, : self.rows, :, : self.length]

    def remove(self, row: int) -> None:
        """Takes a row out; the last row moves to its place."""
        self.rows -= 1
        if row != self.rows:
            for buffer in self.buffers():
                buffer[:, row, :, : self.length] = buffer[:, self.rows, :, : self.length]

    def past(self, row: int, tokens: np.ndarray) -> Past:
        """A copy of one row's columns; ``tokens`` are the row's tokens that have keys and values."""
        at = slice(self.length - len(tokens), self.length)
        keys, values = self.buffers()
        return Past(tokens, keys[:, row, :, at].clone(), values[:, row, :, at].clone())

    def put_past(self, row: int, past: Past, count: int, end: int) -> None:
        """Writes the first ``count`` columns of ``past`` so that they end at column ``end``."""
        if self.keys is None:
            self.allocate(past.keys[0], past.values[0])
        keys, values = self.buffers()
        keys[:, row, :, end - count : end] = past.keys[:, :, :count]
        values[:, row, :, end - count : end] = past.values[:, :, :count]

    def take(self, source: "KV", to: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Copies rows ``rows`` [n] of ``source``, at columns ``columns`` [n, w], to rows ``to`` so that they end at ``length``."""
        if self.keys is None:
            self.allocate(*source.buffers())
        for mine, other in zip(self.buffers(), source.buffers(), strict=True):
            picked = other[:, rows]
            index = columns[None, :, None, :, None].expand(*picked.shape[:3], -1, picked.shape[-1])
            mine[:, to, :, self.length - columns.shape[1] : self.length] = picked.gather(3, index)
