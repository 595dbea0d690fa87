"""What SGLang does on a GPU only: memory that comes back, handles of GPU memory, expert choices, seeds, FP8."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.protocols import Completion, Engine, Request
from mcore_agent.rollout.sglang import SGLangEngine
from mcore_agent.weights.quantize import quantization_config, quantized
from tests.required import need

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

# Kernels want sizes in multiples of 64 or 128; all else is as small as it goes.
COMMON: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 2048, "rope_theta": 10000.0, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {**COMMON, "model_type": "qwen3"}
MOE = {
    **COMMON, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True,
}  # fmt: skip


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by checkpoint name, bf16."""
    from mcore_agent.rollout.sglang.names import expected_weights

    torch.manual_seed(seed)
    return {n: (torch.randn(k.shape) * 0.05 + n.endswith("norm.weight")).bfloat16() for n, k in expected_weights(config, "bf16").items()}


def sums(given: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in given.items()}


@asynccontextmanager
async def serving(config: dict[str, Any], gpus: tuple[int, ...] = (0,), **fields: Any) -> AsyncIterator[SGLangEngine]:
    need("sglang")
    server = {"mem_fraction_static": 0.4} | fields.pop("server", {})
    engine = SGLangEngine(config, dtype="bf16", tp=len(gpus), gpus=gpus, server=server, **fields)
    try:
        await engine.wake()
        yield engine
    finally:
        await engine.close()


async def publish(engine: Engine, given: Mapping[str, torch.Tensor], version: int, count: int = 4) -> None:
    items = list(given.items())
    await engine.begin_update()
    for i in range(0, len(items), count):
        await engine.update(items[i : i + count])
    await engine.end_update(version)


def requests(count: int, **fields: Any) -> list[Request]:
    rng = np.random.default_rng(3)
    return [Request(f"r{i}", rng.integers(0, 1024, 20 + 7 * i), 24, seed=i, **fields) for i in range(count)]


async def answer(engine: Engine, asked: list[Request]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(r) for r in asked)))


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.defect("F1")
@pytest.mark.parametrize("graphs", [False, True])
def test_sleeping_gives_memory_back_and_waking_takes_it(graphs: bool):
    """Over five rounds what is held asleep and awake stays the same; the first bytes come back before ``sleep`` returns."""
    tags = ("weights", "kv_cache", *(["cuda_graph"] if graphs else []))

    async def body() -> None:
        async with serving(DENSE, server={"disable_cuda_graph": not graphs}) as engine:
            awake, asleep = [], []
            for version in range(5):
                await publish(engine, tensors(DENSE), version)
                await answer(engine, requests(2))
                awake.append(free())
                await engine.sleep(tags)
                asleep.append(free())
                await engine.wake(("weights",))
                await engine.wake(tags[1:])
            assert asleep[0] - awake[0] > 0.2 * torch.cuda.mem_get_info(0)[1]
            assert max(awake) - min(awake) < 128 << 20 and max(asleep) - min(asleep) < 128 << 20

    asyncio.run(body())


@pytest.mark.defect("F1")
def test_waking_waits_for_memory():
    """A learner that holds the memory when the engine is to wake lets go of it a second later."""

    async def body() -> None:
        async with serving(DENSE) as engine:
            await publish(engine, tensors(DENSE), 0)
            await engine.sleep()
            held = [torch.empty(int(free() * 0.95), dtype=torch.uint8, device="cuda:0")]

            async def let_go() -> None:
                await asyncio.sleep(1.0)
                held.clear()
                torch.cuda.empty_cache()

            await asyncio.gather(engine.wake(), let_go())
            await publish(engine, tensors(DENSE), 1)
            assert (await answer(engine, requests(1)))[0].finish == "length"

    asyncio.run(body())


@pytest.mark.defect("E2")
@pytest.mark.defect("E3")
@pytest.mark.defect("E7")
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_handles_of_gpu_memory(config: dict[str, Any]):
    """Twenty updates from one buffer on the GPU, overwritten as soon as it is given back, in buckets of all sizes; memory stays flat."""

    async def body() -> None:
        async with serving(config, transport="ipc") as engine:
            held = []
            for version in range(20):
                given = tensors(config, version % 3)
                await engine.begin_update()
                items = list(given.items())
                step = 1 + version % 7
                for i in range(0, len(items), step):
                    buffers = [(name, tensor.cuda()) for name, tensor in items[i : i + step]]
                    await engine.update(buffers)
                    for _, buffer in buffers:
                        buffer.fill_(float("nan"))
                await engine.end_update(version)
                assert await engine.checksum() == sums(given)
                torch.cuda.empty_cache()
                held.append(free())
            assert held[4] - held[-1] < 64 << 20

    asyncio.run(body())


