"""What every engine must do. A new engine adds one line to MAKERS; engines that the registry knows and MAKERS does not fail.

The SGLang engine runs against real servers on the CPU, one for each family, where SGLang is installed. An engine that lacks
``deterministic`` draws anew and rounds anew on a rerun: greedy answers then stand for sampled ones, and log-probabilities are close.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.protocols import Completion, Engine, Request
from mcore_agent.registry import create, variants
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from tests.required import need
from tests.rollout.tiny import CONFIGS, CONTEXT, NEAR, VOCAB, answer, checkpoint, logprobs, prompt, publish, reference, requests, same_bits


def sglang(family: str) -> Engine:
    """An engine of a server that is as new."""
    need("sglang")
    from tests import sglang_servers

    return create("engine", {"name": "sglang", "dtype": "fp32"}, hf_config=CONFIGS[family], address=sglang_servers.shared(family))


MAKERS: dict[str, Callable[[str], Engine]] = {
    "local": lambda family: create("engine", {"name": "local", "dtype": "fp32"}, hf_config=CONFIGS[family]),
    "sglang": sglang,
}
FAMILIES = sorted(CONFIGS)
LIMIT_S = {"local": 60, "sglang": 1800}  # an SGLang server may have to start, beside other work
engines = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.timeout(LIMIT_S[n] + 60)) for n in sorted(MAKERS)])


@asynccontextmanager
async def serving(name: str, family: str = "qwen3", seed: int = 0) -> AsyncIterator[Engine]:
    engine = MAKERS[name](family)
    try:
        await engine.wake()
        await publish(engine, checkpoint(family, seed), 3)
        yield engine
    finally:
        await engine.close()


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, max(LIMIT_S.values())))


def exact(engine: Engine) -> bool:
    """Whether a rerun gives the same bits."""
    return "deterministic" in engine.capabilities()


def repeatable(engine: Engine) -> dict[str, float]:
    """Fields of requests whose tokens are the same on a rerun."""
    return {} if exact(engine) else {"temperature": 0.0}


def same(engine: Engine, a: Completion, b: Completion) -> bool:
    """To the bit, or as close as this engine comes."""
    return same_bits(a, b) if exact(engine) else alike(a, b)


def alike(a: Completion, b: Completion) -> bool:
    """The same tokens, from keys and values that were rounded another way."""
    equal = a.finish == b.finish and np.array_equal(a.tokens, b.tokens) and np.array_equal(a.version, b.version)
    return equal and np.allclose(a.logp, b.logp, atol=NEAR)


def test_every_engine_is_tested():
    assert set(variants("engine")) == set(MAKERS)


@engines
def test_it_has_every_method(name: str):
    engine = MAKERS[name]("qwen3")
    assert isinstance(engine, Engine)
    run(engine.close())


# ------------------------------------------------------------------------------------------- what it computes


@engines
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_forward_pass(name: str, family: str):
    """Prompts of different lengths, one of them twice, in one batch: padding and shared prompts must not show (C15)."""

    async def body():
        async with serving(name, family) as engine:
            asked = requests([5, 17, 2, 17, 9])
            asked.append(Request("twin", asked[1].tokens, 11, seed=999, order=(9,)))
            for r, c in zip(asked, await answer(engine, asked), strict=True):
                assert (c.finish, len(c.tokens)) == ("length", 11)
                assert c.cached == 0 or not exact(engine)  # an engine that batches by the clock may have the twin's prompt already
                assert c.version.tolist() == [3] * 11
                np.testing.assert_allclose(c.logp, logprobs(reference(family), r.tokens, c.tokens), atol=NEAR)

    run(body())


@engines
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(name: str, family: str):
    async def body():
        async with serving(name, family) as engine:
            return await answer(engine, requests([7, 12, 3], temperature=0.0))

    for r, c in zip(requests([7, 12, 3]), run(body()), strict=True):
        ids = torch.from_numpy(r.tokens)[None]
        expected = reference(family).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=11, do_sample=False)
        assert c.tokens.tolist() == expected[0, len(r.tokens) :].tolist()
        np.testing.assert_allclose(c.logp, logprobs(reference(family), r.tokens, c.tokens), atol=NEAR)


@engines
@pytest.mark.defect("C16")
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_logprobs_are_after_temperature_and_before_truncation(name: str, temperature: float):
    async def body():
        async with serving(name) as engine:
            for fields in ({}, {"top_p": 0.7}, {"top_k": 4}):
                asked = requests([6, 13], temperature=temperature, **fields)
                for r, c in zip(asked, await answer(engine, asked), strict=True):
                    expected = logprobs(reference("qwen3"), r.tokens, c.tokens, temperature)
                    np.testing.assert_allclose(c.logp, expected, atol=NEAR)

    run(body())


@engines
@pytest.mark.defect("C15")
def test_samples_follow_the_softmax(name: str):
    """Pearson's chi-square; where seeds are fixed, so is the outcome. The quantile for one in a million is Wilson and Hilferty's."""
    draws, ask = 3000 if name == "local" else 1000, prompt(8)

    async def body():
        async with serving(name) as engine:
            asked = [Request(str(i), ask, 1, seed=i, temperature=2.5) for i in range(draws)]
            return await answer(engine, asked)

    done = run(body())
    with torch.no_grad():
        probs = (reference("qwen3")(torch.from_numpy(ask)[None]).logits[0, -1].double() / 2.5).softmax(-1).numpy()
    counts = np.bincount([c.tokens[0] for c in done], minlength=VOCAB)
    order = np.argsort(-probs)
    rare = np.cumsum(probs[order][::-1])[::-1] * draws < 10  # pooled: cells want an expectation of 5 or more
    cells = [[i] for i in order[~rare] if probs[i] * draws >= 5]
    cells.append([i for i in range(VOCAB) if [i] not in cells])
    expected = np.array([probs[c].sum() * draws for c in cells])
    seen = np.array([counts[c].sum() for c in cells])
    statistic, df = float(((seen - expected) ** 2 / expected).sum()), len(cells) - 1
    assert df > 10 and seen.sum() == draws
    assert statistic < df * (1 - 2 / (9 * df) + 4.753 * (2 / (9 * df)) ** 0.5) ** 3
    for c in done[:20]:
        assert c.logp[0] == pytest.approx(np.log(probs[c.tokens[0]]), abs=NEAR)


@engines
def test_truncation_draws_only_likely_tokens(name: str):
    ask = prompt(8)
    with torch.no_grad():
        probs = reference("qwen3")(torch.from_numpy(ask)[None]).logits[0, -1].double().div(3.0).softmax(-1).numpy()
    order = np.argsort(-probs)
    nucleus = order[: int(np.searchsorted(np.cumsum(probs[order]), 0.5)) + 1]

    async def body(**fields: Any) -> set[int]:
        async with serving(name) as engine:
            asked = [Request(str(i), ask, 1, seed=i, temperature=3.0, **fields) for i in range(400)]
            return {int(c.tokens[0]) for c in await answer(engine, asked)}

    assert run(body(top_k=5)) == set(order[:5].tolist())
    found = run(body(top_p=0.5))
    assert found <= set(nucleus.tolist()) and len(found) > len(nucleus) / 2


@engines
def test_stop_token_is_included_and_ends(name: str):
    async def body():
        async with serving(name) as engine:
            for request in requests([9, 7, 12, 3, 15, 22], **repeatable(engine)):
                (free,) = await answer(engine, [request])
                at = next((i for i in range(2, 11) if free.tokens[i] not in free.tokens[:i]), 0)
                if at:
                    break
            (stopped,) = await answer(engine, [replace(request, stop=(int(free.tokens[at]),))])
            part = Completion(free.tokens[: at + 1], free.logp[: at + 1], free.version[: at + 1], "stop")
            assert same(engine, stopped, part)

    run(body())


# ------------------------------------------------------------------------------------------------ determinism


async def play(engine: Engine, episode: int, delays: Random | None, turns: int = 3) -> list[Completion]:
    """One client whose environment answers after a random time. The next prompt is the whole dialog and an observation."""
    done: list[Completion] = []
    with engine.client():
        tokens = prompt(4 + episode % 7, episode)
        for turn in range(turns if episode % 3 else 1):
            if delays is not None:
                await asyncio.sleep(delays.random() * 0.01)
            request = Request(f"{episode}/{turn}", tokens, 5 + episode % 4, seed=episode, order=(episode, turn), stop=(7,))
            done.append(await engine.generate(request))
            tokens = np.concatenate([tokens, done[-1].tokens, prompt(2 + turn, episode)])
    return done


@engines
def test_a_rerun_gives_the_same_bits(name: str):
    """Arrival order and the environments' speed differ, the answers do not."""

    async def body(shuffle: int) -> list[list[Completion]]:
        async with serving(name) as engine:
            if not exact(engine):
                pytest.skip("the engine does not promise it")
            order, delays = list(range(12)), Random(shuffle) if shuffle else None
            Random(shuffle).shuffle(order)
            done = await asyncio.gather(*(play(engine, i, delays) for i in order))
            return [c for _, c in sorted(zip(order, done, strict=True), key=lambda pair: pair[0])]

    first = run(body(0))
    for shuffle in (1, 2):
        again = run(body(shuffle))
        assert all(same_bits(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))


