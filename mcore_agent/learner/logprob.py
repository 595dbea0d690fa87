"""Log-probability, entropy, log-sum and top-k of the tokens of a pack, from hidden states and a vocabulary-parallel weight.

Logits exist for one chunk of tokens at a time; backward computes them again. They are taken at a temperature, over the
true vocabulary: padding columns take no part. Matrix products run in the model's precision, statistics in at least fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from mcore_agent.learner.value import ValueHead
from mcore_agent.protocols import ModelOut

CHUNK = 256  # tokens whose logits exist at a time
PIECE = 1 << 19  # logits that a processor works on at a time: what its cache holds
GPU_PIECE = 1 << 24


@dataclass(frozen=True)
class Head:
    """What turns hidden states into ModelOut; travels through GPTModel's ``output_processor_context``.

    T is the number of tokens of the pack and T' that number with padding. Under context parallelism ``cp`` rank r holds the
    hidden states of the tokens ``order[r * T'/cp : (r + 1) * T'/cp]``.
    """

    targets: torch.Tensor  # [T'] the token after each position (anything at the end of a row)
    inner: torch.Tensor  # [T] bool: False at the first token of a row
    temperature: float
    entropy: bool
    first: int  # of this rank's columns of the logits
    valid: int  # how many of them are true vocabulary
    tp: Any
    log_sum: bool = False
    top_k: int = 0  # at most the vocabulary
    positions: torch.Tensor | None = None  # [n] tokens (0 to T - 1) whose hidden states are asked for
    cp: Any = None
    order: torch.Tensor | None = None  # [T'] a permutation; None: as they come
    chunk: int = CHUNK
    value: ValueHead | None = None  # what gives ModelOut.value


def head_output(hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, context: Head, **_: Any) -> ModelOut:
    """GPTModel's ``output_processor``: hidden states ``[T'/cp(/tp), 1, h]`` -> ModelOut over the pack's T tokens.

    Position t's logits speak of token t + 1; ModelOut's columns speak of token t, so they are shifted by one; ``hidden`` and
    ``value_behind`` are not: they have read token t. Gradients flow to all but ``top_ids``. Without output layer logp is 0.
    Every rank must take the same loss of the result: nothing is summed over context-parallel ranks in backward.
    Enters collectives of tp (forward and backward) and cp (forward). Raises ValueError when the number of tokens is not T'.
    """
    mine = hidden_states.squeeze(1)
    split = bool((output_layer if output_layer is not None else context.value).sequence_parallel)  # type: ignore[union-attr]
    place = _place(context, len(mine) * (context.tp.size() if split else 1))
    columns: tuple[Any, ...] = (None,) * 5
    if output_layer is not None:
        weight = output_layer.weight if output_weight is None else output_weight
        enter = gather_from_sequence_parallel_region if split else copy_to_tensor_model_parallel_region
        hidden = enter(mine, group=context.tp) if context.tp.size() > 1 else mine  # its gradient is summed over tp in backward
        columns = _Columns.apply(hidden, weight, _own(place, context, len(hidden)), context)
    value = None if context.value is None else _values(mine, context, split)
    value, logp, entropy, log_sum, top_logp, top_ids = _over_cp((value, *columns), context, place)
    size = len(context.inner)

    def shifted(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        column = torch.cat([values.new_zeros(1, *values.shape[1:]), values[: size - 1]])
        inner = context.inner.view(-1, *[1] * (values.dim() - 1))
        return torch.where(inner, column, column.new_zeros(()))

    behind = None if value is None else value[:size]
    spoken, value = shifted(logp), shifted(value)
    if spoken is None:  # a critic has no vocabulary
        assert value is not None
        spoken = torch.zeros_like(value)
    chosen = None if context.positions is None else _hidden_at(mine, context, place, split)
    return ModelOut(spoken, shifted(entropy), shifted(log_sum), shifted(top_logp), shifted(top_ids), chosen, value, behind)


def _values(mine: torch.Tensor, head: Head, split: bool) -> torch.Tensor:
    """[T'/cp] values; every tensor-parallel rank computes them all, so each keeps its own part of their gradient."""
    if split:
        mine = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False, group=head.tp)
    assert head.value is not None
    return head.value(mine)


