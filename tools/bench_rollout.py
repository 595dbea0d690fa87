"""Tokens per CPU-second of the local engine against transformers' generate, alternating, on the 135M Llama shape.

``python tools/bench_rollout.py`` prints the median ratio for each batch size. Random weights; prompts are distinct, so
that computing equal prompts once does not flatter the engine. Both sample at temperature 1 without truncation; the
engine also reports log-probabilities.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import numpy as np
import torch

from mcore_agent.protocols import Request
from mcore_agent.rollout.local import LocalEngine

SHAPE: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, NEW = 200, 64
TARGET = 0.95


def reference_model(seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(**SHAPE, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()


async def serve(model: Any, max_batch: int) -> LocalEngine:
    """An engine with the weights of ``model``."""
    engine = LocalEngine(SHAPE, max_batch=max_batch)
    await engine.wake()
    await engine.begin_update()
    await engine.update((n, t) for n, t in model.state_dict().items() if n != "lm_head.weight")
    await engine.end_update(0)
    return engine


def cpu_seconds_of_engine(engine: LocalEngine, prompts: np.ndarray, new: int, repeat: int) -> float:
    async def all_of() -> None:
        requests = [Request(f"{repeat}/{i}", row, new, seed=i, order=(i,)) for i, row in enumerate(prompts)]
        done = await asyncio.gather(*(engine.generate(r) for r in requests))
        assert all(len(c.tokens) == new for c in done)

    start = time.process_time()
    asyncio.run(all_of())
    return time.process_time() - start


def cpu_seconds_of_generate(model: Any, prompts: np.ndarray, new: int) -> float:
    ids = torch.from_numpy(prompts)
    start = time.process_time()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
    assert out.shape[1] == prompts.shape[1] + new
    return time.process_time() - start


def alternate(model: Any, engine: LocalEngine, batch: int, prompt: int, new: int, repeats: int) -> dict[str, float]:
    """Medians over ``repeats``, each with new prompts; which goes first changes every time."""
    random = np.random.default_rng(batch)
    rates: dict[str, list[float]] = {"engine": [], "generate": []}
    for repeat in range(repeats):
        prompts = random.integers(0, SHAPE["vocab_size"], (batch, prompt))
        for name in ("engine", "generate") if repeat % 2 == 0 else ("generate", "engine"):
            if name == "engine":
                seconds = cpu_seconds_of_engine(engine, prompts, new, repeat)
            else:
                seconds = cpu_seconds_of_generate(model, prompts, new)
            rates[name].append(batch * new / seconds)
    ratio = statistics.median(a / b for a, b in zip(rates["engine"], rates["generate"], strict=True))
    return {**{name: statistics.median(values) for name, values in rates.items()}, "ratio": ratio}


def run(repeats: int, batches: tuple[int, ...] = (8,), prompt: int = PROMPT, new: int = NEW) -> dict[str, Any]:
    """``ratio`` is the first batch size's; ``batch_<n>`` holds tokens per CPU-second of both, and their ratio."""
    model = reference_model()
    engine = asyncio.run(serve(model, max(batches)))
    for warm in (1, 2):
        alternate(model, engine, warm, 8, 2, 1)
    found = {f"batch_{batch}": alternate(model, engine, batch, prompt, new, repeats) for batch in batches}
    asyncio.run(engine.close())
    ratio = found[f"batch_{batches[0]}"]["ratio"]
    return {"threads": torch.get_num_threads(), "repeats": repeats, "target": TARGET, "ratio": ratio, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[8])
    parser.add_argument("--new", type=int, default=NEW)
    args = parser.parse_args()
    found = run(args.repeats, tuple(args.batches), new=args.new)
    for name, value in found.items():
        if name.startswith("batch_"):
            print(f"{name:9} engine {value['engine']:6.1f}  generate {value['generate']:6.1f} tokens per CPU-second"
                  f"  ratio {value['ratio']:.3f}")  # fmt: skip
    print(f"median ratio {found['ratio']:.3f} (target {TARGET}), {found['threads']} threads, {found['repeats']} alternations")


if __name__ == "__main__":
    main()
