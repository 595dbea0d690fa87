"""A patch's likeness to the right one, and whether tests pass (M74; SWE-RL, 2502.18449 eq. 1)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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


@register("reward", "swe_rl")
@dataclass(frozen=True)
class SweRL:
    """``weight * likeness + (1 - weight) * tests``, or ``wrong`` for an answer without applicable edits, or one that changes nothing.

    ``likeness`` is the mean, over the files that either patch changes, of the diffs' matching ratio; ``tests`` is 1 when
    ``gold["command"]`` exits with 0 where the files, the edits and then ``gold["tests"]`` lie. The task's gold is
    ``{"files": {path: text}, "patched": {path: text}}`` with, if weight is below 1, ``command`` and ``tests: {path: text}``.
    ``weight`` 0 and ``wrong`` 0 is the outcome alone. Likeness .75 and passing tests at weight .6: .45 + .4 = .85.
    """

    weight: float = 1.0
    wrong: float = -1.0
    limit_s: float = 60.0
    memory_mb: int = 2048
    sandbox: Backend = "bubblewrap"
    key: str = "swe_rl"
    _children: Children = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        self._bench.check("swe_rl")
        if not 0 <= self.weight <= 1:
            raise RewardError(f"reward 'swe_rl': weight is {self.weight}, but must be in [0, 1]")
        if not -1 <= self.wrong <= 0:
            raise RewardError(f"reward 'swe_rl': wrong is {self.wrong}, but must be in [-1, 0]")
        object.__setattr__(self, "_children", Children(self.limit_s))

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.sandbox, limit_s=self.limit_s, memory_mb=self.memory_mb)

    def score(self, episode: Episode) -> Scored:
        """``{key: value in [-1, 1]}``. Raises InfraError when something other than the patch is at fault."""
        gold = gold_mapping(episode, "files", "patched", *(["command", "tests"] if self.weight < 1 else []))
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
            value += (1 - self.weight) * self._passes(after, gold)
        return Scored({self.key: value}, {"applies": 1.0})

    def _passes(self, files: Mapping[str, str], gold: Mapping[str, Any]) -> bool:
        box = BACKENDS[self.sandbox]()
        box.start()
        try:
            for path, text in {**files, **gold["tests"]}.items():  # tests last: a patch cannot change them
                box.put(path, text.encode(errors="replace"))
            with self._bench.turn:
                ran = box.exec(list(gold["command"]), self._bench.limits)
        finally:
            box.kill()
        if ran.reason == "missing":
            raise VerifierError("setup", f"no {gold['command'][0]} in the sandbox")
        return ran.code == 0 and ran.reason == "ok"
