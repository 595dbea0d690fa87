"""The best and the worst episode of each group, marked as a pair to prefer between (M26; DPO, 2305.18290 eq. 7)."""

from dataclasses import replace

import numpy as np

from mcore_agent.credit.groups import scores, spread
from mcore_agent.loss.dpo import CHOSEN, REJECTED
from mcore_agent.types import Batch, Episode


def preferences(batch: Batch, channel: str) -> Batch:
    """The best and the worst episode of every group become its branches ``chosen`` and ``rejected``, with the channel on all
    tokens that they sampled; where several are alike the first is taken.

    Rewards are the episode's with those of shapings. A group whose rewards are equal up to rounding is left alone, as are
    episodes that are not trained on. Rewards .2 .9 .9 .1 in one group and 1 1 in another::

        branch   ""  chosen  ""  rejected | ""  ""
    """
    own = np.bincount(batch.token_episode, weights=batch.channel("pg"), minlength=len(batch.episodes)) > 0
    worth, group, episodes = scores(batch), batch.by("group"), list(batch.episodes)
    for number in range(int(group.max(initial=-1)) + 1):
        rivals = np.flatnonzero((group == number) & own)
        if spread(worth[rivals], np.zeros(len(rivals), dtype=np.int64)).any():
            for place, branch in ((rivals[worth[rivals].argmax()], CHOSEN), (rivals[worth[rivals].argmin()], REJECTED)):
                episodes[place] = _marked(episodes[place], branch, channel)
    return Batch(tuple(episodes), batch.columns)


def _marked(episode: Episode, branch: str, channel: str) -> Episode:
    rows = tuple(replace(row, channels={**row.channels, channel: row.sampled}) for row in episode.rows)
    return replace(episode, branch=branch, rows=rows)
