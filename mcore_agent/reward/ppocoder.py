"""A program's fate and how much of a reference's structure it has (M73; PPOCoder, 2301.13816 eq. 6-9)."""

from dataclasses import dataclass, field
from functools import cached_property

from mcore_agent.registry import register
from mcore_agent.reward.children import Children, VerifierError
from mcore_agent.reward.code import judge
from mcore_agent.reward.coderl import FATES
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.reward.programs import Bench
from mcore_agent.reward.texts import final_text, gold_mapping, program
from mcore_agent.sandbox import Backend
from mcore_agent.types import Episode

ROOM = FATES["pass"] - FATES["fail"]  # between all tests and not all


@register("reward", "ppocoder")
@dataclass(frozen=True)
class PPOCoder:
    """``fate + ast * shared subtrees + dfg * shared data flow``: ``fate`` as for ``coderl``, the shares of what the task's
    ``gold["solution"]`` has, in [0, 1]. What is no Python gets -1 alone. The paper's KL is the shaping ``kl_reward``.

    ``ast + dfg`` must be below 1.3, or a likeness could outweigh the tests. A program like the reference that fails a test:
    -.3 + .5 + .5 = .7.
    """

    ast: float = 0.5
    dfg: float = 0.5
    sandbox: Backend = "bubblewrap"
    python: str = "python3"
    limit_s: float = 5.0
    memory_mb: int = 1024
    _children: Children = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        self._bench.check("ppocoder")
        if not (self.ast >= 0 and self.dfg >= 0 and self.ast + self.dfg < ROOM):
            raise RewardError(f"reward 'ppocoder': ast is {self.ast} and dfg {self.dfg}, but both must be at least 0 and their sum "
                              f"below {ROOM}, or a program that fails could get more than one that passes")  # fmt: skip
        object.__setattr__(self, "_children", Children(self.limit_s))

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.sandbox, self.python, self.limit_s, self.memory_mb)

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``fate``, ``ast`` and ``dfg``, each with its weight. Raises InfraError when something other than the program is at fault."""
        reference, written = gold_mapping(episode, "tests", "solution")["solution"], program(final_text(episode))
        tried = judge(episode, self._bench)
        if FATES[tried.fate] == FATES["compile"]:
            return {"fate": FATES[tried.fate], "ast": 0.0, "dfg": 0.0}
        alike = self._children.call("structure:compare", program=written, reference=reference)
        if alike is None:
            raise VerifierError("crash", f"task {episode.task.id!r}: a program that compiles could not be parsed")
        return {"fate": FATES[tried.fate], "ast": self.ast * alike["ast"], "dfg": self.dfg * alike["dfg"]}
