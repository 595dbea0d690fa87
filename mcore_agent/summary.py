"""What a run says of itself: a line per step, ``summary.json``, the learning curve, and episodes a person can read."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mcore_agent.metrics import bars
from mcore_agent.types import Episode

FEW = 3  # steps that "first" and "last" rewards average over


def step_line(kind: str, done: int, total: int, numbers: dict[str, Any]) -> str:
    """One line for the console."""
    parts = [f"{kind} {done:>4}/{total}"]
    for name, form in (
        ("loss", "loss {:.4f}"),
        ("reward/mean", "reward {:.3f}"),
        ("credit/groups_with_signal", "groups with signal {}"),
        ("mismatch/logp_abs_max", "mismatch {:.1e}"),
        ("eval/greedy_success", "greedy {:.3f}"),
        ("eval/sampled_success", "sampled {:.3f}"),
    ):
        if numbers.get(name) is not None:
            parts.append(form.format(numbers[name]))
    return "  ".join(parts)


def summarize(progress: Any, wall_s: float) -> dict[str, Any]:
    """The content of ``summary.json``. Keys about what the run did not measure are None."""
    curve, rewards = progress.curve, progress.rewards
    warmup = [entry for entry in curve if entry["stage"] == "sft"]
    last = curve[-1] if curve else {}
    return {
        "steps": progress.step,
        "wall_s": round(wall_s, 1),
        "greedy_success_end": last.get("greedy_success"),
        "sampled_success_end": last.get("sampled_success"),
        "greedy_success_warmup": warmup[-1]["greedy_success"] if warmup else None,
        "sampled_success_warmup": warmup[-1]["sampled_success"] if warmup else None,
        "reward_first": float(np.mean(rewards[:FEW])) if rewards else None,
        "reward_last": float(np.mean(rewards[-FEW:])) if rewards else None,
        "mismatch_logp_abs_max": progress.mismatch,
        "rewards": rewards,
        "curve": curve,
    }


def closing(progress: Any, result: dict[str, Any], folder: Path) -> str:
    """The learning curve and the table that end a run, as text."""
    console = Console(width=88, no_color=True, force_terminal=False)
    with console.capture() as captured:
        if progress.curve:
            console.print()
            for name in ("greedy", "sampled"):
                values = [entry[f"{name}_success"] for entry in progress.curve]
                console.print(f"{name:>8} success  {bars(values)}  {values[0]:.2f} to {values[-1]:.2f}")
        if progress.rewards:
            shown = progress.rewards[-60:]
            console.print(f"{'mean':>8} reward   {bars(shown, max(1.0, *shown))}  {shown[0]:.2f} to {shown[-1]:.2f}")
        table = Table(title="What happened", title_justify="left", show_header=False)
        table.add_column("")
        table.add_column("", justify="right")
        for label, value in _rows(result):
            table.add_row(label, value)
        console.print()
        console.print(table)
        console.print(f"Run folder: {folder}", soft_wrap=True)
    return captured.get()


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    labels = {
        "sampled_success_warmup": "sampled success after imitation",
        "sampled_success_end": "sampled success at the end",
        "greedy_success_end": "greedy success at the end",
        "reward_first": f"mean reward, first {FEW} rl steps",
        "reward_last": f"mean reward, last {FEW} rl steps",
    }
    rows = [("steps", str(result["steps"]))]
    rows += [(label, f"{result[key]:.3f}") for key, label in labels.items() if result[key] is not None]
    rows += [("largest log-prob difference, engine to learner", f"{result['mismatch_logp_abs_max']:.1e}")]
    return [*rows, ("wall time", f"{result['wall_s']:.0f} s")]


def episode_record(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """One line of the run folder's ``episodes``: what was said, by whom, and what it was worth."""
    record: dict[str, Any] = {
        "id": episode.id,
        "task": episode.task.id,
        "group": episode.group,
        "branch": episode.branch,
        "status": episode.status,
        "reason": episode.reason,
        "rewards": {name: value for name, value in episode.rewards.items()},
        "seed": episode.seed,
        "rows": [],
    }
    for row in episode.rows:
        record["rows"].append(
            [{"kind": s.kind, "turn": s.turn, "text": tokenizer.decode(row.tokens[s.start : s.end].tolist())} for s in row.segments]
        )
    return record