@engines
def test_draws_depend_on_seed_alone(name: str):
    async def body():
        async with serving(name) as engine:
            if not exact(engine):
                pytest.skip("the engine does not promise it")
            asked = requests([6, 14, 9])
            together = await answer(engine, asked)
            for r, c in zip(asked, together, strict=True):
                (alone,) = await answer(engine, [r])
                assert alone.tokens.tolist() == c.tokens.tolist()
            (other,) = await answer(engine, [Request("o", asked[0].tokens, 11, seed=7)])
            assert other.tokens.tolist() != together[0].tokens.tolist()

    run(body())


@engines
def test_many_clients_and_turns(name: str):
    """Forty episodes at once: every log-probability is that of a forward pass over exactly what the engine was given."""

    async def body():
        async with serving(name, "llama") as engine:
            return await asyncio.gather(*(play(engine, i, Random(i)) for i in range(40)))

    for episode, done in enumerate(run(body())):
        tokens = prompt(4 + episode % 7, episode)
        assert len(done) == (3 if episode % 3 else 1)
        for turn, c in enumerate(done):
            np.testing.assert_allclose(c.logp, logprobs(reference("llama"), tokens, c.tokens), atol=NEAR)
            tokens = np.concatenate([tokens, c.tokens, prompt(2 + turn, episode)])


