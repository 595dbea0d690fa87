"""Drafts: what the index proposes, by hand; that the engine's answers are those without drafts; that they save steps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.protocols import Completion, Request
from mcore_agent.rollout.drafting import SuffixIndex
from mcore_agent.rollout.errors import EngineStateError
from mcore_agent.rollout.local import LocalEngine
from tests.fakes import agent_for
from tests.rollout.tiny import CONFIGS, answer, checkpoint, logprobs, prompt, publish, reference, requests, same_bits

FAMILIES = sorted(CONFIGS)


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
    return asyncio.run(asyncio.wait_for(body, 120))


# --------------------------------------------------------------------------------------------------- the index


def test_the_longest_match_wins():
    """1 2 3 came three times before 7, but 9 1 2 3 only before 8."""
    index = SuffixIndex(100)
    index.open([1, 2, 3, 7, 0, 1, 2, 3, 7, 0, 1, 2, 3, 7])
    index.open([9, 1, 2, 3, 8, 5])
    assert index.draft(index.open([9, 1, 2, 3]), 8) == [8, 5]
    assert index.draft(index.open([4, 1, 2, 3]), 1) == [7]


def test_the_most_frequent_continuation_and_of_equals_the_newest():
    index = SuffixIndex(100)
    for last in (5, 6, 5, 7, 7):
        index.open([1, 2, 3, last, last])
    assert index.draft(index.open([1, 2, 3]), 8) == [7, 7]
    index.open([1, 2, 3, 5])
    assert index.draft(index.open([1, 2, 3]), 8) == [5, 5]


def test_old_habits_are_given_up():
    """Only the two newest occurrences count: three times 5, then twice 6."""
    index = SuffixIndex(100, places=2)
    for last in (5, 5, 5, 6, 6):
        index.open([1, 2, 3, last])
    assert index.draft(index.open([1, 2, 3]), 8) == [6]


def test_a_draft_is_as_long_as_its_match():
    index = SuffixIndex(100)
    said = list(range(20))
    index.open(said)
    for match in (3, 5, 7):
        assert index.draft(index.open([99, *said[:match]]), 6) == said[match : match + min(match, 6)]
    assert index.draft(index.open([98, 0, 1]), 6) == []  # two tokens are too few
    assert index.draft(index.open(said[:5]), 0) == []


def test_a_draft_ends_where_few_agree():
    """Ten continuations of 1 2 3 4 that agree on 5 and then differ: with share 0.1 one of ten goes on, with 0.2 none does."""
    for share, expected in ((0.1, [5, 29, 69, 0]), (0.2, [5])):
        index = SuffixIndex(200, share=share)
        for i in range(20, 30):
            index.open([1, 2, 3, 4, 5, i, 40 + i, 0])
        assert index.draft(index.open([1, 2, 3, 4]), 8) == expected


def test_a_sequence_draws_on_itself():
    index = SuffixIndex(100)
    name = index.open([4, 5, 6, 7, 8])
    assert index.draft(name, 4) == []
    index.append(name, [4, 5])
    assert index.draft(name, 4) == []
    index.append(name, [6])
    assert index.draft(name, 4) == [7, 8, 4]


def test_a_dialog_goes_on_in_its_sequence():
    index = SuffixIndex(100)
    first = index.open([1, 2, 3])
    assert index.open([1, 2, 3, 4, 5], first) == first and index.size == 5
    assert index.open([1, 2, 9, 4, 5, 6], first) != first and index.size == 11  # the context was rewritten
    assert index.open([1, 2], first) != first  # shorter than what it holds


def test_the_index_is_bounded_and_forgets_the_oldest():
    index = SuffixIndex(30, places=4)
    names = [index.open([i, i + 1, i + 2, i + 3, i + 4, 50, 51, 52, 60 + i, 60]) for i in range(3)]
    index.append(names[0], [99])  # 31 tokens: sequence 1 was not extended for longest
    assert index.size == 21
    assert index.draft(index.open([1, 2, 3]), 9) != [4, 5, 50]
    for places in index._grams.values():
        assert places and {name for name, _ in places} <= set(index._sequences)
    for i in range(200):
        index.open([50, 51, 52, i % 7])
        assert index.size <= 30 and sum(map(len, index._sequences.values())) == index.size
        assert all(len(places) <= 4 for places in index._grams.values())
    assert len(index._grams) <= 30
    big = index.open(range(100, 150))  # more than the budget: it cannot stay, and is not missed
    index.append(big, [1])
    assert index.size == 0 and index._grams == {} and index.draft(big, 4) == []


def replay(index: SuffixIndex, ids: list[int], mask: np.ndarray, longest: int = 8) -> tuple[int, int, int, int]:
    """An episode as an engine would meet it. Returns tokens and steps of the policy, tokens drafted and accepted."""
    tokens = steps = drafted = accepted = 0
    name = None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        name, at = index.open(ids[: begin + 1], name), begin + 1  # the prefill gives the first token
        tokens, steps = tokens + 1, steps + 1
        while at < end:
            draft = index.draft(name, min(longest, end - at - 1))
            right = next((i for i, token in enumerate(draft) if token != ids[at + i]), len(draft))
            index.append(name, ids[at : at + right + 1])
            at, tokens, steps = at + right + 1, tokens + right + 1, steps + 1
            drafted, accepted = drafted + len(draft), accepted + right
    return tokens, steps, drafted, accepted


def episodes(count: int, shift: int = 0) -> list[tuple[list[int], np.ndarray]]:
    """Demonstrations of hop_lookup, tokenized as in a rollout; ``shift`` renames what the policy says."""
    domain = HopLookup(hops=3)
    renderer = agent_for(domain).renderer
    found = []
    for i in range(count):
        ids, mask = renderer.demo(domain.demo(domain.task("train", i), i))
        found.append((np.where(mask, ids + shift, ids).tolist(), mask))
    return found


def test_a_hundred_similar_episodes():
    """Replayed one after another from an empty index: 1.5 tokens a step or more, 2 or more once it has learned (M115)."""
    index = SuffixIndex(200_000)
    counts = np.array([replay(index, ids, mask) for ids, mask in episodes(100)])
    tokens, steps, _, _ = counts.sum(0)
    assert tokens / steps >= 1.5
    assert counts[-20:, 0].sum() / counts[-20:, 1].sum() >= 2


def test_drafts_follow_a_policy_that_shifts():
    """The policy says everything in other tokens after 60 episodes: few drafts hold at first, soon as many as before (M101)."""
    index = SuffixIndex(200_000)
    before = np.array([replay(index, ids, mask) for ids, mask in episodes(60)])
    after = np.array([replay(index, ids, mask) for ids, mask in episodes(60, shift=1000)])

    def rate(counts: np.ndarray) -> float:
        return float(counts[:, 3].sum() / counts[:, 0].sum())

    assert rate(after[:1]) < 0.6 * rate(before[-20:])
    assert rate(after[-20:]) > 0.9 * rate(before[-20:])


# -------------------------------------------------------------------------------------------------- the engine


async def dialogs(engine: LocalEngine, count: int, odd: int = 0, **fields: Any) -> list[tuple[np.ndarray, Completion]]:
    """Two-turn episodes whose prompts share structure, ``count`` at once; prompts of unequal lengths. ``odd`` is added to odd seeds."""

    async def one(i: int) -> list[tuple[np.ndarray, Completion]]:
        done = []
        with engine.client():
            tokens = np.concatenate([prompt(3 + i, i), prompt(9)])
            for turn in range(2):
                request = Request(f"{i}/{turn}", tokens, 20 + 9 * i, seed=i + odd * (i % 2), order=(i, turn), **fields)
                done.append((tokens, await engine.generate(request)))
                tokens = np.concatenate([tokens, done[-1][1].tokens, prompt(4, turn)])
        return done

    return [turn for done in await asyncio.gather(*(one(i) for i in range(count))) for turn in done]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (4, 0.0), (4, 1.0)])
def test_answers_are_those_without_drafts(family: str, rows: int, temperature: float):
    """Tokens are equal, log-probabilities are those of a forward pass, and rows of one batch accept unequal numbers.

    The second round asks the same again, with new seeds for odd rows: drafts are right to the end, or soon wrong.
    """

    async def body(drafting: bool) -> tuple[list, list[dict[str, int]]]:
        async with serving(family, drafting=drafting) as engine:
            rounds, stats = [], []
            for odd in (0, 100):
                rounds += await dialogs(engine, rows, odd, temperature=temperature, top_k=2)
                stats.append(engine.draft_stats())
            return rounds, stats

    near = 2e-5 if family == "llama" else 1e-5  # fp32 itself is 1.7e-5 from fp64 there
    plain, without = run(body(False))
    drafted, stats = run(body(True))
    for (tokens, a), (same, b) in zip(plain, drafted, strict=True):
        assert tokens.tolist() == same.tolist() and a.tokens.tolist() == b.tokens.tolist()
        assert (a.finish, a.cached) == (b.finish, b.cached)
        np.testing.assert_allclose(b.logp, logprobs(reference(family), tokens, b.tokens), atol=near)
    assert without[-1] == {"tokens": stats[-1]["tokens"], "steps": stats[-1]["tokens"], "proposed": 0, "accepted": 0}
    assert stats[-1]["tokens"] == sum(len(c.tokens) for _, c in drafted)
    assert stats[-1]["accepted"] == stats[-1]["tokens"] - stats[-1]["steps"]
    second = {key: stats[1][key] - stats[0][key] for key in stats[0]}
    assert second["tokens"] > 1.3 * second["steps"]
    assert temperature == 0 or stats[-1]["proposed"] > stats[-1]["accepted"] + 5


def test_a_stop_inside_a_draft_ends_the_answer():
    """The drafted tokens behind the stop token are not said, and the next turn goes on from the right cache."""

    async def body():
        async with serving(drafting=True) as engine:
            ask = requests([9], max_new=30)[0]
            (free,) = await answer(engine, [ask])
            at = next(i for i in range(8, 30) if free.tokens[i] not in free.tokens[:i])
            with engine.client():
                before = engine.draft_stats()
                stop = (int(free.tokens[at]),)
                stopped = await engine.generate(Request("s", ask.tokens, 30, seed=ask.seed, stop=stop))
                assert stopped.finish == "stop" and stopped.tokens.tolist() == free.tokens[: at + 1].tolist()
                assert engine.draft_stats()["steps"] - before["steps"] < len(stopped.tokens)
                longer = np.concatenate([ask.tokens, stopped.tokens, prompt(3)])
                after = await engine.generate(Request("t", longer, 12, seed=5))
                assert after.cached == 9 + at
                np.testing.assert_allclose(after.logp, logprobs(reference("qwen3"), longer, after.tokens), atol=1e-5)

    run(body())


def test_samples_with_drafts_follow_the_softmax():
    """Pearson's chi-square of the second and third token, whose drafts were checked, over 4000 seeds, at p = 0.01.

    Their joint distribution (11 × 11) is summed over all first tokens. The quantile is Wilson and Hilferty's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    vocab, draws, heat = 11, 4000, 2.5
    config = {**CONFIGS["qwen3"], "vocab_size": vocab}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval().requires_grad_(False)
    ask = np.array([3, 1, 4, 1, 5, 9])

    async def body() -> tuple[list[Completion], dict[str, int]]:
        engine = LocalEngine(config, drafting=True, draft_below=50, max_batch=50)
        await engine.wake()
        await publish(engine, model.state_dict(), 0)
        done = await answer(engine, [Request(str(i), ask, 4, seed=i, temperature=heat, order=(i,)) for i in range(draws)])
        stats = engine.draft_stats()
        await engine.close()
        return done, stats

    done, stats = run(body())
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    rows = torch.cat([torch.from_numpy(ask).expand(len(pairs), -1), pairs], 1)
    p = (model(rows).logits[:, -3:].double() / heat).softmax(-1)
    first = p[:, 0].gather(1, pairs[:, :1]) * p[:, 1].gather(1, pairs[:, 1:])  # [V * V, 1] of first and second token
    joint = (first * p[:, 2]).view(vocab, vocab, vocab).sum(0)  # [second, third]
    expected = joint.flatten().numpy() * draws
    seen = np.bincount([c.tokens[1] * vocab + c.tokens[2] for c in done], minlength=vocab * vocab)
    assert stats["accepted"] > 0.1 * draws and stats["proposed"] > 2 * stats["accepted"]  # right and wrong ones
    assert expected.min() > 5
    statistic, df = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
    assert statistic < df * (1 - 2 / (9 * df) + 2.326 * (2 / (9 * df)) ** 0.5) ** 3


