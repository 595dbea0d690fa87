"""What is the local engine's own: waves, shared prompts, memory, and how it fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_convert.families import family_of
from mcore_agent.protocols import Completion, Request
from mcore_agent.rollout.local import LocalEngine
from tests.rollout.tiny import CONFIGS, answer, checkpoint, logprobs, prompt, publish, reference, requests, same_bits


class Passes:
    """Shapes [rows, new tokens] of all forward passes of an engine, and what they were given."""

    def __init__(self, engine: LocalEngine):
        self.inputs: list[torch.Tensor] = []
        engine._decoder.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.inputs.append(kwargs["input_ids"].clone())

    @property
    def prefills(self) -> list[list[list[int]]]:
        return [ids.tolist() for ids in self.inputs if ids.shape[1] > 1]

    @property
    def steps(self) -> list[int]:
        return [len(ids) for ids in self.inputs if ids.shape[1] == 1]


@asynccontextmanager
async def serving(family: str = "qwen3", **options: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(CONFIGS[family], **options)
    try:
        await engine.wake()
        await publish(engine, checkpoint(family), 0)
        yield engine
    finally:
        await engine.close()


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60))


def test_equal_prompts_are_computed_once():
    """A group of five and a stranger: two rows in the prefill, six in each step until rows finish."""

    async def body():
        async with serving() as engine:
            passes = Passes(engine)
            asked = [Request(f"g{i}", prompt(9), 4 + i, seed=i, order=(i,)) for i in range(5)]
            asked.append(Request("s", prompt(6), 4, order=(9,)))
            done = await answer(engine, asked)
            assert passes.prefills == [[[0] * 3 + prompt(6).tolist(), prompt(9).tolist()]]
            assert passes.steps == [6, 6, 6, 4, 3, 2, 1]
            assert len({tuple(c.tokens[:4]) for c in done[:5]}) > 1
            for r, c in zip(asked, done, strict=True):
                np.testing.assert_allclose(c.logp, logprobs(reference("qwen3"), r.tokens, c.tokens), atol=1e-5)

    run(body())


def test_a_wave_waits_for_every_client_and_sorts():
    """Clients arrive 2, 0, 1 at different times; two rows fit a batch: requests 0 and 1 run first, all three in one wave."""

    async def body():
        async with serving(max_batch=2) as engine:
            passes = Passes(engine)

            async def one(i: int, wait: float) -> Completion:
                with engine.client():
                    await asyncio.sleep(wait)
                    return await engine.generate(Request(f"r{i}", prompt(8, i), 3, order=(i,)))

            await asyncio.gather(one(2, 0.0), one(0, 0.03), one(1, 0.01))
            assert passes.prefills == [[prompt(8, 0).tolist(), prompt(8, 1).tolist()], [prompt(8, 2).tolist()]]

    run(body())


def test_a_client_inside_another_is_waited_for_instead():
    """An environment that opens a client of its own (a judge) does not wait for the episode that waits for it."""

    async def body():
        async with serving() as engine:

            async def episode(i: int) -> str:
                with engine.client():
                    await engine.generate(Request(f"p{i}", prompt(5), 3, order=(i,)))
                    with engine.client():
                        return (await engine.generate(Request(f"j{i}", prompt(6), 3, order=(i,)))).finish

            assert await asyncio.gather(*(episode(i) for i in range(3))) == ["length"] * 3

    run(body())


def test_prefill_is_split_by_padded_tokens():
    """Lengths 3 5 8 9 20 with a limit of 20: 3 5 8 do not fit with padding to 8 (24), nor 8 9 20."""

    async def body():
        async with serving(prefill_tokens=20) as engine:
            passes = Passes(engine)
            asked = requests([9, 3, 20, 5, 8])
            for r, c in zip(asked, await answer(engine, asked), strict=True):
                np.testing.assert_allclose(c.logp, logprobs(reference("qwen3"), r.tokens, c.tokens), atol=1e-5)
            assert [(len(p), len(p[0])) for p in passes.prefills] == [(2, 5), (2, 9), (1, 20)]

    run(body())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_reused_pasts_of_unequal_lengths(family: str):
    """Second turns that reuse 0 to 14 tokens and add 2 to 9, in one batch: numbers equal recomputation."""

    async def body():
        async with serving(family) as engine:

            async def episode(i: int) -> tuple[np.ndarray, Completion]:
                with engine.client():
                    first = await engine.generate(Request(f"a{i}", prompt(4 + 3 * i, i), 2 + i, seed=i, order=(i,)))
                    tokens = np.concatenate([prompt(4 + 3 * i, i), first.tokens, prompt(2 + (5 * i) % 8, i)])
                    if i == 2:
                        tokens[0] = (tokens[0] + 1) % 131  # shares nothing with its past
                    return tokens, await engine.generate(Request(f"b{i}", tokens, 7, seed=i, order=(i,)))

            done = await asyncio.gather(*(episode(i) for i in range(4)))
            assert [c.cached for _, c in done] == [4 + 2 - 1, 7 + 3 - 1, 0, 13 + 5 - 1]
            for tokens, c in done:
                np.testing.assert_allclose(c.logp, logprobs(reference(family), tokens, c.tokens), atol=1e-5)

    run(body())


def test_the_prefix_cache_is_bounded():
    """One row of 8 + 5 - 1 tokens holds 2 × layers 3 × heads 2 × dim 10 × 4 bytes a token. Room for 1.5 rows keeps two."""
    row = 12 * 2 * 3 * 2 * 10 * 4

    async def body(gb: float) -> list[int]:
        async with serving(prefix_cache_gb=gb) as engine:

            async def episode(i: int) -> int:
                with engine.client():
                    first = await engine.generate(Request(f"a{i}", prompt(8, i), 5, order=(i,)))
                    tokens = np.concatenate([prompt(8, i), first.tokens])
                    return (await engine.generate(Request(f"b{i}", tokens, 5, order=(i,)))).cached

            return await asyncio.gather(*(episode(i) for i in range(3)))

    assert run(body(0)) == [0, 0, 0]
    assert run(body(1.5 * row / 2**30)) == [12, 12, 0]
    assert run(body(1)) == [12, 12, 12]


def test_the_cache_grows_past_its_first_room():
    async def body():
        async with serving() as engine:
            (request,) = requests([5], max_new=150)
            (c,) = await answer(engine, [request])
            np.testing.assert_allclose(c.logp, logprobs(reference("qwen3"), request.tokens, c.tokens), atol=2e-5)

    run(body())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_names_are_those_of_the_converter(family: str):
    async def body():
        async with serving(family) as engine:
            return set(await engine.checksum())

    assert run(body()) == set(family_of(CONFIGS[family]).names())


def test_a_config_file_of_transformers_is_accepted():
    """With everything that ``config.json`` holds, the served model is the same."""

    async def body(config: dict[str, Any]) -> Completion:
        engine = LocalEngine(config)
        await engine.wake()
        await publish(engine, checkpoint("llama"), 0)
        (done,) = await answer(engine, requests([9]))
        await engine.close()
        return done

    written = reference("llama").config.to_dict()
    assert "transformers_version" in written and "architectures" in written
    assert same_bits(run(body(written)), run(body(CONFIGS["llama"])))


def test_sleep_frees_the_weights():
    async def body():
        async with serving() as engine:
            parameters = list(engine._decoder.model.parameters())
            held = sum(p.untyped_storage().nbytes() for p in parameters)
            assert held == sum(t.nbytes for t in checkpoint("qwen3").values())
            await engine.checksum()
            await engine.sleep(("weights",))
            assert sum(p.untyped_storage().nbytes() for p in parameters) == 0
            await engine.wake(("weights",))
            assert sum(p.untyped_storage().nbytes() for p in parameters) == held
            assert all((p == 0).all() for p in parameters)

    run(body())


def test_bf16():
    """Types are kept: bf16 in, bf16 served; log-probabilities are computed in fp32 from bf16 logits."""

    async def body():
        engine = LocalEngine(CONFIGS["qwen3"], dtype="bf16")
        await engine.wake()
        await publish(engine, {n: t.bfloat16() for n, t in checkpoint("qwen3").items()}, 0)
        (request,) = requests([9], max_new=6)
        (c,) = await answer(engine, [request])
        model = reference("qwen3", 0)
        half = type(model)(model.config).to(torch.bfloat16).eval()
        half.load_state_dict({n: t.bfloat16() for n, t in model.state_dict().items()})
        row = torch.from_numpy(np.concatenate([request.tokens, c.tokens]))
        with torch.no_grad():
            logp = half(row[None]).logits[0, len(request.tokens) - 1 : -1].float().log_softmax(-1)
        np.testing.assert_allclose(c.logp, logp.gather(1, row[len(request.tokens) :, None])[:, 0], atol=0.1)
        assert c.logp.dtype == np.float32
        await engine.close()

    run(body())


def test_weights_that_are_not_finite_end_in_errors():
    async def body():
        async with serving() as engine:
            broken = dict(checkpoint("qwen3"))
            broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], float("nan"))
            await publish(engine, broken, 1)
            for c in await answer(engine, requests([5, 9])):
                assert c.finish == "error" and "not finite" in c.error and len(c.tokens) == 0
            await publish(engine, checkpoint("qwen3"), 2)
            assert (await answer(engine, requests([5])))[0].finish == "length"

    run(body())


def test_a_failed_pass_answers_everyone():
    """torch's errors (memory) end requests as errors and the engine goes on; a fault of the program reaches the callers."""

    async def body(error: BaseException) -> list[Any]:
        async with serving(max_batch=2) as engine:
            seen = 0

            def fail(*_: Any) -> None:
                nonlocal seen
                seen += 1
                if seen == 3:
                    raise error

            hook = engine._decoder.model.register_forward_pre_hook(fail)
            done = await asyncio.gather(*(engine.generate(r) for r in requests([5, 9, 7])), return_exceptions=True)
            hook.remove()
            assert (await answer(engine, requests([5])))[0].finish == "length"
            return done

    done = run(body(RuntimeError("out of memory")))
    assert [c.finish for c in done] == ["error", "error", "length"]
    assert "out of memory" in done[0].error and len(done[0].tokens) == 2
    assert all(isinstance(c, TypeError) for c in run(body(TypeError("a bug"))))


