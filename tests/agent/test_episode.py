"""Playing one episode: what was sampled, what was not, how it ends, and what is nobody's fault but the machinery's."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from mcore_agent.agent.episode import EngineFault, Limits, Sampling, play
from mcore_agent.protocols import Completion, InfraError, Request
from mcore_agent.types import Episode
from tests.agent.toy import Toy, random_script, told
from tests.fakes import FakeEngine, agent_for, completion, hop_tokenizer, scripted

CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "bl"}}</tool_call>'
TOKENIZER = hop_tokenizer()
DEFAULT = Sampling()


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def run(domain, policy, sampling=DEFAULT, seed=3, engine=None, **limits) -> Episode:
    engine = engine or FakeEngine(policy)
    task = domain.task("train", 0)
    playing = play(task, domain, engine.generate, agent_for(domain, **limits), sampling, seed=seed, group="g", episode="e", order=(4,))
    return asyncio.run(playing)


def always(observation, *, fail_close=None) -> Toy:
    return Toy(lambda task: lambda turn, action: observation, fail_close=fail_close)


def random_policy(request: Request) -> Completion:
    """Text, calls, broken calls and junk ids, from the request's seed. Every tenth turn never ends."""
    r = Random(request.seed)
    kind = r.randrange(10)
    if kind < 6:
        tokens = encode(r.choice([CALL, CALL + CALL, CALL[:-13], "k é🙂", "<answer>bl</answer>", ""]))
    else:
        tokens = [r.choice([t for t in range(len(TOKENIZER)) if t not in request.stop]) for _ in range(r.randint(0, 20))]
    return completion(request, [*tokens, request.stop[0]] if kind < 9 else [5] * request.max_new, version=r.randint(0, 3))


# ------------------------------------------------------------------------------------------------ properties


@pytest.mark.defect("C5")
@pytest.mark.parametrize("block", range(8))
def test_rows_hold_what_the_engine_saw_and_said(block: int):
    """I1, I2, I3 over 200 random episodes: prompts are prefixes of the row, and its sampled part is the answers."""
    for seed in range(25 * block, 25 * block + 25):
        domain = Toy(lambda task, seed=seed: random_script(Random(seed)))
        engine = FakeEngine(random_policy)
        episode = run(domain, None, seed=seed, engine=engine, max_tokens=400, max_turns=6, max_new=50)
        [row] = episode.rows
        answers = [engine.answers[f"e/{i}"][0] for i in range(len(episode.turns))]
        assert len(engine.requests) == len(answers)
        for name in ("tokens", "logp", "version"):
            said = np.concatenate([getattr(a, name) for a in answers])
            assert np.array_equal(getattr(row, name)[row.sampled], said)
        assert (row.logp[row.sampled] < 0).all() and (row.version[row.sampled] >= 0).all()
        assert episode.sampled_tokens == sum(len(a.tokens) for a in answers)
        assert len(row) <= 400
        # Segments tile the row; the sampled ones are exactly the actions and answers.
        assert [s.start for s in row.segments] == [0, *[s.end for s in row.segments[:-1]]] and row.segments[-1].end == len(row)
        for s in row.segments:
            assert row.sampled[s.start : s.end].all() == row.sampled[s.start : s.end].any() == (s.kind in ("action", "answer"))
        # No request was rendered anew: each is the row up to its turn.
        for i, segment in enumerate(s for s in row.segments if s.kind in ("action", "answer")):
            assert segment.turn == i
            assert np.array_equal(engine.requests[f"e/{i}"][0].tokens, row.tokens[: segment.start])
        assert domain.envs[0].closed == 1


@pytest.mark.defect("C1")
def test_a_row_is_the_full_render_of_its_dialog():
    """Where the policy writes text as the tokenizer would, the finished row and the template agree to the token."""
    checked = 0
    for seed in range(200):
        domain = Toy(lambda task, seed=seed: random_script(Random(seed)))

        def policy(request: Request) -> Completion:
            text = Random(request.seed).choice([CALL, CALL + CALL, "k é🙂", "<answer>bl</answer>"])
            return completion(request, [*encode(text), request.stop[0]])

        episode = run(domain, policy, seed=seed)
        agent, dialog = agent_for(domain), list(episode.task.messages)
        for turn, reply in zip(episode.turns, [*domain.envs[0].replies[: len(episode.turns) - 1], None], strict=True):
            dialog += [{"role": "assistant", "content": turn.action}, *(reply.messages if reply else ())]
        whole = encode(agent.renderer.text(dialog, prompt=False))
        assert whole == [*episode.rows[0].tokens, *encode("\n")]
        # A demonstration of the same dialog is laid out the same, and its mask is what was sampled.
        tokens, trained = agent.renderer.demo(dialog)
        assert np.array_equal(tokens, episode.rows[0].tokens) and np.array_equal(trained, episode.rows[0].sampled)
        checked += len(episode.turns) > 1
    assert checked > 100


