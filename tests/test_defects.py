"""Markers and the table of defects agree, both ways."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_marker_has_a_row_and_every_row_a_test():
    rows = set(re.findall(r"^\| ([A-I]\d+) \|", (HERE / "DEFECTS.md").read_text(), flags=re.M))
    markers = [m for p in HERE.rglob("*.py") for m in re.findall(r"mark\.defect\(([^)]*)\)", p.read_text())]
    marked = {name for m in markers for name in re.findall(r"[A-I]\d+", m)}
    assert marked == rows, f"without a row: {sorted(marked - rows)}; without a test: {sorted(rows - marked)}"
