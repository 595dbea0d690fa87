"""The share of hidden tests that a program passes (M39; execution feedback as a reward)."""

from dataclasses import dataclass
from functools import cached_property

from mcore_agent.protocols import Scored
from mcore_agent.registry import register
from mcore_agent.reward.programs import Bench, Tried, tests_of, try_program
from mcore_agent.reward.texts import final_text, gold_mapping, program
from mcore_agent.sandbox import Backend
from mcore_agent.types import Episode


@register("reward", "code")
@dataclass(frozen=True)
class Code:
    """Passed tests / all tests of the last fenced Python block of the last turn; with ``partial`` False, 1 or 0. No block: 0.

    The task's gold is ``{"tests": [{"input": …, "output": …} or {"call": …, "args": […], "result": …}, …]}``. Each test runs in
    ``sandbox`` for at most ``limit_s`` seconds and ``memory_mb``. Three tests, of which one loops for ever and two pass: 2 / 3.
    """

    partial: bool = True
    sandbox: Backend = "bubblewrap"
    python: str = "python3"
    limit_s: float = 5.0
    memory_mb: int = 1024
    key: str = "code"

    def __post_init__(self):
        self._bench.check("code")

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.sandbox, self.python, self.limit_s, self.memory_mb)

    def score(self, episode: Episode) -> Scored:
        """``{key: value in [0, 1]}``. Raises InfraError when sandbox or tests are at fault."""
        tried = judge(episode, self._bench)
        value = tried.passed / tried.total if self.partial else float(tried.passed == tried.total)
        return Scored({self.key: value}, {"broken": float(tried.fate in ("compile", "runtime"))})


def judge(episode: Episode, bench: Bench) -> Tried:
    """How an episode's program does on the tests of its task."""
    tests = tests_of(gold_mapping(episode, "tests"), episode.task.id)
    return try_program(program(final_text(episode)), tests, bench)
