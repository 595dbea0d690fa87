"""Writes the tables of hand-overs into docs/time_slicing.md: ``python tools/state_table.py``."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mcore_agent.rollout.states import PLACEMENTS, table_markdown  # noqa: E402

PAGE = ROOT / "docs" / "time_slicing.md"


def filled(text: str) -> str:
    """The page with each table between its marks."""
    for name, turns in PLACEMENTS.items():
        text = re.sub(f"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{table_markdown(turns)}\n\2", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
