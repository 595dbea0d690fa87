"""One pass over the micro-batches of this rank through Megatron's schedules, with or without gradients.

The loss is the plain sum of what each micro-batch gives, over all micro-batches and data-parallel ranks; no size
divides it anywhere, so that splitting a batch differently changes nothing but the order of additions.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from mcore_agent.batch.microbatch import MicroBatch, filler
from mcore_agent.learner import moe_losses
from mcore_agent.learner.groups import Groups, device
from mcore_agent.learner.logprob import Head, head_output
from mcore_agent.learner.model import Model
from mcore_agent.learner.packing import PackedRows, pack
from mcore_agent.learner.routing import Chosen, Routes, check_consumed, collect, forget, recorded
from mcore_agent.loss.derived import top_k_needed
from mcore_agent.loss.total import outputs_needed, total_loss
from mcore_agent.precision import token_multiple
from mcore_agent.protocols import LossTerm, ModelOut


class LearnerError(RuntimeError):
    """The learner was given what it cannot compute; raised on every rank."""


@dataclass(frozen=True)
class Pass:
    """What a pass over the micro-batches gave, the same on every pipeline stage."""

    loss: float  # summed over all data-parallel ranks
    metrics: dict[str, float]  # likewise
    outputs: list[dict[str, np.ndarray]]  # of this data-parallel rank: per micro-batch ``logp`` [T] and what else was wanted

    @property
    def logp(self) -> list[np.ndarray]:
        """Per micro-batch [T], at least float32."""
        return [found["logp"] for found in self.outputs]


@dataclass(frozen=True)
class Prepared:
    """A micro-batch as tensors on this rank's device."""

    tokens: torch.Tensor  # [1, T' / cp] this rank's share of the tokens and of the padding
    rows: PackedRows
    head: Head
    columns: dict[str, torch.Tensor]  # [T] of the whole micro-batch
    padding: torch.Tensor | None  # [T' / cp] which of the tokens count in no router loss


@dataclass(frozen=True)
class Ask:
    """What a pass computes: the loss of ``terms``, and the outputs that it reports beside log-probabilities."""

    terms: Sequence[LossTerm] = ()
    temperature: float = 1.0
    report: frozenset[str] = frozenset()  # names of ModelOut: entropy, log_sum, top_logp, top_ids, value; and routing
    top_k: int = 0

    @property
    def needed(self) -> frozenset[str]:
        return outputs_needed(self.terms) | self.report

    @property
    def likeliest(self) -> int:
        """How many of the likeliest tokens of each place the terms or the report want."""
        return max(self.top_k, top_k_needed(self.terms))


def prepare(micro: MicroBatch, model: Model, ask: Ask, length: int = 0) -> Prepared:
    """The micro-batch filled up with rows of one token to ``length``, or to what the layout can split evenly."""
    layout, where = model.groups.layout, device()
    missing = _whole(max(length, len(micro.tokens)), model) - len(micro.tokens)
    tokens = np.concatenate([micro.tokens, np.zeros(missing, dtype=np.int64)])
    lengths = np.concatenate([micro.lengths, np.ones(missing, dtype=np.int64)])
    rows = pack(lengths, model.frequencies, model.dtype, where, layout.cp, model.groups.cp_rank, model.context_mode)
    if micro.routing is not None or "routing" in ask.report:
        replay = None
        if micro.routing is not None:
            experts = model.family.arch.experts
            replay = recorded(micro.routing, model.expert_layers, model.own_layers, rows, model.groups, experts)
        rows.routes = Routes(replay, Chosen("routing" in ask.report, rows.order))
    columns = model.vocab_columns
    first = columns * model.groups.tp_rank
    head = Head(
        targets=torch.from_numpy(np.roll(tokens, -1)).to(where),
        inner=torch.from_numpy(micro.positions > 0).to(where),
        temperature=ask.temperature,
        entropy="entropy" in ask.needed,
        log_sum="log_sum" in ask.needed,
        top_k=ask.likeliest,
        first=first,
        valid=max(0, min(columns, model.family.arch.vocab - first)),
        tp=model.groups.tp,
        cp=model.groups.cp if layout.cp > 1 else None,
        order=rows.order,
        value=model.value_head if {"value", "value_behind"} & ask.needed else None,
    )
    return Prepared(
        tokens=torch.from_numpy(tokens[rows.own]).to(where)[None],
        rows=rows,
        head=head,
        columns={name: torch.from_numpy(values).to(where) for name, values in micro.columns.items()},
        padding=torch.from_numpy(moe_losses.padding_of(micro, len(tokens))[rows.own]).to(where) if model.losses.active else None,
    )


