"""Memory of a learner's rank and FLOPs of a step, from the model and the layout alone.

Weights, gradients and optimizer state (AdamW) are what megatron-core 0.19.2's DistributedDataParallel and
DistributedOptimizer allocate, padding included, to the byte for layers of the local spec; Transformer Engine keeps the
norms elsewhere in the order of parameters, which moves paddings. Everything else is an estimate, and says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_convert.families import Family, Param
from ckpt_convert.families.base import EMBEDDING, OUTPUT
from ckpt_convert.hfconfig import Arch
from ckpt_convert.ops import padded_vocabulary

BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
START, END = 64, 128  # elements that a parameter's start and a bucket's end are multiples of
MOMENTS = {"adamw": 2, "sgd": 1, "muon": 1}  # fp32 tensors of a weight's size; Muon's other parameters are AdamW's
CHUNK = 256  # tokens whose logits exist at a time
HEAD_COPIES = 3.5  # largest memory of the head's pass, in fp32 logits of a chunk
# Measured on no machine of ours: what CUDA with its libraries takes, and what one NCCL communicator takes.
CONTEXT, COMMUNICATOR = 768 << 20, 256 << 20


@dataclass(frozen=True)
class Shape:
    """A layout and what is computed on it.

    ``world = tp * pp * cp * dp``; experts are split over ``ep`` times ``etp`` of the ``tp * cp * dp`` ranks of a stage.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # 0: as tp
    dp: int = 1
    sp: bool = False
    dtype: str = "bf16"
    optimizer: str = "adamw"
    recompute: str = "off"  # selective: the attention's inside; full: whole layers
    tokens: int = 8192  # of a micro-batch, over all context-parallel ranks; see ``fill``
    micro_batches: int = 1  # of a data-parallel rank, per step
    fp8: str = "off"
    fp8_edge_bf16: int = 0
    fp8_params: bool = False
    offload: bool = False  # the optimizer's state is in host memory
    async_save: bool = False  # checkpoints are written from copies in host memory

    def __post_init__(self):
        if self.etp == 0:
            object.__setattr__(self, "etp", self.tp)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense parameters, and share their optimizer state."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts, and share their optimizer state."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)


@dataclass(frozen=True)
class State:
    """Bytes that a rank holds from step to step."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class StagePlan:
    """The fullest rank of a pipeline stage, in bytes. FP8 copies, activations and communication are estimates."""

    stage: int
    state: State
    fp8_copies: int
    activations: int
    communication: int
    host: int = 0  # the optimizer's state where it is not on the GPU: in host memory, and in no total
    copies: int = 0  # in host memory while a checkpoint is written in the background; in no total
    critic: State = State(0, 0, 0)  # of a model of its own

    @property
    def resting(self) -> int:
        """Without activations."""
        return self.state.total + self.critic.total + self.fp8_copies + self.communication

    @property
    def total(self) -> int:
        return self.resting + self.activations


# ------------------------------------------------------------------------------- weights, gradients, optimizer


@dataclass(frozen=True)
class Piece:
    """A rank's shard of one parameter."""

    elements: int
    expert: bool  # in the buffer that expert replicas share
    alone: bool  # in a bucket of its own: the embedding that the last stage has a copy of
    product: bool  # weight of an FP8 product
    matrix: bool  # Muon's, with optimizer muon


