"""The command line: ``mcore-agent train|check|eval|rollout RECIPE [key=value …]``.

Exit codes: 0 done, 1 failed, 2 the configuration or the input cannot run (nothing was started), 130 interrupted.
"""

import argparse
import dataclasses
import errno
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from mcore_agent import launch
from mcore_agent.config import Config, ConfigError, differences, load_config, read_config, save_config
from mcore_agent.state import StateError, is_complete, locked

RUN_MARK, LOCK = "config.yaml", ".lock"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: list[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    started = time.time()
    parser = _parser()
    arguments, late = parser.parse_known_args(words)  # key=value words may also stand after an option
    if unknown := [word for word in late if word.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}")
    arguments.words += late
    try:
        launch.interruptible()
        launch.join_launcher()
        with ExitStack() as stack:
            return _command(arguments, words, started, stack)
    except BrokenPipeError:  # whoever read the output has left; Python must not try to flush the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, RuntimeError, OSError) as e:
        if _spoken(e) is None:
            raise
        return _say(e)
    except KeyboardInterrupt as e:
        if launch.launched() and (error := _interrupted(e)):  # another rank failed too and ended first, which stops this one
            return _say(error)
        if launch.LAUNCHER not in os.environ:  # else the command that started this rank says it, once
            print("mcore-agent: interrupted; the last checkpoint stays, the same command resumes", file=sys.stderr)
        return 130


def _say(e: Exception) -> int:
    """Prints an error whose message says all; returns its exit code."""
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    hint = ". Free space and give the same command again: it goes on from the last checkpoint" if isinstance(e, OSError) else ""
    print(f"mcore-agent{rank}: {e}{hint}", file=sys.stderr)
    return _spoken(e) or 1


def _interrupted(interrupt: KeyboardInterrupt) -> Exception | None:
    """The error that was on its way out, closing what was open, when the interrupt came."""
    e = interrupt.__context__
    while e is not None and not (isinstance(e, Exception) and _spoken(e)):
        e = e.__context__
    return e if isinstance(e, Exception) else None


def _command(arguments: argparse.Namespace, words: list[str], started: float, stack: ExitStack) -> int:
    """Runs a command here or on ranks of its own; ``stack`` keeps the lock of the run folder."""
    config = load_config(arguments.recipe, arguments.words, arguments.overlay, arguments.gpu)
    if launch.first() and not (arguments.loss or arguments.checkpoint):
        from mcore_agent.config_rules import check_model

        check_model(config)
    if arguments.command == "check" and not arguments.loss:
        return _check(config, arguments.gpu)
    starts_ranks = config.world > 1 and not launch.launched()
    if not starts_ranks:
        launch.adopt_environment(config)
        launch.check_port()
    if arguments.command == "train":
        folder = run_folder(config, arguments.recipe, stack)
        words = [*words, f"run.dir={json.dumps(str(folder))}"]  # as YAML, in which a path may need quotes
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    if starts_ranks:
        return launch.torchrun(config.world, words, config)
    return _run(arguments, config, started)


def _spoken(e: Exception) -> int | None:
    """Exit code of an error whose message says all that a user needs: the project's own, and a disk that is full."""
    if isinstance(e, OSError):
        return 1 if e.errno in DISK_FULL else None
    own = type(e).__module__.partition(".")[0] in ("mcore_agent", "ckpt_convert")
    return (2 if isinstance(e, ValueError) else 1) if own else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mcore-agent", description="Agentic reinforcement learning on Megatron-Core and SGLang.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("train", "run a recipe's stages; the same command again resumes"),
        ("check", "say what a recipe will do, without starting anything"),
        ("eval", "score every task of the evaluation split once"),
        ("rollout", "play a few episodes and print them"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", help="a YAML file, see recipes/")
        command.add_argument("words", nargs="*", metavar="key=value", help="override a key of the recipe")
        command.add_argument("--overlay", action="append", default=[], metavar="FILE", help="merge a further YAML file")
        if name == "check":
            kind = command.add_mutually_exclusive_group()
            kind.add_argument("--loss", nargs=2, metavar=("CKPT", "BATCH"), help="print the loss of a saved batch at a checkpoint")
            kind.add_argument("--gpu", metavar="TYPE", help="plan memory and time for this GPU: H100, H200, A100-80, B200, ...")
        else:
            command.set_defaults(loss=None, gpu=None)
        if name in ("eval", "rollout"):
            command.add_argument("--checkpoint", metavar="CKPT", help="a checkpoint folder, or a run folder for its latest")
        else:
            command.set_defaults(checkpoint=None)
        if name == "rollout":
            command.add_argument("--episodes", type=_count, default=4, help="how many (default 4)")
            command.add_argument("--greedy", action="store_true", help="temperature 0")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _run(arguments: argparse.Namespace, config: Config, started: float) -> int:
    from mcore_agent import loop, offline

    if arguments.command == "train":
        loop.train(config, Path(config.run.dir), started)
        return 0
    if arguments.command == "check":
        folder, batch = map(Path, arguments.loss)
        if not batch.is_file():
            raise ConfigError("--loss", str(batch), "no such file", "A run keeps the batch of its last step in batch.npz")
        return offline.print_loss(config, checkpoint_folder(folder), batch)
    checkpoint = checkpoint_folder(Path(arguments.checkpoint)) if arguments.checkpoint else None
    if arguments.command == "eval":
        return offline.print_evaluation(config, checkpoint)
    return offline.print_rollouts(config, checkpoint, arguments.episodes, arguments.greedy)


def run_folder(config: Config, recipe: str, stack: ExitStack) -> Path:
    """The run's folder with its ``config.yaml``: a new one, or an existing one of an equal configuration.

    Locked until ``stack`` closes. Raises ConfigError when the folder belongs to another configuration, holds something
    else, cannot be written, or another process runs in it.
    """
    if not config.run.dir:
        if launch.launched():
            raise ConfigError("run.dir", "", "ranks that another launcher starts need one common folder", "Give run.dir")
        stem = f"{Path(recipe).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = next(p for i in range(1000) if not (p := Path("runs") / (stem + (f"-{i}" if i else ""))).exists())
    else:
        folder = Path(config.run.dir)
    mark = folder / RUN_MARK
    if mark.is_file():
        changed = differences(_run_config(mark), config)
        if changed:
            raise ConfigError("run.dir", str(folder), f"holds a run of another configuration ({'; '.join(changed[:4])})",
                              "Choose another run.dir, or give the old values to resume")  # fmt: skip
    elif folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise ConfigError("run.dir", str(folder), "is not empty and holds no run", "Choose another folder")
    if launch.first():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / LOCK))
            save_config(config, mark)
        except OSError as e:
            raise ConfigError("run.dir", str(folder), f"cannot be written ({e.strerror})", "Choose another folder") from e
        except StateError as e:
            raise ConfigError("run.dir", str(folder), str(e), "Wait for its end, stop it, or choose another folder") from e
    return folder.resolve()


def _run_config(mark: Path) -> Config:
    try:
        return read_config(mark)
    except ConfigError as e:
        raise ConfigError("run.dir", str(mark.parent), f"its {mark.name} is not that of a run ({e})", "Choose another folder") from e


def checkpoint_folder(path: Path) -> Path:
    """A checkpoint from its own folder or from a run folder. Raises ConfigError when it is missing or incomplete."""
    from mcore_agent.state import Checkpoints

    if is_complete(path):
        return path
    latest = Checkpoints(path / "checkpoints", keep=1).latest()
    if latest is None:
        raise ConfigError("checkpoint", str(path), "no complete checkpoint is there", "Name a run folder or a step-… folder")
    return latest


def _check(config: Config, gpu: str | None) -> int:
    from mcore_agent.plan_report import report

    print(report(config, gpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
