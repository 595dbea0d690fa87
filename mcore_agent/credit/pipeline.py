"""From rewards to the column ``advantage``: the parts of a recipe's ``credit``, on the policy's own tokens only."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.stretches import PART
from mcore_agent.protocols import Credit, Rescoring, Stateful
from mcore_agent.types import Batch, View

KINDS = ("filter", "shaping", "estimator", "transform", "normalizer")  # in the order in which a recipe lists them
BRANCH = "branch:"  # a need that the rollout meets: episodes of that branch in every group


def kind_of(name: str) -> str:
    """The kind of a part of ``credit``. Raises RegistryError for an unknown one, with the nearest estimator."""
    for kind in KINDS:
        if name in registry.variants(kind):
            return kind
    known = [n for kind in KINDS for n in registry.variants(kind)]
    raise registry.unknown("part of credit", name, known)


class Pipeline:
    """The parts of ``credit``, each ``{"name": …, argument: …}``, made once for a run: some remember what they have seen.

    Filters choose episodes, shapings add rewards to tokens, one estimator makes advantages of them, transforms re-weight
    those, a normalizer sets their scale. Raises RegistryError for an unknown part, CreditError when there is not exactly
    one estimator, or when parts do not follow the order of ``KINDS``.
    """

    def __init__(self, specs: Sequence[Mapping[str, Any]]):
        self.specs = specs
        kinds = [kind_of(str(spec.get("name"))) for spec in specs]
        if kinds.count("estimator") != 1:
            names = ", ".join(str(s["name"]) for s, kind in zip(specs, kinds, strict=True) if kind == "estimator")
            raise CreditError(f"credit names {names or 'no estimator'}; give exactly one, for example [{{name: grpo}}]")
        for i in range(1, len(kinds)):
            if KINDS.index(kinds[i]) < KINDS.index(kinds[i - 1]):
                raise CreditError(f"credit has the {kinds[i]} {specs[i]['name']!r} after the {kinds[i - 1]} {specs[i - 1]['name']!r}; "
                                  f"the order is: {', '.join(KINDS)}")  # fmt: skip
        parts = [registry.create(kind, spec) for kind, spec in zip(kinds, specs, strict=True)]
        self.parts = dict(zip(range(len(specs)), parts, strict=True))
        self._of = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in KINDS}
        self.estimator = parts[self._of["estimator"][0]]

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch columns that some part needs, and branches that the groups must hold (``branch:<name>``)."""
        return tuple(dict.fromkeys(need for part in self.parts.values() for need in part.needs))

    @property
    def branches(self) -> tuple[str, ...]:
        """Further episodes that every group must hold."""
        return tuple(need.removeprefix(BRANCH) for need in self.needs if need.startswith(BRANCH))

    @property
    def rescores(self) -> bool:
        """Whether the learner must score something first, under the present weights or the reference's."""
        return isinstance(self.estimator, Rescoring)

    @property
    def reference(self) -> bool:
        """Whether the weights of the stage's start must be kept."""
        return "logp_ref" in self.needs or (self.rescores and bool(self.estimator.under))

    def keep(self, batch: Batch) -> np.ndarray:
        """[k] places of the episodes that every filter keeps. Whole batches go through each filter."""
        kept = np.ones(len(batch.episodes), dtype=bool)
        for i in self._of["filter"] if batch.episodes else ():
            kept &= self.parts[i](batch)
        return np.flatnonzero(kept)

    def views(self, batch: Batch, encode: Callable[[str], list[int]]) -> list[View]:
        """What the learner is to score before credit is assigned."""
        return list(self.estimator.views(batch, encode)) if self.rescores and batch.episodes else []

    def __call__(self, batch: Batch, scores: Sequence[np.ndarray] = ()) -> tuple[Batch, dict[str, float]]:
        """The batch with ``advantage`` [N] float32 and what else the estimator gives, all 0 outside the channel ``pg``; numbers to log.

        ``scores`` has the log-probabilities [n] of the scored tokens of each of ``views``. Raises CreditError when a needed
        column is missing, an episode id occurs twice (it would vote twice), the estimator gives other columns than it
        says, or a result has the wrong shape or is not finite.
        """
        twice = [name for name, count in Counter(e.id for e in batch.episodes).items() if count > 1]
        if twice:
            raise CreditError(f"episode {twice[0]!r} is in the batch {sum(e.id == twice[0] for e in batch.episodes)} times")
        self._check_needs(batch)
        mask = batch.channel("pg")
        if not batch.episodes:
            return batch.with_columns(**{name: np.zeros(0, dtype=np.float32) for name in ("advantage", *self.estimator.gives)}), {}
        for i in self._of["shaping"]:
            added, before = self._own(self.parts[i](batch), mask, i), batch.columns.get("token_reward")
            batch = batch.with_columns(token_reward=added if before is None else before + added)
        place = self._of["estimator"][0]
        made = self.estimator(batch, scores) if self.rescores else self.estimator(batch)
        credit = made if isinstance(made, Credit) else Credit(made)
        if credit.columns.keys() != set(self.estimator.gives):
            raise CreditError(f"estimator {self.specs[place]['name']!r} gave the columns {sorted(credit.columns)}, "
                              f"but says {sorted(self.estimator.gives)}")  # fmt: skip
        self._check_shape(credit.advantage, _size(batch, self.estimator.axis), place)
        found = {name: self._own(column, mask, place, np.float32) for name, column in credit.columns.items()}
        advantage = batch.to_tokens(credit.advantage, self.estimator.axis)
        for i in (*self._of["transform"], *self._of["normalizer"]):
            advantage = self.parts[i](self._own(advantage, mask, place), batch)
            place = i
        found["advantage"] = self._own(advantage, mask, place, np.float32)
        return batch.with_columns(**found), dict(credit.numbers)

    def state_dict(self) -> dict[str, Any]:
        """What the parts remember, by their place in the recipe."""
        return {str(i): part.state_dict() for i, part in self.parts.items() if isinstance(part, Stateful)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for i, part in self.parts.items():
            if isinstance(part, Stateful):
                part.load_state_dict(state[str(i)])

    def _check_needs(self, batch: Batch) -> None:
        for i, part in self.parts.items():
            for need in part.needs:
                if not need.startswith(BRANCH) and need not in batch.columns:
                    raise CreditError(f"{kind_of(self.specs[i]['name'])} {self.specs[i]['name']!r} needs the batch column {need!r}; "
                                      f"there are: {', '.join(sorted(batch.columns)) or 'none'}")  # fmt: skip

    def _own(self, values: np.ndarray, mask: np.ndarray, place: int, dtype: type = np.float64) -> np.ndarray:
        """[N] a part's result on the policy's own tokens, 0 on the others."""
        self._check_shape(values, len(mask), place)
        clean = values.dtype == dtype  # then it is not copied
        for piece in (slice(start, start + PART) for start in range(0, len(mask), PART)):
            if not np.isfinite(values[piece]).all():
                at = piece.start + int(np.argmin(np.isfinite(values[piece])))
                raise CreditError(f"{self.specs[place]['name']!r} gave a value that is not finite, at token {at}")
            clean = clean and not np.any((values[piece] != 0) > mask[piece])
        if clean:
            return values
        out: np.ndarray = np.zeros(len(mask), dtype=dtype)
        np.copyto(out, values, where=mask, casting="same_kind")
        return out

    def _check_shape(self, values: np.ndarray, size: int, place: int) -> None:
        if np.shape(values) != (size,):
            raise CreditError(f"{self.specs[place]['name']!r} gave shape {np.shape(values)}, expected ({size},)")


def assign(batch: Batch, specs: Sequence[Mapping[str, Any]]) -> Batch:
    """One batch through a pipeline of its own."""
    return Pipeline(specs)(batch)[0]


def _size(batch: Batch, axis: str) -> int:
    sizes = {"episode": len(batch.episodes), "turn": len(batch.turn_episode), "token": len(batch.token_row)}
    return sizes[axis]
