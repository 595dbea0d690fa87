"""The column ``is_weight``: how much each sampled token counts, because another policy has sampled it (M32)."""

import numpy as np

from mcore_agent.batch.microbatch import PlanError
from mcore_agent.loss.correction import BEHAVIOUR, PROXIMAL, Correction, log_bound
from mcore_agent.types import Batch

LEVELS = ("token", "sequence", "geometric")


def weigh(batch: Batch, correction: Correction) -> tuple[np.ndarray, dict[str, float]]:
    """[N] float32 weights, 0 outside the channel ``pg``, and what the ratios look like.

    Needs the columns ``logp_prox`` and ``logp_old``, both at the temperature of sampling. Numbers: ``correction/weight_mean``,
    ``weight_max``, ``ess`` (effective share of the tokens: (sum w)^2 / (n sum w^2)) and ``dropped`` (share of weight 0), and for each
    level ``correction/<level>/mean``, ``max``, ``ess`` and ``outside`` (share outside the band) of the untreated ratios, one
    for each token or episode. Raises PlanError when a column is missing, has another length or is not finite in the channel.
    """
    delta = gaps(batch)
    mask = batch.channel("pg")
    bound = log_bound(correction)
    numbers: dict[str, float] = {}
    weight = np.zeros(len(mask))
    for level in LEVELS:
        logs = np.clip(_at_level(delta, mask, batch, level), -bound, bound)
        ratio = np.exp(logs)
        units = ratio[mask] if level == "token" else ratio[_first_of_each(batch.token_episode, mask)]
        if len(units):
            outside = (units < correction.low) | (units > correction.high)
            numbers |= {f"correction/{level}/mean": float(units.mean()), f"correction/{level}/max": float(units.max()),
                        f"correction/{level}/ess": _ess(units), f"correction/{level}/outside": float(outside.mean())}  # fmt: skip
        if level == correction.level:
            weight = np.where(mask, _treated(ratio, correction), 0.0)
    if mask.any():
        own = weight[mask]
        numbers |= {"correction/weight_mean": float(own.mean()), "correction/weight_max": float(own.max()),
                    "correction/ess": _ess(own), "correction/dropped": float((own == 0).mean())}  # fmt: skip
    return weight.astype(np.float32), numbers


def gaps(batch: Batch) -> np.ndarray:
    """[N] float64: ``logp_prox - logp_old``, 0 outside the channel ``pg``. Raises PlanError when it cannot be had."""
    mask = batch.channel("pg")
    found = {}
    for name in (PROXIMAL, BEHAVIOUR):
        if name not in batch.columns:
            raise PlanError(f"the batch has no column {name!r}, without which sampled tokens cannot be weighed; it has: "
                            f"{', '.join(sorted(batch.columns)) or 'none'}")  # fmt: skip
        values = np.asarray(batch.columns[name], dtype=np.float64)
        if values.shape != mask.shape:
            raise PlanError(f"batch column {name!r} has shape {values.shape}, expected one number per token {mask.shape}")
        wrong = mask & ~np.isfinite(values)
        if wrong.any():
            at = int(np.argmax(wrong))
            episode = batch.episodes[batch.token_episode[at]]
            raise PlanError(f"{name!r} is {values[at]} at token {at} of the batch, which episode {episode.id!r} sampled")
        found[name] = np.where(mask, values, 0.0)
    return found[PROXIMAL] - found[BEHAVIOUR]


def _at_level(delta: np.ndarray, mask: np.ndarray, batch: Batch, level: str) -> np.ndarray:
    """[N] log-ratio of the unit that each token belongs to."""
    if level == "token":
        return delta
    total = np.bincount(batch.token_episode, weights=delta)
    if level == "geometric":
        total = total / np.maximum(np.bincount(batch.token_episode, weights=mask), 1)
    return total[batch.token_episode]


def _treated(ratio: np.ndarray, correction: Correction) -> np.ndarray:
    if correction.treatment == "truncate":
        return np.minimum(ratio, correction.high)
    if correction.treatment == "clip":
        return np.clip(ratio, correction.low, correction.high)
    return np.where((ratio >= correction.low) & (ratio <= correction.high), ratio, 0.0)


def _first_of_each(owner: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Places of the first token in the mask of each unit that has one."""
    places = np.flatnonzero(mask)
    return places[np.unique(owner[places], return_index=True)[1]]


def _ess(weight: np.ndarray) -> float:
    square = float((weight**2).sum())
    return float(weight.sum()) ** 2 / (len(weight) * square) if square else 0.0
