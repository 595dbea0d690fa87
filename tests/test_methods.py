"""docs/methods.md says what the code, its docstrings and its tests say, and a new variant is in it without another edit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_agent import registry
from mcore_agent.credit.pipeline import KINDS
from tools.methods import NUMBER, PAGE, citations, files

ROOT = Path(__file__).parent.parent
EARLIER = {1, 2, 3, 4, 8, 9, 10, 14, 16, 17, 23, 24, 25, 30, 32, 33, 34, 35, 36, 96, 99, 112, 115, 116}

BRAND_NEW = '''"""Nothing for anybody (M901; Test, 1234.56789 eq. 2), and never anything (M902)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mcore_agent.registry import register


@register("estimator", "brand_new")
@dataclass(frozen=True)
class BrandNew:
    needs: ClassVar[tuple[str, ...]] = ("values",)
    gives: ClassVar[tuple[str, ...]] = ()
    axis: ClassVar[str] = "episode"
    compares: ClassVar[str] = "none"

    def __call__(self, batch):
        return np.zeros(len(batch.episodes))
'''

LOOK = """
import sys
from pathlib import Path
import mcore_agent.credit
root = Path(sys.argv[1])
mcore_agent.credit.__path__.append(str(root / "mcore_agent" / "credit"))
from tests.invariants.credited import estimators
from tools.methods import page
assert {"name": "brand_new"} in estimators()
print("".join(line for line in page(root).splitlines(keepends=True) if line.startswith(("| M901", "| M902"))))
"""


@pytest.fixture(scope="module")
def rows() -> dict[int, list[str]]:
    """The cells of each row of the page, by number."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| M")]
    made = {int(cells[0].strip()[1:]): [cell.strip() for cell in cells[1:]] for cells in lines}
    assert len(made) == len(lines), "a number has two rows"
    return made


def test_the_page_is_up_to_date():
    out = subprocess.run([sys.executable, "tools/methods.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


def test_every_number_that_is_cited_has_a_row_and_no_row_was_lost(rows):
    paths = [path for folder in ("mcore_agent", "ckpt_convert", "tests") for path in files(ROOT / folder) if path != Path(__file__)]
    cited = {int(n) for path in paths for n in NUMBER.findall(path.read_text())}
    assert cited | EARLIER <= rows.keys(), f"without a row: {sorted((cited | EARLIER) - rows.keys())}"
    assert {number for number, cells in rows.items() if cells[-1].startswith("built")} >= EARLIER


def test_what_is_built_has_a_module_and_a_test_and_the_rest_has_neither(rows):
    for number, (method, source, module, _, test, status) in rows.items():
        assert method and source, f"M{number} has no name or no source"
        assert status.partition(";")[0] == ("built" if module else "not yet"), f"M{number}"
        assert bool(module) == bool(test), f"M{number}: {module or 'no module'}, {test or 'no test'}"
        for path in re.findall(r"`([^`]+)`", module + test):
            assert (ROOT / path).is_file(), f"M{number} names {path}"


def test_every_variant_of_credit_and_loss_is_on_the_page(rows):
    modules = {path for cells in rows.values() for path in re.findall(r"`([^`]+)`", cells[2])}
    for kind in (*KINDS, "loss", "aggregation"):
        for name, variant in registry.variants(kind).items():
            assert variant.__module__.replace(".", "/") + ".py" in modules, f"{kind} {name!r}: its module's first line cites no method"


@pytest.mark.parametrize(("line", "expected"), [
    ("The surrogate (M3; PPO, 1707.06347 eq. 7) with clip-higher (M14; DAPO) and dual clip.",
     [(3, "The surrogate", "PPO, 1707.06347 eq. 7"), (14, "Clip-higher", "DAPO")]),
    ("Weights (M25, M16): one for each token.", [(25, "Weights", ""), (16, "Weights", "")]),
    ("Old tokens (I3; M99).", [(99, "Old tokens", "")]),
    ("Two papers (M34; AReaL, 2505.24298; 2110.00641).", [(34, "Two papers", "AReaL, 2505.24298; 2110.00641")]),
    ("Nothing is cited by M6 outside of brackets.", []),
])  # fmt: skip
def test_a_first_line_is_read(line, expected):
    assert [(c.number, c.method, c.source) for c in citations("a.py", line)] == expected


def test_a_new_variant_is_found_without_another_edit(tmp_path):
    """One file in the folder of its kind: the tests of all variants have it, and the page has its rows, key and test."""
    (tmp_path / "mcore_agent" / "credit").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "mcore_agent" / "credit" / "brand_new.py").write_text(BRAND_NEW)
    (tmp_path / "tests" / "test_brand_new.py").write_text('"""M901."""')
    out = subprocess.run([sys.executable, "-c", LOOK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    module, key = "`mcore_agent/credit/brand_new.py`", "`credit: [{name: brand_new}]` with `critic.mode`"
    assert out.stdout.split("\n")[:2] == [
        f"| M901 | Nothing for anybody | Test, 1234.56789 eq. 2 | {module} | {key} | `tests/test_brand_new.py` | built |",
        f"| M902 | Never anything |  | {module} | {key} |  | built |",
    ], out.stdout + out.stderr

