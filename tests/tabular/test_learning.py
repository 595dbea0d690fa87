"""Every way to assign credit teaches a table policy, in seconds and without a model."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from mcore_agent import registry
from mcore_agent.credit.grpo import Grpo
from mcore_agent.types import Task, View
from tests.credit.test_assign import planted  # noqa: F401
from tests.tabular.bed import Table, learn, play, scored
from tests.tabular.worlds import bandit, chain, grid

ESTIMATORS, FILTERS, SHAPINGS, TRANSFORMS, NORMALIZERS = (
    sorted(registry.variants(kind)) for kind in ("estimator", "filter", "shaping", "transform", "normalizer")
)


def test_values_of_the_worlds_by_hand():
    """Uniform policies. Bandit of 5 actions: 1/5. Chain of 2 states and 3 actions with one turn to spare: two of at most three
    turns must be right, (1/3)^2 at once or with one miss in front of either: (1/9) (1 + 2 * 2/3) = 7/27."""
    assert bandit().value(np.full((1, 5), 0.2)) == pytest.approx(0.2)
    assert chain(2, 3, slack=1).value(np.full((2, 3), 1 / 3)) == pytest.approx(7 / 27)
    assert grid(2, 1, horizon=2).value(np.full((2, 4), 0.25)) == pytest.approx(1 / 4 + 3 / 4 * 1 / 4)


def test_an_episode_of_the_table_is_a_real_record():
    """Always the right action, along the chain 0 → 1 → end: 3 states would be tokens 1 to 3, actions 4 to 6, the end 7."""
    table = Table.new(chain(2, 3, slack=1))  # states are tokens 1, 2; actions 3, 4, 5; the end is 6
    table.logits[0, 0] = table.logits[1, 1] = 50.0
    episode = play(table, Task("t", "chain", ()), "e", "g", np.random.default_rng(0))
    assert episode.rows[0].tokens.tolist() == [0, 1, 3, 6, 2, 4, 6]
    assert episode.rows[0].sampled.tolist() == [False, False, True, True, False, True, True]
    assert [(t.state_key, t.history, t.feedback.reward) for t in episode.turns] == [("s0", (), 0.0), ("s1", ("s0",), 1.0)]
    assert episode.reward == 1 and episode.status == "ok"
    view = View("e/0", "x", episode.rows[0].tokens, np.array([2, 3]), "reference")
    np.testing.assert_allclose(scored(view, table, Table.new(table.world)), [np.log(1 / 3), 0], rtol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_learns_the_bandit(name):
    """From 1/5 to at least 9/10."""
    run = learn(bandit(), [{"name": name}], steps=60)
    assert run.curve[0] == pytest.approx(0.2) and run.curve[-1] > 0.9, run.curve[::10]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_learns_the_chain(name):
    """Two right of three turns: from 7/27 to at least 3/4."""
    run = learn(chain(2, 3, slack=1), [{"name": name}], steps=80)
    assert run.curve[0] == pytest.approx(7 / 27) and run.curve[-1] > 0.75, run.curve[::15]


@pytest.mark.parametrize("name", ["gigpo", "hgpo", "progpo", "g2po", "gagpo", "graphgpo", "grpo"])
def test_a_grid_is_crossed(name):
    run = learn(grid(), [{"name": name}], steps=80)
    assert run.curve[-1] > 0.9, run.curve[::15]


@pytest.mark.parametrize("name", [*TRANSFORMS, *NORMALIZERS])
def test_every_transform_and_normalizer_leaves_something_to_learn_from(name):
    run = learn(bandit(), [{"name": "grpo"}, {"name": name}], steps=60)
    assert run.curve[-1] > 0.8, run.curve[::10]


@pytest.mark.parametrize("name", [*FILTERS, *SHAPINGS])
def test_every_filter_and_shaping_leaves_something_to_learn_from(name):
    run = learn(bandit(), [{"name": name}, {"name": "grpo"}], steps=60)
    assert run.curve[-1] > 0.8, run.curve[::10]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_an_estimator_remembers_survives_as_json(name):
    """Made anew in the middle of the run, the credit goes on to the same table, bit for bit."""
    runs = [learn(bandit(), [{"name": name}], steps=6, restart=restart) for restart in (-1, 3)]
    assert np.array_equal(runs[0].table.logits, runs[1].table.logits)
    assert runs[0].table.logits.any()


def test_the_bed_tells_good_credit_from_bad(planted):  # noqa: F811
    @planted("estimator", "backwards")
    @dataclass(frozen=True)
    class Backwards:
        needs: ClassVar[tuple[str, ...]] = ()
        gives: ClassVar[tuple[str, ...]] = ()
        axis: ClassVar[str] = "episode"
        compares: ClassVar[str] = "group"

        def __call__(self, batch):
            return -Grpo()(batch)

    @planted("estimator", "hungry")
    @dataclass(frozen=True)
    class Hungry(Backwards):
        needs: ClassVar[tuple[str, ...]] = ("entropy",)

    assert learn(bandit(), [{"name": "backwards"}], steps=40).curve[-1] < 0.05
    assert learn(bandit(flip=True), [{"name": "grpo"}], steps=40).curve[-1] > 0.95
    with pytest.raises(NotImplementedError, match="no column 'entropy'"):
        learn(bandit(), [{"name": "hungry"}], steps=1)


def test_every_estimator_can_be_made_without_arguments():
    for name in ESTIMATORS:
        parameters = inspect.signature(registry.get("estimator", name)).parameters.values()
        assert all(p.default is not inspect.Parameter.empty for p in parameters), name
