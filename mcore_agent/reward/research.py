"""The answer's F1, a little for the form alone (M64; ReSearch, 2503.19470 sec. 2.3)."""

from dataclasses import dataclass

from mcore_agent.registry import register
from mcore_agent.reward.answers import FIND, Place, f1
from mcore_agent.reward.form import split_thoughts
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.reward.texts import final_text, gold_texts
from mcore_agent.types import Episode


@register("reward", "research")
@dataclass(frozen=True)
class Research:
    """The F1 of the last turn's answer where it is above 0; else ``form`` if the form is right, else 0.

    The form is right when every turn opens with thoughts and the last one has an answer at its ``place``. Gold ``red fort``:
    ``<answer>fort</answer>`` gives 2 / 3, ``<answer>lake</answer>`` after thoughts .1, without them 0.
    """

    form: float = 0.1
    place: Place = "answer"

    def __post_init__(self):
        if not 0 <= self.form < 1:
            raise RewardError(f"reward 'research': form is {self.form}, but must be in [0, 1)")

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"research": value in [0, 1]}``. Raises VerifierError for a task without gold."""
        gold, found = gold_texts(episode), FIND[self.place](final_text(episode))
        value = 0.0 if found is None else max(f1(found, each) for each in gold)
        formed = bool(found) and all(split_thoughts(turn.action)[0] for turn in episode.turns)
        return {"research": value if value > 0 else self.form * formed}
