"""The buffer by itself: places, names, and what it may hold."""

import json
from collections import Counter
from random import Random

import pytest

from mcore_agent.rollout.buffer import Buffer
from mcore_agent.rollout.playing import Job
from mcore_agent.types import Episode, RecordError, Row, Task


def task(i: int, **fields) -> Task:
    return Task(f"t/{i}", "toy", ({"role": "user", "content": str(i)},), **fields)


def complete(buffer: Buffer, group, version: int) -> None:
    row = Row([1, 2], [False, True], [0, -1], [-1, version])
    group.finish([Episode(f"{group.name}#{i}", group.task, group.name, (row,)) for i in range(buffer.group_size)])


@pytest.mark.defect("G5")
def test_drawing_goes_on_where_it_stood_also_in_the_middle_of_a_step():
    """Names and seeds of a group are its step, its place and how often its task was drawn before: a resume changes none."""

    def names(resume: bool) -> list[tuple[str, int]]:
        buffer, found = Buffer(3, 2, max_lag=1), []
        buffer.open(4, 0)
        for i in (0, 0, 7, 7, 0, 0, 0, 0):
            if resume:
                state, version = json.loads(json.dumps(buffer.state_dict())), buffer.version
                buffer = Buffer(3, 2, max_lag=1)
                buffer.load_state_dict(state)
                buffer.open(4, version)
            buffer.draw([task(i)])
        found += [(g.name, g.twin) for g in buffer.groups]
        return found

    expected = ["4/0/t/0", "4/1/t/0", "4/2/t/7", "5/0/t/7", "5/1/t/0", "5/2/t/0", "6/0/t/0", "6/1/t/0"]
    twins = [0, 1, 0, 0, 0, 1, 0, 1]
    assert names(False) == names(True) == [(f"train/{name}", twin) for name, twin in zip(expected, twins, strict=True)]


@pytest.mark.defect("G2")
@pytest.mark.parametrize("seed", range(20))
def test_no_history_makes_room_for_a_group_that_could_grow_too_old(seed: int):
    """Random batches, failures to publish, drops and resumes: places neither leak nor multiply, and FIFO keeps the bound."""
    r = Random(seed)
    lag, prompts = r.randint(1, 3), r.randint(1, 4)
    buffer, version, taken, tasks = Buffer(prompts, 1, lag), r.randint(0, 9), [], (task(i) for i in range(10_000))
    for step in range(40):
        buffer.open(step, version)
        while True:
            assert seed % 2 or not buffer.stale()  # only where versions leap
            buffer.remove(buffer.stale())
            buffer.draw([next(tasks) for _ in range(buffer.room)])
            assert len(buffer.groups) == (lag + 1) * prompts and buffer.room == 0
            if buffer.ready() is not None:
                break
            for group in buffer.groups:
                group.born = version if group.born < 0 else group.born
                if group.waits and r.random() < 0.5:
                    complete(buffer, group, group.born)
        batch = buffer.ready()
        assert all(version - g.oldest <= lag for g in batch)
        buffer.take(batch)
        taken += [int(g.task.id[2:]) for g in batch]
        assert buffer.room == 0 and len(buffer.groups) == lag * prompts
        if r.random() < 0.2:
            state = buffer.state_dict()
            buffer = Buffer(prompts, 1, lag)
            buffer.load_state_dict(state)
        if r.random() < 0.8:
            version += 1 + seed % 2 * r.choice([0, 0, lag])
    assert taken == sorted(taken) and max(Counter(taken).values()) == 1


def test_a_strict_buffer_has_room_only_while_a_batch_is_wanted():
    buffer = Buffer(2, 1, over_sample=0.5)
    buffer.open(0, 0)
    assert buffer.room == 3
    buffer.draw([task(i) for i in range(3)])
    for group in buffer.groups:
        complete(buffer, group, 0)
    buffer.take(buffer.ready())
    buffer.remove(buffer.groups)
    assert buffer.room == 0
    buffer.open(1, 0)  # the weights did not change: one more batch is wanted all the same
    assert buffer.room == 3 and buffer.draw([task(9)]) is None and buffer.groups[0].name == "train/1/0/t/9"


def test_a_group_that_is_played_is_not_overwritten_by_a_file(tmp_path):
    buffer = Buffer(1, 1, max_lag=1)
    buffer.open(0, 0)
    buffer.draw([task(0), task(1)])
    complete(buffer, buffer.groups[0], 0)
    buffer.save(tmp_path / "b.npz")
    other = Buffer(1, 1, max_lag=1)
    other.load_state_dict(buffer.state_dict())
    other.groups[0].begin(0, [Job("x", task(0), other.groups[0].name, 0, ())], [])
    other.load(tmp_path / "b.npz")
    assert [g.episodes for g in other.groups] == [None, None]
    other.groups[0].rewind()
    other.load(tmp_path / "b.npz")
    assert [g.episodes is None for g in other.groups] == [False, True]


def test_a_task_that_could_not_be_saved_is_refused_when_it_is_drawn():
    """At once, and not at the first checkpoint; without groups in flight between steps it need not be saved."""
    wrong = task(3, gold={1, 2})
    buffer = Buffer(2, 1, max_lag=1)
    with pytest.raises(RecordError, match=r"task t/3.gold is set"):
        buffer.draw([wrong])
    Buffer(2, 1).draw([wrong])


@pytest.mark.parametrize(("prompts", "over_sample", "window"), [(100, 0.1, 110), (50, 0.1, 55), (3, 0.1, 4), (8, 0.0, 8), (2, 0.999, 4)])
def test_over_sampling_begins_no_group_that_nobody_asked_for(prompts, over_sample, window):
    assert Buffer(prompts, 1, 0, over_sample).window == window
