"""Tiny models and batches, and what Hugging Face computes from them."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_agent.batch.microbatch import MicroBatch

VOCAB = 59  # odd: padded under tensor parallelism
KINDS = ("llama", "qwen3", "qwen3_moe")


def config_of(kind: str, tied: bool, **changes: Any) -> dict[str, Any]:
    """The content of a config.json; no size is square or a power of two."""
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 52,
        "max_position_embeddings": 96,
        "tie_word_embeddings": tied,
    }
    if kind != "llama":
        config["head_dim"] = 12
    if kind == "qwen3_moe":
        config |= {"moe_intermediate_size": 28, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return config | changes


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint names: transformers 5 holds a layer's experts in one tensor, checkpoints hold them one by one."""
    out = {}
    for name, value in tensors.items():
        head, _, tail = name.rpartition(".")
        if head.endswith("mlp.experts"):
            for e, one in enumerate(value):
                if tail == "gate_up_proj":
                    out[f"{head}.{e}.gate_proj.weight"], out[f"{head}.{e}.up_proj.weight"] = one.chunk(2)
                else:
                    out[f"{head}.{e}.{tail}.weight"] = one
        else:
            out[name] = value
    return out


@functools.cache
def hugging_face(kind: str, tied: bool, norm_topk: bool = True, layers: int = 2) -> Any:
    changes: dict[str, Any] = {"norm_topk_prob": norm_topk} if kind == "qwen3_moe" else {}
    changes["num_hidden_layers"] = layers
    # experts one by one: the grouped product knows no float64
    how = {"experts_implementation": "eager"} if kind == "qwen3_moe" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(kind, tied, **changes)), **how)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise if "norm" in name else noise
    return model


def weights_of(kind: str, tied: bool, norm_topk: bool = True, layers: int = 2) -> dict[str, torch.Tensor]:
    return per_expert({n: p.detach().clone() for n, p in hugging_face(kind, tied, norm_topk, layers).named_parameters()})


def micro_of(lengths: list[int], seed: int, weight: float = 0.02, vocab: int = VOCAB) -> MicroBatch:
    """Random rows with the columns of ppo_clip and sft_nll; weights differ from token to token, some are 0."""
    rng = np.random.default_rng(seed)
    size = sum(lengths)
    mask = (rng.random(size) < 0.7).astype(np.float32)
    mask[np.cumsum(lengths) - lengths] = 0  # nothing predicts the first token of a row
    return MicroBatch(
        tokens=rng.integers(0, vocab, size),
        lengths=np.array(lengths),
        rows=np.arange(len(lengths)),
        columns={
            "mask:sft": mask,
            "mask:pg": mask,
            "w:0": mask * weight * rng.uniform(0.5, 1.5, size),
            "advantage": rng.normal(size=size),
            "logp_old": -4 + 0.1 * rng.normal(size=size),
        },
    )


@dataclass(frozen=True)
class Expected:
    loss: float
    logp: list[np.ndarray]
    grads: dict[str, torch.Tensor]


def logits_of(model: Any, micro: MicroBatch) -> list[torch.Tensor]:
    """Hugging Face's logits, row by row, without packing or padding."""
    bounds = zip(micro.starts[:-1], micro.starts[1:], strict=True)
    return [model(input_ids=torch.from_numpy(micro.tokens[a:b])[None]).logits[0] for a, b in bounds]


def logp_of(model: Any, micro: MicroBatch, temperature: float = 1.0) -> torch.Tensor:
    """[T] log p(token | tokens before it in its row), 0 for the first."""
    rows = []
    for (a, b), logits in zip(zip(micro.starts[:-1], micro.starts[1:], strict=True), logits_of(model, micro), strict=True):
        table = torch.log_softmax(logits.float() / temperature, -1)
        targets = torch.from_numpy(micro.tokens[a + 1 : b])
        rows.append(torch.cat([table.new_zeros(1), table[:-1].gather(1, targets[:, None])[:, 0]]))
    return torch.cat(rows)


def expected(model: Any, micro: list[MicroBatch], temperature: float = 1.0) -> Expected:
    """The weighted negative log-likelihood summed over all micro-batches, by Hugging Face and autograd."""
    model.zero_grad()
    logp = [logp_of(model, m, temperature) for m in micro]
    loss = sum(-(torch.from_numpy(m.columns["w:0"]) * column).sum() for m, column in zip(micro, logp, strict=True))
    loss.backward()
    grads = per_expert({n: p.grad.clone() for n, p in model.named_parameters()})
    return Expected(loss.item(), [column.detach().numpy() for column in logp], grads)


def cut(micro: MicroBatch, parts: list[list[int]]) -> list[MicroBatch]:
    """The rows of a micro-batch dealt into several, by row number."""
    out = []
    for rows in parts:
        pick = np.concatenate([np.arange(micro.starts[r], micro.starts[r + 1]) for r in rows])
        columns = {name: values[pick] for name, values in micro.columns.items()}
        out.append(MicroBatch(micro.tokens[pick], micro.lengths[rows], micro.rows[rows], columns))
    return out
