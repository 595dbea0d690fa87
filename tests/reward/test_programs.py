"""Verifiers that run or compare programs: code (M39), CodeRL (M72), PPOCoder (M73), SWE-RL (M74)."""

import ast
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from mcore_agent.credit.pipeline import assign
from mcore_agent.protocols import Ran, SandboxError
from mcore_agent.reward.children import VerifierError
from mcore_agent.reward.code import Code
from mcore_agent.reward.coderl import CodeRL
from mcore_agent.reward.isolated.similarity import mean_ratio
from mcore_agent.reward.isolated.structure import compare, flows
from mcore_agent.reward.patches import PatchError, diffs, proposed
from mcore_agent.reward.pipeline import RewardError, score
from mcore_agent.reward.ppocoder import PPOCoder
from mcore_agent.reward.swe_rl import ONE, SweRL
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
    reward = Code(limit_s=2.0 if "while True" in source else 20.0, **HERE)
    scored = reward.score(wrote(source))
    assert scored.rewards == {"code": pytest.approx(share, rel=1e-12)} and scored.numbers == {"broken": broken}
    assert reward.score(wrote(source)) == scored


@pytest.mark.parametrize("source", [
    "import os\nos._exit(0)",
    "import sys\ndef add(a, b): sys.exit(0)",
    "import os\ndef add(a, b): os._exit(0)",
    "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return None",
    # It knows the word that marks a value, but no value.
    "import __main__, os\nfor word in ('5 passed', 'true', '\"pass\"', 'null'): print('\\n' + __main__.asked['mark'] + word)\n"
    "import sys; sys.stdout.flush(); os._exit(0)",
    "class Same:\n    def __eq__(self, other): return True\ndef add(a, b): return Same()",
    "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Same(99)",
], ids=["at once", "exit", "_exit", "atexit", "mark", "equal to all", "a number equal to all"])  # fmt: skip
def test_a_program_that_ends_early_or_claims_success_passes_nothing(source):
    tests = [*ADD[:2], {"input": "3\n", "output": "6\n"}]
    assert Code(limit_s=20.0, **HERE).score(wrote(source, tests)).rewards == {"code": 0}


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


def fixes(*blocks: str, **gold):
    text = "<think>hm</think>\n" + "\n".join(blocks)
    return played("look", text, gold={"files": FILES, "patched": {"a.py": "one\n2\nthree\n"}, **gold})


def test_similarity_by_hand():
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


RIGHT = block("a.py", "two\n", "2\n")
WORDS = "import unittest\nclass T(unittest.TestCase):\n"
SECOND = "    assert open('a.py').read().split()[1] == '2'\n"
SUITE_OF_3 = {
    "test_a.py": f"{WORDS}  def test_one(self):\n{SECOND}  def test_two(self):\n    pass\n\ndef test_three():\n    assert 1 + 1 == 2\n"
}


def test_with_tests():
    """``w * likeness + (1 - w) * pass``. A wrong edit of the right line: likeness s < 1, the test fails: w * s alone."""
    gold = {"tests": SUITE_OF_3, "counts": {"test_a.py": 3}}
    reward = SweRL(weight=0.6, **HERE)
    good, bad = fixes(RIGHT, **gold), fixes(block("a.py", "two\n", "9\n"), **gold)
    assert reward.score(good).rewards == {"swe_rl": pytest.approx(0.6 + 0.4)}
    alike = SweRL().score(bad).rewards["swe_rl"]
    assert reward.score(bad).rewards == {"swe_rl": pytest.approx(0.6 * alike)}
    outcome = SweRL(weight=0.0, wrong=0.0, **HERE)
    assert [outcome.score(e).rewards["swe_rl"] for e in (good, bad, fixes("none", **gold))] == [1, 0, 0]
    # It passes by other means than the right patch: likeness below 1, test 1.
    other = fixes(block("a.py", "one\ntwo\nthree\n", "1 2 3\n"), **gold)
    assert outcome.score(other).rewards == {"swe_rl": 1} and SweRL().score(other).rewards["swe_rl"] < 1


