"""How fast each estimator learns: rl steps on the quickstart's task until greedy success reaches a target, beside GRPO's.

    python tools/bench_algorithms.py [--seeds 0 1] [--only grpo rloo …] [--out docs/algorithms.md]

Every estimator of the registry starts from the same imitated policy and gets three times the steps that GRPO needed with that
seed. What an estimator needs (a critic, a reference policy, greedy siblings) follows from what it declares. Results are kept in
``--runs``: a second call goes on where the first was stopped.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mcore_agent.credit.pipeline import Pipeline  # noqa: E402
from mcore_agent.registry import variants  # noqa: E402

RECIPE, YARDSTICK, TARGET = "recipes/quickstart.yaml", "grpo", 0.9
EVERY, MOST, FACTOR = 2, 30, 3  # steps between evaluations, of the yardstick, and how many times its steps the others get
HEAD = """# How fast each estimator learns

Optimization by `ppo_clip` on `hop_lookup` with the quickstart's model, from one imitated policy (greedy success {start:.3f}).
In a cell: the first rl step, of those at which it was measured (every {every}), whose greedy success is at least {target}, and
the last greedy success measured. Each estimator had {factor} times GRPO's steps. Made by
`make bench-algorithms ARGS='--seeds {numbers}'`; settings are each estimator's defaults.

| estimator | {seeds} | of GRPO's steps |
|---|{dashes}|---|
"""
NOTES = """
`vapo` with its default `alpha` of .05, which is meant for answers of thousands of tokens, gives these episodes of about fifty
`lam` near 0: it follows a critic that has learned for a few steps only. With `alpha: 1.0` greedy success was 1.000 at step 3 (seed 0).
"""


def train(folder: Path, *words: str) -> list[dict]:
    """The run's metrics; a finished run is not repeated."""
    if not (folder / "summary.json").is_file():
        command = [sys.executable, "-m", "mcore_agent.cli", "train", RECIPE, f"run.dir={folder}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{folder.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def words_for(name: str, seed: int, base: Path, steps: int) -> list[str]:
    """The recipe's changes for an estimator, by what it declares."""
    stage = f"{{kind: rl, lr: 5.0e-4, steps: {steps}, eval_every: {EVERY}}}"
    words = [f"model={{path: {base}}}", f"stages=[{stage}]", f"credit=[{{name: {name}}}]", f"run.seed={seed}", "run.save_every=0"]
    if {"values", "values_behind"} & set(Pipeline([{"name": name}]).needs):
        words += ["critic.mode=separate", "critic.lr=2.0e-3"]
    return words


def reached(records: list[dict]) -> tuple[int | None, float]:
    """The first step of the target, if any, and the last greedy success."""
    curve = [(m["step"], m["eval/greedy_success"]) for m in records if "eval/greedy_success" in m]
    return next((step for step, success in curve if success >= TARGET), None), curve[-1][1]


def table(found: dict[str, dict[int, tuple[int | None, float]]], seeds: list[int], start: float) -> str:
    """Markdown; estimators by how fast they were."""
    lines = []
    for name, by_seed in found.items():
        ratios = [step / by[0] for seed, (step, _) in by_seed.items() if step and (by := found[YARDSTICK][seed])[0]]
        cells = [f"{step or '–'} ({last:.3f})" for step, last in (by_seed[seed] for seed in seeds)]
        mean = sum(ratios) / len(ratios) if len(ratios) == len(seeds) else float("inf")
        lines.append((mean, f"| `{name}` | {' | '.join(cells)} | {f'{mean:.2f}' if mean < float('inf') else '–'} |"))
    columns, dashes = " | ".join(f"seed {s}" for s in seeds), "|".join("---" for _ in seeds)
    numbers = " ".join(map(str, seeds))
    head = HEAD.format(start=start, every=EVERY, target=TARGET, factor=FACTOR, numbers=numbers, seeds=columns, dashes=dashes)
    return head + "\n".join(line for _, line in sorted(lines)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=[], help="names of estimators; the yardstick is always there")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "algorithms")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "algorithms.md")
    a = parser.parse_args()
    names = [YARDSTICK, *(n for n in variants("estimator") if n != YARDSTICK and (not a.only or n in a.only))]
    base, started, done = a.runs / "base", time.monotonic(), 0
    sft = "{kind: sft, steps: 800, lr: 2.0e-3, warmup: 50, schedule: linear, lr_end: 0.1, demos: 64, eval_every: 50, until_success: 0.38}"
    start = reached(train(base, f"stages=[{sft}]"))[1]
    weights = base / "checkpoints" / (base / "checkpoints" / "latest").read_text().strip()
    found: dict[str, dict[int, tuple[int | None, float]]] = {}
    for name in names:
        for seed in a.seeds:
            yardstick = found[YARDSTICK][seed][0] if name != YARDSTICK else None
            steps = FACTOR * yardstick if yardstick else MOST
            found.setdefault(name, {})[seed] = reached(train(a.runs / f"{name}-{seed}", *words_for(name, seed, weights, steps)))
            done += 1
            left = (time.monotonic() - started) / done * (len(names) * len(a.seeds) - done)
            step, last = found[name][seed]
            print(f"{name:20} seed {seed}: greedy {TARGET} at step {step or '–'}, last {last:.3f}; {left / 60:.0f} min left", flush=True)
    a.out.write_text(table(found, a.seeds, start) + NOTES)
    print(a.out.read_text())


if __name__ == "__main__":
    main()
