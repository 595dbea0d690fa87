"""Runs a program that a model wrote against hidden tests, in a sandbox (M39, M72)."""

import json
import math
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_agent.protocols import ExecLimits, Ran, Sandbox
from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.sandbox import BACKENDS, Backend

Fate = Literal["none", "compile", "runtime", "fail", "pass"]
TOLERANCE = 1e-9  # relative, between numbers with a fraction

COMPILE = "import sys; compile(sys.stdin.read(), 'main.py', 'exec')"
CALL = """\
import json, sys
asked = json.load(sys.stdin)
import main
value = vars(main)[asked["call"]](*asked["args"], **asked["kwargs"])
print("\\n" + asked["mark"] + json.dumps(value))
"""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Bench:
    """Where programs run. ``python`` is a program of the sandbox; limits are for each test.

    No more run at once, inside ``turn``, than there are cores: one that waits for a core would come near its time limit.
    """

    sandbox: Backend = "bubblewrap"
    python: str = "python3"
    limit_s: float = 5.0
    memory_mb: int = 1024
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(cores()), repr=False, compare=False)

    def check(self, reward: str) -> None:
        """Raises RewardError for a setting out of range."""
        for name in ("limit_s", "memory_mb"):
            if not getattr(self, name) > 0:
                raise RewardError(f"reward {reward!r}: {name} is {getattr(self, name)}, but must be above 0")
        if self.sandbox not in BACKENDS:
            raise RewardError(f"reward {reward!r}: sandbox is {self.sandbox!r}, but must be one of {', '.join(BACKENDS)}")

    @property
    def limits(self) -> ExecLimits:
        return ExecLimits(wall_s=self.limit_s, memory_bytes=self.memory_mb << 20)


@dataclass(frozen=True)
class Tried:
    """How a program did: not there (``none``), no Python (``compile``), it broke in a test (``runtime``: an error, or a limit),
    gave a wrong answer (``fail``), or passed all."""

    fate: Fate
    passed: int
    total: int


def try_program(program: str | None, tests: Sequence[Mapping[str, Any]], bench: Bench) -> Tried:
    """A program against all tests, each in a run of its own. Raises InfraError when sandbox or tests are at fault.

    A test is ``{"input": text, "output": text}``, with trailing blanks aside, or ``{"call": function, "args": […], "result": value}``
    with, if wanted, ``kwargs``. What a test expects never enters the sandbox.
    """
    if program is None:
        return Tried("none", 0, len(tests))
    box = BACKENDS[bench.sandbox]()
    box.start()
    try:
        source = program.encode(errors="replace")
        if _ran(box, [bench.python, "-c", COMPILE], bench, source).code:
            return Tried("compile", 0, len(tests))
        box.put("main.py", source)
        fates = [_try_one(test, box, bench) for test in tests]
    finally:
        box.kill()
    worst: Fate = next((fate for fate in ("runtime", "fail") if fate in fates), "pass")  # type: ignore[assignment]
    return Tried(worst, fates.count("pass"), len(tests))


def _try_one(test: Mapping[str, Any], box: Sandbox, bench: Bench) -> Fate:
    if "call" not in test:
        ran = _ran(box, [bench.python, "main.py"], bench, str(test["input"]).encode())
        good = _lines(ran.stdout.decode(errors="replace")) == _lines(str(test["output"]))
    else:
        mark = secrets.token_hex(8)
        asked = {"call": test["call"], "args": list(test.get("args", ())), "kwargs": dict(test.get("kwargs", {})), "mark": mark}
        ran = _ran(box, [bench.python, "-c", CALL], bench, json.dumps(asked).encode())
        good = _same(_returned(ran.stdout, mark), test["result"])
    if ran.code or ran.reason != "ok":
        return "runtime"
    return "pass" if good else "fail"


def _ran(box: Sandbox, command: Sequence[str], bench: Bench, stdin: bytes) -> Ran:
    with bench.turn:
        ran = box.exec(command, bench.limits, stdin)
    if ran.reason == "missing":
        raise VerifierError("setup", f"no {command[0]} in the sandbox: {ran.stderr.decode(errors='replace').strip()}")
    return ran


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


class _Nothing:
    """No value: equal to no result."""


def _returned(said: bytes, mark: str) -> Any:
    """The value that was printed last after the mark."""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.startswith(mark)]
    try:
        return json.loads(lines[-1][len(mark) :]) if lines else _Nothing()
    except (ValueError, RecursionError):  # the program wrote there
        return _Nothing()


def _same(found: Any, wanted: Any) -> bool:
    """Equal as JSON, a truth value apart from a number; numbers with a fraction nearly so."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, float) or isinstance(wanted, float):
        numbers = isinstance(found, (int, float)) and isinstance(wanted, (int, float))
        return numbers and math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(wanted, (list, tuple)):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(wanted, Mapping):
        return isinstance(found, dict) and found.keys() == wanted.keys() and all(_same(found[key], wanted[key]) for key in wanted)
    return found == wanted


def tests_of(gold: Mapping[str, Any], task: str) -> list[Mapping[str, Any]]:
    """The tests of a gold. Raises VerifierError unless there is one at least, and each has one of the two forms."""
    tests = gold["tests"]
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise VerifierError("gold", f"task {task!r} has no tests")
    for i, test in enumerate(tests):
        if not isinstance(test, Mapping) or not ({"input", "output"} <= test.keys() or {"call", "result"} <= test.keys()):
            raise VerifierError("gold", f"task {task!r}: tests[{i}] is {test!r}, but has input and output, or call, args and result")
    return list(tests)
