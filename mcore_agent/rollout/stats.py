"""What a collection counts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_agent.agent.episode import EngineFault
from mcore_agent.types import Episode


@dataclass
class Ledger:
    """Counted while episodes are played, and handed out with the next collection."""

    retries: Counter[str] = field(default_factory=Counter)  # reason -> attempts played again
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> episodes of groups that are not handed out
    dropped_tokens: Counter[str] = field(default_factory=Counter)  # reason -> sampled tokens that nobody will learn from


@dataclass(frozen=True)
class CollectStats:
    """What happened in one collection, and in the background since the one before it.

    ``dropped`` counts by reason the episodes that failed to the last retry (they are handed out, without rows) and those of
    groups that were given up whole: ``stale`` (a token older than the bound) and ``tail`` (more than was asked for). Every token
    that the engine answered with is in ``sampled_tokens`` or ``dropped_tokens`` once, or waits in the buffer.
    The lag of a token is how many weight versions it is older than those it is handed out at.
    """

    episodes: int
    ok: int
    truncated: Mapping[str, int] = field(default_factory=dict)  # reason -> episodes
    retries: Mapping[str, int] = field(default_factory=dict)  # reason -> attempts
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> episodes
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)  # reason -> sampled tokens; ``retry``: of attempts played again
    turns: int = 0
    failed_turns: int = 0  # turns whose feedback is not ok
    sampled_tokens: int = 0
    tokens: int = 0  # of all rows
    lag_max: int = 0  # of the sampled tokens
    lag_mean: float = 0.0
    buffered: int = 0  # groups that are complete and wait
    playing: int = 0  # groups in flight
    wall_s: float = 0.0

    def metrics(self, prefix: str = "rollout") -> dict[str, float]:
        """Flat numbers for the metrics file."""
        counts = ("episodes", "ok", "turns", "failed_turns", "sampled_tokens", "tokens", "wall_s")
        names = (*counts, "lag_max", "lag_mean", "buffered", "playing")
        out: dict[str, float] = {f"{prefix}/{name}": getattr(self, name) for name in names}
        for name in ("truncated", "retries", "dropped", "dropped_tokens"):
            out |= {f"{prefix}/{name}/{reason}": count for reason, count in getattr(self, name).items()}
        return out


def kind(episode: Episode) -> str:
    """The countable part of an episode's reason."""
    return episode.reason.partition(":")[0]


def versions(episodes: Sequence[Episode]) -> np.ndarray:
    """[N] int32: the weight version of every sampled token."""
    return np.concatenate([np.zeros(0, dtype=np.int32), *(row.version[row.sampled] for e in episodes for row in e.rows)])


def measure(
    episodes: Sequence[Episode], ledger: Ledger, wall_s: float, version: int | None = None, buffered: int = 0, playing: int = 0
) -> CollectStats:
    """The statistics of ``episodes``, handed out at weights of ``version`` (None: lags are not taken).

    Raises EngineFault for a token of newer weights: someone counts versions wrongly.
    """
    reasons = {status: Counter(kind(e) for e in episodes if e.status == status) for status in ("truncated", "infra_fail")}
    turns = [turn for e in episodes for turn in e.turns]
    sampled = versions(episodes)
    lags = version - sampled if version is not None and len(sampled) else np.zeros(1, dtype=np.int32)
    if lags.min() < 0:
        raise EngineFault(f"a token was sampled by weights of version {sampled.max()}, but the newest are said to be {version}")
    return CollectStats(
        episodes=len(episodes),
        ok=sum(e.status == "ok" for e in episodes),
        truncated=dict(sorted(reasons["truncated"].items())),
        retries=dict(sorted(ledger.retries.items())),
        dropped=dict(sorted((reasons["infra_fail"] + ledger.dropped).items())),
        dropped_tokens={reason: count for reason, count in sorted(ledger.dropped_tokens.items()) if count},
        turns=len(turns),
        failed_turns=sum(not turn.feedback.ok for turn in turns),
        sampled_tokens=len(sampled),
        tokens=int(np.sum([len(row) for e in episodes for row in e.rows], dtype=np.int64)),
        lag_max=int(lags.max()),
        lag_mean=float(lags.mean()),
        buffered=buffered,
        playing=playing,
        wall_s=wall_s,
    )