def test_one_engine_in_several_event_loops():
    engine = LocalEngine(CONFIGS["qwen3"])
    asyncio.run(engine.wake())
    asyncio.run(publish(engine, checkpoint("qwen3"), 0))
    first, second = (asyncio.run(answer(engine, requests([5, 8]))) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    asyncio.run(engine.close())


def test_a_loop_that_is_torn_down_leaves_the_engine_usable():
    """As after Ctrl-C: the main task ends with requests at work; asyncio cancels the rest."""
    engine = LocalEngine(CONFIGS["qwen3"])

    async def leave() -> None:
        await engine.wake()
        await publish(engine, checkpoint("qwen3"), 0)
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests([5, 8], max_new=140)]
        await asyncio.sleep(0.03)
        del tasks

    asyncio.run(leave())
    assert [c.finish for c in asyncio.run(answer(engine, requests([5, 8])))] == ["length", "length"]
    asyncio.run(engine.sleep())
    asyncio.run(engine.close())


def test_the_event_loop_stays_free():
    """While 140 tokens are computed the loop goes round many times."""

    async def body() -> int:
        async with serving() as engine:
            running = asyncio.create_task(engine.generate(requests([5], max_new=140)[0]))
            turns = 0
            while not running.done():
                await asyncio.sleep(0.001)
                turns += 1
            return turns

    assert run(body()) > 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding"),
        ({"model_type": "qwen9"}, "qwen9"),
    ],
)
def test_configs_that_it_cannot_serve(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LocalEngine({**CONFIGS["qwen3"], **change})


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"prefill_tokens": 0}, {"prefix_cache_gb": -1.0}])
def test_bad_options(options: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(options))):
        LocalEngine(CONFIGS["qwen3"], **options)


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_calls_leaves_a_request_hanging(seed: int):
    """Clients come, go and are cancelled while another task pauses, aborts, updates and resumes at random moments."""

    async def body() -> None:
        async with serving() as engine:
            random = Random(seed)

            async def episode(i: int) -> list[str]:
                ends = []
                with engine.client():
                    for turn in range(random.randint(1, 4)):
                        await asyncio.sleep(random.random() * 0.01)
                        request = Request(f"{i}/{turn}", prompt(3 + i, turn), random.randint(1, 25), seed=i, order=(i, turn))
                        c = await engine.generate(request)
                        assert len(c.tokens) == len(c.logp) == len(c.version) and np.all(np.diff(c.version) >= 0)
                        ends.append(c.finish)
                return ends

            async def trouble() -> None:
                for version in range(1, 12):
                    await asyncio.sleep(random.random() * 0.03)
                    if random.random() < 0.4:
                        await engine.abort([f"{random.randrange(10)}/{turn}" for turn in range(4)])
                    await engine.pause()
                    if random.random() < 0.6:
                        await publish(engine, checkpoint("qwen3"), version)
                    if random.random() < 0.5:
                        await engine.flush()
                    if random.random() < 0.2:
                        await engine.abort()
                    if random.random() < 0.3:
                        episodes[random.randrange(10)].cancel()
                    await engine.resume()

            episodes = [asyncio.create_task(episode(i)) for i in range(10)]
            await trouble()
            for end in await asyncio.gather(*episodes, return_exceptions=True):
                assert isinstance(end, asyncio.CancelledError) or set(end) <= {"length", "abort"}
            await engine.sleep()  # refused if anything were in flight

    run(body())


