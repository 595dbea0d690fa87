"""Carries tensors into a server: packed into one flat piece of memory, one bucket at a time.

A transport's ``send`` returns once the server has copied the bucket, so the memory is free again; ``end`` once all that was sent
is in the model. At most the caller's bucket and one copy of it exist (disk: none in memory).

* ``shm``: a file in memory that both processes map; for servers of the same node without a GPU.
* ``ipc``: a handle of GPU memory, for a server on the same GPUs.
* ``nccl``: a broadcast to the server's ranks, which have other GPUs.
* ``disk``: a safetensors file for each bucket, read by the server at the end.
"""

import asyncio
import base64
import contextlib
import json
import math
import mmap
import os
import pickle
import shutil
import socket
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.sglang.line import Line, Refused
from mcore_agent.rollout.sglang.options import PLUGIN

ALIGN = 64  # bytes; a tensor starts at a multiple, so that it can be viewed in its type
WEIGHTS_S = 600.0  # a bucket's way into the server
GROUP_S = 120.0  # until all ranks of an NCCL group are there, and for each of its broadcasts
SHARED = Path("/dev/shm")

Named = Sequence[tuple[str, Tensor]]


class Transport(Protocol):
    async def send(self, tensors: Named) -> None: ...

    async def end(self) -> None: ...

    async def close(self) -> None: ...


