"""On-policy distillation over whole distributions, or their likeliest tokens (M104; GKD, 2306.13649 sec. 3)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from mcore_agent.loss.common import LossError, check_term, column, keep, mask_of
from mcore_agent.loss.derived import likeliest
from mcore_agent.protocols import ModelOut
from mcore_agent.registry import register

ROUNDING = 1e-6  # a rest of less probability than this is what rounding has left


@register("loss", "distill_top_k")
@dataclass(frozen=True)
class DistillTopK:
    """The KL divergence between student and teacher at every sampled place, ``reverse`` (student first) or ``forward``.

    Both are distributions over the student's ``top_k`` tokens that are among the teacher's (columns ``teacher_id:<i>`` and
    ``teacher_logp:<i>``) too, and one more event: any other token. With ``top_k`` the whole vocabulary this is the divergence
    itself, and below it a lower bound, 0 where student and teacher agree. The mass of the rest has its gradient.

    A student of (.5, .25, .25) and a teacher of (.25, .5, .25): .5 ln 2 + .25 ln(1/2) = .25 ln 2, either way round.
    Metric: ``teacher_kl``.
    """

    top_k: int = 20
    direction: Literal["reverse", "forward"] = "reverse"
    coef: float = 1.0
    aggregate: str = "token_mean"

    channel: ClassVar[str] = "pg"
    scales_with: ClassVar[str | None] = None

    def __post_init__(self):
        check_term("distill_top_k", self.coef, self.aggregate)
        if self.top_k < 1:
            raise LossError(f"loss 'distill_top_k': top_k is {self.top_k}, but must be at least 1")
        if self.direction not in ("reverse", "forward"):
            raise LossError(f"loss 'distill_top_k': direction is {self.direction!r}; known: reverse, forward")

    @property
    def needs(self) -> tuple[str, ...]:
        ids, logp = likeliest(self.top_k)
        return ("top_logp", "top_ids", *ids, *logp)

    def per_token(self, out: ModelOut, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """[T] loss, 0 outside the channel, and metrics of the same shape. Raises LossError without ``top_logp``."""
        if out.top_logp is None or out.top_ids is None or out.top_ids.shape[1] < self.top_k:
            raise LossError(f"loss 'distill_top_k' needs the model outputs 'top_logp' and 'top_ids' of {self.top_k} tokens")
        mask = mask_of(columns, self.channel)
        ids, logp = ([keep(mask, column(columns, name)) for name in names] for names in likeliest(self.top_k))
        student = keep(mask[:, None], out.top_logp[:, : self.top_k])
        same = out.top_ids[:, : self.top_k, None] == torch.stack(ids, 1)[:, None, :]  # [T, k, k]
        both = same.any(-1) & mask[:, None]
        teacher = torch.where(same, torch.stack(logp, 1)[:, None, :], 0.0).sum(-1).to(student.dtype)  # [T, k] 0 where only one has it
        kl = divergence(*((student, teacher) if self.direction == "reverse" else (teacher, student)), both)
        return keep(mask, kl), {"teacher_kl": keep(mask, kl.detach())}


def divergence(first: torch.Tensor, second: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    """[T] ``sum p (log p - log q)`` over the events of ``both`` [T, k] and the rest, from log-probabilities [T, k]."""
    p, q = (torch.where(both, x, -torch.inf).exp() for x in (first, second))
    known = torch.where(both, p * (torch.where(both, first, 0.0) - torch.where(both, second, 0.0)), 0.0).sum(-1)
    rest_p, rest_q = ((1 - x.sum(-1)).clamp(min=ROUNDING) for x in (p, q))
    return known + torch.where(rest_p > ROUNDING, rest_p * (rest_p.log() - rest_q.log()), 0.0)
