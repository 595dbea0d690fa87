"""The converter's command line.

    python -m ckpt_convert hf2mcore --hf H --out M --tp 2 --pp 2 [--ep E]
    python -m ckpt_convert mcore2hf --mcore M --out H2
    python -m ckpt_convert verify --hf H --mcore M

It drives the learner's checkpoint reader and writer, which are imported only by the functions that need them. Ranks are
started as further processes of this module. Exit code 0: done; 1: models differ, or ranks failed; 2: bad input.
"""

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_convert.errors import ConvertError
from ckpt_convert.families import family_of
from ckpt_convert.mcore_folder import COMPLETE, HF, TENSORS, Meta, read_meta, write_meta
from ckpt_convert.source import SafetensorsSource, check_source, common_dtype, read_json
from ckpt_convert.write import carry_files, whole_or_nothing, write_safetensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = (17, 5, 29)  # lengths of the rows that verify compares


@dataclass(frozen=True)
class Job:
    """What the ranks do together; travels to them as JSON."""

    do: str  # save: Hugging Face folder -> torch_dist; export: torch_dist -> safetensors
    source: str  # folder with config.json (and safetensors); for export the checkpoint
    target: str  # existing folder
    dtype: str
    duplicates: tuple[str, ...] = ()
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.ep


# --------------------------------------------------------------------------------------------------- commands


def hf2mcore(hf: Path, out: Path, tp: int, pp: int, ep: int) -> None:
    """A Megatron checkpoint of a Hugging Face folder, its tensors bit for bit. Raises ConvertError."""
    family = family_of(read_json(hf / "config.json"))
    source = SafetensorsSource(hf)
    check_source(family, source)
    family.check_layout(tp, pp, ep)
    dtype = next(name for name, value in DTYPES.items() if value == common_dtype(source))
    duplicates = tuple(n for n in source.names() if n in family.duplicates())
    with whole_or_nothing(out) as partial:
        _check_space(partial, _bytes(family.shapes(), dtype))
        (partial / TENSORS).mkdir()
        (partial / HF).mkdir()
        carry_files(hf, partial / HF)
        _run(Job("save", str(hf), str(partial / TENSORS), dtype, tp=tp, pp=pp, ep=ep))
        layout = {"tp": tp, "pp": pp, "ep": ep, "dp": ep}
        write_meta(partial, Meta(family.model_type, dtype, layout, duplicates))
        (partial / COMPLETE).touch()
    print(f"wrote {out}: {family.model_type}, {len(family.names())} tensors, {dtype}, tp {tp}, pp {pp}, ep {ep}")


def mcore2hf(mcore: Path, out: Path, tp: int, pp: int, ep: int) -> None:
    """A Hugging Face folder of a Megatron checkpoint, with config and tokenizer. Raises ConvertError."""
    meta = read_meta(mcore)
    family = family_of(read_json(mcore / HF / "config.json"))
    family.check_layout(tp, pp, ep)
    with whole_or_nothing(out) as partial:
        _check_space(partial, _bytes(family.shapes(), meta.dtype))
        _run(Job("export", str(mcore), str(partial), meta.dtype, meta.duplicates, tp, pp, ep))
        carry_files(mcore / HF, partial)
    print(f"wrote {out}: {family.model_type}, {len(family.names()) + len(meta.duplicates)} tensors, {meta.dtype}")


def verify(hf: Path, mcore: Path, tolerance: float) -> bool:
    """Whether both models give the same logits on fixed random rows, both computed in fp32; prints the difference."""
    config = read_json(hf / "config.json")
    read_meta(mcore)
    if family_of(config) != family_of(read_json(mcore / HF / "config.json")):
        raise ConvertError(f"the config.json of {hf} and of {mcore / HF} describe different models; compare like with like")
    check_source(family_of(config), SafetensorsSource(hf))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, family_of(config).arch.vocab, (n,), generator=generator) for n in ROWS]
    theirs = _transformers_logits(hf, rows)
    ours = _megatron_logits(mcore, config, rows)
    worst = max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))
    same = worst <= tolerance
    sign = "within" if same else "above"
    print(f"largest logit difference {worst:.2e} over {sum(ROWS)} tokens in {len(ROWS)} rows, {sign} the tolerance {tolerance:g}")
    return same


def _bytes(shapes: dict[str, tuple[int, ...]], dtype: str) -> int:
    return sum(torch.Size(s).numel() for s in shapes.values()) * DTYPES[dtype].itemsize


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        reason = f"{os.strerror(errno.ENOSPC)}: {size / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, reason)


# ------------------------------------------------------------------------------------------------------ ranks


def _run(job: Job) -> None:
    """Does a job on its ranks: here when it is one, else in processes that end with this one. Raises ConvertError."""
    if job.world == 1:
        return work(job)
    from mcore_agent.launch import die_with_parent, end_tree

    with tempfile.TemporaryDirectory() as scratch:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.world}"]
        words += ["-m", "ckpt_convert", "rank", json.dumps(asdict(job)), scratch]
        threads = max(1, len(os.sched_getaffinity(0)) // job.world)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        log = Path(scratch) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                words, env=environment, stdout=stream, stderr=stream, start_new_session=True, preexec_fn=die_with_parent
            )
            try:
                code = process.wait()
            finally:
                end_tree(process.pid)
        for told in sorted(Path(scratch).glob("error-*")):
            raise ConvertError(told.read_text())
        if code:
            text = log.read_text(errors="replace")
            if os.strerror(errno.ENOSPC) in text:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise RanksFailed(f"{job.world} ranks failed with code {code}; the end of what they said:\n{text[-4000:]}")
    return None


