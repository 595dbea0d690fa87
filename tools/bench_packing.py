"""Training throughput of packed rows against padded ones and against rows that need no padding, CPU-seconds, alternating.

``python tools/bench_packing.py`` prints tokens per CPU-second of forward and backward (true tokens, not padding) and
the two ratios. Lengths are heavy-tailed, as turns of an agent are: between 32 and 2,048 with mean 300.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from alternate import cpu_seconds

SHAPE_7M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 768,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SHORTEST, LONGEST, MEAN = 32, 2048, 300
ROWS_OF_PADDED = 8
TOKEN_BUDGET = 4096


def lengths_of(rows: int, seed: int = 2) -> np.ndarray:
    """[rows] in arrival order: the quantiles of a power law cut off at both ends, whose mean is 300, shuffled.

    This seed pads 32 rows to 3.44 times their tokens in eights, as the law does on average.
    """
    quantile = (np.arange(rows) + 0.5) / rows

    def law(power: float) -> np.ndarray:
        low, high = float(SHORTEST) ** -power, float(LONGEST) ** -power
        return np.round((low + quantile * (high - low)) ** (-1 / power)).astype(np.int64)

    least, most = 0.01, 2.0  # the mean falls as the power grows
    for _ in range(40):
        power = (least + most) / 2
        least, most = (power, most) if law(power).mean() > MEAN else (least, power)
    return np.random.default_rng(seed).permutation(law(least))


def run(repeats: int = 5, rows: int = 32) -> dict[str, float]:
    """Medians of tokens per CPU-second, one thread, and medians of the ratios ``of_padded`` and ``of_dense``.

    ``padded``: micro-batches of 8 rows in arrival order, each filled up to its longest with tokens of weight 0.
    ``packed``: the same rows, packed to a token budget. ``dense``: as many tokens in rows of one length, which is the
    one at which a token sees as many keys on average as it does in the packed rows; ``dense_at_mean``: of 300 tokens.
    Raises AssertionError when packed and padded rows do not give the same loss.
    """
    torch.set_num_threads(1)
    sides, tokens = sides_of(rows)
    losses = {name: side() for name, side in sides.items()}  # also warms up
    if abs(losses["packed"] - losses["padded"]) > 1e-5 * abs(losses["padded"]):
        raise AssertionError(f"packed and padded rows do not compute the same: {losses}")
    seconds = cpu_seconds(sides, repeats)
    speed = {name: [tokens[name] / s for s in seconds[name]] for name in sides}
    found = {f"{name}_tokens_per_cpu_s": statistics.median(values) for name, values in speed.items()}
    for other in ("padded", "dense", "dense_at_mean"):
        found[f"of_{other}"] = statistics.median(p / o for p, o in zip(speed["packed"], speed[other], strict=True))
    return found


def sides_of(rows: int) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:
    """(what each side does once, true tokens it does it for)."""
    from ckpt_convert.families import family_of
    from ckpt_convert.source import RandomSource
    from mcore_agent.batch.plan import split
    from mcore_agent.learner import groups
    from mcore_agent.learner.learner import Layout, Learner, OptimSpec
    from mcore_agent.loss.sft_nll import SftNll

    learner = Learner(SHAPE_7M, groups.initialize(Layout()), "fp32", OptimSpec())
    learner.load_weights(RandomSource(family_of(SHAPE_7M), 1))
    lengths = lengths_of(rows)
    padded = np.repeat(lengths.reshape(-1, ROWS_OF_PADDED).max(1), ROWS_OF_PADDED)
    eights = np.arange(rows).reshape(-1, ROWS_OF_PADDED)
    batches = {
        "packed": split(rowset_of(lengths, lengths, np.arange(rows)), TOKEN_BUDGET).slots[0],
        "padded": [split(rowset_of(lengths, padded, eight), 1 << 40).slots[0][0] for eight in eights],
    }
    tokens = dict.fromkeys(batches, int(lengths.sum()))
    keys = float((lengths.astype(np.float64) ** 2).sum() / lengths.sum())
    for name, length in (("dense", round(keys)), ("dense_at_mean", MEAN)):
        equal = np.full(round(lengths.sum() / length), length)
        batches[name] = split(rowset_of(equal, equal, np.arange(len(equal))), TOKEN_BUDGET).slots[0]
        tokens[name] = int(equal.sum())
    terms = [SftNll()]
    return {name: lambda micro=micro: learner.gradients(micro, terms).loss for name, micro in batches.items()}, tokens


def rowset_of(lengths: np.ndarray, filled: np.ndarray, chosen: np.ndarray) -> Any:
    """Those rows of random tokens, each filled up with token 0 of weight 0; weights are those of a mean over all rows' tokens."""
    from mcore_agent.batch.rowset import RowSet

    tokens: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for i in chosen:
        ids = np.random.default_rng(i).integers(0, SHAPE_7M["vocab_size"], lengths[i])
        weight = np.r_[0, np.full(lengths[i] - 1, 1 / lengths.sum())]
        for parts, values in ((tokens, ids), (weights, weight)):
            parts.append(np.pad(values, (0, filled[i] - lengths[i])))
    weight = np.concatenate(weights)
    columns = {"w:0": weight, "mask:sft": np.sign(weight)}
    return RowSet(np.concatenate(tokens), filled[chosen], chosen, len(lengths), columns)


if __name__ == "__main__":
    print({key: round(value, 3) for key, value in run(*map(int, sys.argv[1:])).items()})
