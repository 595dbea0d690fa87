"""Attention for decoding: query heads that share a key-value head become rows of one query block."""

from typing import Any

import torch
from torch import Tensor, nn

NAME = "grouped_decode"


def grouped_decode(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' SDPA attention, but for one new token per row no key or value is repeated over its group.

    ``query`` [B, H, q, D], ``key`` and ``value`` [B, H/G, L, D], mask [B, 1, q, L] or None; returns [B, q, H, D]. Head h
    reads key-value head h // G, so that G heads are G rows [B, H/G, G, D] that see the same columns.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, new, dim = query.shape
    groups = key.shape[1]
    if new > 1 or groups == heads:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    rows = query.reshape(batch, groups, heads // groups, dim)
    out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, out.shape[-1]), None


def install() -> str:
    """Makes the function known to transformers, and returns the name to ask for. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, grouped_decode)
    return NAME
