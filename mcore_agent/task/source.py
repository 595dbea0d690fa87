"""Task sources: which tasks are played next."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mcore_agent.protocols import Domain
from mcore_agent.registry import register
from mcore_agent.types import Episode, Task


@register("source", "epochs")
class EpochSource:
    """Every task of a split once per epoch, each epoch in a new order; a split without end is read from its start.

    The order depends on ``seed`` alone and the state is one position, so a resumed source goes on where the saved
    one stood (I10). Raises ValueError for an empty split, and for a state saved with another split, size or seed.
    """

    def __init__(self, domain: Domain, split: str = "train", seed: int = 0):
        self.domain, self.split, self.seed = domain, split, seed
        self.size, self.position = domain.size(split), 0
        self._epoch, self._order = -1, list[int]()
        if self.size is not None and self.size < 1:
            raise ValueError(f"source 'epochs': split {split!r} has {self.size} tasks; choose a split with tasks")

    def next(self, k: int) -> list[Task]:
        tasks = [self.domain.task(self.split, self._index(self.position + i)) for i in range(k)]
        self.position += k
        return tasks

    def observe(self, episodes: Sequence[Episode]) -> None:
        """The order does not depend on results."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, mine in self._identity().items():
            if state[key] != mine:
                raise ValueError(f"source 'epochs': {key} was {state[key]!r} when saved and is {mine!r}; resume with the same")
        self.position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {"split": self.split, "size": self.size, "seed": self.seed}

    def _index(self, position: int) -> int:
        if self.size is None:
            return position
        epoch, offset = divmod(position, self.size)
        if epoch != self._epoch:
            self._order = Random(f"epochs/{self.seed}/{self.split}/{epoch}").sample(range(self.size), self.size)
            self._epoch = epoch
        return self._order[offset]
