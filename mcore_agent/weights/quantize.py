"""Rollout weights in FP8, made on the way to the engine: e4m3 in blocks of 128 x 128, as DeepSeek-V3 and Qwen3-FP8 store them."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of e4m3 without infinities
SCALE = "_scale_inv"  # follows the name of a quantized weight: what its block is multiplied by

# The projections of attention and of (expert) feed-forward layers. Embeddings, head, norms, biases and routers stay as they are.
QUANTIZED = re.compile(r"\.layers\.\d+\..*_proj(_with_mqa)?\.weight$")


class QuantizeError(ValueError):
    """A tensor cannot be quantized; the message names it."""


def is_quantized(name: str) -> bool:
    """Whether the Hugging Face tensor of this name goes to the engine in FP8.

    >>> is_quantized("model.layers.3.mlp.experts.7.down_proj.weight"), is_quantized("model.layers.3.mlp.gate.weight")
    (True, False)
    """
    return QUANTIZED.search(name) is not None


def quantized(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The stream with each quantized weight replaced by its FP8 tensor and, right behind it, its scales.

    ``tensors`` is exhausted even when one is refused, because other ranks take part in making it. Raises QuantizeError
    for a weight that is not a matrix, not in floating point, or not finite.
    """
    stream = iter(tensors)
    try:
        for name, tensor in stream:
            if not is_quantized(name):
                yield name, tensor
                continue
            small, scale = quantize(tensor, name)
            yield name, small
            yield name + SCALE, scale
    except QuantizeError:
        for _ in stream:
            pass
        raise


def quantize(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """[m, n] in e4m3 and [ceil(m / 128), ceil(n / 128)] float32 scales; the weight is their product, block by block.

    A block's largest magnitude becomes 448. Rounding moves an element by at most 1/16 of itself or 2^-10 of its block's
    scale, whichever is more. Blocks at the edges may be smaller; one of zeros has scale 1.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise QuantizeError(f"{name} has shape {tuple(weight.shape)} and dtype {weight.dtype}; only matrices of numbers are quantized")
    wide = weight.detach().float()
    if not torch.isfinite(wide).all():
        raise QuantizeError(f"{name} holds a value that is not finite: the learner has diverged, and its weights are not served")
    rows, columns = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    peak = blocks.abs().amax(dim=(1, 3))
    smallest = torch.finfo(torch.float32).tiny  # else a block of tiny numbers would be divided by 0
    scale = torch.where(peak > 0, (peak / LARGEST).clamp(min=smallest), torch.ones_like(peak))
    small = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return small.view(padded.shape)[:rows, :columns].contiguous(), scale


def dequantize(small: Tensor, scale: Tensor) -> Tensor:
    """[m, n] float32: what the engine computes with. Raises QuantizeError when the scales are not those of its blocks."""
    rows, columns = small.shape
    expected = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scale.shape) != expected:
        raise QuantizeError(f"a matrix of {rows} x {columns} has {expected} blocks, but the scales have shape {tuple(scale.shape)}")
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return small.float() * spread


def quantization_config(names: Iterable[str]) -> dict[str, Any]:
    """The entry ``quantization_config`` of the served model's config.json, for a model with these tensors."""
    kept = sorted({name.removesuffix(".weight") for name in names if name.endswith(".weight") and not is_quantized(name)})
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }
