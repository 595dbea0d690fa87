"""The watchdog names the state, the rank and the engine that is late, and only when something is."""

import time

import pytest
import torch.distributed as dist

from mcore_agent.rollout.states import TimeSlicer
from mcore_agent.rollout.watchdog import Watchdog


def until(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.defect("F9")
def test_it_names_state_rank_and_engine():
    said: list[str] = []
    board = dist.HashStore()
    ahead, behind = Watchdog(0, 4, 0.05, said.append, board), Watchdog(1, 4, 0, said.append, board)
    level = Watchdog(2, 4, 0, said.append, board)  # rank 3 never came
    with behind("LEARNER_AWAKE", "update"):
        pass
    for dog in (ahead, level):
        with dog("LEARNER_AWAKE", "update"):
            pass
    with level("UPDATE", "trim"), ahead("UPDATE", "trim"), ahead.waits("engine 1"):
        until(lambda: said)
    ahead.close()
    assert said[0].startswith("rank 0: 'trim' in state UPDATE has taken 0 s, waiting for engine 1; not there yet: ")
    assert "rank 1 (after 'update' in state LEARNER_AWAKE for 0 s)" in said[0]
    assert "rank 3 (never seen)" in said[0] and "rank 2" not in said[0]


def test_it_speaks_less_and_less_often():
    said: list[str] = []
    dog = Watchdog(0, 1, 0.1, said.append)
    with dog("UPDATE", "trim"):
        time.sleep(1.0)
    dog.close()
    assert 2 <= len(said) <= 4  # after .1, .2, .4 and .8 s


def test_an_event_in_time_is_silent_and_an_error_passes():
    said: list[str] = []
    dog = Watchdog(0, 1, 0.2, said.append)

    def fail() -> None:
        raise OSError("disk full")

    slicer = TimeSlicer({"save": fail}, start="UPDATE", watch=dog)
    slicer.fire("trim")
    with pytest.raises(OSError, match="disk full"):
        slicer.fire("save")
    time.sleep(0.5)
    dog.close()
    assert said == []
