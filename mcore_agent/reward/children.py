"""Child processes for what may hang, crash or take all memory (M39). A failure in them is the verifier's, never a zero."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

from mcore_agent.processes import end_tree
from mcore_agent.protocols import InfraError

START_S = 120.0  # for a busy machine to start a process and import what it needs
MEMORY_BYTES = 4 << 30
MODULE = "mcore_agent.reward.isolated.child"


class VerifierError(InfraError):
    """What would have judged an answer failed. ``kind``, a word to count by: ``timeout``, ``memory``, ``crash``, ``gold``
    (the task's own solution is of no use) or ``setup`` (something is not installed)."""

    def __init__(self, kind: str, text: str):
        super().__init__(f"verifier_{kind}: {text}")
        self.kind = kind


class Children:
    """At most ``most`` processes that call functions of ``reward.isolated``; several threads may ask. Made when first needed.

    One that fails is replaced. They end when this object does, or whoever made it.
    """

    def __init__(self, limit_s: float, most: int = 2, memory_bytes: int = MEMORY_BYTES):
        self.limit_s, self.memory_bytes = limit_s, memory_bytes
        self._turns = threading.Semaphore(most)
        self._idle: list[_Child] = []
        weakref.finalize(self, _end, self._idle)

    def call(self, function: str, **given: Any) -> Any:
        """The value of ``module:function``, of ``reward.isolated``. Raises VerifierError for a timeout, too much memory or a crash."""
        with self._turns:
            child = self._idle.pop() if self._idle else _Child(self.limit_s, self.memory_bytes)
            value = child.ask({"call": f"mcore_agent.reward.isolated.{function}", "given": given})
            self._idle.append(child)
        return value


class _Child:
    def __init__(self, limit_s: float, memory_bytes: int):
        self.limit_s = limit_s
        self.errors = os.memfd_create("errors")
        words = [sys.executable, "-m", MODULE, str(limit_s), str(memory_bytes)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)

    def ask(self, asked: dict[str, Any]) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(asked).encode() + b"\n")
            stdin.flush()
            ready = select.select([stdout], [], [], START_S + self.limit_s)[0]
            line = stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._failure()
        return json.loads(line)["value"]

    def _failure(self) -> VerifierError:
        """Why there is no answer. Ends the process."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
        said = os.pread(self.errors, 1 << 20, 0)[-2000:].decode(errors="replace").strip().rpartition("\n")[2]
        self.end()
        if code == -signal.SIGALRM:
            return VerifierError("timeout", f"no answer within {self.limit_s:g} s")
        if code < 0:
            said = f"{signal.Signals(-code).name} {said}"
        return VerifierError("memory" if said.startswith("MemoryError") else "crash", said)

    def end(self) -> None:
        """Ends the process; it obeys the end of its input, or is killed."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            end_tree(self.process.pid)
            self.process.wait()
        os.close(self.errors)


def _end(children: list[_Child]) -> None:
    while children:
        children.pop().end()