def test_two_turns_written_out():
    domain = Toy(lambda task: lambda turn, action: told("bm") if turn == 0 else told(done=True, reward=1.0))
    episode = run(domain, scripted(TOKENIZER, [CALL, "<answer>bm</answer>"]))
    prompt = encode("<|im_start|>user\ntask 0<|im_end|>\n<|im_start|>assistant\n")
    obs = encode("\n<|im_start|>tool\nbm<|im_end|>\n<|im_start|>assistant\n")
    call, answer, end = encode(CALL), encode("<answer>bm</answer>"), encode("<|im_end|>")
    row = episode.rows[0]
    assert list(row.tokens) == prompt + call + end + obs + answer + end
    mask = [0] * len(prompt) + [1] * (len(call) + 1) + [0] * len(obs) + [1] * (len(answer) + 1)
    assert list(row.sampled) == [bool(m) for m in mask]
    assert [(s.turn, s.kind, s.end - s.start) for s in row.segments] == [
        (-1, "prompt", len(prompt)),
        (0, "action", len(call) + 1),
        (0, "obs", len(obs)),
        (1, "answer", len(answer) + 1),
    ]
    assert (episode.status, episode.reason, episode.group, episode.id, episode.seed) == ("ok", "", "g", "e", 3)
    first, second = episode.turns
    assert (first.action, first.state_key, first.history) == (CALL, "start", ())
    assert (second.action, second.state_key, second.history) == ("<answer>bm</answer>", "bm", ("start",))
    assert second.feedback.reward == 1.0


def test_requests_carry_the_sampling_and_seeds_of_their_turn():
    engine = FakeEngine(scripted(TOKENIZER, [CALL, CALL, "x"] * 2))
    domain = Toy(lambda task: lambda turn, action: told("bm", done=turn == 2))
    run(domain, None, Sampling(0.7, 0.9, 20), engine=engine, max_new=40)
    requests = [engine.requests[f"e/{i}"][0] for i in range(3)]
    assert {(r.temperature, r.top_p, r.top_k, r.max_new) for r in requests} == {(0.7, 0.9, 20, 40)}
    assert [r.order for r in requests] == [(4, 0), (4, 1), (4, 2)]
    assert {r.session for r in requests} == {"e@3"}
    seeds = [r.seed for r in requests]
    assert len(set(seeds)) == 3
    run(domain, None, seed=4, engine=engine)
    assert not {engine.requests[f"e/{i}"][1].seed for i in range(3)} & set(seeds)
    assert len(set(domain.seeds)) == 2


# --------------------------------------------------------------------------------------------------- endings


@pytest.mark.defect("C3")
def test_an_end_token_is_trained_when_sampled_and_never_invented():
    stopped = run(always(told(done=True)), scripted(TOKENIZER, ["x"]))
    assert stopped.rows[0].tokens[-1] == TOKENIZER.eos_token_id and stopped.rows[0].sampled[-1]
    cut = run(always(told(done=True)), lambda request: completion(request, encode("k") * 99), max_new=7)
    assert (cut.status, cut.reason) == ("truncated", "max_new")
    assert TOKENIZER.eos_token_id not in cut.rows[0].tokens[cut.rows[0].sampled]
    assert cut.sampled_tokens == 7
    assert cut.turns[0].action == "k" * 7


def test_a_turn_that_was_cut_is_not_played():
    domain = always(told(done=True, reward=1.0))
    episode = run(domain, lambda request: completion(request, encode(CALL) * 9), max_new=20)
    assert domain.envs[0].actions == [] and domain.envs[0].closed == 1
    assert episode.turns[0].feedback.reward == 0


