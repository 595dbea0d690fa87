"""Ranks that wait poll, learn of rank 0's end, and get what it has for them."""

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_agent.learner import wait
from mcore_agent.learner.groups import Groups, Layout
from tests.ranks import ranks  # noqa: F401


def messages(groups: Groups) -> list[Any]:
    with wait.open_line(groups) as line:
        first = groups.rank == 0
        got = [line.share({"step": 3} if first else None)]
        got.append(line.scatter(["a", "b"] if first else None) if groups.layout.dp == 2 else line.scatter([7] if first else None))
        got.append(int(line.share(np.arange(3_000_000) if first else None).sum()))  # 24 MB
        got += [line.share(i if first else None) for i in range(20)]
        keys = line.store.num_keys() if first and line.store is not None else 0
    return [*got, keys]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(tp=2, pp=2), Layout(dp=2, tp=2)], ids=str)
def test_messages(ranks, layout):  # noqa: F811
    for rank, found in enumerate(ranks(messages, layout)):
        part = "ab"[rank // layout.tp] if layout.dp == 2 else 7
        assert found[:-1] == [{"step": 3}, part, 2_999_999 * 3_000_000 // 2, *range(20)]


def ordered(groups: Groups) -> list[Any]:
    """Two orders before a message that the others wait for; an order may itself share, and enter a collective."""
    done: list[Any] = []

    def sum_ranks(add: int) -> int:
        box = torch.tensor([groups.rank + add])
        if groups.layout.world > 1:
            dist.all_reduce(box)
        done.append(int(box))
        return done[-1]

    with wait.open_line(groups) as line:
        line.orders = {"sum": sum_ranks, "told": lambda: done.append(line.share("inner" if groups.rank == 0 else None))}
        if groups.rank == 0:
            assert line.order("sum", 10) == done[0]
            line.order("told")
        else:
            with pytest.raises(ValueError, match="only rank 0"):
                line.order("sum", 10)
        done.append(line.share("end" if groups.rank == 0 else None))
        return done


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(tp=2, pp=2)], ids=str)
def test_orders_reach_ranks_that_wait(ranks, layout):  # noqa: F811
    n = layout.world
    for rank, done in enumerate(ranks(ordered, layout)):
        assert done == [n * (n - 1) // 2 + 10 * n, "inner", "end"], rank


def slow(groups: Groups) -> Any:
    wait.BEAT_S = 0.1
    with wait.open_line(groups, dead_s=0.5) as line:
        if groups.rank == 0:
            time.sleep(1.5)
        return line.share("late" if groups.rank == 0 else None)


def leaves(groups: Groups) -> str:
    with wait.open_line(groups, dead_s=60.0) as line:
        if groups.rank == 0:
            return "left"
        with pytest.raises(wait.RankZeroLost) as caught:
            line.share(None)
        return str(caught.value)


def stops(groups: Groups) -> str:
    wait.BEAT_S = 1000.0
    try:
        with wait.open_line(groups, dead_s=0.5) as line:
            if groups.rank == 0:
                time.sleep(1.5)
                return "stopped"
            with pytest.raises(wait.RankZeroLost) as caught:
                line.share(None)
            return str(caught.value)
    finally:
        wait.BEAT_S = 1.0


def bad_parts(groups: Groups) -> str:
    with wait.open_line(groups) as line:
        if groups.rank == 0:
            with pytest.raises(ValueError, match="3 parts for 2"):
                line.scatter([1, 2, 3])
    return "refused"


def test_a_slow_rank_zero_is_not_dead(ranks):  # noqa: F811
    assert ranks(slow, Layout(dp=2)) == ["late", "late"]


def test_rank_zero_left(ranks):  # noqa: F811
    assert "has left" in ranks(leaves, Layout(dp=2), deadline_s=20)[1]


def test_rank_zero_stopped(ranks):  # noqa: F811
    assert "has not beaten for 0.5 s" in ranks(stops, Layout(dp=2), deadline_s=20)[1]


def test_number_of_parts(ranks):  # noqa: F811
    ranks(bad_parts, Layout(dp=2))
