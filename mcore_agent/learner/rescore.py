"""Scores sampled tokens again, under other contexts or other weights, with the learner's own forward pass."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch.distributed as dist

from mcore_agent.batch.microbatch import Plan
from mcore_agent.batch.views import plan_views
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.wait import Line
from mcore_agent.types import View

Outputs = dict[str, np.ndarray]
Key = tuple[str, str, str | None, int]  # row, view, weights and their version


class Rescorer:
    """Methods are collective: rank 0 asks and gets the answers, the others pass None and get None."""

    def __init__(self, learner: Learner, line: Line, token_budget: int):
        self.learner, self.line, self.token_budget = learner, line, token_budget
        self._cache: dict[Key, Outputs] = {}
        self.forwarded = 0  # views that went through the model so far, the others came from the cache

    def score(
        self, views: Sequence[View] | None, version: int, report: Iterable[str] = (), *, top_k: int = 0, under: str | None = None
    ) -> list[Outputs] | None:
        """For each view ``logp`` [n] of its scored tokens, and the outputs named in ``report`` (``ModelOut``).

        All views go through the model together, packed. A view that was scored before, with the same weights (``under``: that
        snapshot, None: the current ones, whose version is ``version``) and at least these outputs, is not computed again.
        """
        wanted = frozenset(report) | {"logp"}
        plan, todo, keys = None, [], []
        if views is not None:
            self._forget(version)
            weights = self.learner.snapshots[under] if under else version
            keys = [(v.row, v.name, under, weights) for v in views]
            todo = [i for i, key in enumerate(keys) if not self._known(key, wanted, top_k)]
            plan = plan_views([views[i] for i in todo], self.token_budget, self.learner.groups.layout.dp)
        found = self.outputs(plan, wanted - {"logp"}, top_k=top_k, under=under)
        if views is None or found is None or plan is None:
            return None
        self.forwarded += len(todo)
        for micros, answers in zip(plan.slots, found, strict=True):
            for micro, answer in zip(micros, answers, strict=True):
                for row, start in zip(micro.rows, micro.starts, strict=False):
                    if row >= 0:
                        place = start + views[todo[row]].scored
                        self._cache[keys[todo[row]]] = {name: values[place] for name, values in answer.items()}
        return [self._cache[key] for key in keys]

    def outputs(
        self, plan: Plan | None, report: Iterable[str] = (), *, top_k: int = 0, under: str | None = None
    ) -> list[list[Outputs]] | None:
        """Rank 0 gives a plan and gets the learner's outputs ``[dp rank][slot]``, each [T] over its micro-batch."""
        groups = self.learner.groups
        asked = self.line.share((frozenset(report), top_k, under))
        parts = None if plan is None else [[] if plan.empty else slots for slots in plan.slots]
        micro = self.line.scatter(parts)
        own = self.learner.outputs(micro, asked[0], top_k=asked[1], under=asked[2]) if micro else []
        found = [(groups.dp_rank, own)]
        if groups.layout.world > 1:
            found *= groups.layout.world
            dist.all_gather_object(found, (groups.dp_rank, own))
        return [dict(found)[r] for r in range(groups.layout.dp)] if groups.rank == 0 else None

    def _known(self, key: Key, wanted: frozenset[str], top_k: int) -> bool:
        have = self._cache.get(key, {})
        return wanted <= have.keys() and (top_k == 0 or have["top_ids"].shape[1] == top_k)

    def _forget(self, version: int) -> None:
        """Drops what older weights have given."""
        snapshots = self.learner.snapshots
        self._cache = {
            key: value for key, value in self._cache.items() if key[3] == (version if key[2] is None else snapshots.get(key[2]))
        }