# What a patch may put into the module that the tests import. Each ends the tests early, and looks like success.
EARLY = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "within a test": "import os\ndef f():\n    os._exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f():\n    return 1",
    "a thread": "import os, threading\nthreading.Timer(.1, os._exit, (0,)).start()\ndef f():\n    import time; time.sleep(9)",
    "the words of success": "import os\ndef f():\n    for i in range(3, 99):\n        try: os.write(i, b'3\\nOK 3\\n')\n"
    "        except OSError: pass\n    print('OK', 3, '3 passed')\n    os._exit(0)",
    "an exec": "import os\ndef f():\n    os.execvp('true', ['true'])",
    "what others know": "import os\ndef f():\n  for pid in (1, os.getppid()):\n    for name in ('fd/0', 'cmdline', 'environ'):\n"
    "      try:\n        said = open(f'/proc/{pid}/{name}', 'rb').read().split(b'\\n')[0] + b'\\n'\n"
    "        with open(f'/proc/{pid}/fd/1', 'wb') as out: out.write(said)\n"
    "      except OSError: pass\n  os._exit(0)",
}
CALLS = "from lib import b\n\ndef test_one():\n    assert b.f() == 2\n\ndef test_two():\n    pass\n\ndef test_three():\n    pass\n"


@pytest.mark.parametrize("trick", EARLY)
def test_a_patch_that_ends_the_tests_early_does_not_pass(trick):
    patched = {"lib/b.py": "def f():\n    return 2\n"}
    gold = {"tests": {"test_b.py": CALLS}, "counts": {"test_b.py": 3}, "patched": patched}
    edit = block("lib/b.py", FILES["lib/b.py"], EARLY[trick] + "\n")
    scored = SweRL(weight=0.0, wrong=0.0, limit_s=30.0, **HERE).score(fixes(edit, **gold))  # tries the right patch first
    assert scored.rewards == {"swe_rl": 0} and scored.numbers == {"applies": 1}


@pytest.mark.parametrize(("text", "passes"), [
    ("read word\npython3 -c 'open(\"a.py\")' < /dev/null && echo done && echo $word", 1),
    ("cat > /dev/null\nexit 0", 0), ("read word; echo $word; exit 1", 0), ("read word; echo $word; echo more", 0), ("echo word", 0),
])  # fmt: skip
def test_a_command_proves_with_a_word_that_it_came_to_its_end(text, passes):
    gold = {"tests": {"check.sh": text}, "command": ["sh", "check.sh"]}
    reward = SweRL(weight=0.0, wrong=0.0, **HERE)
    reward._proved.add("task of e")
    assert reward.score(fixes(RIGHT, **gold)).rewards == {"swe_rl": passes}


def test_files_of_bare_assertions_and_several_files():
    """Two files: 3 tests and bare assertions, which are none; a count that is not reached, or more than that, is not it."""
    tests = {**SUITE_OF_3, "deep/check.py": f"if True:\n{SECOND}"}
    for counts, passes in [
        ({"test_a.py": 3, "deep/check.py": 0}, 1),
        ({"test_a.py": 2}, 0),
        ({"test_a.py": 4}, 0),
        ({"deep/check.py": 1}, 0),
    ]:
        reward = SweRL(weight=0.0, **HERE)
        reward._proved.add("task of e")
        assert reward.score(fixes(RIGHT, tests=tests, counts=counts)).rewards == {"swe_rl": passes}, counts


def test_a_patch_cannot_change_the_tests():
    gold = {"tests": SUITE_OF_3, "counts": {"test_a.py": 3}}
    wrong, reward = block("a.py", "two\n", "9\n"), SweRL(weight=0.0, **HERE)
    pretend = "\n".join(f"def test_{i}(): pass" for i in range(3)) + "\n"
    assert reward.score(fixes(wrong, block("test_a.py", "", pretend), **gold)).rewards == {"swe_rl": 0}
    shadow = block("unittest.py", "", "raise ValueError\n")
    assert [reward.score(fixes(edit, shadow, **gold)).rewards["swe_rl"] for edit in (wrong, RIGHT)] == [0, 1]


def counted(tmp_path, runner: str, text: str) -> int:
    """What a file of tests reports, in this Python, which has pytest."""
    (tmp_path / "test_it.py").write_text(text)
    read, write = os.pipe()
    asked = json.dumps({"path": "test_it.py", "runner": runner, "report": write, "token": "t"})
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", ONE], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[write], cwd=tmp_path
    )
    child.communicate(asked.encode())
    os.close(write)
    with os.fdopen(read) as f:
        token, count = f.read().split()
    assert token == "t"
    return int(count)