class _Columns(torch.autograd.Function):
    """Hidden states ``[T', h]``, weight ``[V/tp, h]``, targets ``[T']`` -> log p(target), entropy, log-sum ``[T']``, top-k ``[T', k]``.

    What the head does not ask for is None. Statistics of all chunks meet in one maximum and one sum over tp (two gathers more
    for top-k). The gradient of the hidden states is that of this rank's columns: the caller sums over tp. Tokens whose
    gradients are all zero cost nothing in backward. A bf16 weight's gradient is summed over the chunks in fp32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, head: Head) -> tuple[Any, ...]:
        sums, best = _Sums.of(hidden, head), _Best.of(hidden, head)
        logits = hidden.new_empty(min(head.chunk, len(hidden)), head.valid)
        for part in _slices(len(hidden), head.chunk if head.valid else 0):
            rows = hidden[part]
            torch.mm(rows, weight[: head.valid].t(), out=logits[: len(rows)])
            for piece in _slices(len(rows), _rows_at_once(logits)):
                place = slice(part.start + piece.start, part.start + piece.stop)
                scaled = logits[piece].to(sums.peak.dtype) / head.temperature
                best.add(place, scaled, head)
                sums.add(place, scaled, targets[place], head)
        sums = sums.over_ranks(head)
        log_total = sums.total.log()
        log_sum = sums.peak + log_total
        entropy = log_total - sums.mean / sums.total if head.entropy else None
        top, ids = best.over_ranks(head) if head.top_k else (None, None)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropy, ids)
        ctx.set_materialize_grads(False)
        if ids is not None:
            ctx.mark_non_differentiable(ids)
        top_logp = None if top is None else top - log_sum[:, None]
        return (sums.chosen - sums.peak) - log_total, entropy, log_sum if head.log_sum else None, top_logp, ids

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        head: Head = ctx.head
        hidden, weight, _, log_sum, *_ = ctx.saved_tensors
        slope = _Slope.of(head, ctx.saved_tensors, grads)
        todo = slope.rows()
        logits = hidden.new_empty(min(head.chunk, len(todo)), head.valid)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=log_sum.dtype) if ctx.needs_input_grad[1] else None
        for part in _slices(len(todo), head.chunk if head.valid else 0):
            at = todo[part]
            rows, mine = hidden[at], logits[: len(at)]
            torch.mm(rows, weight[: head.valid].t(), out=mine)
            for piece in _slices(len(at), _rows_at_once(logits)):
                slope.overwrite(mine[piece], at[piece])
            if grad_hidden is not None:
                grad_hidden[at] = mine @ weight[: head.valid]
            if grad_weight is not None:
                _add_product(grad_weight[: head.valid], mine, rows)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


@dataclass
class _Sums:
    """Sums over the columns of each token's distribution, relative to its highest logit; all ``[T']``."""

    peak: torch.Tensor
    total: torch.Tensor  # of exp(x - peak)
    chosen: torch.Tensor  # the target's logit
    mean: torch.Tensor  # of (x - peak) exp(x - peak)

    @classmethod
    def of(cls, hidden: torch.Tensor, head: Head) -> "_Sums":
        wide = torch.promote_types(hidden.dtype, torch.float32)
        zeros = [torch.zeros(len(hidden), dtype=wide, device=hidden.device) for _ in range(3)]
        return cls(torch.full_like(zeros[0], torch.finfo(wide).min), *zeros)

    def add(self, place: slice, scaled: torch.Tensor, targets: torch.Tensor, head: Head) -> None:
        """Takes up the logits of some tokens, and overwrites them."""
        column, mine = _local(targets, head)
        self.chosen[place] = scaled.gather(1, column[:, None]).squeeze(1) * mine
        peak = scaled.amax(-1)
        self.peak[place] = peak
        scaled.sub_(peak[:, None])
        powers = scaled.exp() if head.entropy else scaled.exp_()
        self.total[place] = powers.sum(-1)
        if head.entropy:
            self.mean[place] = powers.mul_(scaled).sum(-1)

    def over_ranks(self, head: Head) -> "_Sums":
        """Of the whole vocabulary, on every rank."""
        if head.tp.size() == 1:
            return self
        highest = self.peak.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=head.tp)
        lower = self.peak - highest
        sums = torch.stack([self.total * lower.exp(), self.chosen, (self.mean + self.total * lower) * lower.exp()])
        dist.all_reduce(sums, group=head.tp)
        return _Sums(highest, *sums)


@dataclass
class _Best:
    """The highest logits of each token, falling, and their token ids; both ``[T', k]``."""

    values: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, hidden: torch.Tensor, head: Head) -> "_Best":
        wide = torch.promote_types(hidden.dtype, torch.float32)
        values = torch.full((len(hidden), head.top_k), -torch.inf, dtype=wide, device=hidden.device)
        return cls(values, torch.zeros_like(values, dtype=torch.int64))

    def add(self, place: slice, scaled: torch.Tensor, head: Head) -> None:
        k = min(head.top_k, head.valid)
        if k:
            values, columns = scaled.topk(k)
            self.values[place, :k] = values
            self.ids[place, :k] = columns + head.first

    def over_ranks(self, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
        if head.tp.size() == 1:
            return self.values, self.ids
        values = [torch.empty_like(self.values) for _ in range(head.tp.size())]
        ids = [torch.empty_like(self.ids) for _ in values]
        dist.all_gather(values, self.values, group=head.tp)
        dist.all_gather(ids, self.ids, group=head.tp)
        top, at = torch.cat(values, 1).topk(head.top_k)
        return top, torch.cat(ids, 1).gather(1, at)


@dataclass
class _Slope:
    """Gradients of the outputs per token, and from them the gradient of the logits.

    With x the scaled logits and p their softmax: d log p_j / d x_v = [v = j] - p_v; d log_sum / d x_v = p_v;
    d H / d x_v = -p_v (log p_v + H).
    """

    head: Head
    log_sum: torch.Tensor  # [T']
    entropy: torch.Tensor | None  # [T']
    columns: torch.Tensor  # [T', 1 + k] this rank's columns of the target and the top k
    picked: torch.Tensor  # [T', 1 + k] gradients of their log-probabilities, 0 where the column is another rank's
    common: torch.Tensor  # [T'] what every column gets times its probability
    spread: torch.Tensor | None  # [T'] gradient of the entropy

    @classmethod
    def of(cls, head: Head, saved: tuple[Any, ...], grads: tuple[Any, ...]) -> "_Slope":
        _, _, targets, log_sum, entropy, ids = saved
        grad_logp, grad_entropy, grad_log_sum, grad_top, _ = grads
        picked = [torch.zeros_like(log_sum)[:, None] if grad_logp is None else grad_logp[:, None]]
        tokens = [targets[:, None]]
        if ids is not None and grad_top is not None:
            tokens.append(ids)
            picked.append(grad_top)
        columns, mine = _local(torch.cat(tokens, 1), head)
        slopes = torch.cat(picked, 1)
        common = -slopes.sum(1) if grad_log_sum is None else grad_log_sum - slopes.sum(1)
        return cls(head, log_sum, entropy, columns, slopes * mine, common, grad_entropy)

    def rows(self) -> torch.Tensor:
        """The tokens for which this rank's logits have a gradient."""
        some = (self.common != 0) | (self.picked != 0).any(1)
        return (some if self.spread is None else some | (self.spread != 0)).nonzero().squeeze(1)

    def overwrite(self, logits: torch.Tensor, at: torch.Tensor) -> None:
        """The logits of the tokens ``at`` become their gradient."""
        log_p = logits.to(self.log_sum.dtype).div_(self.head.temperature).sub_(self.log_sum[at, None])
        if self.spread is None or self.entropy is None:
            grad = log_p.exp_().mul_(self.common[at, None])
        else:
            grad = log_p.exp()
            grad.mul_(log_p.add_(self.entropy[at, None]).mul_(-self.spread[at, None]).add_(self.common[at, None]))
        grad.scatter_add_(1, self.columns[at], self.picked[at])
        logits.copy_(grad.div_(self.head.temperature))


def _add_product(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor) -> None:
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), rows)
    else:
        total.add_(grad.t() @ rows)


