"""Writes Hugging Face folders: streamed, one tensor in memory, and either whole or not there."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ckpt_convert.errors import ConvertError
from ckpt_convert.source import DTYPES, INDEX, SINGLE

MAX_SHARD = 5 * 10**9  # bytes
CODES = {dtype: code for code, dtype in DTYPES.items()}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Everything in a Hugging Face folder that describes model and tokenizer, and is not weights.
CARRIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*.tiktoken", "chat_template*", "additional_chat_templates/*", "LICENSE*",
)  # fmt: skip


@contextmanager
def whole_or_nothing(out: Path, replace: bool = False) -> Iterator[Path]:
    """A new folder beside ``out`` to fill; it becomes ``out`` when the block ends well and is deleted when it does not.

    After a kill it stays behind under the name ``.<out>.partial-…``, which nothing reads. Everything is on disk
    before the rename. Raises ConvertError when the disk is full, or ``out`` exists already and is not to be replaced.
    """
    out = Path(out).absolute()
    if not replace and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConvertError(f"{out} exists already; delete it or give another folder")
    partial = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            _fsync(path)
        if replace and out.exists():
            shutil.rmtree(out)
        os.rename(partial, out)
        _fsync(out.parent)
    except OSError as e:
        if e.errno in DISK_FULL:
            raise ConvertError(f"cannot write {out}: {e.strerror}; nothing was kept: free space or give another folder") from e
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor go."""

    file: str
    offset: int  # bytes from the start of the file
    size: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def plan(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard: int = MAX_SHARD
) -> tuple[dict[str, Place], dict[str, bytes]]:
    """Places of all tensors, and the header of each file. A tensor larger than ``max_shard`` gets a file of its own."""
    width = dtype.itemsize
    shards: list[dict[str, int]] = [{}]
    for name, shape in shapes.items():
        size = width * torch.Size(shape).numel()
        if shards[-1] and sum(shards[-1].values()) + size > max_shard:
            shards.append({})
        shards[-1][name] = size
    places, headers = {}, {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, size in shard.items():
            entries[name] = {"dtype": CODES[dtype], "shape": list(shapes[name]), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        at = len(headers[file])
        for name, size in shard.items():
            places[name] = Place(file, at, size, dtype, tuple(shapes[name]))
            at += size
    return places, headers


def write_safetensors(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard: int = MAX_SHARD,
) -> int:
    """Writes tensors, in any order, into the safetensors files of ``folder``; returns the number of bytes.

    Space is reserved before the first tensor is asked for. Raises ConvertError unless every name of ``shapes`` comes
    exactly once with its shape and dtype, and OSError when the disk is full: use it inside ``whole_or_nothing``.
    """
    places, headers = plan(shapes, dtype, max_shard)
    missing = set(places)
    handles: dict[str, int] = {}
    try:
        for file, header in headers.items():
            handles[file] = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            size = len(header) + sum(p.size for p in places.values() if p.file == file)
            os.posix_fallocate(handles[file], 0, size)
            _write_at(handles[file], memoryview(header), 0)
        for name, t in tensors:
            if name not in missing:
                why = "came twice" if name in places else "was not expected"
                raise ConvertError(f"tensor {name} {why}; this is a fault of the exporter")
            place = places[name]
            if t.dtype != dtype or tuple(t.shape) != place.shape:
                raise ConvertError(f"tensor {name} is {t.dtype} {tuple(t.shape)}, expected {dtype} {place.shape}")
            missing.remove(name)
            if place.size:
                raw = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                _write_at(handles[place.file], memoryview(raw), place.offset)
    finally:
        for handle in handles.values():
            os.close(handle)
    if missing:
        raise ConvertError(f"{len(missing)} tensors never came, the first is {min(missing)}; this is a fault of the exporter")
    total = sum(p.size for p in places.values())
    if len(headers) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: p.file for name, p in places.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(handle, data, offset)
        data, offset = data[done:], offset + done


def carry_files(source: Path, target: Path) -> list[str]:
    """Copies config, generation config, tokenizer files and chat templates; returns their names.

    Raises ConvertError when ``source`` has no ``config.json``.
    """
    if not (source / "config.json").is_file():
        raise ConvertError(f"{source / 'config.json'} is missing; give a Hugging Face folder")
    names = sorted({p.relative_to(source) for pattern in CARRIED for p in source.glob(pattern) if p.is_file()})
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return [str(name) for name in names]


def write_folder(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    files: Path,
    max_shard: int = MAX_SHARD,
    replace: bool = True,
) -> None:
    """A Hugging Face folder, whole or not there: ``tensors`` with the config and tokenizer files of the folder ``files``.

    An older ``out`` is replaced unless ``replace`` is off. Raises ConvertError as ``write_safetensors`` does.
    """
    with whole_or_nothing(out, replace) as partial:
        write_safetensors(partial, tensors, shapes, dtype, max_shard)
        carry_files(Path(files), partial)
