"""Benchmarks: each prints ratios of two things measured alternately in one run, in CPU seconds.

    python tools/bench.py learner     tokens per CPU-second of the learner, against transformers
    python tools/bench.py rollout     the same of the local engine, against transformers' generate
    python tools/bench.py quickstart  trains the quickstart and says where the time of its steps went
    python tools/bench.py step RUN    the same of a run folder
    python tools/bench.py all         learner, rollout and quickstart
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))


def learner(repeats: int) -> None:
    import bench_learner

    _print("learner, 135M shape, forward and backward", bench_learner.run(repeats), 0.90)


def rollout(repeats: int) -> None:
    import bench_rollout

    _print("local engine, 135M shape, batch 8, prompt 200 + 64 new", bench_rollout.run(repeats), 0.95)


def _print(what: str, result: dict, target: float) -> None:
    print(json.dumps(result, indent=1, default=float))
    print(f"{what}: median ratio {result['ratio']:.3f} (at least {target})")


def step(folder: Path) -> None:
    """The mean step of the rl stage: seconds by part, and what part is neither playing nor learning."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [r for r in records if r["stage"] == "rl"]
    parts = {
        "generate and environment": "rollout/wall_s",
        "forward and backward": "time/passes_s",
        "publish": "time/publish_s",
    }
    whole = float(np.mean([r["time/step_s"] for r in records]))
    rest = whole
    for label, name in parts.items():
        mean = float(np.mean([r.get(name, 0.0) for r in records]))
        rest -= mean
        print(f"{label:<26}{mean:8.3f} s  {mean / whole:6.1%}")
    print(f"{'everything else':<26}{rest:8.3f} s  {rest / whole:6.1%}")
    print(f"{'step':<26}{whole:8.3f} s  of {len(records)} steps")
    working = float(np.mean([r["rollout/wall_s"] + r.get("time/passes_s", 0.0) for r in records]))
    cpu = [r["time/step_cpu_s"] for r in records if "time/evaluate_s" not in r]
    print(f"outside generate, environment and forward/backward: {1 - working / whole:.1%} of a step")
    print(f"CPU-seconds per step on rank 0: {float(np.mean(cpu)):.2f}")


def quickstart() -> None:
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        words = ["train", "recipes/quickstart.yaml", f"run.dir={scratch}/run"]
        subprocess.run([sys.executable, "-m", "mcore_agent.cli", *words], cwd=root, check=True)
        step(Path(scratch) / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learner", "rollout", "quickstart", "step", "all"))
    parser.add_argument("run", nargs="?", type=Path, help="step: a run folder")
    parser.add_argument("--repeats", type=int, default=7, help="alternations (default 7)")
    arguments = parser.parse_args()
    if arguments.what == "step":
        if arguments.run is None:
            parser.error("step needs a run folder")
        step(arguments.run)
    if arguments.what in ("learner", "all"):
        learner(arguments.repeats)
    if arguments.what in ("rollout", "all"):
        rollout(arguments.repeats)
    if arguments.what in ("quickstart", "all"):
        quickstart()


if __name__ == "__main__":
    main()
