"""Verifiers that run or compare programs: code (M39), CodeRL (M72), PPOCoder (M73), SWE-RL (M74)."""

import ast
import threading
from dataclasses import replace

import pytest

from mcore_agent.credit.pipeline import assign
from mcore_agent.protocols import SandboxError
from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.code import Code
from mcore_agent.reward.coderl import CodeRL
from mcore_agent.reward.isolated.similarity import mean_ratio
from mcore_agent.reward.isolated.structure import compare, flows
from mcore_agent.reward.patches import PatchError, diffs, proposed
from mcore_agent.reward.pipeline import RewardError, score
from mcore_agent.reward.ppocoder import PPOCoder
from mcore_agent.reward.swe_rl import SweRL
from mcore_agent.sandbox.process import ProcessSandbox
from mcore_agent.types import Batch
from tests.reward.episodes import played
from tests.sandbox.walls import isolating

HERE = {"sandbox": "process"}  # runs everywhere
ADD = [{"call": "add", "args": [a, b], "result": sum} for a, b, sum in ((2, 3, 5), (-1, 1, 0), (7, 7, 14))]
GOOD = "def add(a, b):\n    return a + b\n"


def wrote(source: str, tests=ADD, **gold):
    return played("look", f"Here:\n```python\n{source}\n```\nDone.", gold={"tests": tests, **gold})


# ------------------------------------------------------------------------------------------------------ code


@pytest.mark.parametrize(("source", "share", "broken"), [
    (GOOD, 1, 0),
    ("def add(a, b):\n    return abs(a) + abs(b)", 2 / 3, 0),  # 2 for -1 + 1
    ("def add(a, b):\n    return 5", 1 / 3, 0),
    ("def add(a, b):\n    if a < 0:\n        while True: pass\n    return a + b", 2 / 3, 1),  # one test takes for ever
    ("def add(a, b):\n    if a == 7: raise ValueError\n    return a + b", 2 / 3, 1),
    ("def add(a, b):\n    return float(a + b)", 1, 0),
    ("def add(a, b):\n    return a + b == 5 or a + b", 2 / 3, 0),  # True is not 5
    ("def add(a, b) return a", 0, 1),
    ("def sub(a, b): return a", 0, 1),
    ("import sys\nsys.exit(0)", 0, 0),  # ends well and has shown nothing
    ("print(5)\ndef add(a, b): print(5); return None", 0, 0),
], ids=range(11))  # fmt: skip
def test_the_share_of_tests_passed(source, share, broken):
    reward = Code(limit_s=2.0, **HERE)
    scored = reward.score(wrote(source))
    assert scored.rewards == {"code": pytest.approx(share, rel=1e-12)} and scored.numbers == {"broken": broken}
    assert reward.score(wrote(source)) == scored


def test_all_or_nothing():
    reward = Code(partial=False, key="solved", **HERE)
    assert reward.score(wrote(GOOD)).rewards == {"solved": 1}
    assert reward.score(wrote("def add(a, b): return abs(a) + abs(b)")).rewards == {"solved": 0}


def test_programs_that_read_and_print():
    """Blanks at the ends of lines and of the text do not count; those within do."""
    tests = [{"input": "3\n1 2 3\n", "output": "6\n"}, {"input": "1\n9", "output": "9"}, {"input": "2\n1 1", "output": "2\n\n"}]
    source = "n = int(input())\nprint(sum(map(int, input().split())), end='  \\n\\n')"
    assert Code(**HERE).score(wrote(source, tests)).rewards == {"code": 1}
    tests = [{"input": "", "output": "a b\nc"}, {"input": "", "output": "a  b\nc"}, {"input": "", "output": "a b c"}]
    assert Code(**HERE).score(wrote("print('a b')\nprint('c')", tests)).rewards == {"code": pytest.approx(1 / 3)}


def test_an_answer_without_a_program():
    assert Code(**HERE).score(played("no program", gold={"tests": ADD})).rewards == {"code": 0}