class RanksFailed(RuntimeError):
    """The ranks ended with an error that no check foresaw."""


def rank(text: str, scratch: Path) -> int:
    """One rank of a job. What the user can mend goes to a file for the process that started the ranks."""
    fields = json.loads(text)
    try:
        work(Job(**{**fields, "duplicates": tuple(fields["duplicates"])}))
    except ConvertError as e:
        (scratch / f"error-{os.environ['RANK']}").write_text(str(e))
        return 2
    return 0


def work(job: Job) -> None:
    """The job, on every rank of its layout."""
    from mcore_agent.learner import groups

    joined = groups.initialize(groups.Layout(tp=job.tp, pp=job.pp, ep=job.ep, dp=job.ep))
    try:
        if job.do == "save":
            learner = _learner(read_json(Path(job.source) / "config.json"), joined, job.dtype)
            learner.load_weights(SafetensorsSource(job.source))
            learner.save(Path(job.target), weights_only=True)
        else:
            _export(job, joined)
    finally:
        groups.destroy()


def _learner(config: dict[str, Any], joined: Any, dtype: str) -> Any:
    from mcore_agent.learner.learner import Learner, OptimSpec

    return Learner(config, joined, dtype, OptimSpec())


def _export(job: Job, joined: Any) -> None:
    from mcore_agent.weights.export import export

    source = Path(job.source)
    learner = _learner(read_json(source / HF / "config.json"), joined, job.dtype)
    learner.load(source / TENSORS, weights_only=True)
    family = learner.model.family
    tensors = export(learner.model)
    if joined.rank:
        for _ in tensors:
            pass
        return
    copies = {original: copy for copy, original in family.duplicates().items() if copy in job.duplicates}
    shapes = family.shapes()
    shapes |= {copy: shapes[original] for original, copy in copies.items()}
    write_safetensors(Path(job.target), _with_copies(tensors, copies), shapes, DTYPES[job.dtype])


def _with_copies(tensors: Iterator[tuple[str, Tensor]], copies: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        if name in copies:
            yield copies[name], tensor


# ----------------------------------------------------------------------------------------------------- logits


def _transformers_logits(hf: Path, rows: Sequence[Tensor]) -> list[Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32, local_files_only=True).eval()
    model.set_experts_implementation("eager")  # grouped products refuse sizes that are not multiples of 16 bytes
    with torch.no_grad():
        return [model(row[None]).logits[0] for row in rows]  # each [T, V]


def _megatron_logits(mcore: Path, config: dict[str, Any], rows: Sequence[Tensor]) -> list[Tensor]:
    import numpy as np

    from mcore_agent.learner import groups
    from mcore_agent.learner.packing import pack

    joined = groups.initialize(groups.Layout())
    try:
        learner = _learner(config, joined, "fp32")
        learner.load(mcore / TENSORS, weights_only=True)
        model, where = learner.model, groups.device()
        lengths = np.array([len(row) for row in rows])
        packed = pack(lengths, model.frequencies, model.dtype, where)
        with torch.no_grad():
            logits = model.modules[0](torch.cat(list(rows))[None].to(where), None, None, packed_seq_params=packed)
        return list(logits[0].float().cpu().split(lengths.tolist()))
    finally:
        groups.destroy()


# ----------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckpt_convert", description="Hugging Face <-> Megatron checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_mcore = commands.add_parser("hf2mcore", help="Hugging Face folder -> Megatron checkpoint")
    to_mcore.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    to_hf = commands.add_parser("mcore2hf", help="Megatron checkpoint -> Hugging Face folder")
    to_hf.add_argument("--mcore", type=Path, required=True, help="folder made by hf2mcore")
    for command, what in ((to_mcore, "write"), (to_hf, "read")):
        command.add_argument("--out", type=Path, required=True, help="folder to make")
        for key, name in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            command.add_argument(f"--{key}", type=int, default=1, help=f"{name} parallel size of the ranks that {what}")
    check = commands.add_parser("verify", help="compare the logits of both")
    check.add_argument("--hf", type=Path, required=True)
    check.add_argument("--mcore", type=Path, required=True)
    check.add_argument("--tolerance", type=float, default=1e-4, help="largest logit difference (default 1e-4)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["rank"]:
        return rank(words[1], Path(words[2]))
    arguments = vars(_parser().parse_args(words))
    command = arguments.pop("command")
    warnings.filterwarnings("ignore", module=r"torch\..*|megatron\..*")  # deprecations inside those packages
    try:
        if command == "verify":
            return 0 if verify(**arguments) else 1
        (hf2mcore if command == "hf2mcore" else mcore2hf)(**arguments)
    except (ConvertError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except RanksFailed as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