@two_gpus
@pytest.mark.defect("E9")
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_nccl_to_another_gpu(config: dict[str, Any]):
    async def body() -> None:
        async with serving(config, gpus=(1,), transport="nccl") as engine:
            for version in range(3):
                given = tensors(config, version)
                await asyncio.wait_for(publish(engine, given, version), 300)
                assert await engine.checksum() == sums(given)

    asyncio.run(body())


@two_gpus
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_shards_are_read_back_whole(config: dict[str, Any]):
    async def body() -> None:
        async with serving(config, gpus=(0, 1)) as engine:
            given = tensors(config)
            await publish(engine, given, 0)
            assert await engine.checksum() == sums(given)
            assert (await answer(engine, requests(2)))[1].finish == "length"

    asyncio.run(body())


@pytest.mark.defect("D2")
@pytest.mark.defect("D3")
def test_routed_experts():
    """A row for every token that was read; the same whether the prompt was computed, cached, or computed again after a pause."""

    async def body() -> None:
        async with serving(MOE, server={"enable_return_routed_experts": True}) as engine:
            assert "routing" in engine.capabilities()
            await publish(engine, tensors(MOE), 0)
            (request,) = requests(1, temperature=0.0, routing=True)
            (cold,) = await answer(engine, [request])
            (warm,) = await answer(engine, [request])
            assert warm.cached > 0 and warm.tokens.tolist() == cold.tokens.tolist()
            running = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(0.02)
            await engine.pause("retract")
            await engine.resume()
            resumed = await running
            for c in (cold, warm, resumed):
                assert c.routing is not None and c.routing.shape == (len(request.tokens) + len(c.tokens) - 1, 3, 2)
                assert c.routing.min() >= 0 and c.routing.max() < 8 and (c.routing[..., 0] != c.routing[..., 1]).all()
                assert (c.routing == cold.routing).mean() > 0.99

    asyncio.run(body())


def test_seeds_and_batches():
    """With deterministic inference a request's bits depend on its seed alone, not on what runs beside it."""

    async def body() -> None:
        async with serving(DENSE, server={"enable_deterministic_inference": True, "attention_backend": "triton"}) as engine:
            assert "deterministic" in engine.capabilities()
            await publish(engine, tensors(DENSE), 0)
            asked = requests(8)
            together = await answer(engine, asked)
            await engine.flush()
            for r, c in zip(asked, together, strict=True):
                (alone,) = await answer(engine, [r])
                assert alone.tokens.tolist() == c.tokens.tolist() and alone.logp.tobytes() == c.logp.tobytes()
            other = Request("o", asked[0].tokens, 24, seed=99)
            assert (await answer(engine, [other]))[0].tokens.tolist() != together[0].tokens.tolist()

    asyncio.run(body())


@pytest.mark.defect("E8")
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 hardware")
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_fp8_weights(config: dict[str, Any]):
    """Quantized on the way; the second update is as good as the first, and both are near the bf16 model."""
    small = {**config, "quantization_config": quantization_config(tensors(config))}

    async def scored(c: dict[str, Any], make: Any) -> list[Completion]:
        async with serving(c) as engine:
            out = []
            for version, seed in enumerate((0, 1, 0)):
                given = make(tensors(config, seed))
                await publish(engine, given, version)
                assert engine.version == version
                out += await answer(engine, requests(1, temperature=0.0))
            return out

    exact = asyncio.run(scored(config, lambda given: given))
    coarse = asyncio.run(scored(small, lambda given: dict(quantized(given.items()))))
    assert coarse[0].tokens.tolist() == coarse[2].tokens.tolist()
    np.testing.assert_allclose(coarse[0].logp, coarse[2].logp, atol=1e-3)
    assert abs(float(coarse[0].logp[0]) - float(exact[0].logp[0])) < 0.5