def layout(tensors: Named) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor lies in a bucket, for JSON, and the bucket's size in bytes."""
    entries, at = [], 0
    for name, tensor in tensors:
        entries.append({"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "start": at})
        at += -(-tensor.nbytes // ALIGN) * ALIGN
    return entries, at


def pack(tensors: Named, entries: Iterable[dict[str, Any]], target: Tensor) -> None:
    """Copies the tensors' bytes to where ``entries`` say, in a flat uint8 tensor."""
    for (_, tensor), entry in zip(tensors, entries, strict=True):
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            start = entry["start"]
            target[start : start + tensor.nbytes].view(tensor.dtype).copy_(flat)


def unpack(flat: Tensor, entries: Iterable[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """Views of the bucket, by name."""
    out = []
    for entry in entries:
        dtype = getattr(torch, entry["dtype"])
        size = math.prod(entry["shape"]) * dtype.itemsize
        out.append((entry["name"], flat[entry["start"] : entry["start"] + size].view(dtype).view(entry["shape"])))
    return out


def metadata_of(tensors: Named, entries: Iterable[dict[str, Any]]) -> list[Any]:
    """The same as SGLang describes the contents of a bucket."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    return [
        FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, entry["start"], entry["start"] + tensor.nbytes, tensor.nbytes)
        for (name, tensor), entry in zip(tensors, entries, strict=True)
    ]


def mapped(file: Any, size: int, write: bool) -> Tensor:
    """A flat uint8 tensor over a file's bytes; it lives as long as the tensor or a view of it."""
    access = mmap.ACCESS_WRITE if write else mmap.ACCESS_COPY
    return torch.frombuffer(mmap.mmap(file.fileno(), size, access=access), dtype=torch.uint8)


async def act(line: Line, folder: Path, ranks: int, **order: Any) -> dict[str, Any]:
    """Has the plugin in every rank of the server (``inside``) do something; returns what the first rank says.

    The order is a file, the call an update without tensors, the replies are files. Raises Refused when a rank cannot do it.
    """
    name = uuid.uuid4().hex
    replies = [folder / f"{name}-{rank}.json" for rank in range(ranks)]
    (folder / "order.json").write_text(json.dumps(order | {"name": name}))
    nothing = base64.b64encode(pickle.dumps([])).decode()
    body = {"serialized_named_tensors": [nothing] * ranks, "load_format": PLUGIN, "flush_cache": False, "abort_all_requests": False}
    await line.do("/update_weights_from_tensor", body, WEIGHTS_S)
    try:
        said = [json.loads(await asyncio.to_thread(reply.read_text)) for reply in replies]
    except (OSError, ValueError) as e:
        raise EngineDown(f"a rank of the server did not reply in {folder}: {e}") from e
    finally:
        for reply in replies:
            reply.unlink(missing_ok=True)
    for reply in said:
        if reply["error"]:
            raise Refused(200, reply["error"])
    return said[0]


class Shm:
    """One file in memory, kept for the next bucket."""

    def __init__(self, line: Line, folder: Path, ranks: int):
        self._line, self._folder, self._ranks = line, folder, ranks
        self._path = (SHARED if SHARED.is_dir() else folder) / f"mcore-agent-{uuid.uuid4().hex}"

    async def send(self, tensors: Named) -> None:
        entries, size = layout(tensors)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with open(fd, "r+b") as file:
            file.truncate(size)
            pack(tensors, entries, mapped(file, size, write=True))
        try:
            await act(self._line, self._folder, self._ranks, action="load", file=str(self._path), size=size, tensors=entries)
        finally:
            self._path.unlink()

    async def end(self) -> None:
        pass

    async def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class Ipc:
    """A flat copy on each GPU of the server, whose handle the server opens. The copy is freed when the server has loaded it."""

    def __init__(self, line: Line, gpus: Sequence[int], selector: str):
        self._line, self._gpus, self._selector = line, gpus, selector

    async def send(self, tensors: Named) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # handles then name a GPU by its uuid: both processes may number them differently
        entries, size = layout(tensors)
        metadata = metadata_of(tensors, entries)
        payload, kept = [], []
        for gpu in self._gpus:
            flat = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
            pack(tensors, entries, flat)
            torch.cuda.synchronize(gpu)
            kept.append(flat)
            payload.append(MultiprocessingSerializer.serialize({"flattened_tensor": flat, "metadata": metadata}, output_str=True))
        body: dict[str, Any] = {"serialized_named_tensors": payload, "load_format": "flattened_bucket", "selector": self._selector}
        body |= {"flush_cache": False, "abort_all_requests": False}
        try:
            await self._line.do("/update_weights_from_tensor", body, WEIGHTS_S)
        finally:
            kept.clear()
            torch.cuda.ipc_collect()

    async def end(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Nccl:
    """A group of this process (rank 0) and the server's ranks, made at the first bucket and used in the order of calls."""

    def __init__(self, line: Line, ranks: int, device: str, selector: str):
        self._line, self._ranks, self._device, self._selector = line, ranks, device, selector
        self._name, self._group = f"weights-{uuid.uuid4().hex}", None

    async def _open(self) -> Any:
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": self._ranks + 1}
        asked = self._line.do("/init_weights_update_group", body | {"group_name": self._name, "backend": "nccl"}, GROUP_S)
        made = asyncio.to_thread(
            init_custom_process_group,
            backend="nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            timeout=timedelta(seconds=GROUP_S),
            world_size=self._ranks + 1,
            rank=0,
            group_name=self._name,
        )
        _, group = await asyncio.gather(asked, made)
        return group

    async def send(self, tensors: Named) -> None:
        if self._group is None:
            self._group = await self._open()
        there = [t.detach().to(self._device).contiguous() for _, t in tensors]
        body = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in there],
            "shapes": [list(t.shape) for t in there],
            "group_name": self._name,
            "selector": self._selector,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await asyncio.gather(self._line.do("/update_weights_from_distributed", body, WEIGHTS_S), asyncio.to_thread(self._broadcast, there))

    def _broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0, group=self._group)
        torch.cuda.synchronize()

    async def end(self) -> None:
        pass

    async def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            await self._line.do("/destroy_weights_update_group", {"group_name": self._name})
            torch.distributed.destroy_process_group(group)


class Disk:
    """One file a bucket in a folder that the server sees; loaded, and removed, at the end."""

    def __init__(self, line: Line, folder: Path):
        self._line, self._folder, self._count = line, folder / "weights", 0

    async def send(self, tensors: Named) -> None:
        from safetensors.torch import save_file

        if not self._count:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        self._count += 1
        made = {name: t.detach().cpu().contiguous() for name, t in tensors}
        await asyncio.to_thread(save_file, made, self._folder / f"bucket-{self._count:05d}.safetensors")

    async def end(self) -> None:
        self._count = 0
        body = {"model_path": str(self._folder), "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
        try:
            await self._line.do("/update_weights_from_disk", body, WEIGHTS_S)
        finally:
            await self.close()

    async def close(self) -> None:
        self._count = 0
        await asyncio.to_thread(shutil.rmtree, self._folder, True)


def transport_of(kind: str, line: Line, folder: Path, ranks: int, gpus: Sequence[int], selector: str) -> Transport:
    """The transport of this name."""
    match kind:
        case "shm":
            return Shm(line, folder, ranks)
        case "ipc":
            return Ipc(line, gpus, selector)
        case "nccl":
            return Nccl(line, ranks, "cuda", selector)
        case "disk":
            return Disk(line, folder)
    raise ValueError(f"transport is {kind!r}, but must be shm, ipc, nccl or disk")