def test_large_batches_and_a_switched_off_engine_draft_nothing():
    """Five rows are too many for ``draft_below`` 4 until one has finished; off means the bits of an engine without drafts."""

    async def body(on: bool, **options: Any) -> tuple[list, dict[str, int]]:
        async with serving(**options) as engine:
            if options:
                engine.drafting_on = on
            await dialogs(engine, 5, temperature=0.0)
            return await dialogs(engine, 5, temperature=0.0), engine.draft_stats()

    plain, _ = run(body(False))
    off, stats = run(body(False, drafting=True))
    assert stats["proposed"] == 0 and all(same_bits(a, b) for (_, a), (_, b) in zip(plain, off, strict=True))
    assert run(body(True, drafting=True, draft_below=5))[1]["steps"] < run(body(True, drafting=True))[1]["steps"] < stats["steps"]


def test_the_switch_needs_an_index():
    engine = LocalEngine(CONFIGS["qwen3"])
    engine.drafting_on = False
    with pytest.raises(EngineStateError, match="drafting"):
        engine.drafting_on = True
    assert not engine.drafting_on and "drafting" not in engine.capabilities()
    run(engine.close())
    for option in ("draft_below", "draft_max", "draft_budget"):
        with pytest.raises(ValueError, match=option.removeprefix("draft_")):
            LocalEngine(CONFIGS["qwen3"], drafting=True, **{option: 0})