def test_a_program_never_sees_what_is_expected():
    """It looks for 6174 in its folder, its arguments, its environment and its command line: 1 if found, else 0. 0 is right."""
    source = (
        "import glob, os, sys\ndef add(a, b):\n"
        "    files = [open(f, 'rb').read() for f in glob.glob('**', recursive=True) if os.path.isfile(f)]\n"
        "    seen = repr((files, sys.argv, dict(os.environ), open('/proc/self/cmdline', 'rb').read()))\n"
        "    return int(str(6000 + a) in seen)"
    )
    tests = [{"call": "add", "args": [174, 0], "result": value} for value in (6174, 0, 1)]
    assert Code(**HERE).score(wrote(source, tests)).rewards == {"code": pytest.approx(1 / 3)}


def test_code_in_a_sandbox_with_walls():
    isolating()
    assert Code().score(wrote(GOOD)).rewards == {"code": 1}
    peek = "import os\ndef add(a, b):\n    return a + b if not os.path.exists('/root') and not os.path.exists('/home') else 0"
    assert Code().score(wrote(peek)).rewards == {"code": 1}


def test_a_sandbox_that_fails_is_no_zero(monkeypatch):
    def broken(self, *_):
        raise SandboxError("keeper", "gone")

    monkeypatch.setattr("mcore_agent.sandbox.process.ProcessSandbox.exec", broken)
    (scored,) = score([wrote(GOOD)], [{"name": "code", **HERE}])
    assert (scored.status, scored.reason, scored.rewards) == ("infra_fail", "reward 'code': sandbox_keeper: gone", {})


def test_a_sandbox_without_python_is_no_zero():
    with pytest.raises(VerifierError, match="verifier_setup: no python9 in the sandbox"):
        Code(python="python9", **HERE).score(wrote(GOOD))


@pytest.mark.parametrize(("gold", "says"), [
    (None, "it must be a mapping"), ({}, "its gold lacks tests"), ({"tests": []}, "has no tests"), ({"tests": "x"}, "has no tests"),
    ({"tests": [{"input": "x"}]}, r"tests\[0\] is .* but has input and output"),
])  # fmt: skip
def test_a_task_without_tests_is_a_failure(gold, says):
    with pytest.raises(VerifierError, match=f"verifier_gold: .*{says}"):
        Code(**HERE).score(played("```\nx\n```", gold=gold))


@pytest.mark.parametrize("make", [Code, CodeRL, PPOCoder])
def test_settings_out_of_range(make):
    name = make.registered_name
    with pytest.raises(RewardError, match=f"reward '{name}': limit_s is 0.0, but must be above 0"):
        make(limit_s=0.0)
    with pytest.raises(RewardError, match=f"reward '{name}': sandbox is 'vm', but must be one of bubblewrap, process"):
        make(sandbox="vm")


def test_no_more_programs_run_at_once_than_there_are_cores(monkeypatch):
    """Seven episodes scored at once on two cores: two commands at a time, and the same numbers."""
    now, most, lock, real = [0], [0], threading.Lock(), ProcessSandbox.exec

    def counted(self, *given):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        try:
            return real(self, *given)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(ProcessSandbox, "exec", counted)
    monkeypatch.setattr("mcore_agent.reward.programs.cores", lambda: 2)
    scored = score([replace(wrote(GOOD), id=f"e{i}") for i in range(7)], [{"name": "code", **HERE}])
    assert [e.rewards for e in scored] == [{"code": 1}] * 7 and most == [2]


# -------------------------------------------------------------------------------------------- CodeRL, PPOCoder

FOUR = {
    "syntax": "def add(a, b) return",
    "error": "def add(a, b):\n    return a.b",
    "wrong": "def add(a, b):\n    return a - b",
    "right": GOOD,
}


def test_four_programs_four_rewards():
    """M72: -1, -.6, -.3, 1; an error in one test is an error, though others pass."""
    assert [CodeRL(**HERE).score(wrote(FOUR[kind])) for kind in FOUR] == [{"coderl": r} for r in (-1, -0.6, -0.3, 1)]
    assert CodeRL(**HERE).score(played("no program", gold={"tests": ADD})) == {"coderl": -1}
    slow = "def add(a, b):\n    if a == 7:\n        while True: pass\n    return a + b"
    assert CodeRL(limit_s=1.0, **HERE).score(wrote(slow)) == {"coderl": -0.6}


