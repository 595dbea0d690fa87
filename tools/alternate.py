"""CPU-seconds of several things measured in turns in one run, so that what the machine does beside them hits all alike."""

import time
from collections.abc import Callable, Mapping
from typing import Any


def cpu_seconds(sides: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """By name the seconds of each of ``repeats`` rounds; a round runs every side once."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.process_time()
            side()
            seconds[name].append(time.process_time() - start)
    return seconds
