"""Episodes in files: what comes back equals what went in, to the bit, and nothing is written that could not come back."""

import dataclasses
from random import Random
from typing import Any

import numpy as np
import pytest

from mcore_agent.rollout.records import load_episodes, pack, save_episodes, unpack
from mcore_agent.types import Episode, Feedback, RecordError, Row, Segment, Task, Turn

TEXTS = ["", "bl", "é 🙂", "x\ud800", "a\nb", "@", '"\\']


def random_value(r: Random, depth: int = 3) -> Any:
    made = [
        lambda: r.choice(TEXTS), lambda: r.randint(-(2**80), 2**80), lambda: r.uniform(-1e300, 1e300), lambda: None,
        lambda: r.random() < 0.5, lambda: np.float32(r.random()), lambda: np.arange(r.randint(0, 2), dtype=r.choice(["i4", "u1", "?"])),
        lambda: np.full((2, r.randint(0, 2)), r.random(), dtype="f4"),
    ]  # fmt: skip
    if depth and r.random() < 0.5:
        kind, size = r.choice([list, tuple, dict]), r.randint(0, 3)
        values = [random_value(r, depth - 1) for _ in range(size)]
        return {f"k{i}{r.choice('ab')}": v for i, v in enumerate(values)} if kind is dict else kind(values)
    return r.choice(made)()


def random_row(r: Random) -> Row:
    n = r.randint(1, 40)
    rng = np.random.default_rng(r.randrange(10**9))
    sampled = rng.random(n) < 0.5
    logp = np.where(sampled, -rng.exponential(size=n), 0).astype(np.float32)
    version = np.where(sampled, rng.integers(0, 9, n), -1)
    channels = {"sft": rng.random(n) < 0.3} if r.random() < 0.4 else {}
    if r.random() < 0.3:
        channels["pg"] = sampled & (rng.random(n) < 0.5)
    routing = rng.integers(0, 60, (n, 3, 2)).astype(np.int32) if r.random() < 0.3 else None
    segments = (Segment(0, n // 2, -1, "prompt"), Segment(n // 2, n, 0, "action"))
    where = {"parent": r.choice([None, 0]), "prefix": r.randint(0, n), "view": r.choice(TEXTS)}
    return Row(rng.integers(0, 2**40, n), sampled, logp, version, segments, **where, channels=channels, routing=routing)


def random_episode(r: Random, i: int) -> Episode:
    messages = ({"role": "user", "content": r.choice(TEXTS)}, {"role": "tool", "content": "", "extra": random_value(r)})
    spec = {"a": random_value(r), "b": random_value(r)}
    task = Task(f"t/{i}", "toy", messages, spec, gold=random_value(r), relabelable=r.random() < 0.5, meta={"m": random_value(r)})
    if r.random() < 0.2:
        return Episode(f"e/{i}", task, f"g/{i % 3}", status="infra_fail", reason="env_error: no container", seed=r.randrange(2**63))
    turns = tuple(
        Turn(t, r.choice(TEXTS), "s", ("a", "b")[:t], Feedback(r.random(), t > 0, True, r.choice(TEXTS)), (0, 3)[:t], r.choice([None, "x"]))
        for t in range(r.randint(0, 2))
    )
    rewards = {"outcome": r.random(), "format": [r.random() for _ in turns]} if r.random() < 0.5 else {}
    rows = tuple(random_row(r) for _ in range(r.randint(1, 3)))
    return Episode(f"e/{i}", task, f"g/{i % 3}", rows, turns, rewards, r.choice(["ok", "truncated"]), "max_turns", "b", r.randrange(2**63))


def equal(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@pytest.mark.defect("G5")
@pytest.mark.parametrize("seed", range(12))
def test_what_comes_back_equals_what_went_in(tmp_path, seed: int):
    r = Random(seed)
    episodes = [random_episode(r, i) for i in range(r.choice([0, 1, 5, 9]))]
    save_episodes(tmp_path / "e.npz", episodes)
    back = load_episodes(tmp_path / "e.npz")
    assert equal(episodes, back)
    assert not equal(episodes, [*back, random_episode(r, 99)])
    save_episodes(tmp_path / "again.npz", back)
    assert equal(load_episodes(tmp_path / "again.npz"), episodes)


def test_any_nesting_of_plain_values():
    r = Random(1)
    for _ in range(300):
        value = random_value(r, 4)
        assert equal(unpack(pack(value, "value")), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"gold": [1, {2, 3}]}, r"task t\.gold\[1\] is set '\{2, 3\}', which has no form in a file; use text"),
        ({"spec": {7: "x"}}, r"task t\.spec is dict"),
        ({"spec": {"@": "x"}}, r"task t\.spec is dict"),
        (b"raw", "task t is bytes"),
        (np.array(["x"]), "task t is ndarray"),
    ],
)
def test_what_has_no_form_is_refused_by_name(value: Any, message: str):
    with pytest.raises(RecordError, match=message):
        pack(value, "task t")


def test_a_damaged_file_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "e.npz"
    save_episodes(path, [random_episode(Random(3), i) for i in range(5)])
    data = path.read_bytes()
    for wrong in (b"", data[: len(data) // 2], b"\0" * 100):
        path.write_bytes(wrong)
        with pytest.raises(RecordError, match="holds no episodes that can be read .* remove it, and its groups are played again"):
            load_episodes(path)


def test_a_file_is_whole_or_absent(tmp_path):
    """A value that cannot be written leaves the file of before."""
    path = tmp_path / "e.npz"
    good = [random_episode(Random(3), i) for i in range(3)]
    save_episodes(path, good)
    bad = dataclasses.replace(good[0], task=dataclasses.replace(good[0].task, gold={1, 2}))
    with pytest.raises(RecordError, match="gold is set"):
        save_episodes(path, [*good, bad])
    assert equal(load_episodes(path), good) and [p.name for p in tmp_path.iterdir()] == ["e.npz"]