def _whole(length: int, model: Model) -> int:
    """The next length that context and sequence parallelism can split evenly, into parts that suit FP8 products where it is on."""
    layout = model.groups.layout
    parts = token_multiple(model.precision.fp8, layout.tp, layout.cp, layout.sp)
    return -(-length // parts) * parts


def run(model: Model, micro: Sequence[MicroBatch], ask: Ask, *, gradients: bool) -> Pass:
    """Forward over every micro-batch and, with ``gradients``, backward; without terms only the outputs.

    Collective over all ranks; each must give the same number of micro-batches. Raises LearnerError on all ranks otherwise.
    """
    longest = _check(micro, model)
    layout = model.groups.layout
    slots = [*micro]
    if layout.vpp > 1:  # interleaved stages take whole rounds
        slots += [filler(list(micro[0].columns))] * (-len(micro) % layout.pp)
    length = longest if model.equal_lengths else 0
    routed: list[Chosen] = []

    def batches() -> Iterator[Prepared]:
        for m in slots:
            batch = prepare(m, model, ask, length)
            if batch.rows.routes is not None:
                routed.append(batch.rows.routes.chosen)
            yield batch

    # each chunk of the model asks for its own micro-batches, each of which is kept until the last chunk has it
    prepared = _shared_out(batches(), layout.vpp)
    balanced = gradients and model.losses.active
    if balanced:
        moe_losses.begin(model.modules, micro, model.groups)
    with torch.set_grad_enabled(gradients):
        found = get_forward_backward_func()(
            forward_step_func=partial(_forward, ask=ask, groups=model.groups),
            data_iterator=prepared if layout.vpp > 1 else prepared[0],
            model=model.chunks,
            num_microbatches=len(slots),
            seq_length=_whole(longest, model),
            micro_batch_size=1,
            forward_only=not gradients,
        )
    done = _shared(found, len(micro), model.groups)
    if balanced:
        done.metrics.update(moe_losses.metrics(model.modules, len(model.expert_layers), model.groups))
    _account(done, micro, routed, model, "routing" in ask.report)
    return done


def _shared_out(source: Iterator[Prepared], count: int) -> list[Iterator[Prepared]]:
    """``count`` iterators over all of ``source``; what all have taken is forgotten at once (``itertools.tee`` keeps up to 57)."""
    waiting: list[deque[Prepared]] = [deque() for _ in range(count)]

    def one(own: deque[Prepared]) -> Iterator[Prepared]:
        while True:
            if not own:
                try:
                    fresh = next(source)
                except StopIteration:
                    return
                for queue in waiting:
                    queue.append(fresh)
                del fresh
            yield own.popleft()

    return [one(own) for own in waiting]


def _account(done: Pass, micro: Sequence[MicroBatch], routed: Sequence[Chosen], model: Model, report: bool) -> None:
    """Every recorded expert was replayed; with ``report`` the outputs get the experts that were chosen."""
    forget_graphs(model)
    for chosen in routed:
        check_consumed(chosen, model.own_layers.intersection(model.expert_layers))
    if report:
        for m, chosen, outputs in zip(micro, routed, done.outputs, strict=False):
            outputs["routing"] = collect(chosen, len(m.tokens), model.expert_layers, model.groups)


def forget_graphs(model: Model) -> None:
    """Token dispatchers hold tensors of their last micro-batch, and those its graph, until the next one: they let go of them.

    So do routers.
    """
    for module in model.modules:
        forget(module)
        for layer in module.decoder.layers:
            dispatcher = vars(layer.mlp).get("token_dispatcher")
            kept = {} if dispatcher is None else vars(dispatcher)
            kept.update({name: None for name, value in kept.items() if torch.is_tensor(value) and value.grad_fn is not None})


def _forward(batches: Iterator[Prepared], chunk: torch.nn.Module, ask: Ask, groups: Groups) -> tuple[Any, Any]:
    batch = next(batches)
    out = chunk(
        batch.tokens,
        None,  # position_ids: each row starts at 0, and PackedRows knows
        None,  # attention_mask: causal within each row
        packed_seq_params=batch.rows,
        padding_mask=None if batch.padding is None else moe_losses.padding_mask(batch.padding, chunk, groups),
        output_processor=head_output,
        output_processor_context=batch.head,
    )
    return out, partial(_loss, columns=batch.columns, ask=ask)


def _loss(out: ModelOut, columns: dict[str, torch.Tensor], ask: Ask) -> tuple[Any, Any, Any]:
    """Called on the last stage only: (loss to differentiate, number of tokens, report). The number is not used."""
    loss, metrics = total_loss(out, columns, ask.terms)
    outputs = {name: found.detach() for name in {"logp", *ask.report} if (found := vars(out).get(name)) is not None}
    return loss, torch.zeros((), dtype=torch.int), (loss.detach().double(), {k: v.double() for k, v in metrics.items()}, outputs)


def _check(micro: Sequence[MicroBatch], model: Model) -> int:
    """Tokens of the longest micro-batch of all ranks."""
    lengths = [len(m.tokens) for m in micro]
    counts = torch.tensor([len(micro), -len(micro), max(lengths, default=0)], device=device())
    if model.groups.layout.world > 1:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    most, least, longest = int(counts[0]), -int(counts[1]), int(counts[2])
    if most != least:
        raise LearnerError(f"ranks have between {least} and {most} micro-batches; fill up with batch.microbatch.filler")
    if most == 0:
        raise LearnerError("there is no micro-batch: a batch to which no loss term gives a weight is skipped, not stepped")
    vocab = model.family.arch.vocab
    for index, m in enumerate(micro):
        if m.tokens.min() < 0 or m.tokens.max() >= vocab:
            raise LearnerError(f"micro-batch {index} holds token ids {m.tokens.min()} to {m.tokens.max()}; the vocabulary is [0, {vocab})")
    return longest


def _shared(found: list[Any], count: int, groups: Groups) -> Pass:
    """Sums over data-parallel ranks on the last stage, then tells the other stages; of ``count`` micro-batches, not of fillers.

    Context-parallel ranks have all computed the whole loss, so they are not summed.
    """
    boxed: list[Any] = [None]
    if groups.last_stage:
        names = list(found[0][1])
        sums = torch.stack([sum(r[0] for r in found), *(sum(r[1][n] for r in found) for n in names)])
        if groups.layout.dp > 1:
            dist.all_reduce(sums, group=groups.dp)
        loss, *values = sums.tolist()
        boxed = [Pass(loss, dict(zip(names, values, strict=True)), [_on_host(r[2]) for r in found[:count]])]
    if groups.layout.pp > 1:
        last = groups.global_rank(groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.layout.pp - 1)
        dist.broadcast_object_list(boxed, src=last, group=groups.pp)
    return boxed[0]


def _on_host(outputs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """As arrays; what is narrower than float32 was computed so, and numpy has no bf16."""
    wide = {name: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for name, t in outputs.items()}
    return {name: t.cpu().numpy() for name, t in wide.items()}
