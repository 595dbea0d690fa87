"""Steps per second of a run whose tools are slow: episodes beside training against episodes in turns with it.

    python tools/bench_async.py [--repeats 2] [--steps 12] [--wait 0.35]

Every call of the environment takes ``--wait`` seconds on top, drawn between half and one and a half times that. Runs of both kinds
alternate; the first steps of each, in which everything starts up, are left out.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mcore_agent.env.hop_lookup import HopLookup  # noqa: E402
from mcore_agent.protocols import Action, Env, Observation  # noqa: E402
from mcore_agent.registry import register  # noqa: E402
from mcore_agent.types import Task  # noqa: E402

SKIPPED = 3  # steps
BESIDE = ("rollout.placement=separate", "rollout.max_lag=1")


class Slow:
    def __init__(self, inner: Env, wait: float, seed: int):
        self.inner, self.wait, self.draws = inner, wait, random.Random(seed)

    async def reset(self) -> Observation:
        return await self.inner.reset()

    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(self.wait * self.draws.uniform(0.5, 1.5))
        return await self.inner.step(action)

    async def close(self) -> None:
        await self.inner.close()


@register("env", "slow_hop_lookup")
class SlowHopLookup(HopLookup):
    def __init__(self, wait: float = 0.3, hops: int = 3):
        super().__init__(hops=hops)
        self.wait = wait

    def make(self, task: Task, seed: int) -> Env:
        return Slow(super().make(task, seed), self.wait, seed)


def steps_of(words: tuple[str, ...], steps: int, wait: float) -> list[dict]:
    """Metrics of the rl steps after the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = [
            *("recipes/quickstart.yaml", f"run.dir={folder}/run", f"env={{name: slow_hop_lookup, wait: {wait}}}", "run.eval_tasks=0"),
            *(f"stages=[{{kind: sft, steps: 150, lr: 2.0e-3, demos: 64}}, {{kind: rl, lr: 5.0e-4, steps: {steps}}}]", "run.save_every=0"),
        ]
        command = [sys.executable, __file__, "--train", *recipe, *words]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return [m for m in records if m["stage"] == "rl"][SKIPPED:]


def run(repeats: int, steps: int, wait: float) -> dict[str, float]:
    ratios, shares = [], []
    for _ in range(repeats):
        turns = mean(m["time/step_s"] for m in steps_of((), steps, wait))
        beside = steps_of(BESIDE, steps, wait)
        ratios.append(turns / mean(m["time/step_s"] for m in beside))  # a quick step follows a slow one
        shares.append(turns)
        print(f"in turns {turns:.2f} s a step, beside {turns / ratios[-1]:.2f} s, ratio {ratios[-1]:.2f}")
        assert all(m["rollout/lag_max"] <= 1 for m in beside)
    return {"ratio": median(ratios), "step_s": median(shares)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        from mcore_agent.cli import main

        sys.exit(main(["train", *sys.argv[2:]]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--wait", type=float, default=0.35, help="seconds of a call of the environment")
    a = parser.parse_args()
    print(json.dumps(run(a.repeats, a.steps, a.wait), indent=1))