@engines
def test_the_past_of_a_client_is_reused(name: str):
    """The second prompt extends the first dialog: all of it but the newest token, whose keys were never needed, is cached."""

    async def body():
        async with serving(name) as engine:
            if "prefix_cache" not in engine.capabilities():
                pytest.skip("no prefix cache")
            with engine.client():
                (one,) = await answer(engine, [Request("1", prompt(9), 6, seed=1)])
                longer = np.concatenate([prompt(9), one.tokens, prompt(4)])
                (two,) = await answer(engine, [Request("2", longer, 6, seed=2)])
                assert (one.cached, two.cached) == (0, 9 + 6 - 1)
                np.testing.assert_allclose(two.logp, logprobs(reference("qwen3"), longer, two.tokens), atol=NEAR)
                (other,) = await answer(engine, [Request("3", longer[:12], 6, seed=2)])
                assert other.cached == 11  # the last prompt token is always computed: it gives the first logits

    run(body())


# -------------------------------------------------------------------------------------------- pause and abort


def hold(asked: list[Request]) -> list[Request]:
    """Long enough that a pause or an abort meets them at work."""
    return [Request(r.id, r.tokens, 100, seed=r.seed, order=r.order, temperature=0.0) for r in asked]


async def begun(engine: Engine, asked: list[Request], wait: float) -> asyncio.Future:
    running = asyncio.gather(*(engine.generate(r) for r in asked))
    await asyncio.sleep(wait)
    return running


