"""Forward and backward of the learner against Hugging Face: the same shape, the same tokens, CPU-seconds, alternating.

``python tools/bench_learner.py`` prints the ratio of tokens per CPU-second (above 1: the learner is faster).
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from alternate import cpu_seconds

SHAPE_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
QUICKSTART = {
    "model_type": "qwen3",
    "vocab_size": 384,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def run(repeats: int = 7, rows: int = 2, length: int = 512) -> dict[str, float]:
    """Measures both on ``rows`` rows of ``length`` tokens, ``repeats`` times in turn, fp32, one thread.

    Returns tokens per CPU-second of each (medians) and ``ratio``, the median over the alternations of learner / Hugging Face.
    """
    tokens = np.random.default_rng(0).integers(0, SHAPE_135M["vocab_size"], (rows, length))
    return compare(SHAPE_135M, list(tokens), repeats)


def run_small(repeats: int = 7) -> dict[str, float]:
    """The same for the quickstart's model: 50 rows of 80 to 130 tokens, which Hugging Face gets padded."""
    rng = np.random.default_rng(0)
    return compare(QUICKSTART, [rng.integers(0, 384, n) for n in rng.integers(80, 131, 50)], repeats)


def compare(config: dict[str, Any], rows: list[np.ndarray], repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    sides = {"learner": learner_side(config, rows), "hugging_face": hugging_face_side(config, rows)}
    losses = {name: side() for name, side in sides.items()}  # also warms up
    if abs(losses["learner"] - losses["hugging_face"]) > 1e-3 * abs(losses["hugging_face"]):
        raise AssertionError(f"the two sides do not compute the same: {losses}")
    seconds = cpu_seconds(sides, repeats)
    total = sum(len(row) for row in rows)
    ratios = [h / o for o, h in zip(seconds["learner"], seconds["hugging_face"], strict=True)]
    speeds = {f"{name}_tokens_per_cpu_s": total / statistics.median(times) for name, times in seconds.items()}
    return speeds | {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def learner_side(config: dict[str, Any], rows: list[np.ndarray]) -> Callable[[], float]:
    from ckpt_convert.families import family_of
    from ckpt_convert.source import RandomSource
    from mcore_agent.batch.microbatch import MicroBatch
    from mcore_agent.learner import groups
    from mcore_agent.learner.learner import Layout, Learner, OptimSpec
    from mcore_agent.loss.sft_nll import SftNll

    learner = Learner(config, groups.initialize(Layout()), "fp32", OptimSpec())
    learner.load_weights(RandomSource(family_of(config), 1))
    lengths = np.array([len(row) for row in rows])
    weight = np.full(int(lengths.sum()), 1 / (lengths.sum() - len(rows)), dtype=np.float32)
    weight[np.cumsum(lengths) - lengths] = 0
    columns = {"w:0": weight, "mask:sft": np.sign(weight)}
    micro = [MicroBatch(np.concatenate(rows), lengths, np.arange(len(rows)), columns)]
    return lambda: learner.gradients(micro, [SftNll()]).loss


def hugging_face_side(config: dict[str, Any], rows: list[np.ndarray]) -> Callable[[], float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    from ckpt_convert.families import family_of
    from ckpt_convert.source import RandomSource

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="sdpa").train()
    source = RandomSource(family_of(config), 1)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(source.get(name))
    longest = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = torch.from_numpy(row), 1
    labels = tokens.masked_fill(mask == 0, -100)
    equal = bool(mask.all())

    def step() -> float:
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=tokens, attention_mask=None if equal else mask).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        return loss.item()

    return step


if __name__ == "__main__":
    for title, measure in (("135M, 512-token rows", run), ("quickstart, 5k tokens", run_small)):
        if sys.argv[1:] and sys.argv[1] not in title:
            continue
        print(title, {key: round(value, 3) for key, value in measure().items()}, flush=True)
