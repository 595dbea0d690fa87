"""Every legal combination of parallel sizes and ways to compute, and samples of them that cover every pair of settings."""

import itertools
import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Layout, LayoutError
from mcore_agent.learner.model import Setup

MOST = 8  # ranks


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    layout: Layout
    moe: bool
    tied: bool
    padded: bool  # every row filled up to its micro-batch's longest
    setup: Setup

    @property
    def kind(self) -> str:
        return "qwen3_moe" if self.moe else "qwen3"

    def settings(self) -> dict[str, Any]:
        ways = {"recompute": self.setup.recompute, "dispatcher": self.setup.dispatcher}
        return asdict(self.layout) | ways | {"moe": self.moe, "tied": self.tied, "padded": self.padded}

    def pairs(self) -> set[Any]:
        """All pairs of (key, value) of this case."""
        return set(itertools.combinations(sorted(self.settings().items()), 2))

    def __str__(self) -> str:
        sizes = "".join(f"{k}{v}" for k, v in asdict(self.layout).items() if k != "sp" and v > 1 and (self.moe or k not in ("ep", "etp")))
        words = ["sp"] * self.layout.sp + ["moe" if self.moe else "dense"] + ["tied"] * self.tied + ["padded"] * self.padded
        return "-".join([sizes or "alone", *words, self.setup.recompute, *[self.setup.dispatcher] * self.moe])


def layouts(moe: bool) -> list[Layout]:
    """All of up to MOST ranks with every size 1 or 2."""
    found = []
    for tp, pp, vpp, cp, dp, ep, etp, sp in itertools.product(*[(1, 2)] * 7, (False, True)):
        if (not moe and (ep, etp) != (1, tp)) or (moe and tp > 1 and not sp):  # experts under tensor parallelism need sp
            continue
        try:
            layout = Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=dp, sp=sp)
        except LayoutError:
            continue
        if layout.world <= MOST:
            found.append(layout)
    return found


def cases() -> list[Case]:
    """The whole matrix, layout after layout, because a new layout costs new process groups."""
    found = []
    for moe in (False, True):
        for layout, tied, padded, recompute in itertools.product(layouts(moe), (False, True), (False, True), ("off", "full")):
            for dispatcher in ("alltoall", "allgather") if moe else ("alltoall",):
                found.append(Case(layout, moe, tied, padded, Setup(recompute, dispatcher)))
    return sorted(found, key=lambda c: tuple(asdict(c.layout).values()))


def sample(of: list[Case], seed: str, least: int = 40) -> list[Case]:
    """Cases, at least so many, in which every pair of settings occurs that occurs anywhere."""
    rng = random.Random(seed)
    order = rng.sample(of, len(of))
    missing = set().union(*(c.pairs() for c in of))
    chosen: list[Case] = []
    while missing:
        best = max(order, key=lambda c: len(c.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
    chosen += [c for c in order if c not in chosen][: max(0, least - len(chosen))]
    return sorted(chosen, key=of.index)


def padded(micro: MicroBatch) -> MicroBatch:
    """The same rows, each filled up to the longest by tokens without weight."""
    longest = int(micro.lengths.max())
    place = (np.arange(longest)[None, :] < micro.lengths[:, None]).ravel()
    columns = {}
    for name, values in {"tokens": micro.tokens, **micro.columns}.items():
        columns[name] = np.zeros(place.shape, dtype=values.dtype)
        columns[name][place] = values
    tokens = columns.pop("tokens")
    return MicroBatch(tokens, np.full(len(micro.lengths), longest), micro.rows, columns)
