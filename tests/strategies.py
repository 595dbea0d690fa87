"""Seeded random episodes and batches for property tests: ragged groups, several rows per episode, missing turns,
rows without a sampled token, equal rewards, demonstrations among rollouts. One seed gives one batch, for good."""

from dataclasses import replace
from functools import cache

import numpy as np

from mcore_agent.batch.sft import demonstration
from mcore_agent.types import Batch, Episode, Feedback, Row, Segment, Task, Turn

SEEDS = range(200)
VOCAB = 37


def row_of(sampled, tokens=None, logp=None, **fields) -> Row:
    """A row from its sampled mask alone: tokens 1, 2, 3, …, behaviour log-prob -1 and version 0 where sampled."""
    sampled = np.array(sampled, dtype=bool)
    size = len(sampled)
    return Row(
        tokens=np.arange(1, size + 1) if tokens is None else np.array(tokens),
        sampled=sampled,
        logp=np.where(sampled, -1.0, 0.0) if logp is None else np.array(logp),
        version=np.where(sampled, 0, -1),
        **fields,
    )


def episode_of(id: str, group: str, reward: float, *masks, **fields) -> Episode:
    """An episode with one row per sampled mask (one of [0, 1, 1] when none is given) and the reward ``outcome``."""
    rows = tuple(row_of(mask) for mask in masks or ([0, 1, 1],))
    return Episode(id=id, task=Task(id, "toy", ()), group=group, rows=rows, rewards={"outcome": reward}, **fields)


def batch_of(rewards, groups=None) -> Batch:
    """One episode of one row per reward; all of one group unless ``groups`` names one for each."""
    groups = groups or "g" * len(rewards)
    return Batch(tuple(episode_of(f"e{i}", g, r) for i, (r, g) in enumerate(zip(rewards, groups, strict=True))))


def random_row(rng: np.random.Generator, first_turn: int, turns: int) -> Row:
    """A prompt, then ``turns`` times some sampled tokens (also none) and some observed ones (also none)."""
    lengths = [int(rng.integers(2, 6))]
    segments = [Segment(0, lengths[0], -1, "prompt")]
    sampled = [False] * lengths[0]
    for turn in range(first_turn, first_turn + turns):
        for kind, count in (("action", int(rng.integers(0, 5))), ("obs", int(rng.integers(0, 4)))):
            segments.append(Segment(len(sampled), len(sampled) + count, turn, kind))
            sampled += [kind == "action"] * count
    mask = np.array(sampled)
    return Row(
        tokens=rng.integers(1, VOCAB, len(mask)),
        sampled=mask,
        logp=np.where(mask, -rng.exponential(1.0, len(mask)), 0.0),
        version=np.where(mask, rng.integers(0, 3), -1),
        segments=tuple(segments),
    )


def random_episode(rng: np.random.Generator, id: str, group: str, reward: float) -> Episode:
    """One to three rows of zero to three turns each; now and then the records of its turns are missing."""
    rows, turns = [], 0
    for _ in range(int(rng.integers(1, 4))):
        count = int(rng.integers(0, 4))
        rows.append(random_row(rng, turns, count))
        turns += count
    records = tuple(Turn(i, f"act {i}", feedback=Feedback(reward=0.1 * i)) for i in range(turns))
    if rng.random() < 0.2:
        rows, records = [replace(row, segments=()) for row in rows], ()
    return Episode(id=id, task=Task(f"task/{group}", "toy", ()), group=group, rows=tuple(rows), turns=records,
                   rewards={"outcome": reward}, status=str(rng.choice(["ok", "ok", "truncated"])))  # fmt: skip


@cache
def random_batch(seed: int, equal: bool = False, demos: bool = True) -> Batch:
    """One to five groups of one to five episodes, in mixed order. ``equal``: rewards are equal within each group.

    Every third batch also holds demonstrations, unless ``demos`` is False.
    """
    rng = np.random.default_rng(seed)
    episodes = []
    for g in range(int(rng.integers(1, 6))):
        size = int(rng.integers(1, 6))
        rewards = np.full(size, rng.normal()) if equal or rng.random() < 0.2 else rng.choice([0.0, 1.0, 0.3, rng.normal()], size)
        episodes += [random_episode(rng, f"{g}/{i}", f"group {g}", float(r)) for i, r in enumerate(rewards)]
    if demos and seed % 3 == 0:
        for i in range(int(rng.integers(1, 4))):
            size = int(rng.integers(3, 9))
            trained = np.arange(size) >= rng.integers(1, size)
            episodes.append(demonstration(Task(f"demo/{i}", "toy", ()), rng.integers(1, VOCAB, size), trained, f"demo {i}"))
    return Batch(tuple(episodes[i] for i in rng.permutation(len(episodes))))


