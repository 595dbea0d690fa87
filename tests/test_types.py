"""The records refuse to contradict themselves, and a batch's axes agree with the records."""

import numpy as np
import pytest

from mcore_agent.types import Batch, Episode, Feedback, RecordError, Row, Segment, Task, Turn
from tests.strategies import SEEDS, episode_of, random_batch, row_of

# The worked example of Row: prompt 11 12, action 21 2, observation 31, answer 22 2.
EXAMPLE = Row(
    tokens=np.array([11, 12, 21, 2, 31, 22, 2]),
    sampled=np.array([0, 0, 1, 1, 0, 1, 1]),
    logp=np.array([0, 0, -0.5, -0.1, 0, -0.7, -0.2]),
    version=np.array([-1, -1, 3, 3, -1, 3, 3]),
    segments=(Segment(0, 2, -1, "prompt"), Segment(2, 4, 0, "action"), Segment(4, 5, 0, "obs"), Segment(5, 7, 1, "answer")),
)
TASK = Task("t", "toy", ())


def row(**change) -> Row:
    fields = {"tokens": [5, 6, 7], "sampled": [0, 1, 1], "logp": [0, -1, -2], "version": [-1, 0, 0], **change}
    return Row(**{k: np.array(v) if isinstance(v, list) else v for k, v in fields.items()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": [], "sampled": [], "logp": [], "version": []}, "tokens is empty"),
        ({"sampled": [0, 1]}, "Row.sampled has 2 entries, tokens has 3"),
        ({"logp": [0, -1, -2, -3]}, "Row.logp has 4 entries"),
        ({"channels": {"sft": np.array([True])}}, "Row.sft has 1 entries"),
        ({"channels": {"pg": np.array([True, False, False])}}, "not sampled"),
        ({"version": [-1, -1, 0]}, "no weight version"),
        ({"logp": [0, float("nan"), -1]}, "finite where sampled"),
        ({"logp": [-1, -1, -1]}, "0 elsewhere"),
        ({"segments": (Segment(1, 4, 0, "action"),)}, r"\[1, 4\) ends after the row's 3 tokens"),
        ({"routing": np.zeros((2, 1, 1))}, "routing has 2 entries"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(change, says):
    with pytest.raises(RecordError, match=says):
        row(**change)


def test_columns_get_their_dtypes_and_channels_their_default():
    made = row()
    assert (made.tokens.dtype, made.sampled.dtype, made.logp.dtype, made.version.dtype) == (
        np.int64, np.bool_, np.float32, np.int32)  # fmt: skip
    assert made.channel("pg").tolist() == [False, True, True]
    assert made.channel("sft").tolist() == [False, False, False]
    assert row(channels={"pg": np.array([False, False, True])}).channel("pg").tolist() == [False, False, True]


@pytest.mark.parametrize(("start", "end", "kind"), [(0, 1, "plan"), (3, 2, "obs"), (-1, 2, "obs")])
def test_a_segment_is_a_span_of_a_known_kind(start, end, kind):
    with pytest.raises(RecordError):
        Segment(start, end, 0, kind)


def test_episodes_are_validated_with_their_name():
    with pytest.raises(RecordError, match="Episode e: status is 'done'"):
        Episode("e", TASK, "g", rows=(EXAMPLE,), status="done")
    with pytest.raises(RecordError, match="Episode e has no rows"):
        Episode("e", TASK, "g")
    assert Episode("e", TASK, "g", status="infra_fail", reason="env died").rows == ()
    with pytest.raises(RecordError, match="reward 'outcome' is nan"):
        Episode("e", TASK, "g", rows=(EXAMPLE,), rewards={"outcome": float("nan")})
    with pytest.raises(RecordError, match="reward 'format' has 3 entries, 1 turns"):
        Episode("e", TASK, "g", rows=(EXAMPLE,), turns=(Turn(0, "a"),), rewards={"format": [1.0, 0.0, 1.0]})


def test_the_reward_of_an_episode_sums_names_and_turns():
    episode = Episode("e", TASK, "g", rows=(EXAMPLE,), turns=(Turn(0, "a"), Turn(1, "b", feedback=Feedback(1.0))),
                      rewards={"outcome": 1.0, "format": [0.25, -0.5]})  # fmt: skip
    assert episode.reward == 1.0 + 0.25 - 0.5
    assert episode.sampled_tokens == 4


def test_the_axes_of_a_batch_follow_the_worked_example():
    first = Episode("a", TASK, "g", rows=(EXAMPLE,), turns=(Turn(0, "x"), Turn(1, "y")))
    second = Episode("b", TASK, "h", rows=(row_of([0, 1, 1]),))
    batch = Batch((first, second))
    assert batch.row_lengths.tolist() == [7, 3]
    assert batch.row_episode.tolist() == [0, 1]
    assert batch.token_row.tolist() == batch.token_episode.tolist() == [0] * 7 + [1] * 3
    assert batch.turn_episode.tolist() == [0, 0]
    assert batch.token_turn.tolist() == [-1, -1, 0, 0, 0, 1, 1, -1, -1, -1]
    assert batch.tokens("tokens").tolist() == [11, 12, 21, 2, 31, 22, 2, 1, 2, 3]
    assert batch.channel("pg").tolist() == [False, False, True, True, False, True, True, False, True, True]
    assert batch.by("group").tolist() == [0, 1]
    assert batch.to_tokens(np.array([2.0, 3.0]), "episode").tolist() == [2.0] * 7 + [3.0] * 3
    assert batch.to_tokens(np.array([2.0, 3.0]), "turn").tolist() == [0, 0, 2, 2, 2, 3, 3, 0, 0, 0]


def test_groups_are_told_apart_by_their_id_wherever_they_stand():
    batch = Batch(tuple(episode_of(f"e{i}", g, 0.0) for i, g in enumerate(["b", "a", "b", "c", "a"])))
    assert batch.by("group").tolist() == [1, 0, 1, 2, 0]


def test_a_batch_without_episodes_has_empty_axes():
    batch = Batch(())
    assert batch.tokens("tokens").dtype == np.int64 and batch.channel("pg").dtype == bool
    for axis in (batch.token_row, batch.token_episode, batch.token_turn, batch.turn_episode, batch.rewards, batch.by("group")):
        assert len(axis) == 0


def test_a_segment_of_a_turn_that_does_not_exist_is_refused_where_turns_matter():
    batch = Batch((Episode("e", TASK, "g", rows=(EXAMPLE,), turns=(Turn(0, "x"),)),))
    with pytest.raises(RecordError, match="Episode e: a segment names turn 1 of 1"):
        _ = batch.token_turn


def test_the_axes_have_the_lengths_of_their_records():
    for seed in SEEDS:
        batch = random_batch(seed)
        assert len(batch.token_row) == len(batch.token_turn) == len(batch.tokens("logp")) == sum(map(len, batch.rows))
        assert len(batch.turn_episode) == sum(len(e.turns) for e in batch.episodes)
        assert np.all(batch.row_episode[batch.token_row] == batch.token_episode)
        turned = batch.token_turn >= 0
        assert np.all(batch.turn_episode[batch.token_turn[turned]] == batch.token_episode[turned])
