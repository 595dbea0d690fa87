"""What the command line does, apart from Megatron: checks, folders, and the comparison of logits.

Megatron's side of a command is a Job, done by a function that the caller gives.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_convert.errors import ConvertError
from ckpt_convert.families import Family, family_of
from ckpt_convert.hfconfig import read_json
from ckpt_convert.job import Job
from ckpt_convert.mcore_folder import COMPLETE, HF, TENSORS, Meta, read_meta, write_meta
from ckpt_convert.source import SafetensorsSource, check_source, common_dtype
from ckpt_convert.write import carry_files, whole_or_nothing, write_safetensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = (17, 5, 29)  # lengths of the rows that verify compares


def hf2mcore(hf: Path, out: Path, tp: int, pp: int, ep: int, do: Callable[[Job], None]) -> str:
    """Makes a Megatron checkpoint of a Hugging Face folder, its tensors bit for bit. Raises ConvertError."""
    family = family_of(read_json(hf / "config.json"))
    source = SafetensorsSource(hf)
    check_source(family, source)
    family.check_layout(tp, pp, ep)
    dtype = next(name for name, value in DTYPES.items() if value == common_dtype(source))
    duplicates = tuple(n for n in source.names() if n in family.duplicates())
    with whole_or_nothing(out) as partial:
        _check_space(partial, family, dtype)
        (partial / TENSORS).mkdir()
        (partial / HF).mkdir()
        carry_files(hf, partial / HF)
        do(Job("save", str(hf.absolute()), str(partial / TENSORS), dtype, tp=tp, pp=pp, ep=ep))
        write_meta(partial, Meta(family.model_type, dtype, {"tp": tp, "pp": pp, "ep": ep, "dp": ep}, duplicates))
        (partial / COMPLETE).touch()
    return f"wrote {out}: {family.model_type}, {len(family.names())} tensors, {dtype}, tp {tp}, pp {pp}, ep {ep}"


def mcore2hf(mcore: Path, out: Path, tp: int, pp: int, ep: int, do: Callable[[Job], None]) -> str:
    """Makes a Hugging Face folder of a Megatron checkpoint, with config and tokenizer. Raises ConvertError."""
    meta = read_meta(mcore)
    family = family_of(read_json(mcore / HF / "config.json"))
    family.check_layout(tp, pp, ep)
    with whole_or_nothing(out) as partial:
        _check_space(partial, family, meta.dtype)
        do(Job("export", str(mcore.absolute()), str(partial), meta.dtype, meta.duplicates, tp, pp, ep))
        carry_files(mcore / HF, partial)
    return f"wrote {out}: {family.model_type}, {len(family.names()) + len(meta.duplicates)} tensors, {meta.dtype}"


def _check_space(folder: Path, family: Family, dtype: str) -> None:
    size = sum(torch.Size(shape).numel() for shape in family.shapes().values()) * DTYPES[dtype].itemsize
    free = shutil.disk_usage(folder).free
    if free < size:
        reason = f"{os.strerror(errno.ENOSPC)}, {size / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, reason)


def write_export(job: Job, family: Family, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Streams exported tensors into the job's target, stored duplicates included."""
    copies = {original: copy for copy, original in family.duplicates().items() if copy in job.duplicates}
    shapes = family.shapes()
    shapes |= {copy: shapes[original] for original, copy in copies.items()}
    write_safetensors(Path(job.target), _with_copies(tensors, copies), shapes, DTYPES[job.dtype])


def _with_copies(tensors: Iterator[tuple[str, Tensor]], copies: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        if name in copies:
            yield copies[name], tensor


def verify(hf: Path, mcore: Path, tolerance: float, megatron: Callable[[Path, Sequence[Tensor]], list[Tensor]]) -> tuple[bool, str]:
    """Whether both models give the same logits on fixed random rows, both in fp32, and a line that says how far apart.

    ``tolerance`` is relative to the largest logit, absolute when that is below 1: what rounding moves grows with it.
    ``megatron(checkpoint, rows)`` gives the logits ``[T, V]`` of each row. Raises ConvertError when they are not comparable.
    """
    read_meta(mcore)
    family = family_of(read_json(hf / "config.json"))
    if family != family_of(read_json(mcore / HF / "config.json")):
        raise ConvertError(f"the config.json of {hf} and of {mcore / HF} describe different models; compare like with like")
    check_source(family, SafetensorsSource(hf))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, family.arch.vocab, (n,), generator=generator) for n in ROWS]
    theirs = _transformers_logits(hf, rows)
    ours = megatron(mcore, rows)
    scale = max(1.0, max(float(t.abs().max()) for t in theirs))
    worst = max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True)) / scale
    same = worst <= tolerance  # False for nan
    where = f"over {sum(ROWS)} tokens in {len(ROWS)} rows"
    size = f"{worst * scale:.2e}, {worst:.2e} of the largest logit" if scale > 1 else f"{worst:.2e}"
    return same, f"largest logit difference {size}, {where}: {'within' if same else 'above'} the tolerance {tolerance:g}"


def _transformers_logits(hf: Path, rows: Sequence[Tensor]) -> list[Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, local_files_only=True).eval()
    model.set_experts_implementation("eager")  # grouped products refuse sizes that are not multiples of 16 bytes
    with torch.no_grad():
        return [model(row[None]).logits[0] for row in rows]