@engines
def test_pause_and_resume_change_nothing(name: str):
    async def body():
        async with serving(name) as engine:
            asked = hold(requests([6, 11]))
            plain = await answer(engine, asked)
            for wait in (0.0, 0.03, 0.09):
                running = await begun(engine, asked, wait)
                await engine.pause()
                await asyncio.sleep(0.01)
                assert not running.done() or wait
                await engine.resume()
                assert all(same(engine, a, b) for a, b in zip(plain, await running, strict=True))

    run(body())


@engines
def test_paused_requests_live_through_an_update(name: str):
    """Tokens before the boundary are the old model's, those behind it the new one's, computed from all tokens anew."""

    async def body(wait: float) -> tuple[Request, Completion]:
        async with serving(name) as engine:
            (request,) = hold(requests([6]))
            running = await begun(engine, [request], wait)
            await engine.pause()
            await publish(engine, checkpoint("qwen3", 1), 4)
            await engine.resume()
            return request, (await running)[0]

    wait, boundary = 0.06, 0
    for _ in range(12):  # the pause comes by the clock: it must once have met the request at work
        request, c = run(body(wait))
        boundary = int((c.version == 3).sum())
        if 0 < boundary < 100:
            break
        wait = wait / 2 if boundary else wait * 2
    assert 0 < boundary < 100 and c.version.tolist() == [3] * boundary + [4] * (100 - boundary)
    old, new = (logprobs(reference("qwen3", seed), request.tokens, c.tokens) for seed in (0, 1))
    np.testing.assert_allclose(c.logp[:boundary], old[:boundary], atol=NEAR)
    np.testing.assert_allclose(c.logp[boundary:], new[boundary:], atol=NEAR)
    assert np.abs(old - new).max() > 0.1


@engines
@pytest.mark.defect("E12")
@pytest.mark.parametrize("modes", [("retract",), ("in_place", "retract"), ("retract", "in_place")], ids="+".join)
def test_modes_that_keep_requests_change_nothing(name: str, modes: tuple[str, ...]):
    async def body():
        async with serving(name) as engine:
            asked = hold(requests([6, 11]))
            plain = await answer(engine, asked)
            running = await begun(engine, asked, 0.05)
            for mode in modes:
                await engine.pause(mode)
            await asyncio.sleep(0.05)
            await engine.resume()
            assert all(alike(a, b) for a, b in zip(plain, await running, strict=True))
            with pytest.raises(ValueError, match="mode is 'later'"):
                await engine.pause("later")

    run(body())


@engines
def test_a_pause_that_aborts(name: str):
    async def body():
        async with serving(name) as engine:
            running = await begun(engine, hold(requests([6, 11])), 0.05)
            await engine.pause("abort")
            assert [c.finish for c in await running] == ["abort"] * 2
            held = await begun(engine, requests([5]), 0.05)
            assert not held.done()
            await engine.resume()
            assert (await held)[0].finish == "length"

    run(body())


@engines
def test_progress_grows_while_it_works(name: str):
    async def body():
        async with serving(name) as engine:
            before = await engine.progress()
            await answer(engine, requests([6, 11], max_new=40))
            for _ in range(100):
                if await engine.progress() > before:
                    break
                await asyncio.sleep(0.1)
            after = await engine.progress()
            assert after > before
            assert await engine.progress() == after
            held = await engine.memory()
            assert held and all(isinstance(n, int) and n >= 0 for n in held.values()) and sum(held.values()) > 0

    run(body())


@engines
def test_requests_sent_while_paused_wait(name: str):
    async def body():
        async with serving(name) as engine:
            await engine.pause()
            running = await begun(engine, requests([5]), 0.02)
            assert not running.done()
            await engine.resume()
            assert (await running)[0].finish == "length"

    run(body())