def pieces(family: Family, shape: Shape, stage: int, chunk: int, head: bool = True) -> list[Piece]:
    """A rank's parameters of one virtual stage, in Megatron's order (of expert rank 0: all have equal sizes).

    Without ``head``: of a critic's backbone, which has no output layer.
    """
    a = family.arch
    per_chunk = a.layers // (shape.pp * shape.vpp)
    first = (chunk * shape.pp + stage) * per_chunk
    last = stage == shape.pp - 1 and chunk == shape.vpp - 1
    mine, ends = range(first, first + per_chunk), []
    if stage == 0 and chunk == 0:
        ends.append(EMBEDDING)
    layers = [p for p in family.globals() if p.layer in mine and (p.expert or 0) < max(1, a.experts // shape.ep)]
    layers.sort(key=lambda p: (p.layer, _order(p)))
    params = [family.param(name) for name in ends] + layers
    if last:
        params += [p for p in family.globals() if p.layer is None and p.name not in (EMBEDDING, OUTPUT)]  # the last norm
        if head and (not a.tied or shape.pp > 1):
            params.append(family.param(OUTPUT))
    return [_piece(p, family, shape) for p in params]


def _order(p: Param) -> int:
    """Megatron registers the first norm, an attention's output projection, the rest of it, and then what follows."""
    first = (".input_layernorm.", ".linear_proj.", ".self_attention.")
    return next((place for place, part in enumerate(first) if part in p.name), len(first))


def _piece(p: Param, family: Family, shape: Shape) -> Piece:
    a = family.arch
    whole = sum(math.prod(s) for s in p.shapes)
    if p.layer is None and p.tp_dim is not None:  # a table of the vocabulary
        whole = padded_vocabulary(a.vocab, shape.tp) * a.hidden
    ranks = 1 if p.tp_dim is None else shape.etp if p.expert is not None else shape.tp
    own_buffer = p.expert is not None and (shape.ep > 1 or shape.etp != shape.tp)
    matrix = p.layer is not None and p.tp_dim is not None
    edge = shape.fp8_edge_bf16
    inner = p.layer is not None and edge <= p.layer < a.layers - edge
    return Piece(
        elements=whole // ranks,
        expert=own_buffer,
        alone=p.layer is None and p.tp_dim is not None and a.tied and shape.pp > 1,
        product=shape.fp8 != "off" and matrix and inner,
        matrix=matrix,
    )


@dataclass(frozen=True)
class Buffer:
    """One flat buffer: its length with padding, and how much of which parameter each replica updates."""

    elements: int
    updated: list[int]  # elements, per replica
    tensors: list[int]  # parameters with a share, per replica


def lay_out(sizes: Sequence[tuple[int, bool]], replicas: int) -> Buffer:
    """A buffer of parameters ``(elements, in a bucket of its own)``, given in the model's order, as Megatron lays it out.

    From last to first; a parameter starts at a multiple of 64, and a bucket, of which every replica updates an equal
    share, ends at a multiple of 128 and of the number of replicas.

    >>> lay_out([(100, False), (70, False)], 1).elements  # 70, padded to 128, and 100, padded to the bucket's 256
    256
    """
    buckets: list[list[tuple[int, int]]] = [[]]
    start, at = 0, 0
    unit, starts = math.lcm(replicas, END), []

    def close() -> None:
        nonlocal start, at
        end = _up(at, unit)
        starts.append((start, end))
        buckets.append([])
        start = at = end

    for size, alone in reversed(sizes):
        at = _up(at, START)
        if alone and buckets[-1]:
            close()
        buckets[-1].append((at, at + size))
        at += size
        if alone:
            close()
    if buckets[-1]:
        close()
    updated, tensors = [0] * replicas, [0] * replicas
    for (first, end), members in zip(starts, buckets, strict=False):
        share = (end - first) // replicas
        for low, high in members:
            for rank in range((low - first) // share, (high - 1 - first) // share + 1):
                updated[rank] += min(high, first + (rank + 1) * share) - max(low, first + rank * share)
                tensors[rank] += 1
    return Buffer(start, updated, tensors)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def rank_state(
    family: Family, shape: Shape, stage: int, replica: int | None = None, expert_replica: int | None = None, head: bool = True
) -> State:
    """State of a rank by its place among the ``replicas`` and ``expert_replicas``; None: of the fullest one. ``head``: see ``pieces``."""
    weights = gradients = optimizer = 0
    width = BYTES[shape.dtype]
    for chunk in range(shape.vpp):
        mine = pieces(family, shape, stage, chunk, head)
        for kind in sorted({(p.expert, p.product and shape.fp8_params) for p in mine}):
            group = [p for p in mine if (p.expert, p.product and shape.fp8_params) == kind]
            expert, fp8 = kind
            buffer = lay_out([(p.elements, p.alone) for p in group], shape.expert_replicas if expert else shape.replicas)
            weights += buffer.elements * (1 if fp8 else width)
            gradients += buffer.elements * max(4, width)
            place = expert_replica if expert else replica
            optimizer += _optimizer(buffer, group, shape, place)
    return State(weights, gradients, optimizer)


def _optimizer(buffer: Buffer, group: list[Piece], shape: Shape, place: int | None) -> int:
    """Master weights (unless the weights are that wide themselves) and moments, and AdamW's step count of each parameter."""
    master = 0 if shape.dtype in ("fp32", "fp64") else 4
    wide = max(4, BYTES[shape.dtype])
    if shape.optimizer == "muon":  # whole matrices go to ranks: an even share is an estimate
        each = sum(p.elements * (master + wide * (1 if p.matrix else 2)) for p in group)
        return -(-each // len(buffer.updated))
    element = master + wide * MOMENTS[shape.optimizer]
    step = 4 if shape.optimizer == "adamw" else 0
    sizes = [n * element + t * step for n, t in zip(buffer.updated, buffer.tensors, strict=True)]
    return max(sizes) if place is None else sizes[place]


def save_copies(family: Family, shape: Shape, stage: int, head: bool = True) -> int:
    """Bytes of host memory while a checkpoint is written in the background, on the rank that writes for its replicas.

    Weights, master weights and moments of its shards, whichever replica updates them. ``head``: see ``pieces``.
    """
    wide, total = max(4, BYTES[shape.dtype]), 0
    for p in (p for chunk in range(shape.vpp) for p in pieces(family, shape, stage, chunk, head)):
        moments = 2 if shape.optimizer == "muon" and not p.matrix else MOMENTS[shape.optimizer]
        total += p.elements * (BYTES[shape.dtype] + wide * (1 + moments))
    return total


def fp8_copies(family: Family, shape: Shape, stage: int) -> int:
    """Estimate: weights of FP8 products in FP8, by row and by column; the first is the weight itself with ``fp8_params``."""
    if shape.fp8 == "off":
        return 0
    elements = sum(p.elements for chunk in range(shape.vpp) for p in pieces(family, shape, stage, chunk) if p.product)
    return elements * (1 if shape.fp8_params else 2)


def fill(rows: int, row: int, budget: int, dp: int) -> tuple[int, int]:
    """(tokens of a micro-batch, micro-batches of a data-parallel rank) of a step of ``rows`` rows of ``row`` tokens.

    No micro-batch is fuller than the budget lets it be, nor than a rank's share of the step, but a whole row it holds.

    >>> fill(rows=6, row=10, budget=40, dp=1), fill(rows=6, row=10, budget=1000, dp=2), fill(rows=1, row=10, budget=3, dp=2)
    ((40, 2), (30, 1), (10, 1))
    """
    tokens = max(row, min(budget, share := -(-rows * row // dp)))
    return tokens, -(-share // tokens)


def layer_bytes(a: Arch, shape: Shape, recompute: str) -> float:
    """Estimate of what one layer keeps for its backward pass, per token of a rank's share (2205.05198, §4).

    Written anew for these layers: no dropout, no scores (attention is fused), RMS norms, gated layers that keep gate, up,
    activated gate and product, experts that keep the weighted product too, queries and keys before and after rotation.
    """
    width = BYTES[shape.dtype]
    into = 1 if shape.fp8 != "off" else width  # inputs of products are kept in FP8
    rows = shape.tp if shape.sp else 1  # ranks that share what tensor parallelism alone repeats
    if recompute == "full":
        return a.hidden * width / rows
    queries, keys = a.heads * a.head_dim / shape.tp, a.groups * a.head_dim / shape.tp
    kept = 2 * (a.hidden * width + a.hidden * into) / rows  # inputs and outputs of the two norms
    kept += (queries * (2 if a.qk_norm else 1) + 2 * keys) * width + queries * into  # before the attention, and behind it
    if recompute == "off":
        kept += (2 * queries + keys) * width + 4 * a.heads / shape.tp  # rotated, result in the attention's order; log-sum-exp
    if not a.experts:
        return kept + a.ffn / shape.tp * (3 * width + into)
    copies = a.topk / rows  # of a token, at experts, with even routing; each of the etp ranks gets those of all of them
    kept += a.experts * 4 * 2 / rows  # the router's logits and probabilities
    return kept + copies * (a.hidden * into * shape.etp + a.expert_ffn * (4 * width + into))


def in_flight(shape: Shape, stage: int) -> int:
    """Chunks whose activations a stage holds at once: Megatron's 1F1B and interleaved schedules (2104.04473, §2.2)."""
    if shape.vpp == 1:
        return min(shape.pp - stage, shape.micro_batches)
    warmup = 2 * (shape.pp - stage - 1) + (shape.vpp - 1) * shape.pp
    return min(warmup + 1, shape.micro_batches * shape.vpp)


def activations(a: Arch, shape: Shape, stage: int) -> int:
    """Estimate of a stage's activations: layers in flight, one layer at work, and the head's chunk of logits."""
    width = BYTES[shape.dtype]
    tokens = shape.tokens / shape.cp
    layers = in_flight(shape, stage) * a.layers // (shape.pp * shape.vpp)
    kept = layers * layer_bytes(a, shape, shape.recompute) + layer_bytes(a, shape, "off")
    if stage < shape.pp - 1:
        return round(tokens * kept)
    kept += a.hidden * width * (2 / (shape.tp if shape.sp else 1) + 2)  # last norm; the head's input and its gradient
    logits = min(CHUNK, shape.tokens) * padded_vocabulary(a.vocab, shape.tp) / shape.tp
    return round(tokens * kept + HEAD_COPIES * logits * max(4, width))


def communication(shape: Shape) -> int:
    """Estimate: CUDA's context and libraries, and NCCL's buffers of every group that a rank shares with others."""
    groups = (shape.tp, shape.pp, shape.cp, shape.replicas, shape.ep, shape.etp, shape.expert_replicas)
    return CONTEXT + COMMUNICATOR * sum(size > 1 for size in groups)


def plan(family: Family, shape: Shape, gpu: bool, critic: bool = False) -> list[StagePlan]:
    """The fullest rank of every pipeline stage; ``gpu``: with what CUDA and NCCL take; ``critic``: beside a separate critic.

    The critic's value head, of hidden size + 1 elements, is left out.
    """
    return [_stage_plan(family, shape, stage, gpu, critic) for stage in range(shape.pp)]


def _stage_plan(family: Family, shape: Shape, stage: int, gpu: bool, critic: bool) -> StagePlan:
    heads = (True, False) if critic else (True,)  # the critic's backbone has no output layer
    states = [rank_state(family, shape, stage, head=head) for head in heads] + [State(0, 0, 0)]
    host = sum(state.optimizer for state in states) if shape.offload else 0
    if shape.offload:
        states = [replace(state, optimizer=0) for state in states]
    return StagePlan(
        stage=stage,
        state=states[0],
        critic=states[1],
        host=host,
        copies=sum(save_copies(family, shape, stage, head) for head in heads) if shape.async_save else 0,
        fp8_copies=fp8_copies(family, shape, stage) * (2 if critic else 1),
        activations=activations(family.arch, shape, stage),
        communication=communication(shape) if gpu else 0,
    )


def kv_bytes(a: Arch, tokens: int, dtype: str, tp: int = 1) -> int:
    """Keys and values of ``tokens`` tokens on one of an engine's ``tp`` ranks; with more ranks than groups, groups are repeated.

    In bf16, 10 tokens of 5 layers with 3 groups of size 2 take 10 * 5 * 2 * 3 * 2 * 2 = 1200 bytes.
    """
    return tokens * a.layers * 2 * -(-a.groups // tp) * a.head_dim * BYTES[dtype]


def engine_weights(family: Family, dtype: str, tp: int = 1) -> int:
    """An engine's copy of the model on one of its ``tp`` ranks."""
    return sum(math.prod(s) for s in family.shapes().values()) * BYTES[dtype] // tp


@dataclass(frozen=True)
class Flops:
    """Multiplications and additions, of all ranks together."""

    forward: float
    backward: float
    recompute: float

    @property
    def training(self) -> float:
        return self.forward + self.backward + self.recompute


def flops(a: Arch, tokens: int, row: float, recompute: str = "off") -> Flops:
    """One forward and backward pass over ``tokens`` tokens in rows of ``row`` tokens.

    A weight costs 2 per token, for active experts only and not for the embedding's look-up. Causal attention of a row of
    n tokens costs ``2 * 2 * n^2 / 2`` per query element (scores, and their product with the values). Backward costs twice
    the forward pass (2001.08361, §2.1). Norms, rotation and softmax are left out.
    """
    queries, keys = a.heads * a.head_dim, a.groups * a.head_dim
    weights = a.hidden * (2 * queries + 2 * keys)
    weights += a.hidden * (a.experts + 3 * a.topk * a.expert_ffn) if a.experts else 3 * a.hidden * a.ffn
    inside = 2.0 * a.layers * queries * tokens * row
    layers = 2.0 * a.layers * weights * tokens + inside
    forward = layers + 2.0 * a.vocab * a.hidden * tokens
    return Flops(forward, 2 * forward, {"off": 0.0, "selective": inside, "full": layers}[recompute])