def test_turn_budget():
    domain = always(told("bm"))
    episode = run(domain, scripted(TOKENIZER, [CALL] * 9), max_turns=3)
    assert (episode.status, episode.reason, len(episode.turns)) == ("truncated", "max_turns", 3)
    assert episode.rows[0].sampled[-1]  # nothing after the last turn: no one reads it


def test_token_budget():
    call, obs = len(encode(CALL)) + 1, len(encode("\n<|im_start|>tool\nbm<|im_end|>\n<|im_start|>assistant\n"))
    prompt = len(encode("<|im_start|>user\ntask 0<|im_end|>\n<|im_start|>assistant\n"))
    two = prompt + 2 * call + obs
    ends = {}
    for budget in (prompt - 1, prompt, prompt + call - 1, prompt + call, prompt + call + obs, two - 1, two):
        domain = Toy(lambda task: lambda turn, action: told("bm", done=turn == 1))
        episode = run(domain, scripted(TOKENIZER, [CALL] * 2), max_tokens=budget)
        assert len(episode.rows[0]) <= max(budget, prompt)
        assert domain.envs[0].closed == 1
        ends[budget] = (episode.status, episode.reason, len(episode.turns))
    assert list(ends.values()) == [
        ("truncated", "prompt_overflow", 0),
        ("truncated", "prompt_overflow", 0),
        ("truncated", "max_tokens", 1),
        ("truncated", "obs_overflow", 1),
        ("truncated", "obs_overflow", 1),  # room for the observation, none for a reply
        ("truncated", "max_tokens", 2),
        ("ok", "", 2),
    ]


def test_limits_that_allow_nothing_are_refused():
    for name in ("max_turns", "max_new", "max_tokens"):
        with pytest.raises(ValueError, match=f"Limits.{name} is 0; give at least 1"):
            Limits(**{"max_turns": 1, "max_new": 1, "max_tokens": 1, name: 0})


# -------------------------------------------------------------------------------------------------- failures


def raising(error: Exception):
    def step(turn, action):
        raise error

    return Toy(lambda task: step)


def assert_failed(episode: Episode, reason: str):
    assert (episode.status, episode.reason) == ("infra_fail", reason)
    assert episode.rows == () and episode.turns == () and episode.rewards == {}
    assert (episode.id, episode.group, episode.task.id) == ("e", "g", "toy/train/0")


@pytest.mark.defect("H4")
def test_an_environment_that_fails_is_no_zero_reward():
    domain = raising(InfraError("no container"))
    assert_failed(run(domain, scripted(TOKENIZER, [CALL])), "env_error: no container")
    assert domain.envs[0].closed == 1
    zero = run(always(told(done=True, reward=0.0)), scripted(TOKENIZER, ["x"]))
    assert (zero.status, zero.turns[0].feedback.reward) == ("ok", 0.0)


@pytest.mark.defect("H4")
@pytest.mark.parametrize("finish", ["error", "abort"])
def test_an_engine_that_fails_is_no_zero_reward(finish: str):
    none = np.array([])
    domain = always(told("bm"))
    texts = iter([CALL])

    def policy(request: Request) -> Completion:
        for text in texts:
            return completion(request, [*encode(text), request.stop[0]])
        return Completion(none, none, none, finish, error="out of memory")

    assert_failed(run(domain, policy), f"engine_{finish}: out of memory")
    assert domain.envs[0].closed == 1


def test_an_engine_that_cannot_be_reached():
    def policy(request):
        raise InfraError("connection refused")

    assert_failed(run(always(told("bm")), policy), "engine_error: connection refused")


@pytest.mark.parametrize(
    "error",
    [
        "prompt of 9 and max_new 7 exceed the context of 12",
        "Requested token count exceeds the model's maximum context length of 12 tokens.",
        "The input (13 tokens) is longer than the model's context length (12 tokens).",
        "context_overflow: 13 tokens",
    ],
)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_request_that_the_model_cannot_hold_ends_the_episode_as_truncated(error: str, turn: int):
    none = np.array([])
    domain = always(told("bm"))

    def policy(request: Request) -> Completion:
        if request.id == f"e/{turn}":
            return Completion(none, none, none, "error", error=error)
        return completion(request, [*encode(CALL), request.stop[0]])

    episode = run(domain, policy)
    assert (episode.status, episode.reason, len(episode.turns)) == ("truncated", "context_overflow", turn)
    assert episode.sampled_tokens == turn * (len(encode(CALL)) + 1) and domain.envs[0].closed == 1


