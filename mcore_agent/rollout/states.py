"""Who holds the memory: engine and learner take turns on the same devices, by this table.

Each rank walks the same cycle. An event that the table does not list for the present state is an error.
"""

import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

CYCLE = (
    # state, the event that leaves it, who is awake
    ("ROLLOUT", "drain", "engine serves"),
    ("DRAIN", "sleep_engine", "engine finishes or aborts its requests"),
    ("ENGINE_ASLEEP", "wake_learner", "nobody"),
    ("LEARNER_AWAKE", "update", "learner, all of it"),
    ("UPDATE", "trim", "learner steps"),
    ("LEARNER_TRIMMED", "wake_weights", "learner, parameters only"),
    ("ENGINE_WEIGHTS_AWAKE", "publish", "learner's parameters, engine's weights"),
    ("PUBLISH", "sleep_learner", "weights travel"),
    ("LEARNER_ASLEEP", "wake_engine", "engine's weights"),
    ("ENGINE_AWAKE", "rollout", "engine, all of it"),
)
STATES = tuple(state for state, _, _ in CYCLE)

# One time round, and: further steps in UPDATE; the first publish of a run, or one after a batch without signal, has no step.
TABLE: dict[tuple[str, str], str] = {
    **{(state, event): STATES[(i + 1) % len(CYCLE)] for i, (state, event, _) in enumerate(CYCLE)},
    ("UPDATE", "update"): "UPDATE",
    ("LEARNER_AWAKE", "trim"): "LEARNER_TRIMMED",
    **{(state, "save"): state for state in STATES},
    ("ROLLOUT", "evaluate"): "ROLLOUT",
}
EVENTS = tuple(dict.fromkeys(event for _, event in TABLE))
DEFERRED = {"evaluate": "ROLLOUT"}  # asked anywhere else, these wait for that state


class StateError(RuntimeError):
    """An event that is not legal in the present state. The message names the legal ones."""


@dataclass(frozen=True)
class Handover:
    """One transition, and the memory that this process still held after it."""

    before: str
    event: str
    after: str
    seconds: float  # of the event's hook
    memory: Mapping[str, int]  # bytes by kind


def residual_memory() -> dict[str, int]:
    """Bytes that this process holds: ``rss`` and, when torch runs on CUDA, ``cuda_allocated`` and ``cuda_reserved``."""
    found = {"rss": _rss()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda_allocated"] = torch.cuda.memory_allocated()
        found["cuda_reserved"] = torch.cuda.memory_reserved()
    return found


def _rss() -> int:
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux: the peak is the best the system tells
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class TimeSlicer:
    """Walks the table. ``hooks`` maps an event to what it does; an event without one only changes the state.

    ``fire`` runs the hook, then moves; a hook that raises leaves the state as it was. ``evaluate`` outside ROLLOUT is
    remembered (once) and runs when ROLLOUT is entered. A run starts in LEARNER_AWAKE: an engine starts without weights.
    """

    def __init__(
        self,
        hooks: Mapping[str, Callable[..., Any]],
        start: str = "LEARNER_AWAKE",
        measure: Callable[[], Mapping[str, int]] = residual_memory,
    ):
        unknown = sorted(set(hooks) - set(EVENTS))
        if unknown:
            raise StateError(f"hooks for {', '.join(unknown)}, which are no events; events: {', '.join(EVENTS)}")
        if start not in STATES:
            raise StateError(f"no state {start!r}; states: {', '.join(STATES)}")
        self.state = start
        self.log: list[Handover] = []
        self._hooks, self._measure = dict(hooks), measure
        self._deferred: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def legal(self) -> tuple[str, ...]:
        """Events that may be fired now, deferred ones included."""
        return tuple(e for e in EVENTS if (self.state, e) in TABLE or e in DEFERRED)

    def fire(self, event: str, *args: Any, **kwargs: Any) -> Any:
        """What the event's hook returned; None when it was deferred. Raises StateError when the table has no such pair."""
        if (self.state, event) not in TABLE:
            if event not in DEFERRED:
                raise StateError(f"event {event!r} in state {self.state}; legal events: {', '.join(self.legal())}")
            self._deferred[event] = (args, kwargs)
            return None
        result = self._go(event, args, kwargs)
        for waiting in [e for e in self._deferred if DEFERRED[e] == self.state]:
            held = self._deferred.pop(waiting)
            self._go(waiting, *held)
        return result

    def _go(self, event: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, began = self.state, time.perf_counter()
        result = self._hooks[event](*args, **kwargs) if event in self._hooks else None
        self.state = TABLE[before, event]
        self.log.append(Handover(before, event, self.state, time.perf_counter() - began, self._measure()))
        log.debug("%s --%s--> %s %s", before, event, self.state, self.log[-1].memory)
        return result


def table_markdown() -> str:
    """The table, for people: one line a state, with who is awake in it and where its events lead."""
    lines = ["| state | awake | event → next state |", "|---|---|---|"]
    for state, _, awake in CYCLE:
        leads = [f"{event} → {after}" for (at, event), after in TABLE.items() if at == state and after != state]
        stays = [event for (at, event), after in TABLE.items() if at == state and after == state]
        waits = [f"{event} waits for {where}" for event, where in DEFERRED.items() if where != state]
        lines.append(f"| {state} | {awake} | {'; '.join([*leads, *(f'{e} (stays)' for e in stays), *waits])} |")
    return "\n".join(lines)