# ------------------------------------------------------------------------------------- pauses, absence, accounts


async def at_work(engine: LocalEngine, asked: list[Request]) -> asyncio.Future:
    """Running until a few tokens have come."""
    before = await engine.progress()
    running = asyncio.gather(*(engine.generate(r) for r in asked))
    while await engine.progress() < before + 3 * len(asked):
        await asyncio.sleep(0.001)
    return running


def test_modes_of_pause():
    """In place keeps keys and values, retract drops them and changes no answer, abort ends what runs and what waits."""

    async def body():
        async with serving() as engine:
            asked = requests([6, 11], max_new=140)
            plain = await answer(engine, asked)
            for mode in ("in_place", "retract"):
                passes = Passes(engine)
                running = await at_work(engine, asked)
                await engine.pause(mode)
                held = (await engine.memory())["kv_cache"]
                assert not running.done() and (held == 0) == (mode == "retract")
                await engine.resume()
                for a, b in zip(plain, await running, strict=True):
                    assert a.tokens.tolist() == b.tokens.tolist()
                    np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
                assert len(passes.prefills) == (2 if mode == "retract" else 1)
            running = await at_work(engine, asked)
            await engine.pause()
            waiting = asyncio.create_task(engine.generate(Request("w", prompt(4), 3)))
            await asyncio.sleep(0)
            await engine.pause("abort")  # a second pause, of another mode
            done = await running
            assert [c.finish for c in (*done, await waiting)] == ["abort"] * 3
            assert 0 < len(done[0].tokens) < 140
            late = asyncio.create_task(engine.generate(Request("late", prompt(4), 3)))
            await asyncio.sleep(0.02)
            assert not late.done()
            await engine.resume()
            assert (await late).finish == "length"
            with pytest.raises(ValueError, match="sideways.*in_place"):
                await engine.pause("sideways")

    run(body())


