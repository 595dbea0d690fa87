"""Benchmarks: each prints ratios of two things measured alternately in one run, in CPU seconds.

    python tools/bench.py learner     tokens per CPU-second of the learner, against transformers
    python tools/bench.py rollout     the same of the local engine, against transformers' generate
    python tools/bench.py drafting    the same of the local engine with drafts, against itself without them
    python tools/bench.py packing     tokens per CPU-second of packed rows, against padded ones and against rows of one length
    python tools/bench.py head        log-probabilities of 4,096 tokens at vocabulary 152,064: memory, distance, time
    python tools/bench.py quickstart  trains the quickstart and says where the time of its steps went
    python tools/bench.py step RUN    the same of a run folder
    python tools/bench.py all         learner, rollout, drafting, packing, head and quickstart
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


def drafting() -> None:
    import bench_drafting

    bench_drafting.report(bench_drafting.run(bench_drafting.STEPS))


def packing(repeats: int) -> None:
    import bench_packing

    result = bench_packing.run(repeats)
    print(json.dumps(result, indent=1, default=float))
    for other, target in (("padded", 2.50), ("dense", 0.95)):
        print(f"packed rows, 7M shape, against {other} ones: median ratio {result[f'of_{other}']:.3f} (at least {target})")


def head(repeats: int) -> None:
    import bench_head

    result = bench_head.run(repeats)
    _print("head, forward and backward against all logits at once", result, 0.75)
    print(f"peak memory: {result['memory_chunks']:.2f} chunks of fp32 logits (at most 3.5)")
    print(f"distance: {max(result['logp_distance'], result['entropy_distance']):.1e} (at most 1e-6)")


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
    parser.add_argument("what", choices=("learner", "rollout", "drafting", "packing", "head", "quickstart", "step", "all"))
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
    if arguments.what in ("drafting", "all"):
        drafting()
    if arguments.what in ("packing", "all"):
        packing(arguments.repeats)
    if arguments.what in ("head", "all"):
        head(arguments.repeats)
    if arguments.what in ("quickstart", "all"):
        quickstart()


if __name__ == "__main__":
    main()
