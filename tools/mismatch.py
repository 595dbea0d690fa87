"""Shows how far engine and learner disagreed in a run, and with ``--model`` which of them is off.

    python tools/mismatch.py runs/quickstart
    python tools/mismatch.py runs/quickstart --model runs/quickstart/hf --version 12

``--model`` is a Hugging Face folder with the weights of that version; its own forward pass over the worst rows is the arbiter.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcore_agent.config import ConfigError, read_config
from mcore_agent.mismatch import MismatchError, Record, arbitrate, read_dump

SHOWN = 20  # steps, spread over the run
COLUMNS = {
    "mean": "mismatch/logp_abs_mean",
    "max": "mismatch/logp_abs_max",
    "k3": "mismatch/k3",
    "alarm": "mismatch/alarm",
    "weight": "correction/weight_mean",
    "ess": "correction/ess",
    "dropped": "correction/dropped",
}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--model", type=Path, help="Hugging Face folder that judges the worst rows")
    parser.add_argument("--version", type=int, help="weight version of --model: only tokens that it sampled are compared")
    arguments = parser.parse_args(words)
    out = Console(highlight=False)
    try:
        steps = [r for r in _records(arguments.run / "metrics.jsonl") if COLUMNS["max"] in r]
        rows = [record for path in sorted((arguments.run / "mismatch").glob("*.jsonl")) for record in read_dump(path)]
        out.print(_steps(steps) if steps else "The run has no step that compares engine and learner")
        out.print(_rows(rows, arguments) if rows else "The run has kept no outliers")
    except (OSError, MismatchError, ConfigError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError as e:
        raise MismatchError(f"{path} is damaged: {e}") from e


def _steps(records: list[dict[str, Any]]) -> Table:
    """At most ``SHOWN`` steps, first and last among them; columns that the run never measured are left out."""
    count = min(SHOWN, len(records))
    chosen = [records[i * (len(records) - 1) // max(count - 1, 1)] for i in range(count)]
    names = {title: key for title, key in COLUMNS.items() if any(key in r for r in records)}
    table = Table("step", *names, title="Learner against engine", title_justify="left")
    for r in chosen:
        table.add_row(str(r["step"]), *(f"{r[key]:.3g}" if key in r else "" for key in names.values()))
    return table


def _rows(records: list[Record], arguments: argparse.Namespace) -> Table:
    """The worst rows, and with a model the verdict on each."""
    worst = sorted(records, key=lambda r: -r["gap"])[:SHOWN]
    if arguments.model is None:
        table = Table("episode", "row", "gap", "at", "tokens", "versions", title="Worst rows", title_justify="left")
        for r in worst:
            versions = ", ".join(map(str, sorted(set(r["version"]))))
            table.add_row(r["episode"], str(r["row"]), f"{r['gap']:.3g}", str(r["at"]), str(len(r["places"])), versions)
        return table
    from transformers import AutoModelForCausalLM

    temperature = read_config(arguments.run / "config.yaml").rollout.temperature
    if not (arguments.model / "config.json").is_file():
        raise MismatchError(f"{arguments.model} is no Hugging Face folder; export one with run.export=true")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32", attn_implementation="sdpa").eval()
    verdicts = arbitrate(model, worst, temperature, arguments.version)
    table = Table("episode", "row", "tokens", "engine", "learner", "off", title="Both against the model", title_justify="left")
    for v in verdicts:
        table.add_row(v.episode, str(v.row), str(v.tokens), f"{v.engine:.3g}", f"{v.learner:.3g}", v.side)
    if not verdicts:
        raise MismatchError(f"no kept row has a token of weight version {arguments.version}")
    return table


if __name__ == "__main__":
    sys.exit(main())
