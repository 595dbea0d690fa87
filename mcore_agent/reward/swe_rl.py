"""A patch's likeness to the right one, and whether tests pass (M74; SWE-RL, 2502.18449 eq. 1)."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from mcore_agent.protocols import Scored
from mcore_agent.registry import register
from mcore_agent.reward.children import Children, VerifierError
from mcore_agent.reward.patches import PatchError, diffs, proposed
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.reward.programs import Bench
from mcore_agent.reward.texts import final_text, gold_mapping
from mcore_agent.sandbox import BACKENDS, Backend
from mcore_agent.types import Episode

ISOLATED = Path(__file__).with_name("isolated")
SUITE, ONE = ((ISOLATED / name).read_text() for name in ("suite.py", "suite_file.py"))
RUNNERS = ("unittest", "pytest")
HOOKS = "conftest.py"  # code that pytest obeys: of the tests, never of a patch


@register("reward", "swe_rl")
@dataclass(frozen=True)
class SweRL:
    """``weight * likeness + (1 - weight) * tests``, or ``wrong`` for an answer without applicable edits, or one that changes nothing.

    ``likeness`` is the mean, over the files that either patch changes, of the diffs' matching ratio; ``tests`` is 1 when all of the
    task's tests pass where the files, the edits and then ``gold["tests"]`` lie. The task's gold is ``{"files": {path: text},
    "patched": {path: text}}`` with, if weight is below 1, ``tests: {path: text}`` and one of

    * ``counts: {path: number}``: how many tests of each file pass after the right patch. Each file runs in a process of its own, by
      ``runner`` (``unittest``, or ``pytest`` where the sandbox has it), and one that ends before it has reported has failed.
    * ``command``: for other languages. It gets a random word as the first line of its input, and has to print it as its last line and
      exit with 0 once it has counted the tests that passed. The word must not reach the tested code: status 0 alone proves nothing.

    Before a task's first answer its right patch is tried: where that fails, the task is at fault and not the policy. Tested code that
    searches its own process for the report could still forge one. ``weight`` 0 and ``wrong`` 0 is the outcome alone.
    Likeness .75 and passing tests at weight .6: .45 + .4 = .85.
    """

    weight: float = 1.0
    wrong: float = -1.0
    limit_s: float = 60.0
    memory_mb: int = 2048
    sandbox: Backend = "bubblewrap"
    python: str = "python3"
    key: str = "swe_rl"
    _children: Children = field(init=False, repr=False, compare=False)
    _proved: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # tasks whose right patch passes

    def __post_init__(self):
        self._bench.check("swe_rl")
        if not 0 <= self.weight <= 1:
            raise RewardError(f"reward 'swe_rl': weight is {self.weight}, but must be in [0, 1]")
        if not -1 <= self.wrong <= 0:
            raise RewardError(f"reward 'swe_rl': wrong is {self.wrong}, but must be in [-1, 0]")
        object.__setattr__(self, "_children", Children(self.limit_s))

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.sandbox, self.python, self.limit_s, self.memory_mb)

    def score(self, episode: Episode) -> Scored:
        """``{key: value in [-1, 1]}``. Raises InfraError when something other than the patch is at fault."""
        gold = gold_mapping(episode, "files", "patched", *(["tests"] if self.weight < 1 else []))
        files = dict(gold["files"])
        try:
            after = proposed(final_text(episode), files)
        except PatchError:
            return Scored({self.key: self.wrong}, {"applies": 0.0})
        value = 0.0
        if self.weight > 0:
            wanted = diffs(files, {**files, **gold["patched"]})
            value += self.weight * self._children.call("similarity:mean_ratio", found=diffs(files, after), wanted=wanted)
        if self.weight < 1:
            self._prove(episode.task.id, gold)
            value += (1 - self.weight) * self._passes(after, gold, episode.task.id)
        return Scored({self.key: value}, {"applies": 1.0})

    def _prove(self, task: str, gold: Mapping[str, Any]) -> None:
        """Raises VerifierError unless the right patch passes the tests."""
        if task not in self._proved:
            if not self._passes({**gold["files"], **gold["patched"]}, gold, task):
                raise VerifierError("gold", f"task {task!r}: its own patch does not pass its tests in this sandbox")
            self._proved.add(task)

    def _passes(self, files: Mapping[str, str], gold: Mapping[str, Any], task: str) -> bool:
        command, asked = self._suite(gold, task)
        word = secrets.token_hex(16)
        own = {path: text for path, text in files.items() if PurePosixPath(path).name != HOOKS}
        hooks = {path: text for path, text in gold["files"].items() if PurePosixPath(path).name == HOOKS}
        box = BACKENDS[self.sandbox]()
        box.start()
        try:
            for path, text in {**own, **hooks, **gold["tests"]}.items():  # tests last: a patch cannot change them
                box.put(path, text.encode(errors="replace"))
            with self._bench.turn:
                ran = box.exec(command, self._bench.limits, f"{word}\n{asked}".encode())
        finally:
            box.kill()
        if ran.reason == "missing":
            raise VerifierError("setup", f"no {command[0]} in the sandbox")
        said = ran.stdout.decode(errors="replace").split("\n")
        return ran.code == 0 and ran.reason == "ok" and word in said[-2:-1]

    def _suite(self, gold: Mapping[str, Any], task: str) -> tuple[list[str], str]:
        """The command of a task's tests, and what it reads after the word."""
        if "command" in gold:
            return list(gold["command"]), ""
        counts, runner = gold.get("counts"), gold.get("runner", "unittest")
        if not isinstance(counts, Mapping) or not counts or runner not in RUNNERS:
            raise VerifierError(
                "gold", f"task {task!r}: its gold needs a command, or counts of tests by file (runner: {', '.join(RUNNERS)})"
            )
        return [self.python, "-I", "-c", SUITE], json.dumps({"counts": dict(counts), "one": ONE, "runner": runner})
