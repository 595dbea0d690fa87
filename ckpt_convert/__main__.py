"""The converter's command line, and Megatron's side of it.

    python -m ckpt_convert hf2mcore --hf H --out M --tp 2 --pp 2 [--ep E]
    python -m ckpt_convert mcore2hf --mcore M --out H2
    python -m ckpt_convert verify --hf H --mcore M

Exit code 0: done; 1: models differ, or ranks failed; 2: bad input. Ranks are further processes of this module. Saving a
checkpoint starts helper processes that import this module once more, so it imports what is heavy in its functions.
"""

import argparse
import errno
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_convert.errors import ConvertError
from ckpt_convert.job import Job

if TYPE_CHECKING:
    from torch import Tensor




class RanksFailed(RuntimeError):
    """The ranks ended with an error that no check foresaw."""


def do(job: Job) -> None:
    """Does a job on its ranks: here when it is one, else in processes that end with this one.

    Raises ConvertError and OSError (disk full) as the ranks did, or RanksFailed with the end of their output.
    """
    if job.world == 1:
        return work(job)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        code = _start(job, Path(scratch), log)
        for told in sorted(Path(scratch).glob("error-*")):
            raise ConvertError(told.read_text())
        if code:
            text = log.read_text(errors="replace")
            if os.strerror(errno.ENOSPC) in text:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise RanksFailed(f"{job.world} ranks failed with code {code}; the end of what they said:\n{text[-4000:]}")
    return None


def _start(job: Job, scratch: Path, log: Path) -> int:
    from mcore_agent.launch import run_ranks

    threads = max(1, len(os.sched_getaffinity(0)) // job.world)
    with log.open("wb") as stream:
        return run_ranks(job.world, ["-m", "ckpt_convert", "rank", job.to_json(), str(scratch)], threads, stream)


def rank(text: str, scratch: Path) -> int:
    """One rank of a job. What the user can mend goes to a file, for the process that started the ranks."""
    from mcore_agent.launch import end_with_launcher

    end_with_launcher()
    try:
        work(Job.from_json(text))
    except ConvertError as e:
        (scratch / f"error-{os.environ['RANK']}").write_text(str(e))
        return 2
    return 0


def work(job: Job) -> None:
    """A job on this rank. Collective over the ranks of its layout."""
    from ckpt_convert.commands import write_export
    from ckpt_convert.mcore_folder import HF, TENSORS
    from ckpt_convert.source import SafetensorsSource

    source, target = Path(job.source), Path(job.target)
    with _learner(source if job.do == "save" else source / HF, job.dtype, job.tp, job.pp, job.ep) as learner:
        if job.do == "save":
            learner.load_weights(SafetensorsSource(source))
            learner.save(target, weights_only=True)
            return
        from mcore_agent.weights.export import export

        learner.load(source / TENSORS, weights_only=True)
        tensors = export(learner.model)
        if learner.groups.rank == 0:
            write_export(job, learner.model.family, tensors)
        else:
            for _ in tensors:  # every rank takes part in gathering shards
                pass


@contextmanager
def _learner(files: Path, dtype: str, tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[Any]:
    """A learner for the config in ``files``; its process groups end with the block. Tensors that cannot be written or
    read are a ConvertError."""
    from ckpt_convert.hfconfig import read_json
    from mcore_agent.learner import groups
    from mcore_agent.learner.checkpoint import CheckpointError
    from mcore_agent.learner.learner import Learner, OptimSpec

    joined = groups.initialize(groups.Layout(tp=tp, pp=pp, ep=ep, dp=ep, sp=tp > 1))
    try:
        yield Learner(read_json(files / "config.json"), joined, dtype, OptimSpec())
    except CheckpointError as e:
        raise ConvertError(str(e)) from e
    finally:
        groups.destroy()


def megatron_logits(mcore: Path, rows: "Sequence[Tensor]") -> "list[Tensor]":
    """fp32 logits ``[T, V]`` of each row of token ids, from one packed pass of a Megatron checkpoint."""
    import numpy as np
    import torch

    from ckpt_convert.mcore_folder import HF, TENSORS
    from mcore_agent.learner import groups
    from mcore_agent.learner.packing import pack

    lengths = np.array([len(row) for row in rows])
    with _learner(mcore / HF, "fp32") as learner, torch.no_grad():
        learner.load(mcore / TENSORS, weights_only=True)
        model, where = learner.model, groups.device()
        packed = pack(lengths, model.frequencies, model.dtype, where)
        logits = model.modules[0](torch.cat(list(rows))[None].to(where), None, None, packed_seq_params=packed)
        return list(logits[0].float().cpu().split(lengths.tolist()))


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
    check = commands.add_parser("verify", help="compare the logits of both, computed in fp32")
    check.add_argument("--hf", type=Path, required=True)
    check.add_argument("--mcore", type=Path, required=True)
    check.add_argument("--tolerance", type=float, default=1e-4, help="relative to the largest logit (default 1e-4)")
    return parser


def _command(arguments: dict[str, Any]) -> int:
    from ckpt_convert import commands
    from mcore_agent.launch import interruptible

    interruptible()
    warnings.filterwarnings("ignore", module=r"torch\..*|megatron\..*")  # deprecations inside those packages
    command = arguments.pop("command")
    same, line = True, ""
    if command == "verify":
        same, line = commands.verify(**arguments, megatron=megatron_logits)
    else:
        line = (commands.hf2mcore if command == "hf2mcore" else commands.mcore2hf)(**arguments, do=do)
    print(line)
    return 0 if same else 1


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["rank"]:
        return rank(words[1], Path(words[2]))
    arguments = vars(_parser().parse_args(words))
    try:
        return _command(arguments)
    except (ConvertError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except RanksFailed as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
