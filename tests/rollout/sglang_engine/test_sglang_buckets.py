"""Tensors in one flat piece of memory, and back."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.rollout.sglang.buckets import ALIGN, SHARED, Shm, layout, mapped, pack, unpack
from mcore_agent.rollout.sglang.line import Refused

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
    """In place of the server: reads the bucket as the server does, at once or after the sender has its memory back."""

    def __init__(self, folder: Path, say: str = ""):
        self.folder, self.say = folder, say
        self.sums: list[dict[str, str]] = []
        self.files: list[str] = []

    async def do(self, route: str, body: Mapping[str, Any], limit_s: float) -> None:
        order = json.loads((self.folder / "order.json").read_text())
        assert len(body["serialized_named_tensors"]) == order["ranks"] == 2 and body["flush_cache"] is False
        self.files.append(order["file"])
        if self.say:
            raise Refused(400, self.say)
        with open(order["file"], "rb") as file:
            flat = mapped(file, order["size"], write=False)
        self.sums.append({name: tensor_checksum(tensor) for name, tensor in unpack(flat, order["tensors"])})


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


def test_a_refused_bucket_leaves_no_file(tmp_path: Path):
    line = Reader(tmp_path, say="no")
    with pytest.raises(Refused, match="no"):
        asyncio.run(_send_twice(tmp_path, line))
    assert not Path(line.files[0]).exists()
