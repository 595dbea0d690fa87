"""Runs many commands of the command line in one process, as starting up takes longer than most of them do.

Reads lines of JSON ``{"words": […], "variables": {…}, "file_limit": bytes or null}`` from stdin and answers each with a line
``[exit code, output]`` on stdout. The environment ``breakable`` is the hop-lookup task with a fault: the variable BREAK says which
(``down``: reset raises InfraError, ``fault``: step raises KeyError), and BREAK_LOG is a file of what was opened and closed.
"""

import contextlib
import io
import json
import os
import resource
import sys
import traceback
from pathlib import Path

from mcore_agent.cli import main
from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.protocols import Action, Env, InfraError, Observation
from mcore_agent.registry import register
from mcore_agent.types import Task


def note(what: str) -> None:
    with Path(os.environ["BREAK_LOG"]).open("a") as log:
        log.write(what + "\n")


class Breakable:
    def __init__(self, inner: Env):
        self.inner = inner
        note("open")

    async def reset(self) -> Observation:
        if os.environ.get("BREAK") == "down":
            raise InfraError("the sandbox is gone")
        return await self.inner.reset()

    async def step(self, action: Action) -> Observation:
        if os.environ.get("BREAK") == "fault":
            raise KeyError("a fault of the environment's code")
        return await self.inner.step(action)

    async def close(self) -> None:
        note("close")
        await self.inner.close()


@register("env", "breakable")
class BreakableDomain(HopLookup):
    def make(self, task: Task, seed: int) -> Env:
        return Breakable(super().make(task, seed))


def answer(command: dict) -> tuple[int, str]:
    out, before = io.StringIO(), dict(os.environ)
    os.environ.update(command["variables"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (command["file_limit"] or resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    code: int = 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(command["words"])
        except SystemExit as e:
            code = int(e.code or 0)
        except (KeyError, RuntimeError, OSError, ValueError):  # as the interpreter does at the end of a process
            traceback.print_exc()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.environ.clear()
    os.environ.update(before)
    return code, out.getvalue()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints past Python is no answer
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
