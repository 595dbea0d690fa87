"""Starting ranks and ending them: everything that a run started is gone within seconds of its end."""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO

import psutil

from mcore_agent.config import Config, ConfigError, threads_per_rank
from mcore_agent.processes import die_with_parent, end_tree

LAUNCHER = "MCORE_AGENT_LAUNCHER"  # process id of the command that started the ranks, in their environment


def launched() -> bool:
    """Whether torchrun or srun has started this process as one of its ranks."""
    return "RANK" in os.environ or ("SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def first() -> bool:
    """Whether this process speaks for its run: the command itself, or rank 0 of another launcher's ranks."""
    return LAUNCHER not in os.environ and os.environ.get("RANK", "0") == "0"


def join_launcher() -> None:
    """A rank's first act: its place among the ranks, also under srun, and its end with whoever started it.

    A rank that dies in native code (SIGSEGV, SIGABRT, …) first prints the Python stack of all its threads.
    """
    if not launched():
        return
    faulthandler.enable(2)  # the descriptor: what sys.stderr is may change
    if "RANK" not in os.environ:
        slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
        os.environ.update({name: os.environ[source] for name, source in slurm.items()})
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    end_with_launcher()


def adopt_environment(config: Config) -> None:
    """Checks what the launcher has set, and sets this rank's threads.

    Raises ConfigError when the launcher started another number of ranks than the layout needs, or did not say all.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        value = os.environ.get(name)
        if launched() and (value is None or (name != "MASTER_ADDR" and not value.isdecimal())):
            raise ConfigError(name, value, "RANK is set, but this variable is not as torchrun or srun would set it",
                              "Set it, or unset RANK to start ranks from here")  # fmt: skip
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.world:
        raise ConfigError("learner", f"tp={config.learner.tp} pp={config.learner.pp} dp={config.learner.dp}",
                          f"needs {config.world} ranks, but the launcher started {world}", "Make both agree")  # fmt: skip
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(config))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def interruptible() -> None:
    """SIGTERM unwinds the stack as Ctrl-C does, so that every ``with`` block closes what it opened."""

    def stop(signum, frame):
        handler = signal.getsignal(signal.SIGINT)  # an event loop has its own, which cancels what it runs
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signum, frame)

    signal.signal(signal.SIGTERM, stop)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """An interrupt inside the block is raised at its end: one that falls into the callbacks of a fork would be lost."""
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    caught = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in caught:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def check_port() -> None:
    """Raises ConfigError when MASTER_PORT was given and this host's rank 0 cannot have it."""
    port = os.environ.get("MASTER_PORT")
    if port is None or os.environ.get("RANK", "0") != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", int(port)))
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError("MASTER_PORT", port, f"cannot be used ({e})", "Choose a free port or unset it") from e


def torchrun(ranks: int, words: Sequence[str], config: Config) -> int:
    """Runs ``mcore-agent`` with these words on ``ranks`` local ranks; returns the exit code.

    Ctrl-C and SIGTERM reach the ranks, and what is left after GRACE_S seconds is killed.
    """
    try:
        return run_ranks(ranks, ["-m", "mcore_agent.cli", *words], threads_per_rank(config))
    except KeyboardInterrupt:
        print("mcore-agent: interrupted; the ranks were stopped, the last checkpoint stays, the same command resumes", file=sys.stderr)
        return 130


def run_ranks(ranks: int, words: Sequence[str], threads: int, stream: IO[bytes] | None = None) -> int:
    """``python words…`` on ``ranks`` local ranks under torchrun; the exit code. No rank outlives this call or this process.

    A rank must call ``end_with_launcher`` first of all. ``stream`` takes what the ranks print.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", "mcore_agent.launch", "--standalone", f"--nproc-per-node={ranks}", *words]
    process: subprocess.Popen | None = None
    try:
        with interrupts_later():
            process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=stream, start_new_session=True, preexec_fn=die_with_parent
            )
        return process.wait()
    finally:
        if process is not None:
            end_tree(process.pid)


def supervise(words: Sequence[str]) -> int:
    """torchrun in this process, without its report: says which rank was killed, if one was, and returns the code of the
    rank that refused (2), of an interrupt (130), or 1."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # its own reports: this process does nothing else
    try:
        run.run(run.parse_args(list(words)))
    except SignalException:
        return 130
    except ChildFailedError as e:
        codes = {rank: failure.exitcode for rank, failure in e.failures.items()}
        for rank, code in codes.items():
            if code < 0 and -code not in (signal.SIGTERM, signal.SIGINT):
                hint = " (the system does so when memory is short)" if -code == signal.SIGKILL else ""
                print(f"mcore-agent: rank {rank} was ended by {signal.Signals(-code).name}{hint}", file=sys.stderr)
        return 2 if 2 in codes.values() else 1
    return 0


def end_with_launcher() -> None:
    """Ties this rank's life to its parent's, and ends it at once when the launcher is gone already."""
    die_with_parent()
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and not psutil.pid_exists(int(launcher)):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1:]))
