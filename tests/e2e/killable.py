"""The command line with an engine that may be killed: ``killable``, a process that answers without a model (tests/engine_server.py).

``KILL_IN=cycle:STATE,…`` kills one of the engines when that state is about to be left in that cycle of hand-overs;
``KILL_EVERY=seconds:count:seed`` kills one at random times. Weights are not kept by the server, only their checksums by whoever gave them.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.cli import main
from mcore_agent.processes import die_with_parent
from mcore_agent.registry import register
from mcore_agent.rollout import states
from tests.engine_process import SERVER, ProcessEngine

STARTED: list["Killable"] = []  # by this process, the last ones alive


@register("engine", "killable")
class Killable(ProcessEngine):
    own_process = True

    @staticmethod
    def check_options(options: Mapping[str, Any], cuda: bool) -> None:
        pass

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        dtype: str = "fp32",
        max_batch: int = 1,
        tp: int = 1,
        gpus: Sequence[int] = (),
        folder: str = "",
        address: tuple[int, int] | None = None,
        delay: float = 0.002,
    ):
        self.owned = address is None
        self.sums: dict[str, str] = {}
        self.version = -1
        if address is None:
            words = [sys.executable, "-S", "-E", str(SERVER), str(delay), "-1", str(hf_config["vocab_size"]), "5"]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
            assert process.stdout is not None
            self.process = process
            address = int(process.stdout.readline()), process.pid
            STARTED.append(self)
            with Path(os.environ["KILL_LOG"]).open("a") as log:
                log.write(json.dumps({"started": process.pid}) + "\n")
        self.address = address
        self.port = address[0]

    async def sync(self) -> None:
        self.version = (await self._call("look"))["version"]

    async def begin_update(self) -> None:
        self.sums = {}
        await super().begin_update()

    async def update(self, bucket: Any) -> None:
        bucket = list(bucket)
        self.sums |= {name: tensor_checksum(torch.as_tensor(tensor)) for name, tensor in bucket}
        await super().update(bucket)

    async def checksum(self) -> dict[str, str]:
        await self._call("look")
        return dict(self.sums)

    async def close(self) -> None:
        if self.owned:
            await super().close()


def kill(reason: str) -> None:
    alive = [engine for engine in STARTED if engine.process.poll() is None]
    if alive:
        victim = random.Random(reason).choice(alive)
        os.kill(victim.process.pid, signal.SIGKILL)
        with Path(os.environ["KILL_LOG"]).open("a") as log:
            log.write(json.dumps({"killed": victim.process.pid, "at": reason}) + "\n")


def kill_in_states(plan: str) -> None:
    wanted = {tuple(item.split(":")) for item in plan.split(",")}
    go, cycle = states.TimeSlicer._go, 0

    def watched(self, event, *rest):
        nonlocal cycle
        cycle += event == "rollout"
        if (at := (str(cycle), self.state)) in wanted and event not in ("save", "recover"):
            wanted.discard(at)
            kill(":".join(at))
        return go(self, event, *rest)

    states.TimeSlicer._go = watched  # type: ignore[method-assign]


def kill_every(seconds: float, count: int, seed: int) -> None:
    draws = random.Random(seed)

    def body() -> None:
        while not STARTED:
            time.sleep(0.05)
        for i in range(count):
            time.sleep(draws.uniform(0, 2 * seconds))
            kill(f"{seed}/{i}")

    threading.Thread(target=body, daemon=True).start()


if __name__ == "__main__":
    if plan := os.environ.get("KILL_IN"):
        kill_in_states(plan)
    if every := os.environ.get("KILL_EVERY"):
        a, b, c = every.split(":")
        kill_every(float(a), int(b), int(c))
    sys.exit(main())
