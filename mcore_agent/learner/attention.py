"""The two modules that the local layer spec lacks: a norm that allows sequence parallelism, attention over packed rows."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from mcore_agent.learner.context import gather_keys, heads_of, tokens_of
from mcore_agent.learner.packing import Blocks, Buckets, PackedRows


class _RmsNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; torch has one kernel for it only on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale  # scale is at least fp32, so is everything from here
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        inner = grad * weight.to(scale.dtype)
        along = (inner * unit).mean(-1, keepdim=True)
        return unit.mul_(along).neg_().add_(inner).mul_(scale).to(x.dtype), grad_weight.to(weight.dtype), None


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm (1910.07467), computed in fp32 at least."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        # finalize_model_grads sums the gradients of parameters marked so over the tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(x, self.weight, self.eps)


class _Rotate(torch.autograd.Function):
    """Turns each pair (x[i], x[i + d/2]) by its angle; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    out = torch.empty_like(x)
    half = first.shape[-1]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class _ToSlots(torch.autograd.Function):
    """This rank's tokens ``[L, ...]`` to the slots of calls ``[slots, ...]``. Padding slots give no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Buckets | Blocks) -> Tensor:
        ctx.slot_of = slots.slot_of
        return x.index_select(0, slots.token_of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.slot_of), None


class _ToTokens(torch.autograd.Function):
    """Slots back to tokens. Padding slots get gradient 0, so their keys and values get none either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Buckets | Blocks) -> Tensor:
        ctx.slot_of, ctx.slots = slots.slot_of, len(x)
        return x.index_select(0, slots.slot_of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros((ctx.slots, *grad.shape[1:])).index_copy_(0, ctx.slot_of, grad), None


def _attend(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float | None, mask: Tensor | None = None) -> Tensor:
    """Attention within each of ``count`` equal parts: q ``[count * Q, heads, d]``, k and v ``[count * K, groups, d]`` -> as q.

    ``mask`` is added to the scores and broadcasts to ``[count, heads, Q, K]``; None: causal, and K = Q.
    """
    q, k, v = (t.unflatten(0, (count, -1)).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


# ------------------------------------------------------------------- whole rows: all tokens, some heads


def bucketed_rows(q: Tensor, k: Tensor, v: Tensor, p: PackedRows, scale: float | None) -> Tensor:
    """Query ``[T, heads, d]``, key and value ``[T, groups, d]`` -> ``[T, heads, d]``, by torch's own attention on any device."""
    if p.buckets is None:
        return _attend(q, k, v, p.rows, scale)
    parts = [_ToSlots.apply(t, p.buckets).split(p.buckets.sizes) for t in (q, k, v)]
    done = [_attend(q, k, v, rows, scale) for q, k, v, (rows, _) in zip(*parts, p.buckets.shapes, strict=True)]
    return _ToTokens.apply(torch.cat(done), p.buckets)


def flash_rows(q: Tensor, k: Tensor, v: Tensor, p: PackedRows, scale: float | None) -> Tensor:
    """The same by flash-attn (2307.08691), where it is installed: bf16 on a GPU."""
    from flash_attn import flash_attn_varlen_func

    longest = int(p.lengths.max())
    return flash_attn_varlen_func(q, k, v, p.bounds, p.bounds, longest, longest, softmax_scale=scale, causal=True)


def engine_rows(q: Tensor, k: Tensor, v: Tensor, p: PackedRows, scale: float | None) -> Tensor:
    """The same by Transformer Engine, where it is installed: bf16 on a GPU."""
    longest = int(p.lengths.max())
    out = _engine(q.shape[1], k.shape[1], q.shape[2], scale)(
        q, k, v, cu_seqlens_q=p.bounds, cu_seqlens_kv=p.bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return out.view(q.shape)


@functools.cache
def _engine(heads: int, groups: int, dim: int, scale: float | None) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads,
        dim,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scale,
    )


def flex_rows(q: Tensor, k: Tensor, v: Tensor, p: PackedRows, scale: float | None) -> Tensor:
    """The same by FlexAttention (2412.05496)."""
    place = torch.arange(len(q), device=q.device)
    first = torch.repeat_interleave(p.bounds[:-1], p.bounds.diff()) if p.share == "heads" else p.first
    return _flex(q, k, v, _flex_mask(p, place, first), scale)


# ------------------------------------------------------------------- some queries of all heads, all keys


def blocked_keys(q: Tensor, k: Tensor, v: Tensor, p: PackedRows, scale: float | None, group: Any) -> Tensor:
    """Query ``[L, heads, d]``, key and value ``[L, groups, d]`` of this rank's tokens -> ``[L, heads, d]``.

    By torch's own attention on any device; one all-gather over ``group``, and backward one reduce-scatter.
    """
    assert p.order is not None
    parts = p.blocks.parts
    queries = _ToSlots.apply(q, p.blocks).split(p.blocks.sizes)
    keys = gather_keys(k, v, p.order, [part.key_of for part in parts], group)
    done = [_attend(x, *kv, part.count, scale, part.mask) for x, kv, part in zip(queries, keys, parts, strict=True)]
    return _ToTokens.apply(torch.cat(done), p.blocks)


def flex_keys(q: Tensor, k: Tensor, v: Tensor, p: PackedRows, scale: float | None, group: Any) -> Tensor:
    """The same, and the same collectives, by FlexAttention."""
    assert p.order is not None
    ((keys, values),) = gather_keys(k, v, p.order, [slice(0, len(p.order))], group)
    return _flex(q, keys, values, _flex_mask(p, p.place, p.first), scale)


def _flex_mask(p: PackedRows, place: Tensor, first: Tensor) -> BlockMask:
    """For queries at ``place`` in the pack, whose rows begin at ``first``; made once per micro-batch."""
    if "flex" not in p.made:

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= place[query]) & (key >= first[query])

        make = _compiled(create_block_mask) if place.is_cuda else create_block_mask
        p.made["flex"] = make(seen, None, None, len(place), int(p.lengths.sum()), device=place.device)
    return p.made["flex"]


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """q ``[L, heads, d]``, k and v ``[T, groups, d]`` -> ``[L, heads, d]``."""
    attend = _compiled(flex_attention) if q.is_cuda else flex_attention
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)  # the number of tokens changes from pack to pack