def test_the_greedy_programs_reward_is_the_baseline():
    """M72: sampled 1 and -.6 beside a greedy -.3: 1 + .3 and -.6 + .3."""
    kinds = ("right", "error", "wrong")
    made = [replace(wrote(FOUR[kind]), id=kind, branch="greedy" if kind == "wrong" else "") for kind in kinds]
    (row,) = made[2].rows
    made[2] = replace(made[2], rows=(replace(row, channels={"pg": row.sampled & False}),))
    batch = Batch(tuple(score(made, [{"name": "coderl", **HERE}])))
    advantage = assign(batch, [{"name": "remax"}]).columns["advantage"]
    # Four tokens each: prompt, action, obs, action.
    assert advantage == pytest.approx([0, 1.3, 0, 1.3, 0, -0.3, 0, -0.3, 0, 0, 0, 0], rel=1e-12)


def test_likeness_of_programs():
    """M73. Names do not count. Of ``x = 1`` the subtrees are module, assignment (two: a name alone has nothing below it)."""
    assert compare(GOOD, GOOD) == {"ast": 1, "dfg": 1}
    assert compare("def f(x, y):\n    return x + y", "def add(a, b):\n    return a + b") == {"ast": 1, "dfg": 1}
    # Both have [x = 1]; the reference has y = 2 too: subtrees module(2), assign, assign; shared: one assign of three.
    assert compare("x = 1", "x = 1\ny = 2")["ast"] == pytest.approx(1 / 3)
    # b from a, then b from b and from c. The other: b from a only: 1 of 3.
    assert sorted(flows(ast.parse("b = a\nb += c"))) == [(0, 0), (0, 1), (0, 2)]
    assert compare("q = p", "b = a\nb += c")["dfg"] == pytest.approx(1 / 3)
    # i 0 from xs 1; y 2 from i; z 3 from j 4, j and y; j from y.
    found = flows(ast.parse("for i in xs:\n    y: int = i\nz = [j for j in y]"))
    assert found == [(0, 1), (2, 0), (3, 4), (3, 4), (3, 2), (4, 2)]
    assert compare("def f(:", GOOD) is None
    deep = compare("x = " + "-" * 5000 + "1", GOOD)  # whether the parser takes it is its own affair
    assert deep is None or deep["dfg"] == 1
    assert compare("x = " + "1 + " * 900 + "1", GOOD)["dfg"] == 1


def test_ppocoder_is_monotone():
    """M73: pass > fails a test > an error or none > no Python; the last has no likeness. KL is a shaping of its own.

    ``a - b`` beside ``a + b``: subtrees module, function, arguments, return, binary operation: only arguments is shared (1/5).
    """
    gold = {"solution": GOOD}
    got = {kind: PPOCoder(**HERE).score(wrote(source, **gold)) for kind, source in FOUR.items()}
    assert got["right"] == {"fate": 1, "ast": 0.5, "dfg": 0.5}
    assert got["wrong"] == {"fate": -0.3, "ast": pytest.approx(0.5 / 5), "dfg": 0.5}  # no flow in the reference: nothing is missing
    assert got["syntax"] == {"fate": -1, "ast": 0, "dfg": 0}
    total = {kind: sum(parts.values()) for kind, parts in got.items()}
    assert total["right"] > total["wrong"] > total["error"] > total["syntax"]
    # The most that a wrong program can get, the least that a right one can: -.3 + 1 < 1.
    same = wrote(GOOD, [*ADD, {"call": "add", "args": [1, 1], "result": 3}], **gold)
    assert sum(PPOCoder(**HERE).score(same).values()) == pytest.approx(0.7)


