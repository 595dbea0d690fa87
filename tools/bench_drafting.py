"""Tokens per CPU-second of the local engine with drafts against without, alternating, one episode at a time.

``python tools/bench_drafting.py`` trains a small Qwen3 (1 M parameters) on demonstrations of the hop-lookup task until it
plays by itself, then lets it play 100 tasks, sampled at temperature 1 and greedily: each task once with drafts and once
without, with the same seed. The index starts empty and hears only the episodes of its own engine. A model this small
spends a step on overhead rather than on arithmetic; so does a large one on reading its weights.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mcore_agent.agent.episode import Agent, Limits, Sampling, play
from mcore_agent.agent.parse import HermesParser
from mcore_agent.agent.render import ChatRenderer
from mcore_agent.agent.tokenizer import contents, train_tokenizer
from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.rollout.local import LocalEngine
from mcore_agent.types import Episode

SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 384, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
EPISODES, BLOCK, TARGET_TOKENS, TARGET_RATIO = 100, 10, 1.5, 1.3
STEPS = 300  # of training before the measurement


def demonstrations(domain: HopLookup, renderer: ChatRenderer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [count, T] of demonstrations, padded; labels are -100 where the policy does not speak."""
    rows = [renderer.demo(domain.demo(domain.task("train", 1000 + i), i)) for i in range(count)]
    width = max(len(ids) for ids, _ in rows)
    tokens, labels = torch.zeros(count, width, dtype=torch.long), torch.full((count, width), -100)
    for i, (ids, mask) in enumerate(rows):
        tokens[i, : len(ids)] = torch.from_numpy(ids)
        labels[i, : len(ids)] = torch.from_numpy(np.where(mask, ids, -100))
    return tokens, labels


def trained(shape: dict[str, Any], tokens: torch.Tensor, labels: torch.Tensor, steps: int, batch: int = 32) -> Any:
    """A model that imitates the rows. Plain AdamW with a falling rate."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(len(tokens), (batch,))
        loss = model(input_ids=tokens[chosen], labels=labels[chosen]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


async def serve(shape: dict[str, Any], model: Any, drafting: bool) -> LocalEngine:
    engine = LocalEngine(shape, drafting=drafting)
    await engine.wake()
    await engine.begin_update()
    await engine.update((n, t.detach()) for n, t in model.state_dict().items() if n != "lm_head.weight")
    await engine.end_update(0)
    return engine


async def episodes(engine: LocalEngine, domain: HopLookup, agent: Agent, which: range, sampling: Sampling) -> list[Episode]:
    """One after another: the engine's batch is one row."""
    done = []
    for i in which:
        with engine.client():
            name = f"{i}"
            done.append(
                await play(domain.task("train", i), domain, engine.generate, agent, sampling, seed=i, group=name, episode=name, order=(i,))
            )
    return done


def alternate(engines: dict[str, LocalEngine], episode: Callable[[LocalEngine, range], list[Episode]]) -> dict[str, Any]:
    """Blocks of episodes in turns; which engine goes first changes every time."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    rows: dict[str, list[list[int]]] = {name: [] for name in engines}
    before = engines["drafts"].draft_stats()
    for number, first in enumerate(range(0, EPISODES, BLOCK)):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            done = episode(engines[name], range(first, first + BLOCK))
            seconds = time.process_time() - start
            rates[name].append(sum(int(row.sampled.sum()) for e in done for row in e.rows) / seconds)
            rows[name] += [row.tokens.tolist() for e in done for row in e.rows]
    after = engines["drafts"].draft_stats()
    stats = {key: after[key] - before[key] for key in after}
    return {
        **{f"tokens_per_cpu_second_{name}": statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(a / b for a, b in zip(rates["drafts"], rates["plain"], strict=True)),
        "tokens_per_step": stats["tokens"] / stats["steps"],
        "drafted_tokens_accepted": stats["accepted"] / max(stats["proposed"], 1),
        "episodes_equal": sum(a == b for a, b in zip(rows["drafts"], rows["plain"], strict=True)) / len(rows["plain"]),
    }


def run(steps: int) -> dict[str, Any]:
    domain = HopLookup(hops=3)
    tokenizer = train_tokenizer(contents(domain.demo(domain.task("train", i), i) for i in range(300)), 384)
    renderer = ChatRenderer(tokenizer, domain.tools)
    agent = Agent(renderer, HermesParser(tuple(domain.tools)), Limits(max_turns=6, max_new=40, max_tokens=260))
    shape = {**SHAPE, "vocab_size": len(tokenizer)}
    model = trained(shape, *demonstrations(domain, renderer, 512), steps)
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for label, heat in (("sampled", 1.0), ("greedy", 0.0)):
        engines = {"drafts": asyncio.run(serve(shape, model, True)), "plain": asyncio.run(serve(shape, model, False))}
        sampling = Sampling(temperature=heat)

        def episode(engine: LocalEngine, which: range, sampling: Sampling = sampling) -> list[Episode]:
            return asyncio.run(episodes(engine, domain, agent, which, sampling))

        for engine in engines.values():
            asyncio.run(episodes(engine, domain, agent, range(5000, 5002), sampling))  # warm
        found[label] = alternate(engines, episode)
        for engine in engines.values():
            asyncio.run(engine.close())
    return found


def report(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=1))
    for label in ("sampled", "greedy"):
        result = found[label]
        print(
            f"drafts, {label}, one row: {result['tokens_per_step']:.2f} tokens a step (at least {TARGET_TOKENS}), "
            f"median ratio {result['ratio']:.2f} (at least {TARGET_RATIO})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps before the measurement")
    report(run(parser.parse_args().steps))


if __name__ == "__main__":
    main()