def _local(tokens: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's columns of the tokens (some legal column for those of other ranks), and which are its own."""
    column = tokens - head.first
    mine = (column >= 0) & (column < head.valid)
    return column.clamp(0, max(head.valid - 1, 0)), mine


def _slices(size: int, step: int) -> list[slice]:
    """``size`` rows in slices of ``step``; none when ``step`` is 0."""
    return [slice(start, min(start + step, size)) for start in range(0, size, step)] if step else []


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(8, (GPU_PIECE if logits.is_cuda else PIECE) // max(1, logits.shape[1]))


def _size(group: Any) -> int:
    return 1 if group is None else group.size()


def _place(head: Head, size: int) -> torch.Tensor | None:
    """``[T']`` where each token of the pack is in the order of the context-parallel ranks; None: where it was."""
    ranks = _size(head.cp)
    if size * ranks != len(head.targets):
        raise ValueError(f"{ranks} context-parallel ranks with {size} hidden states each, but {len(head.targets)} targets; pad the pack")
    if head.order is None:
        return None
    place = torch.empty_like(head.order)
    place[head.order] = torch.arange(len(head.order), device=head.order.device)
    return place


def _own(place: torch.Tensor | None, head: Head, size: int) -> torch.Tensor:
    """The targets of this context-parallel rank's tokens, ``[T'/cp]``."""
    targets = head.targets if head.order is None else head.targets[head.order]
    start = 0 if head.cp is None else head.cp.rank() * size
    return targets[start : start + size]


def _over_cp(found: tuple[Any, ...], head: Head, place: torch.Tensor | None) -> tuple[Any, ...]:
    """The columns of the whole pack in its order; backward gives each rank the gradient of its own tokens."""

    def whole(values: torch.Tensor) -> torch.Tensor:
        if _size(head.cp) > 1:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=head.cp)
        return values if place is None else values.index_select(0, place)

    if _size(head.cp) == 1 and place is None:
        return found
    *columns, ids = found
    wide = [None if c is None else c.view(len(c), -1) for c in columns]
    together = iter(whole(torch.cat([c for c in wide if c is not None], 1)).split([c.shape[1] for c in wide if c is not None], 1))
    split = [None if c is None else next(together).view(-1, *c.shape[1:]) for c in columns]
    return *split, None if ids is None else whole(ids)


def _hidden_at(mine: torch.Tensor, head: Head, place: torch.Tensor | None, split: bool) -> torch.Tensor:
    """``[n, h]`` hidden states of ``head.positions`` on every rank; backward gives each token's gradient to its holder."""
    assert head.positions is not None
    at = head.positions if place is None else place[head.positions]
    holder = 0 if head.cp is None else head.cp.rank()
    if split:
        holder = holder * head.tp.size() + head.tp.rank()
    local = at - holder * len(mine)
    held = (local >= 0) & (local < len(mine))
    rows = mine.index_select(0, local.clamp(0, len(mine) - 1))
    chosen = torch.where(held[:, None], rows, rows.new_zeros(()))
    for group in (head.tp if split else None, head.cp):
        if _size(group) > 1:
            chosen = reduce_from_tensor_model_parallel_region(chosen, group=group)
    return chosen