@engines
def test_abort_keeps_what_there_is(name: str):
    async def body():
        async with serving(name) as engine:
            asked = hold(requests([6, 11, 4]))
            plain = await answer(engine, asked)
            for wait in (0.0, 0.05):
                running = await begun(engine, asked, wait)
                await engine.abort(["1", "nobody"])
                done = await running
                assert [c.finish for c in done] == ["length", "abort", "length"]
                n = len(done[1].tokens)
                assert n < 100 and done[1].tokens.tolist() == plain[1].tokens[:n].tolist()
                assert done[0].tokens.tolist() == plain[0].tokens.tolist()
            running = await begun(engine, asked, 0.05)
            await engine.pause()
            await engine.abort()
            assert [c.finish for c in await running] == ["abort"] * 3
            await engine.resume()
            assert (await answer(engine, requests([5])))[0].finish == "length"

    run(body())


@engines
def test_every_request_ends_when_the_engine_closes(name: str):
    async def body(paused: bool, wait: float) -> list[str]:
        async with serving(name) as engine:
            running = await begun(engine, hold(requests([6, 11])), wait)
            if paused:
                await engine.pause()
            await engine.close()
            await engine.close()
            with pytest.raises(EngineStateError, match="closed"):
                await engine.generate(requests([4])[0])
            return [c.finish for c in await running]

    for paused in (False, True):
        for wait in (0.0, 0.05):
            assert run(body(paused, wait)) == ["abort", "abort"]


@engines
def test_a_cancelled_caller_leaves_no_trace(name: str):
    async def body():
        async with serving(name) as engine:
            asked = hold(requests([6, 11]))
            for wait in (0.0, 0.05):
                tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
                await asyncio.sleep(wait)
                tasks[0].cancel()
                await asyncio.sleep(0)
                again = asyncio.create_task(engine.generate(asked[0]))  # the id is free again
                assert [(await tasks[1]).finish, (await again).finish] == ["length", "length"]
            await engine.sleep()  # refused if anything were in flight

    run(body())


@engines
def test_a_closing_client_lets_the_others_go(name: str):
    async def body():
        async with serving(name) as engine:

            async def idle() -> None:
                with engine.client():
                    await asyncio.sleep(0.05)

            async def busy() -> Completion:
                with engine.client():
                    return await engine.generate(requests([5])[0])

            done = await asyncio.gather(idle(), busy(), idle())
            assert done[1].finish == "length"

    run(body())


# ------------------------------------------------------------------------------------------------ bad requests


