"""Plants known faults of parallel training in a copy of the tree, one at a time; the tests named with each must catch it.

    python tools/mutate_layouts.py             all faults
    python tools/mutate_layouts.py NAME ...    some of them
    python tools/mutate_layouts.py --list      names, what each breaks, and the tests that should see it

A fault is one exact replacement of text. First the chosen tests must pass without any fault. Exit code 0: every fault was
caught, 1: one survived, 2: nothing is proved (a text is not there exactly once, tests fail without a fault or cannot run, or
fail with one for another reason than what they computed, such as a machine too busy to start a rank in time).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from layout_faults import FAULTS, Fault, MutationError

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 900.0
# a fault that does not even run would be caught by any test
NONSENSE = re.compile(r"\b(?:NameError|SyntaxError|IndentationError|ImportError|ModuleNotFoundError|AttributeError|TypeError)\b")
# nor is a crash or a busy machine the fault's doing
ELSEWHERE = re.compile(r"TimeoutError|[Tt]imed out|Timeout \(>|\bdied \(")


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    caught_by: str  # id of a test; empty: the fault survived
    reason: str  # of that test's failure
    seconds: float
    unproven: str = ""  # why the run says nothing about the fault

    @property
    def verdict(self) -> str:
        return "UNPROVEN" if self.unproven else "caught" if self.caught_by else "SURVIVED"


def copy_tree(target: Path) -> None:
    """The working tree without what git ignores."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def environment(tree: Path) -> dict[str, str]:
    """That of the tests: the copy comes before any installed package, and all layouts have a test."""
    return os.environ | {
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault of the same length within a second would not be noticed
        "OMP_NUM_THREADS": "1",
        "MCORE_AGENT_LAYOUTS": "all",
        "MCORE_AGENT_SLOW": "all",
        "COLUMNS": "2000",  # or a failure's reason is cut off
    }


def check_copy(tree: Path) -> None:
    """Raises MutationError when Python would import another tree than the copy."""
    words = [sys.executable, "-c", "import mcore_agent, tests.ranks; print(mcore_agent.__file__); print(tests.ranks.__file__)"]
    out = subprocess.run(words, cwd=tree, env=environment(tree), capture_output=True, text=True)
    found = out.stdout.split()
    if out.returncode or len(found) != 2 or not all(Path(f).is_relative_to(tree) for f in found):
        raise MutationError(f"the tests would not import the copy in {tree} but {found}: {out.stderr[-500:]}")


def pytest(tree: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """(exit code, output). Raises MutationError when it takes longer than LIMIT_S."""
    words = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider", *options, *tests]
    try:
        done = subprocess.run(words, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as e:
        raise MutationError(f"{' '.join(tests)} took longer than {LIMIT_S:.0f} s") from e
    return done.returncode, done.stdout + done.stderr


def check_baseline(tree: Path, faults: Sequence[Fault]) -> None:
    """Raises MutationError unless the tests of these faults pass as things are."""
    tests = sorted({test for fault in faults for test in fault.tests})
    code, output = pytest(tree, tests)
    if code:
        raise MutationError(f"without any fault pytest ends with code {code}:\n{output[-3000:]}")


def try_fault(tree: Path, fault: Fault) -> Outcome:
    """Plants the fault, runs its tests to the first failure, and takes it out again. Raises MutationError when it does not fit."""
    clock = time.monotonic()
    before = fault.apply(tree)
    try:
        code, output = pytest(tree, fault.tests, "-x")
    finally:
        (tree / fault.file).write_text(before)
    seconds = time.monotonic() - clock
    if code == 0:
        return Outcome(fault, "", "", seconds)
    failed = re.search(r"^FAILED (.+?)(?: - (.*))?$", output, flags=re.M)
    if unproven := doubt(code, output):
        return Outcome(fault, "", "", seconds, f"{unproven}\n{output[-3000:]}")
    assert failed is not None
    return Outcome(fault, failed.group(1), failed.group(2) or "", seconds)


def doubt(code: int, output: str) -> str:
    """Why a pytest run that did not pass says nothing about the fault; empty when it does."""
    if code != 1 or not re.search(r"^FAILED ", output, flags=re.M):
        return f"pytest ends with code {code} and no failed test"
    if found := NONSENSE.search(output):
        return f"{found.group()}: the fault does not do what it says"
    if found := ELSEWHERE.search(output):
        return f"{found.group()}: the machine was too busy, or a rank crashed"
    if "no answer from ranks" in output and not re.search(r"rank \d+: Traceback", output):
        return "no rank answered in time, and none said why"
    return ""


def run(faults: Sequence[Fault]) -> list[Outcome]:
    """Tries each, with a line of progress. Raises MutationError."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutate_layouts_") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        check_copy(tree)
        for fault in faults:  # before minutes are spent
            (tree / fault.file).write_text(fault.apply(tree))
        clock = time.monotonic()
        check_baseline(tree, faults)
        print(f"without a fault all tests pass ({time.monotonic() - clock:.0f} s)", flush=True)
        clock = time.monotonic()
        for done, fault in enumerate(faults, 1):
            outcome = try_fault(tree, fault)
            outcomes.append(outcome)
            left = (time.monotonic() - clock) / done * (len(faults) - done) / 60
            print(f"[{done}/{len(faults)}] {outcome.verdict} {fault.name}, {outcome.seconds:.0f} s; about {left:.1f} min left", flush=True)
            if outcome.unproven:
                print(outcome.unproven, file=sys.stderr, flush=True)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["", "fault | caught by | reason | seconds", "--- | --- | --- | ---"]
    for o in outcomes:
        reason = (o.unproven or o.reason).partition("\n")[0][:100]
        lines.append(f"{o.fault.name} | {o.caught_by or o.verdict} | {reason} | {o.seconds:.0f}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plants known faults; the suite must catch each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and plant nothing")
    arguments = parser.parse_args(words)
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in arguments.names if name not in known]:
        print(f"unknown faults {', '.join(unknown)}; known are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in arguments.names] or FAULTS
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.what}\n    {fault.file}\n    " + "\n    ".join(fault.tests))
        return 0
    try:
        outcomes = run(chosen)
    except MutationError as e:
        print(e, file=sys.stderr)
        return 2
    print(table(outcomes))
    verdicts = {o.verdict for o in outcomes}
    return 1 if "SURVIVED" in verdicts else 2 if "UNPROVEN" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