def test_ppocoder_refuses_weights_that_outweigh_tests():
    with pytest.raises(RewardError, match=r"ast is 0.8 and dfg 0.5, but both must be at least 0 and their sum below 1.3"):
        PPOCoder(ast=0.8, dfg=0.5)
    with pytest.raises(VerifierError, match="verifier_gold: task 'task of e': its gold lacks solution"):
        PPOCoder(**HERE).score(wrote(GOOD))
    with pytest.raises(VerifierError, match="verifier_crash: SyntaxError"):
        PPOCoder(**HERE).score(wrote(GOOD, solution="def ("))


# --------------------------------------------------------------------------------------------------- SWE-RL

FILES = {"a.py": "one\ntwo\nthree\n", "lib/b.py": "x = 1\ny = 2\n"}


def block(path: str, old: str, new: str) -> str:
    return f"### {path}\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n"


def fixes(*blocks: str, patched=None, **gold):
    text = "<think>hm</think>\n" + "\n".join(blocks)
    return played("look", text, gold={"files": FILES, "patched": patched or {"a.py": "one\n2\nthree\n"}, **gold})


def test_f20_similarity_by_hand():
    """``abcd`` and ``abcf``: 3 equal characters, 2 * 3 / 8 = .75; a second file that one lacks: (.75 + 0) / 2."""
    assert mean_ratio({"f": "abcd"}, {"f": "abcf"}) == 0.75
    assert mean_ratio({"f": "abcd"}, {"f": "abcf", "g": "z"}) == mean_ratio({"f": "abcd", "g": "z"}, {"f": "abcf"}) == 0.375
    assert mean_ratio({}, {}) == 1 and mean_ratio({"f": "x"}, {}) == 0 and mean_ratio({"f": "", "g": "q"}, {"f": "", "g": "q"}) == 1
    # A character of more than 1 % of 200 or more is not taken for noise: equal halves of 300 give 2 * 300 / 700.
    assert mean_ratio({"f": "a" * 300}, {"f": "a" * 400}) == pytest.approx(600 / 700)


def test_reading_and_applying_edits():
    assert proposed(block("a.py", "two\n", "2\n2b\n") + block("lib/b.py", "x = 1\ny = 2\n", ""), FILES) == {
        "a.py": "one\n2\n2b\nthree\n", "lib/b.py": "",
    }  # fmt: skip
    assert proposed(block("new.py", "", "n\n"), FILES) == {**FILES, "new.py": "n\n"}
    assert proposed(block("a.py", "two\n", "2\n") + block("a.py", "2\n", "II\n"), FILES)["a.py"] == "one\nII\nthree\n", "in their order"
    assert proposed(block("t", "b\n", "c\n"), {"t": "a\nb"}) == {"t": "a\nc\n"}, "a last line without an end"
    assert proposed(block("t", "b\n", "c\n"), {"t": "bb\nb\nb\n"}) == {"t": "bb\nc\nb\n"}, "whole lines, the first such"


@pytest.mark.parametrize(("text", "says"), [
    ("I would change two to 2.", "no block"),
    (block("a.py", "two\n", "two\n"), "an edit changes nothing"),
    (block("a.py", "four\n", "4\n"), "the lines to replace are not there"),
    (block("a.py", "wo\n", "4\n"), "the lines to replace are not there"),
    (block("c.py", "two\n", "2\n"), "c.py does not exist"),
    (block("a.py", "", "2\n"), "nothing to search for"),
    (block("../a.py", "", "2\n"), "leads out"), (block("/etc/cron", "", "2\n"), "leads out"),
    (block("a.py", "two\n", "2\n") + "### a.py\n<<<<<<< SEARCH\none\n", "not complete"),
    (block("a.py", "two\n", "2\n").replace("=======\n", ""), "no block"),
])  # fmt: skip
def test_proposals_that_are_worth_minus_one(text, says):
    with pytest.raises(PatchError, match=says):
        proposed(text, FILES)
    assert SweRL().score(fixes(text)).rewards == {"swe_rl": -1}
    assert SweRL(wrong=0.0).score(fixes(text)).numbers == {"applies": 0}


