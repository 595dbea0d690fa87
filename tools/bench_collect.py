"""The coordinator's own CPU time while many episodes wait for an engine, as a share of the wall time.

``python tools/bench_collect.py`` plays 256 episodes of 8 turns at once against an engine in this process that takes 2 s a turn,
on the real clock, and prints the share (target: at most 0.10). ``--virtual`` does the same work in simulated time.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from simulate_async import TimedEngine, agent_for, tokenizer
from virtual_time import run as simulate

from mcore_agent.env.hop_lookup import HopLookup
from mcore_agent.rollout.collect import Collector
from mcore_agent.task.source import EpochSource

TARGET = 0.10


def measure(episodes: int = 256, turns: int = 8, turn_s: float = 2.0, group_size: int = 8, virtual: bool = False) -> dict[str, Any]:
    """``share`` is CPU over wall seconds, the engine's and the environment's few microseconds included."""
    domain = HopLookup(max_turns=turns + 1)

    async def play() -> dict[str, Any]:
        engine = TimedEngine(tokenizer(), turn_s, episodes, (turns, turns))  # calls a tool to the last turn
        collector = Collector(engine, domain, agent_for(domain, turns), EpochSource(domain), run_seed=0, prompts=episodes // group_size,  # type: ignore[arg-type]
                              group_size=group_size)  # fmt: skip
        wall, clock, cpu = time.perf_counter(), asyncio.get_running_loop().time(), time.process_time()
        _, stats = await collector.collect(0, 0)
        cpu = time.process_time() - cpu
        seconds = asyncio.get_running_loop().time() - clock if virtual else time.perf_counter() - wall
        return {"turns": stats.turns, "cpu_s": cpu, "wall_s": seconds, "share": cpu / seconds, "cpu_ms_per_turn": 1e3 * cpu / stats.turns}

    tokenizer()
    return simulate(play()) if virtual else asyncio.run(play())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-s", type=float, default=2.0)
    parser.add_argument("--virtual", action="store_true", help="simulated time")
    args = parser.parse_args()
    found = measure(args.episodes, args.turns, args.turn_s, virtual=args.virtual)
    print(f"{found['turns']} turns: {found['cpu_s']:.2f} CPU-seconds in {found['wall_s']:.1f} s, "
          f"share {found['share']:.3f} (target {TARGET}), "
          f"{found['cpu_ms_per_turn']:.2f} ms a turn")  # fmt: skip


if __name__ == "__main__":
    main()
