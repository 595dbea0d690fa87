"""The policy's own tokens in stretches of whole episodes that fit in the cache, and what each token earned."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mcore_agent.types import Batch

PART = 2**16  # tokens that are worked on at a time: their columns fit in the cache


@dataclass(frozen=True)
class Stretch:
    """n tokens of the channel ``pg`` of some whole episodes: the steps between which advantages reach.

    ``own`` is the channel's mask over the tokens ``part`` of the batch.
    """

    part: slice
    own: np.ndarray  # [part] bool
    ends: np.ndarray  # [runs] the places behind each episode's steps; episodes without steps are no runs
    reward: np.ndarray  # [n] float64, as ``step_rewards`` has it

    def take(self, column: np.ndarray) -> np.ndarray:
        """[n] float64 of a token column [N]."""
        return column[self.part][self.own].astype(np.float64)

    def put(self, out: np.ndarray, values: np.ndarray) -> None:
        """Values [n] to their tokens in ``out`` [N]."""
        out[self.part][self.own] = values


def stretches(batch: Batch) -> Iterator[Stretch]:
    """All tokens of the channel ``pg``, in order."""
    mask, shaped = batch.channel("pg"), batch.columns.get("token_reward")
    (place, amount), edges = placed_rewards(batch, mask), _edges(batch)
    for part in parts(batch):
        own = mask[part]
        a, b = np.searchsorted(edges, (part.start, part.stop), side="right")
        ends = _counted(own, edges[a:b] - part.start)
        reward = np.zeros(int(ends[-1])) if shaped is None else shaped[part][own].astype(np.float64)
        a, b = np.searchsorted(place, (part.start, part.stop))
        np.add.at(reward, _counted(own, place[a:b] - part.start), amount[a:b])
        yield Stretch(part, own, ends[np.append(ends[0] > 0, ends[1:] > ends[:-1])], reward)


def _counted(own: np.ndarray, places: np.ndarray) -> np.ndarray:
    """[k] how many are True before each of some places, which ascend."""
    behind = places.tolist()
    return np.cumsum([np.count_nonzero(own[i:j]) for i, j in zip([0, *behind], behind, strict=False)], dtype=np.int64)


def parts(batch: Batch) -> Iterator[slice]:
    """The token axis in pieces of whole episodes, of at least ``PART`` tokens but for the last."""
    start = 0
    for end in _edges(batch)[1:].tolist():
        if end - start >= PART or end == len(batch.token_episode):
            if end > start:
                yield slice(start, end)
            start = end


def step_rewards(batch: Batch) -> np.ndarray:
    """[N] the rewards of each episode at the sampled tokens that they follow, with those that a shaping gave to tokens.

    They add up to the episode's score (``groups.scores``).
    The reward of a turn without a sampled token of its own counts at the last one before it, or else at the episode's
    first. An episode without any sampled token has nowhere to put a reward.
    """
    shaped = batch.columns.get("token_reward")
    out = np.zeros(len(batch.token_row)) if shaped is None else np.array(shaped, dtype=np.float64)
    np.add.at(out, *placed_rewards(batch, batch.channel("pg")))
    return out


def placed_rewards(batch: Batch, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [k], episode after episode, and what the episode earned there; a token may come twice. ``mask`` is the channel ``pg``."""
    place, amount = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    edges, first_turn = _edges(batch), np.searchsorted(batch.turn_episode, np.arange(len(batch.episodes)))
    for i, episode in enumerate(batch.episodes):
        span = slice(edges[i], edges[i + 1])
        own = mask[span]
        if not own.any():
            continue
        last = span.stop - 1 - int(own[::-1].argmax())
        by_turn = any(np.ndim(value) for value in episode.rewards.values())
        ends = span.start + _turn_ends(own, batch.token_turn[span] - first_turn[i], len(episode.turns)) if by_turn else place[0]
        for value in episode.rewards.values():
            place.append(ends if np.ndim(value) else np.array([last]))
            amount.append(np.atleast_1d(np.asarray(value, dtype=np.float64)))
    places, amounts = np.concatenate(place), np.concatenate(amount)
    order = np.argsort(places, kind="stable")
    return places[order], amounts[order]


def _turn_ends(own: np.ndarray, turn: np.ndarray, count: int) -> np.ndarray:
    """[count] the last sampled token of each turn or of those before it, or else the first one of all."""
    steps = np.flatnonzero(own)
    turn = np.maximum(turn[steps], 0)
    last = np.flatnonzero(np.append(turn[1:] != turn[:-1], True))  # of each run of equal turns
    ends = np.full(count, steps[0])
    if count:
        np.maximum.at(ends, turn[last], steps[last])
    return np.maximum.accumulate(ends)


def _edges(batch: Batch) -> np.ndarray:
    """[E + 1] where the tokens of each episode begin, and where they end."""
    return np.searchsorted(batch.token_episode, np.arange(len(batch.episodes) + 1))
