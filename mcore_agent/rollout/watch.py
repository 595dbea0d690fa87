"""Is an engine dead, frozen, or only busy? Judged from probes, one engine each."""

import asyncio
from dataclasses import dataclass

from mcore_agent.protocols import Engine, EngineDown


@dataclass
class Watch:
    """What the probes of one engine have said. Times are seconds that probes went unanswered or unchanged, summed.

    A probe that raises EngineDown is final. A connection that fails for ``dead_s`` is: the process may be starting its
    socket. Silence, or requests without progress, for ``stall_s`` is: a busy engine may not answer for a while. One
    probe never counts for more than its deadline, so an event loop that was itself held up blames no engine.
    """

    stall_s: float
    dead_s: float
    probe_s: float  # between two probes
    answer_s: float = 0.0  # a probe's deadline; set from the others
    progress: int | None = None
    refused: float = 0.0
    silent: float = 0.0
    still: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stall_s", "dead_s", "probe_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but is a time in seconds: give more than 0")
        self.answer_s = max(self.probe_s, min(self.dead_s, self.stall_s) / 2)

    async def probe(self, engine: Engine, awake: bool, working: bool) -> str:
        """One probe; returns why the engine is lost, or nothing.

        ``awake``: it should answer; one that sleeps or loads weights may be silent. ``working``: it has requests and
        nothing to wait for; without work no progress is expected.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self.answer_s):
                progress = await engine.progress()
        except EngineDown as e:
            return str(e) or "the probe found it down"
        except TimeoutError:
            return self.missed(awake)
        except OSError as e:
            return self.failed(loop.time() - began, e)
        return self.heard(progress, loop.time() - began, awake and working)

    def _step(self, took: float) -> float:
        return self.probe_s + min(took, self.answer_s)

    def heard(self, progress: int, took: float, working: bool) -> str:
        """The engine said how far it is."""
        self.refused = self.silent = 0.0
        if not working or progress != self.progress:
            self.still = 0.0
        else:
            self.still += self._step(took)
        self.progress = progress
        return f"requests in flight and no progress for {self.still:.1f} s" if self.still >= self.stall_s else ""

    def missed(self, awake: bool) -> str:
        """It did not answer in time."""
        self.silent = self.silent + self._step(self.answer_s) if awake else 0.0
        return f"no answer for {self.silent:.1f} s" if self.silent >= self.stall_s else ""

    def failed(self, took: float, error: OSError) -> str:
        """The connection failed."""
        self.refused += self._step(took)
        return f"not reachable for {self.refused:.1f} s: {error!r}" if self.refused >= self.dead_s else ""
