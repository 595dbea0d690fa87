"""Tensors for another process of this machine, through memory that both see: one copy in, none out."""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 64  # bytes


@dataclass(frozen=True)
class Packed:
    """What lies in a parcel: its size in bytes and (name, type, shape, first byte) of each tensor."""

    size: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]


class Parcel:
    """A file without a name that two processes map. ``descriptor`` is its number in this process.

    One side packs, the other unpacks, in turns: the memory is free again when the receiver has said so (E3).
    """

    def __init__(self, descriptor: int | None = None):
        self.descriptor = _nameless() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def pack(self, bucket: Sequence[tuple[str, Tensor]]) -> Packed:
        """Copies CPU tensors in; the parcel grows to what it needs."""
        places, size = [], 0
        for name, tensor in bucket:
            places.append((name, tensor.dtype, tuple(tensor.shape), size))
            size += -(-tensor.nbytes // ALIGN) * ALIGN
        packed = Packed(size, tuple(places))
        if size > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, size)
        for (_, tensor), (_, view) in zip(bucket, self.views(packed), strict=True):
            view.copy_(tensor)
        return packed

    def views(self, packed: Packed) -> Iterator[tuple[str, Tensor]]:
        """The tensors where they lie, valid until the next ``pack`` of either side."""
        if packed.size == 0:
            yield from ((name, torch.empty(shape, dtype=dtype)) for name, dtype, shape, _ in packed.tensors)
            return
        if self._map is None or len(self._map) < packed.size:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        for name, dtype, shape, start in packed.tensors:
            size = torch.Size(shape).numel() * dtype.itemsize
            yield name, whole[start : start + size].view(dtype).view(shape)

    def close(self) -> None:
        self._map = None  # unmapped when no tensor looks at it any more
        os.close(self.descriptor)


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mcore-agent")
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())
