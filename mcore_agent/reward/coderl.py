"""Four rewards for four fates of a program (M72; CodeRL, 2207.01780 eq. 5)."""

from dataclasses import dataclass
from functools import cached_property

from mcore_agent.registry import register
from mcore_agent.reward.code import judge
from mcore_agent.reward.programs import Bench
from mcore_agent.sandbox import Backend
from mcore_agent.types import Episode

FATES = {"none": -1.0, "compile": -1.0, "runtime": -0.6, "fail": -0.3, "pass": 1.0}


@register("reward", "coderl")
@dataclass(frozen=True)
class CodeRL:
    """-1 for no Python, -.6 where a test ends in an error or at a limit, -.3 where an answer is wrong, 1 when all tests pass.

    Tests and program as for ``code``. The paper's baseline is the greedy program's reward: the estimator ``remax``; a sampled
    program that passes beside a greedy one with a wrong answer then has the advantage 1 - -.3 = 1.3.
    """

    sandbox: Backend = "bubblewrap"
    python: str = "python3"
    limit_s: float = 5.0
    memory_mb: int = 1024

    def __post_init__(self):
        self._bench.check("coderl")

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.sandbox, self.python, self.limit_s, self.memory_mb)

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"coderl": -1, -.6, -.3 or 1}``. Raises InfraError when sandbox or tests are at fault."""
        return {"coderl": FATES[judge(episode, self._bench).fate]}
