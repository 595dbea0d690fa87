"""Gives the learner's memory back while others need the device, and takes it again with the same bits.

Every tensor keeps its place: only the storage under it is freed (resized to nothing) and later filled again, so that
parameters stay views into Megatron's buffers. Megatron 0.19.2's own ``offload_to_cpu`` of optimizers moves tensors
instead, which cuts fp32 parameters off from the buffers; its ``offload_grad_buffers`` is used for the gradients.
"""

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer

from mcore_agent.learner.optimizer import live_parts

AWAKE, TRIMMED, ASLEEP = "AWAKE", "TRIMMED", "ASLEEP"
MISSING = {AWAKE: "", TRIMMED: "gradients and optimizer state", ASLEEP: "parameters, gradients and optimizer state"}


class OffloadError(RuntimeError):
    """Something was asked of the learner while what it needs was given back. The message says what to call."""


class Storages:
    """Device memory under some tensors, which can be away. Bits survive: ``free`` copies them to the host, ``restore`` back."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def free(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Host copies are pinned when the storage is on a GPU. Nothing may use the tensors until ``restore``."""
        leaving = []
        for storage in storages:
            pinned = storage.device.type == "cuda"
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_bytes(storage), non_blocking=pinned)
            leaving.append((storage, host))
        torch.cuda.synchronize()
        for storage, _ in leaving:
            storage.resize_(0)
        self._away += leaving

    def restore(self) -> None:
        """Takes the memory again and fills it. The host copies are dropped."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=host.is_pinned())
        torch.cuda.synchronize()
        self._away = []

    def host_bytes(self) -> int:
        return sum(host.numel() for _, host in self._away)


class Offload:
    """What of the learner's memory is here: all (AWAKE), parameters only (TRIMMED), or nothing (ASLEEP).

    ``to_host``: parameters and optimizer state go to host memory. Without it they stay where they are and only the
    gradients, which hold nothing worth keeping between steps, are freed: the choice on a machine that has only host memory.
    Each rank acts for itself; there is no collective. ``trim``, ``sleep`` and ``wake`` may be called in any state.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, to_host: bool):
        self.state = AWAKE
        self._chunks, self._optimizer, self._to_host = chunks, optimizer, to_host
        self._parameters, self._moments = Storages(), Storages()

    def trim(self) -> None:
        """Frees gradients and optimizer state (moments and fp32 master weights)."""
        if self.state != AWAKE:
            return
        self._optimizer.zero_grad()  # main gradients are views into the buffers
        if self._to_host:
            self._moments.free(self._storages_of_moments())
        for chunk in self._chunks:
            chunk.offload_grad_buffers()
        self.state = TRIMMED
        _return_to_system()

    def sleep(self) -> None:
        """Frees the parameters too."""
        self.trim()
        if self.state == TRIMMED and self._to_host:
            self._parameters.free(self._storages_of_parameters())
            _return_to_system()
        self.state = ASLEEP

    def wake(self) -> None:
        """Everything is here again, bit for bit; the gradients are zero."""
        self._parameters.restore()
        self._moments.restore()
        for chunk in self._chunks:
            chunk.restore_grad_buffers()
        self.state = AWAKE

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wakes for the time of a block (a checkpoint, say), after which the same is away as before it."""
        before = self.state
        self.wake()
        try:
            yield
        finally:
            if before != AWAKE:
                self.trim()
            if before == ASLEEP:
                self.sleep()

    @contextmanager
    def parameters(self) -> Iterator[None]:
        """The parameters are here for the time of a block (a publish, say), after which they are away again if they were."""
        if self.state != ASLEEP:
            yield
            return
        self._parameters.restore()
        self.state = TRIMMED
        try:
            yield
        finally:
            self.sleep()

    def need(self, what: str, parameters_only: bool = False) -> None:
        """To be called before memory is touched. Raises OffloadError when something that ``what`` needs is away."""
        if self.state == AWAKE or (parameters_only and self.state == TRIMMED):
            return
        raise OffloadError(f"the learner cannot {what}: its {MISSING[self.state]} are given back (state {self.state}); call wake first")

    def residual_bytes(self) -> dict[str, int]:
        """Bytes that are allocated now under the learner's tensors, by kind, and those of the copies on the host."""
        gradients = (b.grad_data.untyped_storage() for b in self._buffers() if b.grad_data is not None)
        return {
            "parameters": sum(s.nbytes() for s in self._storages_of_parameters()),
            "optimizer": sum(s.nbytes() for s in self._storages_of_moments()),
            "gradients": sum(s.nbytes() for s in gradients),
            "host": self._parameters.host_bytes() + self._moments.host_bytes(),
        }

    # ------------------------------------------------------------------------------------------------ what there is

    def _buffers(self) -> list:
        return [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]

    def _storages_of_parameters(self) -> list[torch.UntypedStorage]:
        buffers = (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        frozen = (p.data for chunk in self._chunks for p in chunk.parameters() if not p.requires_grad)
        return _distinct([*buffers, *frozen])

    def _storages_of_moments(self) -> list[torch.UntypedStorage]:
        """Optimizer state on the device of the parameters; what an offloaded optimizer keeps on the host is not here."""
        parameters = self._storages_of_parameters()
        known, where = {s._cdata for s in parameters}, {s.device for s in parameters}
        tensors = []
        for part in live_parts(self._optimizer):
            tensors += [p.data for group in part.param_groups for p in group["params"]]
            tensors += [t for state in part.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        return [s for s in _distinct(tensors) if s._cdata not in known and s.device in where]


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """[nbytes] uint8 view of all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _return_to_system() -> None:
    """Freed memory goes back: on a GPU from torch's cache, on the host from glibc's heap, which keeps what is not at its end."""
    torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
