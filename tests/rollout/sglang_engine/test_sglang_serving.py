"""Weights into a real server, again and again, by every way that works on a CPU."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest
import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.protocols import Request
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from mcore_agent.rollout.sglang import SGLangEngine
from mcore_agent.rollout.sglang.line import Line, Refused
from mcore_agent.rollout.sglang.wire import body_of
from mcore_agent.weights.publish import PublishError
from mcore_agent.weights.publish import publish as publish_verified
from tests import sglang_servers
from tests.rollout.tiny import CONFIGS, NEAR, answer, checkpoint, logprobs, prompt, publish, reference, requests

pytestmark = pytest.mark.timeout(1800)


@asynccontextmanager
async def engine_of(family: str, dtype: str = "fp32", **fields) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(CONFIGS[family], dtype=dtype, address=sglang_servers.shared(family, dtype), **fields)
    try:
        await engine.wake()
        yield engine
    finally:
        await engine.close()


def sums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.defect("E4")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_bf16_arrives_bit_for_bit(family: str):
    """Tied, and with experts; dense fp32 is the contract's."""

    async def body() -> None:
        async with engine_of(family, "bf16") as engine:
            tensors = {name: tensor.bfloat16() for name, tensor in checkpoint(family).items()}
            await publish(engine, tensors, 0)
            assert await engine.checksum() == sums(tensors)
            (c,) = await answer(engine, requests([9]))
            close = logprobs(reference(family), requests([9])[0].tokens, c.tokens)
            np.testing.assert_allclose(c.logp, close, atol=0.2)

    asyncio.run(body())


