"""Any part of the registry's credit on random batches, with whatever it needs."""

import dataclasses
import typing
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from mcore_agent import registry
from mcore_agent.credit.groups import CreditError
from mcore_agent.credit.pipeline import KINDS, Pipeline
from mcore_agent.types import Batch, View
from tests.strategies import VOCAB, cut_rows, moved_tokens, permuted, random_batch, with_greedy, with_values

Spec = dict[str, Any]


def variants_of(kind: str) -> list[Spec]:
    """A specification for each variant of a kind, and for each value of its field ``measure`` if it has one."""
    made: list[Spec] = []
    for name, variant in registry.variants(kind).items():
        hints = typing.get_type_hints(variant) if "measure" in {f.name for f in dataclasses.fields(variant)} else {}
        choices = typing.get_args(hints["measure"]) if hints else ()
        made += [{"name": name, "measure": measure} for measure in choices] or [{"name": name}]
    return made


def estimators() -> list[Spec]:
    return variants_of("estimator")


def label(spec: Spec) -> str:
    return "-".join(map(str, spec.values()))


def made(spec: Spec) -> Any:
    """The part itself."""
    (part,) = _without_state(_frozen(spec)) or [_part(spec)]
    return part


def _part(spec: Spec) -> Any:
    return registry.create(next(kind for kind in KINDS if spec["name"] in registry.variants(kind)), spec)


def _frozen(spec: Spec) -> tuple[tuple[str, Any], ...]:
    return tuple(spec.items())


@cache
def _without_state(spec: tuple[tuple[str, Any], ...]) -> list[Any]:
    """The one object that serves every batch, or none where a part remembers something."""
    part = _part(dict(spec))
    return [part] if type(part).__dataclass_params__.frozen else []


@cache
def _pipeline_without_state(specs: tuple[tuple[tuple[str, Any], ...], ...]) -> list[Pipeline]:
    return [Pipeline([dict(spec) for spec in specs])] if all(_without_state(spec) for spec in specs) else []


def pipeline_of(*specs: Spec) -> Pipeline:
    """One that remembers nothing, made once for all tests if its parts cannot remember."""
    (pipeline,) = _pipeline_without_state(tuple(map(_frozen, specs))) or [Pipeline(specs)]
    return pipeline


@cache
def batch_for(seed: int, greedy: bool = False, equal: bool = False, demos: bool = True) -> Batch:
    """A random batch with the columns that parts of credit may need, and with greedy episodes if asked for."""
    batch = random_batch(seed, equal=equal, demos=demos, hard=True)
    return with_values(with_greedy(batch, seed) if greedy else batch, seed)


@cache
def permuted_for(seed: int, greedy: bool) -> tuple[Batch, np.ndarray]:
    """The batch in another order, and for each of its tokens the place in the old one."""
    batch = batch_for(seed, greedy)
    moved, order = permuted(batch, seed)
    source = moved_tokens(batch, order)
    return moved.with_columns(**{name: values[source] for name, values in batch.columns.items()}), source


@cache
def cut_for(seed: int, greedy: bool) -> tuple[Batch, np.ndarray]:
    """The batch with rows cut in two, and for each of its tokens the one that it repeats."""
    batch = batch_for(seed, greedy)
    cut, source = cut_rows(batch)
    return cut.with_columns(**{name: values[source] for name, values in batch.columns.items()}), source


def planted(batch: Batch) -> Batch:
    """NaN and infinity in every number outside the policy's own tokens."""
    outside = ~batch.channel("pg")
    junk = np.where(np.arange(len(outside)) % 3 == 0, np.inf, np.nan)
    return batch.with_columns(**{name: np.where(outside, junk, values) for name, values in batch.columns.items()})


def part_of(batch: Batch, chosen: Sequence[int] | np.ndarray) -> tuple[Batch, np.ndarray]:
    """Some episodes with their columns, and which tokens [N] of the batch are theirs."""
    own = np.isin(batch.token_episode, chosen)
    alone = Batch(tuple(batch.episodes[i] for i in sorted(chosen)))
    return alone.with_columns(**{name: values[own] for name, values in batch.columns.items()}), own


def encode(text: str) -> list[int]:
    return [1 + ord(c) % (VOCAB - 1) for c in text]


def score_of(view: View) -> np.ndarray:
    """[n] log-probabilities that follow from a view's tokens and weights alone, wherever they came from."""
    seed = zlib.crc32(view.tokens.tobytes()) + len(view.under)
    return -np.random.default_rng(seed).exponential(1.0, len(view.scored)).astype(np.float32)


def credited(batch: Batch, *specs: Spec, pipeline: Pipeline | None = None, score: Callable[[View], np.ndarray] = score_of) -> Batch:
    """The batch with advantages, by a pipeline of its own unless one is given; ``score`` is the learner of its views."""
    pipeline = pipeline or pipeline_of(*specs)
    missing = [need for need in pipeline.needs if not need.startswith("branch:") and need not in batch.columns]
    assert not missing, f"{specs} needs {missing}: let tests/strategies.py:with_values give these columns"
    return pipeline(batch, [score(view) for view in pipeline.views(batch, encode)])[0]


def needs_greedy(spec: Spec) -> bool:
    branches = {need for need in made(spec).needs if need.startswith("branch:")}
    assert branches <= {"branch:greedy"}, f"{spec} needs {branches}: let tests/strategies.py make such episodes"
    return bool(branches)


def baseline(spec: tuple[tuple[str, Any], ...], seed: int) -> np.ndarray:
    """[N] float32 what an estimator gives for ``batch_for``: several tests hold something against it."""
    return given_by(spec, seed)["advantage"]


@cache
def given_by(spec: tuple[tuple[str, Any], ...], seed: int) -> dict[str, np.ndarray]:
    """The column of advantages and those that the estimator gives beside it, [N] float32 each."""
    settings = dict(spec)
    columns = credited(batch_for(seed, needs_greedy(settings)), settings).columns
    found = {name: columns[name] for name in ("advantage", *made(settings).gives)}
    for values in found.values():
        values.setflags(write=False)
    return found


def switched_off(spec: Spec) -> Spec | None:
    """A part of credit with every number at 0; None for one that has no number, or does not take 0."""
    variant = type(made(spec))
    numbers = {f.name: 0.0 for f in dataclasses.fields(variant) if f.init and isinstance(f.default, float)}
    try:
        made({**spec, **numbers})
    except CreditError:
        return None
    return {**spec, **numbers} if numbers else None
