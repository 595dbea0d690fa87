"""tools/mutate_layouts.py: every fault still fits the code, and what survives or says nothing is told apart from what is caught."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mutate_layouts.py"
spec = importlib.util.spec_from_file_location("mutate_layouts_tool", TOOL)
assert spec and spec.loader
tool = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = tool  # its dataclasses look for it
spec.loader.exec_module(tool)

CHEAP = ("tests/learner/test_context.py::test_deal_by_hand",)
BLOCK = ("mcore_agent/learner/context.py", "BLOCK = 64 ")


@pytest.mark.parametrize("fault", tool.FAULTS, ids=lambda f: f.name)
def test_every_fault_fits(fault, tmp_path):
    path = tmp_path / fault.file
    path.parent.mkdir(parents=True)
    before = (tool.ROOT / fault.file).read_text()
    path.write_text(before)
    assert fault.apply(tmp_path) == before != path.read_text()
    compile(path.read_text(), fault.file, "exec")
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (tool.ROOT / file).read_text()


def test_faults_are_named_once_and_enough():
    names = [fault.name for fault in tool.FAULTS]
    assert len(set(names)) == len(names) >= 12
    assert tool.main(["no_such_fault"]) == 2 and tool.main(["--list", names[0]]) == 0


def test_a_fault_that_does_not_fit(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("x = 1", 2), ("y", 0)):
        with pytest.raises(tool.MutationError, match=rf"f: a.py holds the text '{old}' {count} times, not once; adapt the fault"):
            tool.Fault("f", "", "a.py", old, "", ()).apply(tmp_path)


@pytest.mark.parametrize(("code", "output", "why"), [
    (1, "E  assert 2 == 1\nFAILED tests/a.py::b - assert 2 == 1", ""),
    (1, "E  rank 0: Traceback\nE  RoutingError: x\nE  no answer from ranks [1]\nFAILED tests/a.py::b", ""),
    (1, "E  no answer from ranks [0, 1]\nFAILED tests/a.py::b", "no rank answered in time"),
    (1, "E  TimeoutError: timed out\nFAILED tests/a.py::b", "too busy"),
    (1, "E  rank 1: died (EOFError(), exit code -11)\nFAILED tests/a.py::b", "a rank crashed"),
    (1, "E  NameError: x\nFAILED tests/a.py::b", "does not do what it says"),
    (4, "ERROR: not found: tests/a.py::c", "code 4 and no failed test"),
])  # fmt: skip
def test_what_proves_nothing(code, output, why):
    found = tool.doubt(code, output)
    assert why in found and bool(why) == bool(found)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_verdicts(capsys, monkeypatch):
    """A cheap fault is caught, one that changes nothing survives, one that does not even run proves nothing."""
    good = tool.Fault("smaller blocks", "", *BLOCK, "BLOCK = 32 ", CHEAP)
    idle = tool.Fault("nothing", "", *BLOCK, "BLOCK = 8 * 8 ", CHEAP)
    monkeypatch.setattr(tool, "FAULTS", [good, idle])
    assert tool.main([]) == 1
    said = capsys.readouterr().out
    assert f"smaller blocks | {CHEAP[0]} | " in said and "nothing | SURVIVED" in said and "min left" in said
    monkeypatch.setattr(tool, "FAULTS", [tool.Fault("broken", "", *BLOCK, "BLOCK = SIZE ", CHEAP)])
    assert tool.main([]) == 2
    assert "UNPROVEN broken" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_fault_is_caught(capsys):
    """Another one with every commit; ``python tools/mutate_layouts.py`` tries all."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tool.ROOT, capture_output=True, text=True).stdout
    fault = random.Random(commit).choice(tool.FAULTS)
    assert tool.main([fault.name]) == 0, capsys.readouterr()
    assert f"caught {fault.name}" in capsys.readouterr().out
