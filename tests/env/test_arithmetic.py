"""Sums: the graded reward and the tasks."""

import asyncio

import pytest

from mcore_agent.env.arithmetic import SumReply, brevity
from mcore_agent.protocols import Action


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [
        ("12", "12", 1.0),
        (" 12\n", "12", 1.0),
        ("12.", "12", 0.5 + 0.5 * 11 / 12),
        ("5 + 7 = 12", "12", 0.5 + 0.5 * 4 / 12),  # 8 characters too many
        ("The answer is 12", "12", 0.5),  # 14 too many
        ("The answer to this is surely 12", "12", 0.5),
        ("112", "12", 0.0),
        ("13", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_reward(reply: str, answer: str, expected: float):
    assert brevity(reply, answer) == pytest.approx(expected)


def test_tasks():
    domain = SumReply(largest=30)
    for i in range(50):
        task = domain.task("train", i)
        system, user = task.messages
        words = user["content"].split()
        x, y = int(words[5]), int(words[7])
        assert system == {"role": "system", "content": "You are a calculator."}
        assert user["content"] == f"Reply with only a number. {x} + {y} ="
        assert task.gold == str(x + y) and 1 <= x <= 30 and 1 <= y <= 30


def test_one_reply_ends_it():
    async def main():
        domain = SumReply()
        env = domain.make(task := domain.task("eval", 3), 0)
        assert not (await env.reset()).done
        return await env.step(Action(task.gold))

    obs = asyncio.run(main())
    assert obs.done and obs.messages == () and obs.feedback.reward == 1.0


def test_worked_examples_come_first():
    messages = SumReply(shots=2).task("train", 0).messages
    assert [m["content"] for m in messages[1:5]] == [
        "Reply with only a number. 2 + 2 =", "4", "Reply with only a number. 3 + 3 =", "6",
    ]  # fmt: skip
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user"]


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="largest is 0"):
        SumReply(largest=0)
    with pytest.raises(ValueError, match="shots is -1"):
        SumReply(shots=-1)