def test_a_wave_does_not_wait_for_a_client_that_is_away():
    """Its keys and values stay; once it is back it is waited for again."""

    async def body():
        async with serving() as engine:
            back, order = asyncio.Event(), []

            async def slow() -> Completion:
                with engine.client():
                    first = await engine.generate(Request("a0", prompt(9), 6, order=(0,)))
                    with engine.away():
                        await back.wait()
                    await asyncio.sleep(0.3)  # no longer away: the other's third request must wait
                    order.append("back")
                    return await engine.generate(Request("a1", np.concatenate([prompt(9), first.tokens]), 6, order=(0,)))

            async def fast() -> None:
                with engine.client():
                    for turn in range(3):
                        if turn == 2:
                            back.set()
                            await asyncio.sleep(0)
                        await engine.generate(Request(f"b{turn}", prompt(7, turn), 6, order=(1,)))
                        order.append(turn)

            slowly, _ = await asyncio.gather(slow(), fast())
            assert order == [0, 1, "back", 2] and slowly.cached == 9 + 6 - 1
            with engine.away():  # outside any client
                assert (await answer(engine, requests([5])))[0].finish == "length"

    run(body())


def test_progress_counts_tokens_and_memory_counts_bytes():
    """One token holds keys and values of 3 layers × 2 heads × 10 numbers × 4 bytes."""

    async def body():
        async with serving() as engine:
            weights = sum(t.nbytes for t in checkpoint("qwen3").values())
            assert await engine.progress() == 0 and await engine.memory() == {"weights": weights, "kv_cache": 0}
            await answer(engine, requests([5, 8], max_new=7))
            assert await engine.progress() == 14
            with engine.client():
                await answer(engine, [Request("c", prompt(8), 5)])
                await engine.pause()  # the batch is over
                await engine.resume()
                assert (await engine.memory())["kv_cache"] == (8 + 5 - 1) * 2 * 3 * 2 * 10 * 4
            assert (await engine.memory())["kv_cache"] == 0
            running = await at_work(engine, requests([5], max_new=140))
            assert await engine.progress() < 19 + 140  # it is read while tokens are computed
            assert (await running)[0].finish == "length" and await engine.progress() == 19 + 140
            await engine.sleep()
            assert await engine.memory() == {"weights": 0, "kv_cache": 0}

    run(body())