@pytest.mark.defect("E8")
@pytest.mark.parametrize("transport", ["shm", "disk"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_second_update_is_as_good_as_the_first(family: str, transport: str):
    """Other weights in between, buckets of other sizes: the same weights give the same bits and log-probabilities."""

    async def body() -> None:
        async with engine_of(family, transport=transport) as engine:
            folder = Path(engine.address.folder)
            (request,) = requests([9], temperature=0.0)
            seen = []
            for version, seed in enumerate((0, 1, 0)):
                items = list(checkpoint(family, seed).items())
                Random(version).shuffle(items)
                await engine.begin_update()
                for i in range(0, len(items), 3 + version):
                    await engine.update(items[i : i + 3 + version])
                await engine.update([])
                await engine.end_update(version)
                assert await engine.checksum() == sums(dict(items))
                (c,) = await answer(engine, [request])
                np.testing.assert_allclose(c.logp, logprobs(reference(family, seed), request.tokens, c.tokens), atol=NEAR)
                seen.append(c)
                assert not (folder / "weights").exists()
            assert seen[0].tokens.tolist() == seen[2].tokens.tolist()
            np.testing.assert_allclose(seen[0].logp, seen[2].logp, atol=1e-6)

    asyncio.run(body())


@pytest.mark.defect("E1")
def test_an_update_of_empty_buckets_is_incomplete():
    async def body() -> None:
        async with engine_of("qwen3") as engine:
            await engine.begin_update()
            await engine.update([])
            with pytest.raises(WeightUpdateError, match="missing"):
                await engine.end_update(0)
            await publish(engine, checkpoint("qwen3"), 0)

    asyncio.run(body())


@pytest.mark.parametrize("fault", ["corrupted", "dropped", "added"])
def test_a_faulty_publish_says_which_name(fault: str):
    """Bits that change on the way are seen in what the server says it holds."""
    victim = "model.layers.1.mlp.experts.3.up_proj.weight"

    class Faulty(SGLangEngine):
        async def update(self, bucket) -> None:
            items = dict(bucket)
            if victim in items and fault == "corrupted":
                items[victim] = items[victim].clone()
                items[victim][3, 5] += 1
            if victim in items and fault == "dropped":
                del items[victim]
            if victim in items and fault == "added":
                items["model.layers.1.mlp.experts.gate_up_proj"] = items[victim]
            await super().update(items.items())

    async def body() -> None:
        engine = Faulty(CONFIGS["qwen3_moe"], address=sglang_servers.shared("qwen3_moe"))
        await engine.wake()
        said = {"corrupted": f"other bits.*{victim}", "dropped": f"missing: {victim}", "added": "unknown: .*gate_up_proj"}[fault]
        with pytest.raises(PublishError, match=said):
            await publish_verified({0: engine}, checkpoint("qwen3_moe").items(), 0)
        await engine.close()

    asyncio.run(body())


@pytest.mark.defect("E2")
@pytest.mark.defect("F10")
def test_twenty_publishes_leave_no_memory_and_no_files():
    """Of either process: 20 publishes of 12 MB each would show as 240 MB."""
    wide = {**CONFIGS["qwen3"], "vocab_size": 40_000}

    async def body() -> None:
        tensors = dict(checkpoint("qwen3"))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.randn(wide["vocab_size"], 36)
        server = sglang_servers.start("qwen3", hf_config=wide)
        engine = SGLangEngine(wide, address=await asyncio.to_thread(lambda: server.address))
        root, own = psutil.Process(server.pid), psutil.Process()
        await engine.wake()
        held = []
        for version in range(23):
            await publish(engine, tensors, version)
            if version in (2, 22):
                files = [p.num_fds() for p in (own, root, *root.children(recursive=True))]
                held.append((server.rss(), own.memory_info().rss, files, len(os.listdir("/dev/shm"))))
        (early, late) = held
        assert late[0] - early[0] < 60 << 20 and late[1] - early[1] < 60 << 20
        assert sum(late[2]) <= sum(early[2]) + 2 and late[3] <= early[3] + 1
        await engine.close()
        server.close()

    asyncio.run(body())


@pytest.mark.defect("E13")
def test_calls_at_the_same_time_do_not_lock_each_other_out():
    """Pauses, resumes, aborts and requests while weights travel: all end, and the server serves the last version."""

    async def body() -> None:
        async with engine_of("qwen3") as engine:
            await publish(engine, checkpoint("qwen3"), 0)

            async def play(i: int) -> str:
                await asyncio.sleep(0.02 * i)
                try:
                    return (await engine.generate(Request(f"p{i}", prompt(5 + i), 30, seed=i))).finish
                except EngineStateError:
                    return "refused"

            async def trouble() -> None:
                for mode in ("in_place", "retract") * 4:
                    await asyncio.sleep(0.03)
                    await engine.pause(mode)
                    try:
                        await engine.resume()
                    except EngineStateError:
                        continue

            async def update() -> None:
                for version in (1, 2):
                    await engine.pause()
                    try:
                        await publish(engine, checkpoint("qwen3", version % 2), version)
                    except EngineStateError:  # resumed in between: requests run again
                        await engine.pause()
                        await publish(engine, checkpoint("qwen3", version % 2), version)
                    await engine.resume()

            done = await asyncio.wait_for(asyncio.gather(trouble(), update(), *(play(i) for i in range(8)), return_exceptions=True), 600)
            assert set(done[2:]) <= {"length", "refused"}
            if not isinstance(done[1], EngineStateError):
                assert engine.version == 2
            await engine.pause("abort")
            await publish(engine, checkpoint("qwen3"), 3)
            await engine.resume()
            assert (await answer(engine, requests([5])))[0].version.tolist() == [3] * 11

    asyncio.run(body())


@pytest.mark.defect("E10")
def test_a_session_that_somebody_left_open_is_ended():
    async def body() -> None:
        async with engine_of("qwen3") as engine:
            line = Line(engine.address.url)
            await line.do("/begin_weight_update", {})
            with pytest.raises(Refused, match="already open"):
                await line.do("/begin_weight_update", {})
            await publish(engine, checkpoint("qwen3"), 0)
            with pytest.raises(Refused, match="no weight-update session"):
                await line.do("/end_weight_update")
            await line.close()
            assert await engine.checksum() == sums(dict(checkpoint("qwen3")))

    asyncio.run(body())


def test_names_of_requests_do_not_begin_one_another():
    """SGLang aborts every request whose name begins with the one given: "1" would take "10" along."""

    async def body() -> None:
        async with engine_of("qwen3") as engine:
            await publish(engine, checkpoint("qwen3"), 0)
            names = ["1", "10", "1/2"]
            running = [asyncio.create_task(engine.generate(Request(name, prompt(5), 140))) for name in names]
            await asyncio.sleep(0.1)
            await engine.abort(["1"])
            assert [(await r).finish for r in running] == ["abort", "length", "length"]

    asyncio.run(body())


def test_an_abort_keeps_tokens():
    async def body() -> None:
        async with engine_of("qwen3") as engine:
            await publish(engine, checkpoint("qwen3"), 0)
            for paused in (False, True):
                (request,) = requests([6], max_new=150)
                running = asyncio.create_task(engine.generate(request))
                before = await engine.progress()
                while await engine.progress() < before + 30:
                    await asyncio.sleep(0.02)
                if paused:
                    await engine.pause()
                await engine.abort()
                c = await running
                assert c.finish in ("abort", "length") and len(c.tokens) >= 8
                np.testing.assert_allclose(c.logp, logprobs(reference("qwen3"), request.tokens, c.tokens), atol=NEAR)
                if paused:
                    await engine.resume()

    asyncio.run(body())


def test_a_prompt_that_only_the_server_finds_too_long_is_an_error():
    """An engine with a larger context than its server's: the refusal is a typed answer, and the server goes on."""

    async def body() -> None:
        address = sglang_servers.shared("qwen3")
        engine = SGLangEngine({**CONFIGS["qwen3"], "max_position_embeddings": 4000}, address=address)
        await engine.wake()
        await publish(engine, checkpoint("qwen3"), 0)
        long, short = await answer(engine, [Request("long", prompt(200), 5), Request("short", prompt(20), 5)])
        assert long.finish == "error" and "context length" in long.error and len(long.tokens) == 0
        assert short.finish == "length"
        await engine.close()

    asyncio.run(body())


@pytest.mark.defect("C15")
def test_listed_alternatives_do_not_replace_the_sampled_token():
    """With five likeliest tokens listed beside it the log-probability is still that of the token that was drawn."""

    async def body() -> None:
        async with engine_of("qwen3") as engine:
            await publish(engine, checkpoint("qwen3"), 0)
            request = Request("r", prompt(9), 20, temperature=1.7)
            line = Line(engine.address.url)
            found = await line.call("/generate", body_of(request, "x", False) | {"top_logprobs_num": 5})
            await line.close()
            from mcore_agent.rollout.sglang.wire import completion_of

            c = completion_of(request, found, None)
            np.testing.assert_allclose(c.logp, logprobs(reference("qwen3"), request.tokens, c.tokens, 1.7), atol=NEAR)
            assert any(top[0][1] != token for top, token in zip(found["meta_info"]["output_top_logprobs"], c.tokens, strict=True))

    asyncio.run(body())
