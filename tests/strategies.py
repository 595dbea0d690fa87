"""Seeded random episodes and batches for property tests: ragged groups, several rows per episode, missing turns,
rows without a sampled token, equal rewards, demonstrations among rollouts. One seed gives one batch, for good."""

from dataclasses import replace
from functools import cache

import numpy as np

from mcore_agent.batch.marks import turn_ends
from mcore_agent.batch.sft import demonstration
from mcore_agent.types import GREEDY, Batch, Episode, Feedback, Row, Segment, Task, Turn

SEEDS = range(200)
VOCAB = 37
TOP_K = 3  # of the columns of a teacher
STYLES = ("mixed", "binary", "real", "huge", "tiny")  # of rewards, by seed


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


def random_episode(rng: np.random.Generator, id: str, group: str, reward: float, states: bool = True, by_turn: bool = False) -> Episode:
    """One to three rows of zero to three turns each; now and then the records of its turns are missing.

    ``states``: turns are taken in a few states with names, the same ones in every group. ``by_turn``: each turn earns something too.
    """
    rows, turns = [], 0
    for _ in range(int(rng.integers(1, 4))):
        count = int(rng.integers(0, 4))
        rows.append(random_row(rng, turns, count))
        turns += count
    keys = [str(key) for key in rng.choice(["s0", "s1", "s2", ""], turns)] if states else [""] * turns
    said = [Feedback(0.1 * i, ok=bool(rng.random() < 0.8), changed=bool(rng.random() < 0.7)) for i in range(turns)]
    records = tuple(Turn(i, f"act {i}", keys[i], tuple(keys[:i]), said[i]) for i in range(turns))
    if rng.random() < 0.2:
        rows, records = [replace(row, segments=()) for row in rows], ()
    rewards: dict[str, float | list[float]] = {"outcome": reward}
    if by_turn:
        rewards["step"] = rng.choice([0.0, 0.0, 0.5, -0.25], len(records)).tolist()
    return Episode(id=id, task=task_of(group), group=group, rows=tuple(rows), turns=records, rewards=rewards,
                   status=str(rng.choice(["ok", "ok", "truncated"])))  # fmt: skip


def task_of(group: str) -> Task:
    """The task of a group; every other one has a right answer, and there are three domains."""
    number = int(group.split()[-1])
    return Task(f"task/{group}", f"toy {number % 3}", (), gold="a1" if number % 2 else None)


def random_rewards(rng: np.random.Generator, style: str, size: int) -> np.ndarray:
    """[size] rewards of one group; in one group of five they are all equal."""
    if rng.random() < 0.2:
        return np.full(size, rng.normal())
    if style == "binary":
        return rng.choice([0.0, 1.0], size)
    if style in ("real", "huge", "tiny"):
        return rng.normal(size=size) * {"real": 1.0, "huge": 1e6, "tiny": 1e-9}[style]
    return rng.choice([0.0, 1.0, 0.3, rng.normal()], size)


@cache
def random_batch(seed: int, equal: bool = False, demos: bool = True, hard: bool = False) -> Batch:
    """One to five groups of one to five episodes, in mixed order. ``equal``: rewards are equal within each group, and are 0
    where states have names, because what is earned later may count less. ``hard``: rewards of every kind and size by
    turns (``STYLES``), and in every fourth batch turns earn something too.

    Unless ``demos`` is False, every third batch also holds demonstrations, and every fourth pairs of answers to prefer between.
    """
    rng = np.random.default_rng(seed)
    style, episodes = STYLES[seed % len(STYLES)] if hard else STYLES[0], []
    states = not equal or seed % 2 == 0
    for g in range(int(rng.integers(1, 6))):
        size = int(rng.integers(1, 6))
        rewards = np.full(size, rng.normal() * (not states)) if equal else random_rewards(rng, style, size)
        earning = hard and not equal and seed % 4 == 1
        episodes += [random_episode(rng, f"{g}/{i}", f"group {g}", float(r), states, earning) for i, r in enumerate(rewards)]
    if demos and seed % 3 == 0:
        for i in range(int(rng.integers(1, 4))):
            size = int(rng.integers(3, 9))
            trained = np.arange(size) >= rng.integers(1, size)
            episodes.append(demonstration(Task(f"demo/{i}", "toy", ()), rng.integers(1, VOCAB, size), trained, f"demo {i}"))
    if demos and seed % 4 == 0:
        for i in range(int(rng.integers(1, 4))):
            episodes += random_pair(rng, f"pair {i}")
    return Batch(tuple(episodes[i] for i in rng.permutation(len(episodes))))