# ------------------------------------------------------------------------------------------------------


def kernels(dtype: torch.dtype, cuda: bool, installed: Callable[[str], bool]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """What attends whole rows and what attends gathered keys; ``installed`` tells whether a package is there.

    >>> [f.__name__ for f in kernels(torch.float32, False, lambda package: True)]
    ['bucketed_rows', 'blocked_keys']
    """
    if not cuda or dtype == torch.float64:
        return bucketed_rows, blocked_keys
    if dtype == torch.bfloat16 and installed("transformer_engine"):
        return engine_rows, flex_keys
    if dtype == torch.bfloat16 and installed("flash_attn"):
        return flash_rows, flex_keys
    return flex_rows, flex_keys


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class PackedAttention(MegatronModule):
    """Causal attention over packed rows, rotary position included.

    Query ``[L, heads, d]``, key and value ``[L, groups, d]``, each this rank's heads and tokens; the result is
    ``[L, heads * d]``. With several context-parallel ranks it enters two all-to-alls of their group, or one all-gather
    and in backward one reduce-scatter.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale
        self.replay: Any = None  # routing.Replay of the layer's router, which must know whose tokens it gets
        self.cp = None if pg_collection is None else pg_collection.cp
        self.rows, self.keys = kernels(config.params_dtype, torch.cuda.is_available(), _installed)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> Tensor:
        if not isinstance(packed_seq_params, PackedRows):
            raise TypeError(f"PackedAttention needs PackedRows, not {type(packed_seq_params).__name__}")
        p = packed_seq_params
        if self.replay is not None:
            self.replay.rows = p
        query = _Rotate.apply(query, p.cos, p.sin)
        key = _Rotate.apply(key, p.cos, p.sin)
        if p.share == "heads":
            whole = self.rows(*heads_of(query, key, value, self.cp), p, self.scale)
            return tokens_of(whole, self.cp).flatten(1)
        if p.share == "keys":
            return self.keys(query, key, value, p, self.scale, self.cp).flatten(1)
        return self.rows(query, key, value, p, self.scale).flatten(1)
