"""Who holds the memory: engine and learner take turns on the same devices, by a table.

Each rank walks the same cycle. An event that the table does not list for the present state is an error.
"""

import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Turns:
    """A cycle of (state, the event that leaves it, who is awake), with further transitions that leave the cycle's order.

    ``start`` is where a run begins: engines start without weights. In ``serving`` episodes are played, in ``training`` the
    learner may step. A checkpoint may be saved in every state; an evaluation asked for elsewhere waits for ``serving``.
    """

    name: str
    cycle: tuple[tuple[str, str, str], ...]
    more: Mapping[tuple[str, str], str]
    start: str
    serving: str
    training: tuple[str, ...]

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(state for state, _, _ in self.cycle)

    @property
    def table(self) -> dict[tuple[str, str], str]:
        states = self.states
        return {
            **{(state, event): states[(i + 1) % len(states)] for i, (state, event, _) in enumerate(self.cycle)},
            **self.more,
            **{(state, "save"): state for state in states},
            (self.serving, "evaluate"): self.serving,
            (self.serving, "recover"): self.serving,
        }

    @property
    def events(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(event for _, event in self.table))

    @property
    def deferred(self) -> dict[str, str]:
        """Events that, asked for anywhere else, wait for this state."""
        return {"evaluate": self.serving}

    def way(self, state: str, goal: str) -> list[str]:
        """The events of the cycle that lead from a state to another; an optimizer step is passed over where one may be."""
        after = {(at, event): next_state for (at, event), next_state in self.table.items()}
        order = {at: event for at, event, _ in self.cycle} | {at: event for at, event in self.more if event != "update"}
        events: list[str] = []
        while state != goal:
            events.append(order[state])
            state = after[state, order[state]]
        return events


# One time round, and: further steps in UPDATE; the first publish of a run, or one after a batch without signal, has no step.
COLOCATED = Turns(
    "colocated",
    (
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
    ),
    {("UPDATE", "update"): "UPDATE", ("LEARNER_AWAKE", "trim"): "LEARNER_TRIMMED"},
    start="LEARNER_AWAKE",
    serving="ROLLOUT",
    training=("LEARNER_AWAKE", "UPDATE"),
)

# Learner and engine have their own devices: both are awake all the time, and only the weights are handed over.
SEPARATE = Turns(
    "separate",
    (
        ("SERVING", "pause", "engine serves, learner steps"),
        ("PAUSED", "publish", "engine keeps its requests, learner waits"),
        ("PUBLISH", "rollout", "weights travel"),
    ),
    {("SERVING", "update"): "SERVING", ("PAUSED", "update"): "PAUSED"},
    start="PAUSED",
    serving="SERVING",
    training=("SERVING", "PAUSED"),
)
PLACEMENTS = {turns.name: turns for turns in (COLOCATED, SEPARATE)}


class StateError(RuntimeError):
    """An event that is not legal in the present state. The message names the legal ones."""


@dataclass(frozen=True)
class Handover:
    """One transition, and the memory that was still held after it."""

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


Watch = Callable[[str, str], AbstractContextManager[Any]]


class TimeSlicer:
    """Walks a table. ``hooks`` maps an event to what it does; an event without one only changes the state.

    ``fire`` runs the hook, then moves; a hook that raises leaves the state as it was. ``evaluate`` outside the serving state
    is remembered (once) and runs when that is entered. ``watch(state, event)`` is entered around each hook.
    """

    def __init__(
        self,
        hooks: Mapping[str, Callable[..., Any]],
        start: str = "",
        measure: Callable[[], Mapping[str, int]] = residual_memory,
        turns: Turns = COLOCATED,
        watch: Watch = lambda state, event: nullcontext(),
    ):
        self.turns, self.table, self.state = turns, turns.table, start or turns.start
        unknown = sorted(set(hooks) - set(turns.events))
        if unknown:
            raise StateError(f"hooks for {', '.join(unknown)}, which are no events; events: {', '.join(turns.events)}")
        if self.state not in turns.states:
            raise StateError(f"no state {start!r}; states: {', '.join(turns.states)}")
        self.log: list[Handover] = []
        self._hooks, self._measure, self._watch = dict(hooks), measure, watch
        self._deferred: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @property
    def serving(self) -> bool:
        return self.state == self.turns.serving

    def legal(self) -> tuple[str, ...]:
        """Events that may be fired now, deferred ones included."""
        return tuple(e for e in self.turns.events if (self.state, e) in self.table or e in self.turns.deferred)

    def fire(self, event: str, *args: Any, **kwargs: Any) -> Any:
        """What the event's hook returned; None when it was deferred. Raises StateError when the table has no such pair."""
        if (self.state, event) not in self.table:
            if event not in self.turns.deferred:
                raise StateError(f"event {event!r} in state {self.state}; legal events: {', '.join(self.legal())}")
            self._deferred[event] = (args, kwargs)
            return None
        result = self._go(event, args, kwargs)
        for waiting in [e for e in self._deferred if self.turns.deferred[e] == self.state]:
            held = self._deferred.pop(waiting)
            self._go(waiting, *held)
        return result

    def serve(self) -> None:
        """On to the serving state, once round even when it is there already: whoever asks has new weights."""
        if self.serving:
            self.fire(self.turns.cycle[0][1])
        for event in self.turns.way(self.state, self.turns.serving):
            self.fire(event)

    def train(self) -> None:
        """On to a state in which the learner may step."""
        if self.state not in self.turns.training:
            for event in self.turns.way(self.state, self.turns.training[0]):
                self.fire(event)

    def _go(self, event: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, began = self.state, time.perf_counter()
        with self._watch(before, event):
            result = self._hooks[event](*args, **kwargs) if event in self._hooks else None
        self.state = self.table[before, event]
        self.log.append(Handover(before, event, self.state, time.perf_counter() - began, self._measure()))
        log.debug("%s --%s--> %s %s", before, event, self.state, self.log[-1].memory)
        return result


def table_markdown(turns: Turns = COLOCATED) -> str:
    """A table, for people: one line a state, with who is awake in it and where its events lead."""
    lines = ["| state | awake | event → next state |", "|---|---|---|"]
    for state, _, awake in turns.cycle:
        leads = [f"{event} → {after}" for (at, event), after in turns.table.items() if at == state and after != state]
        stays = [event for (at, event), after in turns.table.items() if at == state and after == state]
        waits = [f"{event} waits for {where}" for event, where in turns.deferred.items() if where != state]
        lines.append(f"| {state} | {awake} | {'; '.join([*leads, *(f'{e} (stays)' for e in stays), *waits])} |")
    return "\n".join(lines)