def test_the_engine_need_not_wait_during_calls_of_the_environment():
    """``away`` is entered around reset, every step and close, and never while a request is made."""
    inside, seen = [0], []

    @contextmanager
    def away():
        inside[0] += 1
        yield
        inside[0] -= 1

    domain = Toy(lambda task: lambda turn, action: (seen.append(("step", inside[0])), told("bm", done=turn == 1))[1])
    make = domain.make

    def watched(task, seed):
        env = make(task, seed)
        reset, close = env.reset, env.close

        async def at_reset():
            seen.append(("reset", inside[0]))
            return await reset()

        async def at_close():
            seen.append(("close", inside[0]))
            await close()

        env.reset, env.close = at_reset, at_close
        return env

    domain.make = watched

    async def generate(request: Request) -> Completion:
        seen.append(("ask", inside[0]))
        return completion(request, [*encode(CALL), request.stop[0]])

    task = domain.task("train", 0)
    asyncio.run(play(task, domain, generate, agent_for(domain), DEFAULT, seed=0, group="g", episode="e", away=away))
    assert seen == [("reset", 1), ("ask", 0), ("step", 1), ("ask", 0), ("step", 1), ("close", 1)] and inside == [0]


def test_failures_of_making_and_closing():
    broken = Toy(lambda task: None)
    broken.make = lambda task, seed: (_ for _ in ()).throw(InfraError("no image"))
    assert_failed(run(broken, None), "env_error: no image")
    assert_failed(run(always(told(done=True), fail_close=InfraError("stuck")), scripted(TOKENIZER, ["x"])), "env_error: stuck")


def test_a_slow_environment_times_out():
    domain = always(told("bm"))
    make = domain.make

    def slow(task, seed):
        env = make(task, seed)

        async def step(action):
            await asyncio.sleep(60)

        env.step = step
        return env

    domain.make = slow
    assert_failed(run(domain, scripted(TOKENIZER, [CALL]), env_timeout_s=0.05), "env_timeout: no answer within 0.05 s")
    assert domain.envs[0].closed == 1


@pytest.mark.parametrize("fail_close", [None, InfraError("stuck")])
def test_a_fault_of_the_program_propagates_after_the_environment_is_closed(fail_close):
    domain = raising(KeyError("bug"))
    domain.fail_close = fail_close
    with pytest.raises(KeyError, match="bug"):
        run(domain, scripted(TOKENIZER, [CALL]))
    assert domain.envs[0].closed == 1


def test_cancellation_closes_the_environment():
    domain = always(told("bm"))

    async def main():
        engine = FakeEngine(scripted(TOKENIZER, [CALL]))
        await engine.pause()
        task = asyncio.create_task(
            play(domain.task("train", 0), domain, engine.generate, agent_for(domain), Sampling(), seed=0, group="g", episode="e")
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert domain.envs[0].closed == 1


@pytest.mark.defect("C15")
@pytest.mark.defect("C19")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": np.zeros(2, dtype=np.float32)}, "3 tokens .* 2 logp"),
        ({"version": np.zeros(0, dtype=np.int32)}, "0 versions"),
        ({"tokens": np.array([]), "logp": np.array([]), "version": np.array([])}, "0 tokens"),
        ({"finish": "stop", "tokens": np.array([5, 6, 7])}, "stopped at token 7"),
        ({"finish": "eos"}, "finish is 'eos'"),
    ],
)
def test_an_engine_that_breaks_its_protocol_is_a_fault(change: dict, message: str):
    def policy(request: Request) -> Completion:
        return replace(completion(request, [5, 6, request.stop[0]]), **change)

    with pytest.raises(EngineFault, match=message):
        run(always(told("bm")), policy)


def test_malformed_calls_reach_the_environment_and_the_episode_goes_on():
    domain = Toy(lambda task: lambda turn, action: told("error" if action.calls[0].error else "bm", done=turn == 2))
    episode = run(domain, scripted(TOKENIZER, [CALL[:-13], CALL.replace("bl", '"'), CALL]))
    errors = [action.calls[0].error for action in domain.envs[0].actions]
    assert [bool(e) for e in errors] == [True, True, False]
    assert episode.status == "ok" and len(episode.turns) == 3
