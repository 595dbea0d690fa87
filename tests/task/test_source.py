"""Task sources: which tasks come, and that a resumed source goes on where it stood."""

import json
from collections import Counter

import pytest

from mcore_agent.protocols import TaskSource
from mcore_agent.registry import create, variants
from mcore_agent.task.source import EpochSource
from tests.agent.toy import Toy


def domain(n):
    return Toy(lambda task: None, n=n)


def ids(tasks) -> list[str]:
    return [task.id for task in tasks]


@pytest.mark.parametrize("name", variants("source"))
@pytest.mark.parametrize("n", [7, None])
def test_a_source_resumes_at_every_step(name: str, n: int | None):
    """I10: the state goes through JSON, as it does in a checkpoint."""

    def make():
        return create("source", {"name": name}, domain=domain(n), seed=3)

    source = make()
    assert isinstance(source, TaskSource)
    batches, states = [], [json.dumps(source.state_dict())]
    for k in (3, 1, 5, 8, 20, 2, 7, 7):
        batches.append(ids(source.next(k)))
        states.append(json.dumps(source.state_dict()))
    for step, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(state))
        assert [ids(resumed.next(len(batch))) for batch in batches[step:]] == batches[step:]


@pytest.mark.parametrize("k", [1, 4, 7, 10])
def test_every_task_comes_once_per_epoch(k: int):
    source = EpochSource(domain(7), seed=1)
    drawn = [task for _ in range(70 // k) for task in ids(source.next(k))]
    epochs = [drawn[i : i + 7] for i in range(0, len(drawn) - 6, 7)]
    assert all(Counter(epoch) == Counter(epochs[0]) and len(set(epoch)) == 7 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_depends_on_the_seed_alone():
    orders = {seed: ids(EpochSource(domain(30), seed=seed).next(30)) for seed in (0, 1)}
    assert orders[0] != orders[1]
    split = EpochSource(domain(30), seed=0)
    assert ids(split.next(11)) + ids(split.next(19)) == orders[0]


def test_an_endless_split_is_read_in_order():
    source = EpochSource(domain(None), split="eval")
    assert ids(source.next(2)) + ids(source.next(1)) == [f"toy/eval/{i}" for i in range(3)]


@pytest.mark.parametrize(("key", "other"), [("seed", {"seed": 1}), ("split", {"split": "eval"}), ("size", {"domain": domain(8)})])
def test_the_state_of_another_run_is_refused(key: str, other: dict):
    state = EpochSource(domain(7)).state_dict()
    with pytest.raises(ValueError, match=f"'epochs': {key} was .* when saved and is .*; resume with the same"):
        EpochSource(**{"domain": domain(7), **other}).load_state_dict(state)


def test_an_empty_split_is_refused():
    with pytest.raises(ValueError, match="split 'train' has 0 tasks"):
        EpochSource(domain(0))
