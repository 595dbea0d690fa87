"""Keys and values, and the experts that tokens were sent to: of a running batch, and of an episode between two turns."""

from collections.abc import Sequence
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
    experts: Tensor | None = None  # [moe layers, 1, P, experts per token] int32

    @property
    def stores(self) -> tuple[Tensor, ...]:
        return (self.keys, self.values) if self.experts is None else (self.keys, self.values, self.experts)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class KV:
    """The cache of a batch, written in place. It speaks the part of transformers' ``Cache`` that decoders call.

    Rows end at the same column, ``length``; a row of n tokens fills the n columns before it. Buffers are
    ``[layers, rows, heads, columns, dim]`` and grow by half; columns before ``first`` are used by no row. The experts of
    a mixture are a third buffer of that form: one head, and the chosen experts as its numbers.
    """

    def __init__(self, layers: int, rows: int, capacity: int, length: int = 0):
        self.layers, self.rows, self.capacity, self.length, self.first = layers, rows, capacity, length, 0
        self._stores: tuple[Tensor, ...] = ()

    def _empty(self, like: Tensor, layers: int) -> Tensor:
        """A buffer for numbers like these ([..., heads, any, dim]). Zero: padding is masked but must be finite."""
        return torch.zeros((layers, self.rows, like.shape[-3], self.capacity, like.shape[-1]), dtype=like.dtype, device=like.device)

    def buffers(self) -> tuple[Tensor, ...]:
        """Keys and values, and experts if there are any."""
        assert self._stores, "no forward pass has filled this cache"
        return self._stores

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Appends ``[rows, heads, q, dim]`` behind ``length`` (which ``advance`` moves) and returns all columns."""
        if not self._stores:
            self._stores = self._empty(key, self.layers), self._empty(value, self.layers)
        end = self.length + key.shape[-2]
        if end > self.capacity:
            self._grow(end)
        keys, values = self._stores[:2]
        keys[layer, : self.rows, :, self.length : end] = key
        values[layer, : self.rows, :, self.length : end] = value
        return keys[layer, : self.rows, :, self.first : end], values[layer, : self.rows, :, self.first : end]

    def put_experts(self, layer: int, layers: int, chosen: Tensor) -> None:
        """Experts ``[rows * q, k]`` of the tokens whose keys ``update`` has just got, in the ``layer``-th of ``layers`` mixtures."""
        chosen = chosen.reshape(self.rows, 1, -1, chosen.shape[-1]).int()
        if len(self._stores) == 2:
            self._stores = (*self._stores, self._empty(chosen, layers))
        self._stores[2][layer, : self.rows, :, self.length : self.length + chosen.shape[2]] = chosen

    def experts(self, row: int, tokens: int) -> np.ndarray | None:
        """``[tokens, moe layers, k]`` int32 of the newest columns of a row; None for a model without experts."""
        if len(self._stores) < 3:
            return None
        return self._stores[2][:, row, 0, self.length - tokens : self.length].transpose(0, 1).cpu().numpy().copy()

    def advance(self, columns: int) -> None:
        self.length += columns

    def settle(self, columns: int, kept: Sequence[int]) -> None:
        """Of the newest ``columns`` columns, row i keeps the first ``kept[i]``; rows that keep fewer move right to end together."""
        most = max(kept)
        self.length += most - columns
        for row, count in enumerate(kept):
            shift = most - count
            for buffer in self.buffers() if shift else ():
                part = buffer[:, row, :, self.first : self.length]
                part[:, :, shift:] = part[:, :, : part.shape[2] - shift].clone()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length - self.first

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length - self.first

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length - self.first + query_length, 0

    def _grow(self, needed: int) -> None:
        self.capacity = max(needed, self.capacity + self.capacity // 2)
        old = self._stores
        self._stores = tuple(self._empty(store, store.shape[0]) for store in old)
        for new, full in zip(self._stores, old, strict=True):
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
        return Past(tokens, *(buffer[:, row, :, at].clone() for buffer in self.buffers()))

    def put_past(self, row: int, past: Past, count: int, end: int) -> None:
        """Writes the first ``count`` columns of ``past`` so that they end at column ``end``."""
        if not self._stores:
            self._stores = tuple(self._empty(store, store.shape[0]) for store in past.stores)
        for mine, other in zip(self._stores, past.stores, strict=True):
            mine[:, row, :, end - count : end] = other[:, :, :count]

    def take(self, source: "KV", to: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Copies rows ``rows`` [n] of ``source``, at columns ``columns`` [n, w], to rows ``to`` so that they end at ``length``."""
        if not self._stores:
            self._stores = tuple(self._empty(store, store.shape[0]) for store in source.buffers())
        for mine, other in zip(self._stores, source.buffers(), strict=True):
            picked = other[:, rows]
            index = columns[None, :, None, :, None].expand(*picked.shape[:3], -1, picked.shape[-1])
            mine[:, to, :, self.length - columns.shape[1] : self.length] = picked.gather(3, index)
