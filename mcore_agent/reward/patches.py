"""Edits that a model proposes as blocks of search and replace: read, applied, and told as a diff (M74)."""

import difflib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

SEARCH, SPLIT, REPLACE = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"
BLOCK = re.compile(
    rf"^### +(\S+)[ \t]*\n(?:```\w*[ \t]*\n)?{SEARCH}[ \t]*\n(.*?)^{SPLIT}[ \t]*\n(.*?)^{REPLACE}[ \t]*$", re.DOTALL | re.MULTILINE
)
MARKER = re.compile(rf"^(?:{SEARCH}|{REPLACE})[ \t]*$", re.MULTILINE)


class PatchError(ValueError):
    """A proposal that cannot be applied; the message says why."""


def proposed(text: str, files: Mapping[str, str]) -> dict[str, str]:
    """The files with the edits of a text. Raises PatchError when it has none, one is malformed, changes nothing or does not fit.

    A block is ``### path``, ``<<<<<<< SEARCH``, the old lines, ``=======``, the new lines, ``>>>>>>> REPLACE``, each on its own
    line. An edit is made at the first place that has the old lines; a new file has none.
    """
    blocks = BLOCK.findall(text)
    if not blocks:
        raise PatchError("no block of search and replace")
    if 2 * len(blocks) != len(MARKER.findall(text)):
        raise PatchError("a block is not complete")
    changed = dict(files)
    for path, old, new in blocks:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise PatchError(f"{path} leads out of the repository")
        if old == new:
            raise PatchError(f"{path}: an edit changes nothing")
        if path not in changed and old:
            raise PatchError(f"{path} does not exist")
        content = changed.get(path, "")
        if content and not old:
            raise PatchError(f"{path}: nothing to search for")
        content += "\n" if content and not content.endswith("\n") else ""
        at = 0 if content.startswith(old) else content.find("\n" + old) + 1
        if not content.startswith(old, at):
            raise PatchError(f"{path}: the lines to replace are not there")
        changed[path] = content[:at] + new + content[at + len(old) :]
    return changed


def diffs(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """A unified diff without its head for each file that is not the same."""
    out = {}
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path, ""), after.get(path, "")
        if old != new:
            lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=3, lineterm=""))
            out[path] = "\n".join(lines[2:])
    return out
