"""The last token of each turn as a channel of its own (M96)."""

import numpy as np

from mcore_agent.batch.marks import turn_ends
from mcore_agent.types import Batch
from tests.credit.test_turn_gae import turns_of
from tests.strategies import SEEDS, random_batch


def test_turns_of_two_and_three_with_two_tokens_between():
    """One token of prompt, then 2 sampled, 2 observed, 3 sampled, 2 observed: places 2 and 7 end a turn."""
    batch = turn_ends(Batch((turns_of([2, 3], [0, 1], observed=2),)), "turn_end")
    sampled = np.flatnonzero(batch.channel("pg"))
    assert np.flatnonzero(batch.channel("turn_end")).tolist() == [sampled[1], sampled[4]]


def test_one_token_of_each_turn_that_has_any():
    for seed in SEEDS[:60]:
        batch = random_batch(seed)
        made, own = turn_ends(batch, "turn_end"), batch.channel("pg")
        ends = np.flatnonzero(made.channel("turn_end"))
        assert own[ends].all() and np.array_equal(made.channel("pg"), own)
        turn = list(zip(batch.token_episode, batch.token_turn, strict=True))
        last = {turn[i]: i for i in np.flatnonzero(own)}
        assert sorted(last.values()) == ends.tolist()
