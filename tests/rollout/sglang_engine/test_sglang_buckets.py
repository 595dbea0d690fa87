"""Tensors in one flat piece of memory, and back."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.sglang.buckets import ALIGN, SHARED, Shm, layout, mapped, metadata_of, pack, unpack
from mcore_agent.rollout.sglang.line import Refused
from tests.required import need

TENSORS = [
    ("a", torch.randn(3, 5)),
    ("empty", torch.zeros(0, 4)),
    ("half", torch.randn(7, 11).bfloat16()),
    ("turned", torch.randn(4, 6).T),
    ("eight", torch.randn(9, 2).to(torch.float8_e4m3fn)),
    ("scalar", torch.tensor(3.5)),
]
SUMS = {name: tensor_checksum(tensor) for name, tensor in TENSORS}


@pytest.mark.defect("E4")
def test_a_bucket_keeps_every_bit():
    entries, size = layout(TENSORS)
    flat = torch.full((size,), 255, dtype=torch.uint8)
    pack(TENSORS, entries, flat)
    again = unpack(flat, json.loads(json.dumps(entries)))
    assert {name: tensor_checksum(tensor) for name, tensor in again} == SUMS
    assert all(entry["start"] % ALIGN == 0 for entry in entries)
    assert size <= sum(tensor.nbytes for _, tensor in TENSORS) + ALIGN * len(TENSORS)


class Reader:
    """In place of a server of two ranks: reads a bucket as the server does. ``fault`` is what the second rank cannot do."""

    def __init__(self, folder: Path, fault: str = "", silent: bool = False):
        self.folder, self.fault, self.silent = folder, fault, silent
        self.sums: list[dict[str, str]] = []
        self.files: list[str] = []

    async def do(self, route: str, body: Mapping[str, Any], limit_s: float) -> None:
        order = json.loads((self.folder / "order.json").read_text())
        assert len(body["serialized_named_tensors"]) == 2 and body["flush_cache"] is False and body["abort_all_requests"] is False
        self.files.append(order["file"])
        with open(order["file"], "rb") as file:
            flat = mapped(file, order["size"], write=False)
        self.sums.append({name: tensor_checksum(tensor) for name, tensor in unpack(flat, order["tensors"])})
        for rank in range(1 if self.silent else 2):
            reply = {"error": self.fault if rank else "", "sums": {}}
            (self.folder / f"{order['name']}-{rank}.json").write_text(json.dumps(reply))


async def _send_twice(folder: Path, line: Any) -> None:
    transport = Shm(line, folder, 2)
    await transport.send(TENSORS)
    await transport.send(TENSORS[2:])
    await transport.close()


def test_shared_memory_arrives_and_is_given_back(tmp_path: Path):
    line = Reader(tmp_path)
    asyncio.run(_send_twice(tmp_path, line))
    assert line.sums == [SUMS, dict(list(SUMS.items())[2:])]
    assert not any(Path(file).exists() for file in line.files) and Path(line.files[0]).parent == SHARED


@pytest.mark.parametrize(
    ("line", "error"), [({"fault": "no such layer"}, (Refused, "no such layer")), ({"silent": True}, (EngineDown, "did not reply"))]
)
def test_a_bucket_that_a_rank_cannot_load_is_refused_and_leaves_no_file(tmp_path: Path, line: dict[str, Any], error: Any):
    reader = Reader(tmp_path, **line)
    with pytest.raises(error[0], match=error[1]):
        asyncio.run(_send_twice(tmp_path, reader))
    assert not Path(reader.files[0]).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["order.json"]


def test_a_bucket_is_in_the_form_that_sglang_reads():
    """Its own class finds every tensor in ours: handles of GPU memory are read that way."""
    need("sglang")
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    entries, size = layout(TENSORS)
    flat = torch.zeros(size, dtype=torch.uint8)
    pack(TENSORS, entries, flat)
    again = FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata_of(TENSORS, entries)).reconstruct_tensors()
    assert {name: tensor_checksum(tensor) for name, tensor in again} == SUMS
