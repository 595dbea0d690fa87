"""An asyncio event loop whose clock jumps to the next timer instead of waiting for it: real code runs in simulated time."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Deadlock(RuntimeError):
    """Every task waits for another one, and no timer is set."""


class _NoWait(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Looks at files without waiting, and tells the loop for how long it would have."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"at {self.loop.time():.3f} s of simulated time nothing is left that could wake a task")
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is simulated seconds. No threads: what they do takes no time here."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoWait()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Like ``asyncio.run``. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