def test_likeness_of_patches():
    right = block("a.py", "two\n", "2\n")
    assert SweRL().score(fixes(right)).rewards == {"swe_rl": 1}
    # Two files, of which the answer changes one in the same way.
    both = {"a.py": "one\n2\nthree\n", "lib/b.py": "x = 1\ny = 3\n"}
    assert SweRL().score(fixes(right, patched=both)).rewards == {"swe_rl": 0.5}
    assert SweRL().score(fixes(right, block("new.py", "", "n\n"))).rewards == {"swe_rl": 0.5}
    # "@@ -1,3 +1,3 @@", " one", "-two", "+2", " three" and 4 ends of lines: 15 + 4 + 4 + 2 + 6 + 4 = 35, of which one is another.
    wanted, found = diffs(FILES, {**FILES, "a.py": "one\n2\nthree\n"}), diffs(FILES, {**FILES, "a.py": "one\n9\nthree\n"})
    assert wanted == {"a.py": "@@ -1,3 +1,3 @@\n one\n-two\n+2\n three"}
    assert len(wanted["a.py"]) == len(found["a.py"]) == 35
    assert SweRL().score(fixes(block("a.py", "two\n", "9\n"))).rewards == {"swe_rl": pytest.approx(2 * 34 / 70)}
    # Edits that undo each other change nothing, which is nothing like a patch; and like no patch, all.
    undone = block("a.py", "two\n", "2\n"), block("a.py", "2\n", "two\n")
    assert SweRL().score(fixes(*undone)).rewards == {"swe_rl": 0}
    assert SweRL().score(fixes(*undone, patched=dict(FILES))).rewards == {"swe_rl": 1}


def test_with_tests():
    """``w * likeness + (1 - w) * pass``. A wrong edit of the right line: likeness s < 1, the test fails: w * s alone."""
    gold = {"tests": {"check.py": "assert open('a.py').read().split()[1] == '2'"}, "command": ["python3", "check.py"]}
    reward = SweRL(weight=0.6, **HERE)
    good, bad = fixes(block("a.py", "two\n", "2\n"), **gold), fixes(block("a.py", "two\n", "9\n"), **gold)
    assert reward.score(good).rewards == {"swe_rl": pytest.approx(0.6 + 0.4)}
    alike = SweRL().score(bad).rewards["swe_rl"]
    assert reward.score(bad).rewards == {"swe_rl": pytest.approx(0.6 * alike)}
    outcome = SweRL(weight=0.0, wrong=0.0, **HERE)
    assert [outcome.score(e).rewards["swe_rl"] for e in (good, bad, fixes("none", **gold))] == [1, 0, 0]
    # It passes by other means than the right patch: likeness below 1, test 1.
    other = fixes(block("a.py", "one\ntwo\nthree\n", "1 2 3\n"), **gold)
    assert outcome.score(other).rewards == {"swe_rl": 1} and SweRL().score(other).rewards["swe_rl"] < 1


def test_a_patch_cannot_change_the_tests():
    gold = {"tests": {"check.py": "raise SystemExit(1)"}, "command": ["python3", "check.py"]}
    assert SweRL(weight=0.0, **HERE).score(fixes(block("check.py", "", "pass\n"), **gold)).rewards == {"swe_rl": 0}


def test_swe_failures_and_settings():
    with pytest.raises(VerifierError, match="verifier_setup: no pytest9 in the sandbox"):
        SweRL(weight=0.0, **HERE).score(fixes(block("a.py", "two\n", "2\n"), tests={}, command=["pytest9"]))
    with pytest.raises(VerifierError, match="its gold lacks command, tests"):
        SweRL(weight=0.5, **HERE).score(fixes("x"))
    for fields, says in [({"weight": 1.5}, "weight is 1.5"), ({"wrong": 0.5}, "wrong is 0.5"), ({"limit_s": 0.0}, "limit_s is 0.0")]:
        with pytest.raises(RewardError, match=f"reward 'swe_rl': {says}"):
            SweRL(**fields)