def test_which_tests_count(tmp_path):
    """One that passes, and a function; not the failing, the skipped, the one with a bad subtest, the expected failure."""
    text = (
        "import unittest\nclass T(unittest.TestCase):\n  def test_a(self): pass\n  def test_b(self): assert 0\n"
        "  @unittest.skip('')\n  def test_c(self): pass\n  @unittest.expectedFailure\n  def test_d(self): assert 0\n"
        "  def test_e(self):\n    for i in range(3):\n      with self.subTest(i=i): assert i == 1\n"
        "  def test_f(self): raise SystemExit(0)\ndef test_g(): pass\n"
    )
    assert counted(tmp_path, "unittest", text) == counted(tmp_path, "pytest", text) == 2
    text = "import pytest\n@pytest.mark.parametrize('i', range(5))\ndef test_a(i): assert i != 3\n"
    text += "@pytest.fixture\ndef bad():\n  yield\n  assert 0\ndef test_b(bad): pass\n"
    assert counted(tmp_path, "pytest", text) == 4


def test_pytests_own_hooks_are_not_the_patchs(monkeypatch):
    """A conftest.py that a patch adds or edits stays outside; the repository's own is there."""
    seen = []

    def look(self, command, *_):
        seen.append({p.name: p.read_text() for p in (self.home / "work").rglob("*.py")})
        return Ran(0, b"", b"", "ok", 0.1)

    monkeypatch.setattr(ProcessSandbox, "exec", look)
    gold = {"tests": {"test_a.py": ""}, "counts": {"test_a.py": 0}, "files": {**FILES, "conftest.py": "own\n"}}
    reward = SweRL(weight=0.0, **HERE)
    reward._proved.add("task of e")
    reward.score(fixes(RIGHT, block("conftest.py", "own\n", "evil\n"), block("lib/conftest.py", "", "evil\n"), **gold))
    assert seen == [{"a.py": "one\n2\nthree\n", "b.py": "x = 1\ny = 2\n", "conftest.py": "own\n", "test_a.py": ""}]


def test_a_task_whose_own_patch_fails_is_at_fault_and_is_tried_once(monkeypatch):
    ran, real = [], ProcessSandbox.exec
    monkeypatch.setattr(ProcessSandbox, "exec", lambda *given: ran.append(1) or real(*given))
    reward, gold = SweRL(weight=0.0, **HERE), {"tests": SUITE_OF_3, "counts": {"test_a.py": 3}}
    for answers in (1, 2):
        assert reward.score(fixes(RIGHT, **gold)).rewards == {"swe_rl": 1} and len(ran) == 1 + answers
    with pytest.raises(VerifierError, match="verifier_gold: task 'task of e': its own patch does not pass its tests"):
        SweRL(weight=0.0, **HERE).score(fixes(RIGHT, **{**gold, "counts": {"test_a.py": 5}}))
    for wrong in ({}, {"counts": {}}, {"counts": 3}, {"counts": {"test_a.py": 3}, "runner": "nose"}):
        with pytest.raises(VerifierError, match="verifier_gold: task 'task of e': its gold needs a command, or counts of tests by file"):
            SweRL(weight=0.0, **HERE).score(fixes(RIGHT, tests=SUITE_OF_3, **wrong))


def test_swe_in_a_sandbox_with_walls():
    isolating()
    gold = {"tests": SUITE_OF_3, "counts": {"test_a.py": 3}}
    assert SweRL(weight=0.0).score(fixes(RIGHT, **gold)).rewards == {"swe_rl": 1}
    assert SweRL(weight=0.0).score(fixes(block("a.py", "two\n", "9\n"), **gold)).rewards == {"swe_rl": 0}


def test_swe_failures_and_settings():
    with pytest.raises(VerifierError, match="verifier_setup: no pytest9 in the sandbox"):
        SweRL(weight=0.0, **HERE).score(fixes(block("a.py", "two\n", "2\n"), tests={}, command=["pytest9"]))
    with pytest.raises(VerifierError, match="its gold lacks tests"):
        SweRL(weight=0.5, **HERE).score(fixes("x"))
    for fields, says in [({"weight": 1.5}, "weight is 1.5"), ({"wrong": 0.5}, "wrong is 0.5"), ({"limit_s": 0.0}, "limit_s is 0.0")]:
        with pytest.raises(RewardError, match=f"reward 'swe_rl': {says}"):
            SweRL(**fields)