# ------------------------------------------------------------------------------------------------------ experts


def experts(tokens: np.ndarray) -> np.ndarray:
    """[T, 3, 2] the experts that a plain forward pass of the reference sends each token to."""
    with torch.no_grad():
        logits = reference("qwen3_moe")(torch.from_numpy(tokens)[None], output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, dim=-1).indices for layer in logits], 1).numpy()


@pytest.mark.parametrize("drafting", [False, True])
def test_routing_is_that_of_a_forward_pass(drafting: bool):
    """Second turns that reuse caches, rows of unequal lengths that end at unequal times, with drafts and without."""

    async def body():
        async with serving("qwen3_moe", drafting=drafting) as engine:
            assert "routing" in engine.capabilities()

            async def episode(i: int, name: str) -> list[tuple[np.ndarray, Completion]]:
                done = []
                with engine.client():
                    tokens = prompt(4 + 3 * i, i)
                    for turn in range(2):
                        request = Request(f"{name}{i}/{turn}", tokens, 6 + 4 * i, seed=i, order=(i,), routing=i != 2)
                        done.append((tokens, await engine.generate(request)))
                        tokens = np.concatenate([tokens, done[-1][1].tokens, prompt(3, turn)])
                return done

            for name in "xy":  # what is heard in x is drafted in y
                for i, done in enumerate(await asyncio.gather(*(episode(i, name) for i in range(4)))):
                    for tokens, c in done:
                        if i == 2:  # not asked for
                            assert c.routing is None
                            continue
                        row = np.concatenate([tokens, c.tokens])
                        assert c.routing is not None and c.routing.dtype == np.int32
                        assert c.routing.shape == (len(row) - 1, 3, 2)
                        assert np.array_equal(c.routing, experts(row)[:-1])
                    assert done[1][1].cached > 0
            assert not drafting or engine.draft_stats()["accepted"] > 20

    run(body())


def test_routing_of_an_aborted_answer_and_of_a_dense_model():
    async def body():
        async with serving("qwen3_moe") as engine:
            ask = Request("r", prompt(7), 140, routing=True)
            running = await at_work(engine, [ask])
            await engine.pause()
            await engine.abort()
            (c,) = await running
            assert c.finish == "abort" and c.routing is not None
            assert np.array_equal(c.routing, experts(np.concatenate([ask.tokens, c.tokens]))[:-1])
        async with serving("qwen3") as engine:
            assert "routing" not in engine.capabilities()
            with pytest.raises(ValueError, match="'r'.*routing"):
                await engine.generate(ask)

    run(body())
