"""A remembered value of every prompt, from evidence in the order of the policies that earned it (M94; SPO++)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mcore_agent.credit.beta import Beta, EventLog, Scale, check_memory, tasks_of
from mcore_agent.credit.groups import CreditError, scores
from mcore_agent.protocols import Credit
from mcore_agent.registry import register
from mcore_agent.types import Batch


@register("estimator", "spo_pp")
@dataclass
class SpoPp:
    """``A = r - v`` as in ``spo``, where the evidence behind v is sorted by the weight version that sampled an episode's first
    token, not by when the episode was done: an episode that took long changes nothing by coming late.

    Between two versions with evidence ``rho^(versions between)`` of it stays, at least ``rho_low``; versions stand for the
    policy's drift, so that nothing is scored again. Pairs with the normalizer ``standardize`` by token. Evidence more than
    ``window`` versions older than a prompt's newest is counted as ``late`` and left out of its value.

    A new prompt has a = b = 4. A success at version 3 gets A = .5 and leaves 4.5, 3.5; a failure at version 4 then gets
    A = 0 - .5625 and leaves .96 * 4.5 = 4.32 and .96 * 3.5 + 1 = 4.36.
    """

    rho: float = 0.96
    rho_low: float = 0.875
    worst: float = 0.0
    best: float = 1.0
    window: int = 64
    logs: dict[str, EventLog] = field(init=False, default_factory=dict)

    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "history"

    def __post_init__(self):
        self.scale = Scale(self.worst, self.best)
        check_memory("estimator 'spo_pp'", self.rho_low, self.scale)
        if not 0 < self.rho <= 1:
            raise CreditError(f"estimator 'spo_pp': rho is {self.rho}, but must be above 0 and at most 1")
        if self.window < 1:
            raise CreditError(f"estimator 'spo_pp': window is {self.window}, but must be at least 1")

    def value(self, task: str) -> float:
        """Expected success of a prompt, from 0 to 1."""
        known = self.logs[task].posterior(self.rho, self.rho_low) if task in self.logs else Beta.prior(self.rho_low)
        return known.value

    def __call__(self, batch: Batch) -> Credit:
        """[E] float64 advantages; the memory then knows the batch."""
        reward, gained, late = scores(batch), np.zeros(len(batch.episodes)), 0
        steps = np.flatnonzero(batch.channel("pg"))
        owner, at = np.unique(batch.token_episode[steps], return_index=True)
        version = dict(zip(owner.tolist(), batch.tokens("version")[steps[at]].tolist(), strict=True))
        for task, places in tasks_of(batch).items():
            gained[places] = reward[places] - self.scale.score(self.value(task))
            log = self.logs.setdefault(task, EventLog(Beta.prior(self.rho_low)))
            for i in places.tolist():
                late += not log.add(version[i], self.scale.evidence(float(reward[i])), self.window, self.rho, self.rho_low)
        return Credit(gained, numbers={"late": late, "prompts_known": len(self.logs)})

    def state_dict(self) -> dict[str, Any]:
        return {"logs": {task: log.to_json() for task, log in self.logs.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.logs = {task: EventLog.from_json(log) for task, log in state["logs"].items()}
