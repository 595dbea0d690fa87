"""One pass over the micro-batches of this rank through Megatron's schedules, with or without gradients.

The loss is the plain sum of what each micro-batch gives, over all micro-batches and data-parallel ranks; no size
divides it anywhere, so that splitting a batch differently changes nothing but the order of additions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Groups, device
from mcore_agent.learner.logprob import Head, head_output
from mcore_agent.learner.model import Model
from mcore_agent.learner.packing import PackedRows, pack
from mcore_agent.loss.total import outputs_needed, total_loss
from mcore_agent.protocols import LossTerm, ModelOut


class LearnerError(RuntimeError):
    """The learner was given what it cannot compute; raised on every rank."""


@dataclass(frozen=True)
class Pass:
    """What a pass over the micro-batches gave, the same on every pipeline stage."""

    loss: float  # summed over all data-parallel ranks
    metrics: dict[str, float]  # likewise
    logp: list[np.ndarray]  # of this data-parallel rank: per micro-batch [T] float32


@dataclass(frozen=True)
class Prepared:
    """A micro-batch as tensors on this rank's device."""

    tokens: torch.Tensor  # [1, T'] with padding to a multiple of tp under sequence parallelism
    rows: PackedRows
    head: Head
    columns: dict[str, torch.Tensor]


def prepare(micro: MicroBatch, model: Model, temperature: float, entropy: bool) -> Prepared:
    groups, where = model.groups, device()
    tokens, lengths = micro.tokens, micro.lengths
    missing = -len(tokens) % groups.layout.tp if model.config.sequence_parallel else 0
    if missing:
        tokens, lengths = np.concatenate([tokens, np.zeros(missing, dtype=np.int64)]), np.append(lengths, missing)
    columns = model.modules[-1].vocab_size // groups.layout.tp
    first = columns * groups.tp_rank
    head = Head(
        targets=torch.from_numpy(np.roll(tokens, -1)).to(where),
        inner=torch.from_numpy(micro.positions > 0).to(where),
        temperature=temperature,
        entropy=entropy,
        first=first,
        valid=max(0, min(columns, model.family.arch.vocab - first)),
        tp=groups.tp,
    )
    return Prepared(
        tokens=torch.from_numpy(tokens)[None].to(where),
        rows=pack(lengths, model.frequencies, model.dtype, where),
        head=head,
        columns={name: torch.from_numpy(values).to(where) for name, values in micro.columns.items()},
    )


def run(model: Model, micro: Sequence[MicroBatch], terms: Sequence[LossTerm], temperature: float, *, gradients: bool) -> Pass:
    """Forward over every micro-batch and, with ``gradients``, backward; without terms only the log-probabilities.

    Every rank must call it with the same number of micro-batches. Raises LearnerError on all ranks otherwise.
    """
    _check(micro, model)
    entropy = "entropy" in outputs_needed(terms)
    prepared = (prepare(m, model, temperature, entropy) for m in micro)
    with torch.set_grad_enabled(gradients):
        found = get_forward_backward_func()(
            forward_step_func=partial(_forward, terms=terms),
            data_iterator=prepared,
            model=model.chunks,
            num_microbatches=len(micro),
            seq_length=len(micro[0].tokens),
            micro_batch_size=1,
            forward_only=not gradients,
        )
    return _shared(found, model.groups)


def _forward(batches: Iterator[Prepared], chunk: torch.nn.Module, terms: Sequence[LossTerm]) -> tuple[Any, Any]:
    batch = next(batches)
    out = chunk(
        batch.tokens,
        None,  # position_ids: each row starts at 0, and PackedRows knows
        None,  # attention_mask: causal within each row
        packed_seq_params=batch.rows,
        output_processor=head_output,
        output_processor_context=batch.head,
    )
    return out, partial(_loss, columns=batch.columns, terms=terms)


def _loss(out: ModelOut, columns: dict[str, torch.Tensor], terms: Sequence[LossTerm]) -> tuple[Any, Any, Any]:
    """Called on the last stage only: (loss to differentiate, number of tokens, report). The number is not used."""
    loss, metrics = total_loss(out, columns, terms)
    report = (loss.detach().double(), {k: v.double() for k, v in metrics.items()}, out.logp.detach().float())
    return loss, torch.zeros((), dtype=torch.int), report


def _check(micro: Sequence[MicroBatch], model: Model) -> None:
    counts = torch.tensor([len(micro), -len(micro)], device=device())
    if model.groups.layout.world > 1:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    most, least = int(counts[0]), -int(counts[1])
    if most != least:
        raise LearnerError(f"ranks have between {least} and {most} micro-batches; fill up with batch.microbatch.filler")
    if most == 0:
        raise LearnerError("there is no micro-batch: a batch to which no loss term gives a weight is skipped, not stepped")
    vocab = model.family.arch.vocab
    for index, m in enumerate(micro):
        if m.tokens.min() < 0 or m.tokens.max() >= vocab:
            raise LearnerError(f"micro-batch {index} holds token ids {m.tokens.min()} to {m.tokens.max()}; the vocabulary is [0, {vocab})")


def _shared(found: list[Any], groups: Groups) -> Pass:
    """Sums over data-parallel ranks on the last stage, then tells the other stages."""
    boxed: list[Any] = [None]
    if groups.last_stage:
        names = list(found[0][1])
        sums = torch.stack([sum(r[0] for r in found), *(sum(r[1][n] for r in found) for n in names)])
        if groups.layout.dp > 1:
            dist.all_reduce(sums, group=groups.dp)
        loss, *values = sums.tolist()
        boxed = [Pass(loss, dict(zip(names, values, strict=True)), [r[2].cpu().numpy() for r in found])]
    if groups.layout.pp > 1:
        last = groups.global_rank(groups.tp_rank, groups.dp_rank, groups.layout.pp - 1)
        dist.broadcast_object_list(boxed, src=last, group=groups.pp)
    return boxed[0]