def with_columns(batch: Batch, seed: int) -> Batch:
    """Random columns for every loss: advantages (0 outside ``pg`` and in a third of the rows), old, proximal and reference
    log-probs, values and returns."""
    rng = np.random.default_rng(1000 + seed)
    size = len(batch.token_row)
    live = rng.random(len(batch.rows)) > 1 / 3
    advantage = np.where(batch.channel("pg") & live[batch.token_row], rng.normal(size=size), 0.0)
    old = np.where(batch.channel("pg"), -rng.exponential(1.0, size), 0.0)
    reference = old + rng.normal(scale=0.3, size=size)
    batch = with_values(batch, seed)
    gap = batch.columns["logp_prox"] - batch.columns["logp_old"]
    returns = batch.columns["values"] + rng.normal(size=size)
    return batch.with_columns(
        advantage=advantage.astype(np.float32),
        logp_old=old.astype(np.float32),
        logp_prox=old.astype(np.float32) + gap,
        logp_ref=reference.astype(np.float32),
        returns=returns.astype(np.float32),
    )


def with_values(batch: Batch, seed: int) -> Batch:
    """What estimators may need, [N] float32: ``values`` of a critic for every token, as the learner gives it, ``logp_old`` of
    the policy that sampled, and near it ``logp_prox`` of the one that the batch finds."""
    rng = np.random.default_rng(5000 + seed)
    values = rng.normal(size=len(batch.token_row)).astype(np.float32)
    gap = np.where(batch.channel("pg"), rng.normal(scale=0.4, size=len(values)), 0.0).astype(np.float32)
    return batch.with_columns(values=values, logp_old=batch.tokens("logp"), logp_prox=batch.tokens("logp") + gap)


def random_logp(batch: Batch, seed: int) -> np.ndarray:
    """[N] float64 log-probs of a learner, near ``logp_old`` so that some ratios are clipped and some are not."""
    rng = np.random.default_rng(2000 + seed)
    return np.asarray(batch.columns["logp_old"], dtype=np.float64) + rng.normal(scale=0.3, size=len(batch.token_row))


def permuted(batch: Batch, seed: int) -> tuple[Batch, np.ndarray]:
    """The batch without columns in another order of episodes, and that order."""
    order = np.random.default_rng(3000 + seed).permutation(len(batch.episodes))
    return Batch(tuple(batch.episodes[i] for i in order)), order


def moved_tokens(batch: Batch, order: np.ndarray) -> np.ndarray:
    """For each token of a permuted batch its place in the old one."""
    return np.concatenate([np.flatnonzero(batch.token_episode == i) for i in order])


def cut_rows(batch: Batch) -> tuple[Batch, np.ndarray]:
    """Every row cut in two where it has sampled tokens on both sides: the second row repeats the first as its prefix.

    Returns the batch without columns, and for each of its tokens the token of the old batch that it repeats.
    """
    episodes, source, at = [], [], 0
    for episode in batch.episodes:
        rows: list[Row] = []
        for row in episode.rows:
            places = np.flatnonzero(row.sampled)
            index = np.arange(at, at + len(row))
            at += len(row)
            if len(places) < 2:
                rows.append(replace(row, parent=None, prefix=0))
                source.append(index)
                continue
            cut = int(places[len(places) // 2])
            rows.append(_masked(row, np.arange(cut) >= 0, parent=None, prefix=0))
            rows.append(_masked(row, np.arange(len(row)) >= cut, parent=len(rows) - 1, prefix=cut))
            source += [index[:cut], index]
        episodes.append(replace(episode, rows=tuple(rows)))
    return Batch(tuple(episodes)), np.concatenate(source)


def _masked(row: Row, keep: np.ndarray, **fields) -> Row:
    """The first ``len(keep)`` tokens of a row, sampled only where ``keep``."""
    size = len(keep)
    mask = row.sampled[:size] & keep
    segments = tuple(replace(s, end=min(s.end, size)) for s in row.segments if s.start <= size)
    return Row(row.tokens[:size], mask, np.where(mask, row.logp[:size], 0), np.where(mask, row.version[:size], -1),
               segments, channels={k: v[:size] & keep for k, v in row.channels.items()}, **fields)  # fmt: skip
