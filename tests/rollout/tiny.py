"""Tiny models for engine tests: sizes are not square and not powers of two. The reference is plain transformers."""

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mcore_agent.protocols import Completion, Engine, Request

VOCAB, CONTEXT = 131, 160
NEAR = 3e-5  # nats, between log-probabilities of two sets of float32 kernels: how they block sums depends on the CPU
_COMMON: dict[str, Any] = {
    "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 50,
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "rope_theta": 12345.0, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": False},
    "qwen3_moe": {
        **_COMMON, "model_type": "qwen3_moe", "head_dim": 10, "tie_word_embeddings": True, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 22, "norm_topk_prob": True,
    },
}  # fmt: skip


@cache
def reference(family: str, seed: int = 0) -> Any:
    """A transformers model with random weights, different for each seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**CONFIGS[family])
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **options).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # ones would hide a norm that was left out
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@cache
def checkpoint(family: str, seed: int = 0) -> Mapping[str, torch.Tensor]:
    """The same weights as transformers writes them to a checkpoint: names and shapes owe nothing to the engine."""
    with TemporaryDirectory() as folder:
        reference(family, seed).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


async def publish(engine: Engine, tensors: Mapping[str, torch.Tensor], version: int) -> None:
    await engine.begin_update()
    await engine.update(tensors.items())
    await engine.end_update(version)


def logprobs(model: Any, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """By a plain forward pass without a cache."""
    row = torch.from_numpy(np.concatenate([prompt, completion]))
    with torch.no_grad():
        logits = model(row[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, row[len(prompt) :, None])[:, 0].numpy()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, length)).integers(0, VOCAB, length)


def requests(lengths: list[int], **fields: Any) -> list[Request]:
    made = {"max_new": 11, **fields}
    return [Request(str(i), prompt(n, i), seed=100 + i, order=(i,), **made) for i, n in enumerate(lengths)]


async def answer(engine: Engine, asked: list[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(r) for r in asked)))


def same_bits(a: Completion, b: Completion) -> bool:
    return (
        a.finish == b.finish
        and np.array_equal(a.tokens, b.tokens)
        and a.logp.tobytes() == b.logp.tobytes()
        and np.array_equal(a.version, b.version)
    )
