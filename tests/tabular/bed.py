"""A test bed without a model: a table is the policy, its episodes are real records, and any credit of a recipe teaches it.

A row is written in tokens of its own: 0 opens the prompt, then states, actions, and an end token behind every action::

    tokens    0 s0 a2  E s1 a0  E
    sampled   0  0  1  1  0  1  1       an end token follows every action with probability 1

The loss is the plain policy gradient: the sum of ``A log p`` over the policy's own tokens, per episode.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_agent.batch.select import select
from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.credit.stretches import step_rewards
from mcore_agent.types import GREEDY, Batch, Episode, Feedback, Row, Segment, Task, Turn, View
from tests.tabular.worlds import World

VOCABULARY = 300  # tokens that are neither state nor action are all equally likely
TEXT = 200  # the first of those that texts are made of


@dataclass
class Table:
    """Logits [states, actions] of a policy, and what it thinks that states are worth before an action and after it."""

    world: World
    logits: np.ndarray
    values: np.ndarray  # [states, 1 + actions]

    @classmethod
    def new(cls, world: World) -> "Table":
        return cls(world, np.zeros((world.states, world.actions)), np.zeros((world.states, 1 + world.actions)))

    @property
    def policy(self) -> np.ndarray:
        """[states, actions] probabilities."""
        e = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def action(self, token: int) -> int | None:
        number = token - 1 - self.world.states
        return number if 0 <= number < self.world.actions else None

    def place(self, tokens: Sequence[int], at: int) -> tuple[int | None, int]:
        """The last state before a token, and the column of ``values`` for what precedes it."""
        state = next((t - 1 for t in reversed(tokens[:at]) if 1 <= t <= self.world.states), None)
        before = self.action(tokens[at - 1])
        return state, 0 if before is None else 1 + before

    def logp(self, tokens: Sequence[int], at: int) -> float:
        """Log-probability of ``tokens[at]`` after those before it."""
        state, column = self.place(tokens, at)
        action = self.action(tokens[at])
        if action is not None and state is not None:
            return float(np.log(self.policy[state, action]))
        return 0.0 if column and tokens[at] == self.end else -float(np.log(VOCABULARY))

    @property
    def end(self) -> int:
        return 1 + self.world.states + self.world.actions

    def encode(self, text: str) -> list[int]:
        """``a2`` is the action 2; of other texts each character is a token."""
        if text[:1] == "a" and text[1:].isdigit() and int(text[1:]) < self.world.actions:
            return [1 + self.world.states + int(text[1:])]
        return [TEXT + ord(c) % (VOCABULARY - TEXT) for c in text]


def play(table: Table, task: Task, id: str, group: str, rng: np.random.Generator, greedy: bool = False) -> Episode:
    """One episode; a greedy one takes the likeliest action and is not trained on."""
    world, policy = table.world, table.policy
    tokens, segments, turns, rewards = [0, 1 + world.start], [Segment(0, 2, -1, "prompt")], [], []
    state: int | None = world.start
    past: list[str] = []
    status = "truncated"
    for index in range(world.horizon):
        assert state is not None
        action = int(policy[state].argmax()) if greedy else int(rng.choice(world.actions, p=policy[state]))
        then, reward = world.moves[state, action]
        segments.append(Segment(len(tokens), len(tokens) + 2, index, "action"))
        tokens += [1 + world.states + action, table.end]
        turns.append(Turn(index, f"a{action}", f"s{state}", tuple(past), Feedback(reward, changed=then != state)))
        rewards.append(reward)
        past.append(f"s{state}")
        state = then
        if then is None:
            status = "ok"
            break
        if index + 1 < world.horizon:
            segments.append(Segment(len(tokens), len(tokens) + 1, index, "obs"))
            tokens.append(1 + then)
    sampled = np.array([table.action(t) is not None or t == table.end for t in tokens])
    logp = np.array([table.logp(tokens, i) if sampled[i] else 0.0 for i in range(len(tokens))])
    row = Row(np.array(tokens), sampled, logp, np.where(sampled, 0, -1), tuple(segments),
              channels={"pg": np.zeros(len(tokens), dtype=bool)} if greedy else {})  # fmt: skip
    return Episode(id, task, group, (row,), tuple(turns), {"outcome": float(sum(rewards))}, status, branch=GREEDY if greedy else "")


@dataclass
class Learned:
    """How a run went: the exact expected reward before each step and at the end, and what came of it."""

    table: Table
    pipeline: Pipeline
    curve: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)


def learn(
    world: World, credit: Sequence[Mapping[str, Any]], *,
    steps: int = 60, groups: int = 3, size: int = 6, lr: float = 0.5, critic_lr: float = 0.3, seed: int = 0, restart: int = -1,
) -> Learned:  # fmt: skip
    """Trains a table on a world. After step ``restart`` the credit's parts are made anew, with what they remembered as JSON.

    Raises NotImplementedError for a need that the bed does not know.
    """
    table, start = Table.new(world), Table.new(world)
    run = Learned(table, Pipeline(credit))
    rng = np.random.default_rng(seed)
    for step in range(steps):
        run.curve.append(world.value(table.policy))
        if step == restart:
            kept = json.loads(json.dumps(run.pipeline.state_dict()))
            run.pipeline = Pipeline(credit)
            run.pipeline.load_state_dict(kept)
        episodes = []
        for g in range(groups):
            task = Task(f"{world.name}/{g}", world.name, (), gold="a0")
            name = f"{step}/{g}"
            episodes += [play(table, task, f"{name}/{i}", name, rng) for i in range(size)]
            for branch in run.pipeline.branches:
                if branch != GREEDY:
                    raise NotImplementedError(f"the test bed plays no branch {branch!r}")
                episodes.append(play(table, task, f"{name}/greedy", name, rng, greedy=True))
        batch = Batch(tuple(episodes))
        batch = provide(select(batch, run.pipeline.keep(batch)), run.pipeline, table, start)
        views = run.pipeline.views(batch, table.encode)
        batch, run.numbers = run.pipeline(batch, [scored(view, table, start) for view in views])
        if batch.episodes:
            improve(table, batch, lr, critic_lr)
    run.curve.append(world.value(table.policy))
    return run


def provide(batch: Batch, pipeline: Pipeline, table: Table, start: Table) -> Batch:
    """The batch with the columns that the parts need."""
    columns = {"logp_old": batch.tokens("logp")}
    for need in pipeline.needs:
        if need.startswith("branch:") or need in columns:
            continue
        rows = [row.tokens.tolist() for row in batch.rows]
        if need in ("values", "values_behind"):
            found = [value_of(table, tokens, i) for tokens in rows for i in range(len(tokens))]
        elif need in ("logp_prox", "logp_ref"):
            judge = table if need == "logp_prox" else start
            found = [judge.logp(tokens, i) if i else 0.0 for tokens in rows for i in range(len(tokens))]
        else:
            raise NotImplementedError(f"the test bed has no column {need!r}")
        columns[need] = np.array(found, dtype=np.float32)
    return batch.with_columns(**columns)


def value_of(table: Table, tokens: Sequence[int], at: int) -> float:
    state, column = table.place(tokens, at)
    return 0.0 if state is None else float(table.values[state, column])


def scored(view: View, table: Table, start: Table) -> np.ndarray:
    """[n] log-probabilities of a view's scored tokens."""
    judge, tokens = (start if view.under == "reference" else table), view.tokens.tolist()
    return np.array([judge.logp(tokens, int(i)) for i in view.scored], dtype=np.float32)


def improve(table: Table, batch: Batch, lr: float, critic_lr: float) -> None:
    """One step of the policy along its gradient, and of the values towards the returns."""
    advantage, mask = batch.columns["advantage"].astype(np.float64), batch.channel("pg")
    returns = batch.columns.get("returns", returns_of(batch))
    count = max(1, sum(bool(row.channel("pg").any()) for row in batch.rows))
    policy, step = table.policy, np.zeros_like(table.logits)
    seen, total = np.zeros_like(table.values), np.zeros_like(table.values)
    at = 0
    for row in batch.rows:
        tokens = row.tokens.tolist()
        for i in np.flatnonzero(mask[at : at + len(row)]):
            state, column = table.place(tokens, int(i))
            assert state is not None
            seen[state, column] += 1
            total[state, column] += returns[at + i] - table.values[state, column]
            action = table.action(tokens[i])
            if action is not None:
                step[state] -= advantage[at + i] * policy[state]
                step[state, action] += advantage[at + i]
        at += len(row)
    table.logits += lr * step / count
    table.values += critic_lr * total / np.maximum(seen, 1)


def returns_of(batch: Batch) -> np.ndarray:
    """[N] what the episode earned from the token on."""
    reward = step_rewards(batch)
    whole = np.bincount(batch.token_episode, weights=reward, minlength=len(batch.episodes))
    first = np.searchsorted(batch.token_episode, np.arange(len(batch.episodes)))
    before = np.cumsum(reward) - reward
    return whole[batch.token_episode] - (before - before[first][batch.token_episode])