def random_pair(rng: np.random.Generator, group: str) -> list[Episode]:
    """A chosen and a rejected answer of one or two rows each, with the channel ``dpo`` on some of their tokens and nothing sampled."""
    made = []
    for branch in ("chosen", "rejected"):
        rows = []
        for _ in range(int(rng.integers(1, 3))):
            size = int(rng.integers(3, 8))
            mask = (np.arange(size) > 0) & (rng.random(size) < 0.6)
            mask[-1] = True
            rows.append(replace(row_of(np.zeros(size), rng.integers(1, VOCAB, size)), channels={"dpo": mask}))
        made.append(Episode(f"{group}/{branch}", Task(group, "toy", ()), group, tuple(rows), branch=branch))
    return made


def with_greedy(batch: Batch, seed: int) -> Batch:
    """One greedy episode more in every group that the policy played; nothing of it is trained on. Where a group's rewards are equal,
    it has the same."""
    rng = np.random.default_rng(6000 + seed)
    more = []
    for group in sorted({e.group for e in batch.episodes if e.sampled_tokens}):
        like = [e.reward for e in batch.episodes if e.group == group]
        reward = like[0] if len(set(like)) == 1 else float(rng.choice([*like, 0.0]))
        made = random_episode(rng, f"{group}/greedy", group, reward)
        rows = tuple(replace(row, channels={"pg": np.zeros(len(row), dtype=bool)}) for row in made.rows)
        more.append(replace(made, rows=rows, branch=GREEDY))
    return Batch((*batch.episodes, *more))


@cache
def trained_batch(seed: int) -> Batch:
    """A random batch with a column for every loss, and the channel of the one that learns the ends of turns."""
    return with_columns(turn_ends(random_batch(seed), "turn_end"), seed)


def with_columns(batch: Batch, seed: int) -> Batch:
    """Random columns for every loss: advantages (0 outside ``pg`` and in a third of the rows), old, proximal and reference
    log-probs, values and returns, and a teacher's log-probs of the token and of its ``TOP_K`` likeliest ones."""
    rng = np.random.default_rng(1000 + seed)
    size = len(batch.token_row)
    live = rng.random(len(batch.rows)) > 1 / 3
    advantage = np.where(batch.channel("pg") & live[batch.token_row], rng.normal(size=size), 0.0)
    old = np.where(batch.channel("pg"), -rng.exponential(1.0, size), 0.0)
    reference, teacher = old + rng.normal(scale=0.3, size=size), old + rng.normal(scale=0.3, size=size)
    batch = with_values(batch, seed)
    gap = batch.columns["logp_prox"] - batch.columns["logp_old"]
    returns = batch.columns["values"] + rng.normal(size=size)
    ids, logp = random_top(rng, size)
    likeliest = {f"teacher_id:{i}": ids[:, i] for i in range(TOP_K)} | {f"teacher_logp:{i}": logp[:, i] for i in range(TOP_K)}
    return batch.with_columns(
        advantage=advantage.astype(np.float32),
        logp_old=old.astype(np.float32),
        logp_prox=old.astype(np.float32) + gap,
        logp_ref=reference.astype(np.float32),
        logp_teacher=teacher.astype(np.float32),
        returns=returns.astype(np.float32),
        **{name: values.astype(np.float32) for name, values in likeliest.items()},
    )


def random_top(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """[size, TOP_K] ids and falling log-probs of the likeliest tokens of distributions over five tokens."""
    logp = np.log(rng.dirichlet(np.ones(5), size))
    ids = np.argsort(-logp, axis=1)[:, :TOP_K]
    return ids, np.take_along_axis(logp, ids, axis=1)


def with_values(batch: Batch, seed: int) -> Batch:
    """What parts of credit may need, [N] float32: ``values`` of a critic for every token, as the learner gives it, ``logp_old`` of
    the policy that sampled, and near it ``logp_prox`` of the one that the batch finds and ``logp_ref`` of the reference."""
    rng = np.random.default_rng(5000 + seed)
    values = rng.normal(size=len(batch.token_row)).astype(np.float32)
    behind = np.roll(values, -1)
    gap, far = (np.where(batch.channel("pg"), rng.normal(scale=0.4, size=len(values)), 0.0).astype(np.float32) for _ in range(2))
    old = batch.tokens("logp")
    return batch.with_columns(values=values, values_behind=behind, logp_old=old, logp_prox=old + gap, logp_ref=old + far)


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
    """Every row cut in two where it has trained tokens on both sides: the second row repeats the first as its prefix.

    Returns the batch without columns, and for each of its tokens the token of the old batch that it repeats.
    """
    episodes, source, at = [], [], 0
    for episode in batch.episodes:
        rows: list[Row] = []
        for row in episode.rows:
            places = np.flatnonzero(np.any([row.sampled, *row.channels.values()], axis=0))
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
