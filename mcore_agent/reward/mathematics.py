"""A boxed mathematical answer is right or wrong (M39; verifiable rewards, 2411.15124 sec. 6)."""

from dataclasses import dataclass, field

from mcore_agent.registry import register
from mcore_agent.reward.children import Children, VerifierError
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.reward.texts import boxed, final_text, gold_texts
from mcore_agent.types import Episode


@register("reward", "math")
@dataclass(frozen=True)
class Mathematics:
    """1 when the last box of the last turn, thoughts aside, equals the task's gold (one of them, if it is a list), else 0.

    Numbers, fractions, sets, intervals and expressions are compared as such. Units count where both have one that is known, and are
    turned into one another; otherwise they, and words in ``\\text``, are left out. No box, and more than ``max_chars``
    characters in it, is wrong. A comparison of more than ``limit_s`` seconds, or one that crashes, is an infrastructure failure.

    Gold ``\\frac{1}{2}``: ``\\boxed{0.5}`` gives 1, ``\\boxed{2}`` and ``0.5`` give 0. Gold ``5 km``: ``5 km``, ``5000 m`` and ``5`` give
    1, ``5 kg``, ``5 m`` and ``5000 km`` give 0.
    """

    limit_s: float = 5.0
    max_chars: int = 500
    processes: int = 2
    key: str = "math"
    _children: Children = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in ("limit_s", "max_chars", "processes"):
            if not getattr(self, name) > 0:
                raise RewardError(f"reward 'math': {name} is {getattr(self, name)}, but must be above 0")
        object.__setattr__(self, "_children", Children(self.limit_s, self.processes))

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{key: 0.0 or 1.0}``. Raises VerifierError."""
        gold, answer = gold_texts(episode), boxed(final_text(episode))
        if not answer or len(answer) > self.max_chars:
            return {self.key: 0.0}
        equal = self._children.call("mathematics:same", gold=[boxed(each) or each for each in gold], answer=answer)
        if equal is None:
            raise VerifierError("gold", f"task {episode.task.id!r}: {gold!r} cannot be read as mathematics")
        return {self.key: float(equal)}
