"""Correcting for the gap between the policy that sampled and the one that learns (M32), for any loss that has a ratio."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mcore_agent.loss.common import LossError, column, keep, mask_of
from mcore_agent.protocols import LossTerm, ModelOut

BEHAVIOUR = "logp_old"  # log-probabilities of the engine, under the weights that sampled the token
PROXIMAL = "logp_prox"  # of the learner, under the weights that a batch finds
WEIGHT = "is_weight"  # what ``batch.correction.weigh`` makes of the two


@dataclass(frozen=True)
class Correction:
    """How much a sampled token counts, by ``w = pi_prox / pi_behaviour``: three knobs.

    ``level``: w of the token, of the episode (``sequence``: the product over its sampled tokens), or the n-th root of that
    product (``geometric``), which a long episode does not blow up. An episode is one sequence however it is cut into rows.
    ``treatment``: ``truncate`` gives min(w, high), ``clip`` the nearest number in [low, high], ``mask`` w inside of the band
    and 0 outside. Log-ratios .5, -.5, 1.2 of tokens, truncated at 2, give 1.64872, .60653, 2.

    Raises LossError for a band that does not hold 1: equal policies would not be left alone.
    """

    treatment: Literal["truncate", "clip", "mask"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.0
    high: float = 2.0  # may be infinite

    def __post_init__(self):
        for name, value, known in (
            ("treatment", self.treatment, ("truncate", "clip", "mask")),
            ("level", self.level, ("token", "sequence", "geometric")),
        ):
            if value not in known:
                raise LossError(f"correction: {name} is {value!r}; known: {', '.join(known)}")
        if not 0 <= self.low <= 1 <= self.high or self.low == self.high:
            raise LossError(f"correction: the band is [{self.low}, {self.high}], but must hold 1: 0 <= low <= 1 <= high, and low < high")
        if self.treatment == "truncate" and self.low != 0:
            raise LossError(f"correction: low is {self.low}, but 'truncate' bounds from above only; leave it out, or use 'clip'")


@dataclass(frozen=True)
class Corrected:
    """A term with a ratio to the behaviour policy, corrected: its ratio is to ``logp_prox``, its loss times ``is_weight``.

    With the surrogate of PPO this is decoupled PPO (2505.24298) with the weight that the correction chose. The term
    keeps its aggregation: a token of weight 0 leaves the numerator and stays in the denominator, so that rejecting some
    tokens does not make others count more. Where the two policies agree, loss and gradient have the term's own bits.
    """

    term: LossTerm

    @property
    def channel(self) -> str:
        return self.term.channel

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.term.needs, PROXIMAL, WEIGHT)))

    @property
    def scales_with(self) -> str | None:
        return self.term.scales_with

    @property
    def coef(self) -> float:
        return self.term.coef

    @property
    def aggregate(self) -> str:
        return self.term.aggregate

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and the term's own metrics. Raises LossError when a column is missing."""
        weight = keep(mask_of(columns, self.channel), column(columns, WEIGHT))
        loss, metrics = self.term.per_token(out, {**columns, BEHAVIOUR: column(columns, PROXIMAL)})
        return loss * weight, metrics


def correct(terms: Iterable[LossTerm], correction: Correction | None) -> list[LossTerm]:
    """Terms that need ``logp_old`` corrected, the others as they are; without a correction all as they are."""
    return [Corrected(term) if correction is not None and BEHAVIOUR in term.needs else term for term in terms]  # type: ignore[misc]


def automatic(*, moe: bool, max_lag: int, quantized: bool) -> Correction | None:
    """What ``auto`` stands for: tokens truncated at 2 where the two policies are known to differ, nothing elsewhere.

    They differ by nature with experts (a router's choice flips on the last bit), with quantized rollout weights, and
    with tokens that older weights have sampled.
    """
    return Correction() if moe or quantized or max_lag > 0 else None


def uncorrected(needs: Sequence[Sequence[str]], max_lag: int) -> tuple[str, str] | None:
    """(reason, way out) where one policy would silently be taken for another; ``needs`` are those of the corrected terms.

    Refused are a loss that knows the learner's log-probabilities but not those that sampled, and tokens of older weights
    without a weight for what has changed since.
    """
    for index, names in enumerate(needs):
        if PROXIMAL in names and BEHAVIOUR not in names:
            return (f"loss[{index}] takes log-probabilities that the learner computed again for those of the policy that sampled",
                    f"Let it need {BEHAVIOUR!r} too, and set correction.treatment")  # fmt: skip
    if max_lag > 0 and not any(PROXIMAL in names for names in needs):
        return (f"tokens up to {max_lag} weight versions old are trained on as if the present weights had sampled them",
                "Set correction.treatment to auto, or use a loss that weighs by itself, such as decoupled_ppo")  # fmt: skip
    return None


def log_bound(correction: Correction) -> float:
    """Log-ratios beyond it are cut before exp: past any finite band, and exp of it is still finite in float32."""
    return max(20.0, math.log(correction.high) + 1 if math.isfinite(correction.high) else 0.0)
