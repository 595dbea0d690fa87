"""Runs files of Python tests and says a word when as many passed as should (M39, M74): a script for a sandbox, standard library only.

Its input is a line with the word, then ``{"counts": {path: number}, "one": the text of suite_file.py, "runner": …}``. The word is
not handed on to the tested code, and the status of this process is not that code's.
"""

import json
import os
import subprocess
import sys
from typing import Any


def main() -> None:
    """Prints the word, or exits with status 1."""
    word = sys.stdin.readline().strip()
    asked = json.loads(sys.stdin.read())
    if all(passed(path, asked) == wanted for path, wanted in asked["counts"].items()):
        print(word)
    else:
        sys.exit(1)


def passed(path: str, asked: dict[str, Any]) -> "int | None":
    """How many tests of a file pass, in a process of its own; None when that ended before it could tell, whatever its status."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    token = os.urandom(16).hex()
    given = json.dumps({"path": path, "runner": asked["runner"], "report": write, "token": token})
    words = [sys.executable, "-I", "-c", asked["one"]]
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[write], text=True
    )
    os.close(write)
    child.communicate(given)
    try:
        said = os.read(read, 1 << 12).decode(errors="replace").split()
    except BlockingIOError:  # what it started holds the other end, and nothing was said
        said = []
    os.close(read)
    return int(said[1]) if len(said) > 1 and said[0] == token and said[1].isdecimal() else None


if __name__ == "__main__":
    main()
