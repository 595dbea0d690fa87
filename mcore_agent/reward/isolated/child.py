"""A process that answers calls, one line of JSON each, and ends itself when one takes too long (M39).

Started by ``reward.children``: ``python -m mcore_agent.reward.isolated.child LIMIT_S MEMORY_BYTES``. It ends when its stdin does, so
that it outlives nobody.
"""

import importlib
import json
import os
import resource
import signal
import sys


def serve(limit_s: float, memory_bytes: int) -> None:
    """Answers ``{"call": "module:function", "given": {…}}`` with ``{"value": …}``; an exception of the function ends the process."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        module, _, name = asked["call"].partition(":")
        function = vars(importlib.import_module(module))[name]  # importing takes none of the limit
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # the signal's default action needs no turn of the interpreter
        value = function(**asked["given"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps({"value": value}).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
