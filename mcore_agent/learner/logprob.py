"""Log-probability and entropy of the tokens of a pack, from vocabulary-parallel logits.

Log-probabilities are taken at a temperature, over the true vocabulary: padding columns take no part.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_agent.protocols import ModelOut

PART = 1 << 19  # logits that a processor works on at a time: what its cache holds
GPU_PART = 1 << 26


@dataclass(frozen=True)
class Head:
    """What turns hidden states into log-probabilities; travels through GPTModel's ``output_processor_context``."""

    targets: torch.Tensor  # [T'] the token after each position (anything at the end of a row); T' counts padding tokens
    inner: torch.Tensor  # [T] bool: False at the first token of a row
    temperature: float
    entropy: bool
    first: int  # of this rank's columns of the logits
    valid: int  # how many of them are true vocabulary
    tp: Any


def head_output(hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, context: Head, **_: Any) -> ModelOut:
    """GPTModel's ``output_processor``: hidden states ``[T'(/tp), 1, h]`` -> ModelOut over the pack's T tokens.

    Position t's logits speak of token t + 1; ModelOut's columns speak of token t, so they are shifted by one.
    """
    logits, _ = output_layer(hidden_states, weight=output_weight)
    logp, entropy = _Columns.apply(logits.squeeze(1), context)
    size = len(context.inner)

    def shifted(values: torch.Tensor) -> torch.Tensor:
        column = torch.cat([values.new_zeros(1), values[: size - 1]])
        return torch.where(context.inner, column, column.new_zeros(()))

    return ModelOut(shifted(logp), shifted(entropy) if context.entropy else None)


class _Columns(torch.autograd.Function):
    """Logits ``[T, V/tp]`` -> log p(target) ``[T]`` and entropy ``[T]`` (zeros unless asked for), both at least fp32.

    The logits are kept and nothing else of their size: backward overwrites them with their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        peak = torch.full((len(logits),), torch.finfo(wide).min, dtype=wide, device=logits.device)
        total, chosen, mean = (torch.zeros_like(peak) for _ in range(3))
        for part in _parts(logits):
            scaled = logits[part, : head.valid].to(wide) / head.temperature
            row, column = _mine(head, part)
            chosen[part][row] = scaled[row, column]
            if head.valid:
                peak[part] = scaled.amax(-1)
            scaled.sub_(peak[part, None])
            if head.entropy:
                powers = scaled.exp()
                mean[part] = (powers * scaled).sum(-1)
            else:
                powers = scaled.exp_()
            total[part] = powers.sum(-1)
        if head.tp.size() > 1:
            peak, total, chosen, mean = _over_ranks(head.tp, peak, total, chosen, mean)
        log_total = total.log()
        entropy = log_total - mean / total if head.entropy else torch.zeros_like(total)
        ctx.head = head
        ctx.save_for_backward(logits, peak + log_total, entropy)
        return (chosen - peak) - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor, None]:
        head: Head = ctx.head
        logits, log_sum, entropy = ctx.saved_tensors
        for part in _parts(logits):
            log_p = logits[part, : head.valid].to(log_sum.dtype) / head.temperature - log_sum[part, None]
            slope = -grad_logp[part, None]
            if head.entropy:  # d H / d x = -p (log p + H)
                slope = slope - grad_entropy[part, None] * (log_p + entropy[part, None])
            grad = log_p.exp_().mul_(slope)
            row, column = _mine(head, part)
            grad[row, column] += grad_logp[part][row]
            logits[part, : head.valid] = grad.div_(head.temperature)
            logits[part, head.valid :] = 0
        return logits, None


def _parts(logits: torch.Tensor) -> list[slice]:
    """Slices of tokens whose logits are worked on together."""
    step = max(8, (GPU_PART if logits.is_cuda else PART) // max(1, logits.shape[1]))
    return [slice(start, min(start + step, len(logits))) for start in range(0, len(logits), step)]


def _mine(head: Head, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the part whose target is one of this rank's columns, and that column."""
    column = head.targets[part] - head.first
    row = ((column >= 0) & (column < head.valid)).nonzero().squeeze(-1)
    return row, column[row]


def _over_ranks(group: Any, peak: torch.Tensor, total: torch.Tensor, chosen: torch.Tensor, mean: torch.Tensor) -> list[torch.Tensor]:
    """The sums of all ranks, each relative to the highest peak."""
    highest = peak.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    lower = peak - highest
    sums = torch.stack([total * lower.exp(), chosen, (mean + total * lower) * lower.exp()])
    dist.all_reduce(sums, group=group)
    return [highest, *sums]
