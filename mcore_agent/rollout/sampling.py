"""Next tokens from logits, with the log-probabilities of the whole distribution (M52; top-p, 1904.09751).

Random draws are a function of (seed, position), not of a generator's state.
So a draw does not depend on what else is in the batch, on the order of requests, or on earlier pauses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcore_agent.protocols import Request

MASK64 = (1 << 64) - 1
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014, figure 13): a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Float64 numbers in [0, 1), one for each pair of a seed (uint64) and a token position."""
    with np.errstate(over="ignore"):
        words = _mix(_mix(seeds + GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Draw:
    """Sampling parameters of the B rows of a batch, in the batch's order."""

    seeds: np.ndarray  # [B] uint64
    temperature: Tensor  # [B, 1] float32, 1 where greedy
    greedy: Tensor  # [B] bool
    any_sampled: bool
    scaled: bool  # some temperature is not 1
    truncated: tuple[tuple[int, int, float], ...]  # (row, top_k, top_p) of rows that use either

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device) -> "Draw":
        heat = np.array([r.temperature for r in requests], dtype=np.float32)
        greedy = heat == 0
        heat[greedy] = 1.0
        return Draw(
            seeds=np.array([r.seed & MASK64 for r in requests], dtype=np.uint64),
            temperature=torch.from_numpy(heat).to(device)[:, None],
            greedy=torch.from_numpy(greedy).to(device),
            any_sampled=not greedy.all(),
            scaled=bool((heat != 1.0).any()),
            truncated=tuple(
                (i, r.top_k, r.top_p)
                for i, r in enumerate(requests)
                if r.temperature > 0 and (r.top_k > 0 or r.top_p < 1.0)
            ),
        )

    def repeat(self, times: int) -> "Draw":
        """Each row ``times`` times in a row, for as many positions of it."""
        return Draw(
            seeds=self.seeds.repeat(times),
            temperature=self.temperature.repeat_interleave(times, 0),
            greedy=self.greedy.repeat_interleave(times),
            any_sampled=self.any_sampled,
            scaled=self.scaled,
            truncated=tuple((row * times + i, top_k, top_p) for row, top_k, top_p in self.truncated for i in range(times)),
        )


def truncate(probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """``probs`` [V] with 0 outside the ``top_k`` likeliest tokens (0: all), then outside the nucleus ``top_p``.

    The nucleus is the smallest set of likeliest tokens whose share of what top-k left reaches ``top_p``. Not normalized.
    """
    values, order = probs.sort(descending=True, stable=True)
    if top_k > 0:
        values[top_k:] = 0
    mass = values.double().cumsum(0)
    values[(mass - values) >= top_p * mass[-1]] = 0
    return torch.zeros_like(probs).scatter_(0, order, values)


def sample(logits: Tensor, draw: Draw, positions: np.ndarray) -> tuple[Tensor, Tensor]:
    """One token for each row, and its log-probability after temperature over the whole vocabulary.

    ``logits`` [B, V] are overwritten when they are float32; ``positions`` [B] are the positions that the new tokens take.
    Returns ids [B] int64 and log-probabilities [B] float32. A greedy row (temperature 0) takes the likeliest token and
    reports its log-probability at temperature 1. Where logits are not finite the log-probability is not finite either.
    """
    logits = logits.float()
    if draw.scaled:
        logits /= draw.temperature
    lse = logits.logsumexp(-1, keepdim=True)
    if draw.any_sampled:
        probs = (logits - lse).exp_()
        for row, top_k, top_p in draw.truncated:
            probs[row] = truncate(probs[row], top_k, top_p)
        cdf = probs.cumsum(-1, dtype=torch.float64)
        u = torch.from_numpy(uniforms(draw.seeds, positions)).to(logits.device)[:, None]
        # Strictly below the total, so that rounding never lands behind the last token that has a probability.
        total = cdf[:, -1:]
        target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
        ids = torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if draw.greedy.any():
            ids = torch.where(draw.greedy, logits.argmax(-1), ids)
    else:
        ids = logits.argmax(-1)
    return ids, (logits.gather(1, ids[:, None]) - lse)[:, 0]