@engines
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": np.array([], dtype=np.int64)}, "tokens"),
        ({"tokens": np.array([3, VOCAB])}, f"tokens is {VOCAB}.*vocabulary"),
        ({"tokens": np.array([3, -1])}, "tokens is -1"),
        ({"stop": (VOCAB,)}, "stop"),
        ({"max_new": 0}, "max_new is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_invalid_requests_are_refused(name: str, fields: dict[str, Any], message: str):
    async def body():
        async with serving(name) as engine:
            with pytest.raises(ValueError, match=message):
                await engine.generate(Request(**{"id": "x", "tokens": np.array([1, 2]), "max_new": 3, **fields}))

    run(body())


@engines
def test_context_overflow_and_equal_ids(name: str):
    async def body():
        async with serving(name) as engine:
            (exact,) = await answer(engine, [Request("fits", prompt(CONTEXT - 5), 5)])
            assert exact.finish == "length"
            (over,) = await answer(engine, [Request("over", prompt(CONTEXT - 5), 6)])
            assert over.finish == "error" and str(CONTEXT) in over.error and len(over.tokens) == 0
            running = await begun(engine, hold(requests([6])), 0.01)
            with pytest.raises(ValueError, match="in flight"):
                await engine.generate(requests([6])[0])
            await engine.abort()
            await running

    run(body())


# ----------------------------------------------------------------------------------------------------- weights


@engines
@pytest.mark.defect("E4")
@pytest.mark.defect("E17")
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_arrive_bit_for_bit(name: str, family: str):
    """Names are those of a checkpoint: one per expert, and no output layer when it is tied."""
    tensors = checkpoint(family)
    assert ("lm_head.weight" in tensors) == (not CONFIGS[family]["tie_word_embeddings"])

    async def body():
        async with serving(name, family) as engine:
            served = await engine.checksum()
            assert served == {n: tensor_checksum(t) for n, t in tensors.items()}
            flipped = {n: t.clone() for n, t in tensors.items()}
            victim = sorted(flipped)[len(flipped) // 2]
            flipped[victim].view(-1).view(torch.int32)[5] ^= 1  # one bit
            await publish(engine, flipped, 4)
            again = await engine.checksum()
            assert [n for n in served if served[n] != again[n]] == [victim]

    run(body())


@engines
@pytest.mark.defect("E3")
def test_buffers_are_the_callers_again_after_update(name: str):
    async def body():
        async with serving(name) as engine:
            await engine.begin_update()
            for tensor_name, tensor in checkpoint("qwen3", 1).items():
                buffer = tensor.clone()
                await engine.update([(tensor_name, buffer)])
                buffer.fill_(float("nan"))
            await engine.end_update(4)
            assert await engine.checksum() == {n: tensor_checksum(t) for n, t in checkpoint("qwen3", 1).items()}

    run(body())


@engines
@pytest.mark.defect("E7")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_many_buckets_equal_one(name: str, family: str):
    async def body():
        async with serving(name, family) as engine:
            items = list(checkpoint(family, 1).items())
            Random(0).shuffle(items)
            await engine.begin_update()
            for i in range(0, len(items), 3):
                await engine.update(iter(items[i : i + 3]))
            await engine.end_update(4)
            assert await engine.checksum() == {n: tensor_checksum(t) for n, t in items}

    run(body())


def broken(kind: str) -> tuple[list[tuple[str, torch.Tensor]], str]:
    """A faulty update, and what the error must say."""
    items = list(checkpoint("qwen3_moe", 1).items())
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert expert in dict(items)
    match kind:
        case "missing":
            return [i for i in items if i[0] != expert], f"1 missing: {expert}"
        case "unknown":
            return [*items, ("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(5, 44, 36))], "1 unknown: .*gate_up_proj"
        case "duplicate":
            return [*items, (expert, dict(items)[expert])], f"more than once: {expert}"
        case "shape":
            return [(n, t.T if n == expert else t) for n, t in items], f"{expert}.*\\(36, 22\\).*\\(22, 36\\)"
        case "dtype":
            return [(n, t.bfloat16() if n == expert else t) for n, t in items], f"{expert}.*bfloat16"
    raise AssertionError(kind)


@engines
@pytest.mark.defect("E20")
@pytest.mark.parametrize("kind", ["missing", "unknown", "duplicate", "shape", "dtype"])
def test_a_faulty_update_is_refused_until_a_complete_one(name: str, kind: str):
    items, message = broken(kind)

    async def body():
        async with serving(name, "qwen3_moe") as engine:
            await engine.begin_update()
            with pytest.raises(WeightUpdateError, match=message):
                await engine.update(items)
                await engine.end_update(4)
            assert engine.version == 3
            with pytest.raises(EngineStateError, match="update"):
                await engine.generate(requests([4])[0])
            with pytest.raises(EngineStateError, match="begin"):
                await engine.end_update(4)
            await publish(engine, checkpoint("qwen3_moe", 1), 4)
            (done,) = await answer(engine, requests([4]))
            assert done.version.tolist() == [4] * 11

    run(body())


@engines
def test_a_publisher_that_raises_leaves_nothing_served(name: str):
    def half():
        yield from list(checkpoint("qwen3", 1).items())[:4]
        raise ConnectionError("the learner died")

    async def body():
        async with serving(name) as engine:
            await engine.begin_update()
            with pytest.raises(ConnectionError):
                await engine.update(half())
            with pytest.raises(EngineStateError):
                await engine.generate(requests([4])[0])
            await publish(engine, checkpoint("qwen3", 1), 4)
            assert (await answer(engine, requests([4])))[0].finish == "length"

    run(body())


@engines
@pytest.mark.defect("E10")
def test_paused_requests_survive_a_failed_update(name: str):
    async def body():
        async with serving(name) as engine:
            running = await begun(engine, hold(requests([6])), 0.02)
            await engine.pause()
            await engine.begin_update()
            with pytest.raises(WeightUpdateError):
                await engine.end_update(4)
            with pytest.raises(EngineStateError, match="update"):
                await engine.resume()
            await publish(engine, checkpoint("qwen3", 1), 4)
            await engine.resume()
            assert len((await running)[0].tokens) == 100

    run(body())


@engines
@pytest.mark.defect("E11")
def test_an_update_forgets_keys_and_values(name: str):
    """The same dialog before and after: nothing is reused, and log-probabilities are those of the new weights."""

    async def body():
        async with serving(name) as engine:
            with engine.client():
                await engine.generate(Request("1", prompt(9), 6))
                reused = await engine.generate(Request("2", prompt(9), 6))
                await publish(engine, checkpoint("qwen3", 1), 4)
                fresh = await engine.generate(Request("3", prompt(9), 6))
                await engine.flush()
                flushed = await engine.generate(Request("4", prompt(9), 6))
            assert (reused.cached > 0) == ("prefix_cache" in engine.capabilities())
            assert (fresh.cached, flushed.cached) == (0, 0)
            assert fresh.version.tolist() == [4] * 6 and engine.version == 4
            np.testing.assert_allclose(fresh.logp, logprobs(reference("qwen3", 1), prompt(9), fresh.tokens), atol=NEAR)

    run(body())


@engines
def test_calls_out_of_order_are_refused(name: str):
    async def body():
        engine = MAKERS[name]("qwen3")
        with pytest.raises(EngineStateError, match="wake"):
            await engine.generate(requests([4])[0])
        with pytest.raises(EngineStateError, match="wake"):
            await engine.begin_update()
        await engine.wake()
        with pytest.raises(EngineStateError, match="update"):
            await engine.generate(requests([4])[0])
        with pytest.raises(EngineStateError, match="begin"):
            await engine.update([])
        await publish(engine, checkpoint("qwen3"), 5)
        await engine.begin_update()
        await engine.update(checkpoint("qwen3").items())
        with pytest.raises(WeightUpdateError, match="version is 4"):
            await engine.end_update(4)
        await engine.end_update(5)
        running = await begun(engine, hold(requests([6])), 0.02)
        for call in (engine.sleep, engine.begin_update, engine.flush):
            with pytest.raises(EngineStateError, match="in flight"):
                await call()
        await engine.pause()
        with pytest.raises(EngineStateError, match="in flight"):
            await engine.sleep()
        await engine.resume()
        await running
        with pytest.raises(ValueError, match="disk"):
            await engine.sleep(["disk"])
        await engine.close()
        for call in (engine.pause, engine.resume, engine.sleep, engine.wake, engine.begin_update, engine.flush, engine.checksum):
            with pytest.raises(EngineStateError, match="closed"):
                await call()

    run(body())


@engines
def test_sleep_and_wake(name: str):
    async def body():
        async with serving(name) as engine:
            with engine.client():
                before = await engine.generate(Request("1", prompt(9), 6, **repeatable(engine)))
                await engine.sleep(("kv_cache",))
                with pytest.raises(EngineStateError, match="kv_cache"):
                    await engine.generate(Request("2", prompt(9), 6))
                await engine.wake(("kv_cache", "cuda_graph"))
                after = await engine.generate(Request("3", prompt(9), 6, **repeatable(engine)))
            assert after.cached == 0 and same(engine, before, after)
            await engine.sleep()
            await engine.sleep()
            with pytest.raises(EngineStateError, match="weights"):
                await engine.generate(Request("4", prompt(9), 6))
            await engine.wake(("weights",))
            await publish(engine, checkpoint("qwen3"), 4)
            await engine.wake(("kv_cache",))
            again = await engine.generate(Request("5", prompt(9), 6, **repeatable(engine)))
            assert again.tokens.tolist() == before.tokens.tolist() and again.version.tolist() == [4] * 6

    run(body())
