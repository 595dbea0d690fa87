"""Memory of the GPUs that a server shares with a learner: what it gave back, and whether it can have it again."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence

import psutil

from mcore_agent.protocols import EngineDown

FREE_S = 60.0  # until memory that another process gives back is there
SHARE = 0.98  # of what was freed must be free again: drivers round


def free_bytes(gpus: Sequence[int]) -> int:
    """Free memory of the GPU that has least."""
    import torch

    return min(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)


def device_memory(pid: int, gpus: Sequence[int]) -> dict[str, int]:
    """Bytes of GPU memory that a process and its descendants hold, as ``device``; nothing without GPUs."""
    if not gpus:
        return {}
    import pynvml

    pynvml.nvmlInit()
    try:
        root = psutil.Process(pid)
        pids = {root.pid, *(child.pid for child in root.children(recursive=True))}
        total = 0
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    total += process.usedGpuMemory or 0
        return {"device": total}
    except psutil.NoSuchProcess:
        return {"device": 0}
    finally:
        pynvml.nvmlShutdown()


class Freed:
    """Bytes on each GPU that tags gave back when they went to sleep."""

    def __init__(self, gpus: Sequence[int]):
        self._gpus = tuple(gpus)
        self._bytes: dict[str, int] = {}

    @contextlib.contextmanager
    def measured(self, tags: Iterable[str]) -> Iterator[None]:
        """Notes what the block frees."""
        before = free_bytes(self._gpus) if self._gpus else 0
        yield
        if self._gpus:
            freed = max(0, free_bytes(self._gpus) - before)
            self._bytes |= dict.fromkeys(sorted(tags), 0) | {min(tags): freed}

    async def available(self, tags: Iterable[str]) -> None:
        """Waits until as much is free as the tags gave back: the learner's memory may be on its way.

        Raises EngineDown after FREE_S seconds.
        """
        needed = int(SHARE * sum(self._bytes.pop(tag, 0) for tag in sorted(tags)))
        if not self._gpus or not needed:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FREE_S
        while (free := free_bytes(self._gpus)) < needed:
            if loop.time() > deadline:
                raise EngineDown(
                    f"{sorted(tags)} cannot wake: {needed >> 20} MiB are needed, {free >> 20} MiB of GPU memory are free "
                    f"after {FREE_S:.0f} s; another process holds them"
                )
            await asyncio.sleep(0.2)
