"""The two modules that the local layer spec lacks: a norm that allows sequence parallelism, attention over packed rows."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_agent.learner.packing import Buckets, PackedRows


class _RmsNorm(torch.autograd.Function):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; torch has one kernel for it only on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(x, self.weight, self.eps)


class _Rotate(torch.autograd.Function):
    """Turns each pair (x[i], x[i + d/2]) by its angle; the gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    out = torch.empty_like(x)
    half = first.shape[-1]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class _ToSlots(torch.autograd.Function):
    """Packed tokens ``[T, ...]`` to bucket slots ``[slots, ...]``. Padding slots give no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buckets: Buckets) -> torch.Tensor:
        ctx.slot_of = buckets.slot_of
        return x.index_select(0, buckets.token_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.slot_of), None


class _ToTokens(torch.autograd.Function):
    """Bucket slots back to packed tokens. Padding slots get gradient 0, so their keys and values get none either."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buckets: Buckets) -> torch.Tensor:
        ctx.slot_of, ctx.slots = buckets.slot_of, len(x)
        return x.index_select(0, buckets.slot_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_zeros((ctx.slots, *grad.shape[1:])).index_copy_(0, ctx.slot_of, grad), None


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, scale: float | None) -> torch.Tensor:
    """Attention within each of ``rows`` rows of equal length: q ``[rows * L, heads, d]`` -> ``[rows * L, heads * d]``."""
    q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class PackedAttention(MegatronModule):
    """Causal attention over packed rows, rotary position included.

    Query ``[T, heads, d]``, key and value ``[T, groups, d]``, each this rank's heads; the result is ``[T, heads * d]``.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if not isinstance(packed_seq_params, PackedRows):
            raise TypeError(f"PackedAttention needs PackedRows, not {type(packed_seq_params).__name__}")
        p = packed_seq_params
        query = _Rotate.apply(query, p.cos, p.sin)
        key = _Rotate.apply(key, p.cos, p.sin)
        if p.buckets is None:
            return _causal(query, key, value, p.rows, self.scale)
        sizes = p.buckets.sizes
        parts = [_ToSlots.apply(t, p.buckets).split(sizes) for t in (query, key, value)]
        done = [_causal(q, k, v, rows, self.scale) for q, k, v, (rows, _) in zip(*parts, p.buckets.shapes, strict=True)]
        return _ToTokens.apply(torch.cat(done), p.buckets)