def test_a_rerun_with_drafts_gives_the_same_bits():
    async def body() -> list[tuple[np.ndarray, Completion]]:
        async with serving(drafting=True) as engine:
            return [turn for _ in range(2) for turn in await dialogs(engine, 6, temperature=1.3)]

    assert all(same_bits(a, b) for (_, a), (_, b) in zip(run(body()), run(body()), strict=True))


def test_updates_and_retractions_meet_drafts():
    """A request that is stopped at work, once retracted and once across an update: tokens and versions have one boundary."""

    async def body(wait: float) -> tuple[Request, Completion]:
        async with serving(drafting=True) as engine:
            request = Request("r", prompt(9), 120, temperature=0.0)
            running = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(wait)
            await engine.pause("retract")
            await engine.resume()
            await asyncio.sleep(wait / 2)
            await engine.pause()
            await publish(engine, checkpoint("qwen3", 1), 1)
            await engine.resume()
            return request, await running

    wait = 0.03
    for _ in range(12):  # by the clock: it must once have met the request at work
        request, c = run(body(wait))
        boundary = int((c.version == 0).sum())
        if 0 < boundary < 120:
            break
        wait = wait / 2 if boundary else wait * 2
    assert c.version.tolist() == [0] * boundary + [1] * (120 - boundary) and 0 < boundary < 120
    old, new = (logprobs(reference("qwen3", seed), request.tokens, c.tokens) for seed in (0, 1))
    np.testing.assert_allclose(c.logp[:boundary], old[:boundary], atol=1e-5)
    np.testing.assert_allclose(c.logp[boundary:], new[boundary:], atol=1e-5)
