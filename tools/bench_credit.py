"""How long credit takes, and how much memory beside its input, for many long episodes.

    python tools/bench_credit.py [--episodes 512] [--tokens 32000] [--turns 16] [--only grpo gae …] [--repeat 3]

Input is what the rows and columns of the batch hold. A line: CPU seconds of the estimator alone and of the whole pipeline (best of
``--repeat``), and the highest memory that each took on top of the input, as a multiple of it (a run of its own, traced). The bars
are for the pipeline: half a second and 2. What a batch derives from its rows once for all stages (whose token is it, of which
turn) is made before.
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from mcore_agent.credit.pipeline import Pipeline
from mcore_agent.types import Batch, Episode, Row, Segment, Task, Turn

SECONDS, MEMORY = 0.5, 2.0
NAMES = ("grpo", "gae", "turn_gae", "bilevel_gae", "vapo", "vtrace", "sapo", "reinforce_pp")
CREDITS = {"standardize": [{"name": "grpo"}, {"name": "standardize"}], "kl_reward": [{"name": "kl_reward"}, {"name": "gae"}]}


def episode(number: int, tokens: int, turns: int, rng: np.random.Generator) -> Episode:
    """A prompt, then turns of three quarters action and one quarter observation; groups of eight."""
    edges = np.linspace(tokens // 16, tokens, turns + 1).astype(int)
    sampled, segments = np.zeros(tokens, dtype=bool), [Segment(0, int(edges[0]), -1, "prompt")]
    for turn, (a, b) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        middle = a + 3 * (b - a) // 4
        sampled[a:middle] = True
        segments += [Segment(a, middle, turn, "action"), Segment(middle, b, turn, "obs")]
    row = Row(rng.integers(1, 1000, tokens), sampled, np.where(sampled, -1.0, 0.0), np.where(sampled, 0, -1), tuple(segments))
    task, records = Task(f"t{number // 8}", "toy", ()), tuple(Turn(i, "act") for i in range(turns))
    return Episode(f"e{number}", task, f"g{number // 8}", (row,), records, {"outcome": float(rng.random() < 0.4)})


def batch_of(episodes: int, tokens: int, turns: int) -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(max(64, 3 * tokens // 4), tokens + 1, episodes)
    lengths[0] = tokens
    batch = Batch(tuple(episode(i, int(n), turns, rng) for i, n in enumerate(lengths)))
    size = int(batch.row_lengths.sum())
    names = ("values", "values_behind", "logp_old", "logp_prox", "logp_ref")
    return batch.with_columns(**{name: rng.standard_normal(size, dtype=np.float32) for name in names})


def nbytes(batch: Batch) -> int:
    rows = sum(a.nbytes for row in batch.rows for a in (row.tokens, row.sampled, row.logp, row.version))
    return rows + sum(column.nbytes for column in batch.columns.values())


def seconds(work: Callable[[], object], repeat: int) -> float:
    found = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def peak(work: Callable[[], object]) -> int:
    """Bytes at the highest point, what the result holds included."""
    tracemalloc.start()
    result = work()
    _, high = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32_000, help="of the longest episode; the others have at least 3/4 of it")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=[], help="estimators, and " + ", ".join(CREDITS))
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    batch = batch_of(a.episodes, a.tokens, a.turns)
    start = time.perf_counter()
    assert len(batch.token_turn) == len(batch.token_episode)
    derived, own = time.perf_counter() - start, nbytes(batch)
    print(f"{a.episodes} episodes, {len(batch.token_row):,} tokens, input {own / 1e6:.0f} MB; axes made in {derived:.2f} s")
    print(f"{'':14} {'estimator':>10} {'pipeline':>10} {'memory':>8}")
    for name in a.only or (*NAMES, *CREDITS):
        pipeline = Pipeline(CREDITS.get(name, [{"name": name}]))
        alone = seconds(lambda pipeline=pipeline: pipeline.estimator(batch), a.repeat)
        whole = seconds(lambda pipeline=pipeline: pipeline(batch), a.repeat)
        ratio = peak(lambda pipeline=pipeline: pipeline.estimator(batch)) / own
        through = peak(lambda pipeline=pipeline: pipeline(batch)) / own
        verdict = "" if whole <= SECONDS and through <= MEMORY else "  above the bar"
        print(f"{name:14} {alone:9.2f}s {whole:9.2f}s {ratio:5.2f} (pipeline {through:.2f}){verdict}", flush=True)


if __name__ == "__main__":
    main()
