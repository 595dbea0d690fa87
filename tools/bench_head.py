"""Log-probability and entropy of 4,096 tokens at vocabulary 152,064: memory, distance and CPU-seconds against all logits at once.

Memory is what the kernel reports as the peak resident set (VmHWM) of a fresh child process over a forward and backward, less
what was resident before and less the two gradients; a first pass over a few tokens loads the code that is measured.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TOKENS, VOCAB, WIDTH = 4096, 152_064, 64
SHARE = 512  # tokens of the timed comparison: all logits of 4,096 would be 2.5 GB, several times over
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def run(repeats: int = 5) -> dict[str, float]:
    """Peak extra memory in fp32 logits of a 256-token chunk, largest relative distances, and the ratio of CPU-seconds direct / chunked.

    The two are timed in turn, forward and backward, on the same 512 tokens and one thread.
    """
    torch.set_num_threads(1)
    found = distances()
    seconds: dict[str, list[float]] = {"chunked": [], "direct": []}
    for _ in range(repeats + 1):
        for name, side in (("chunked", chunked), ("direct", direct)):
            leaves = inputs(SHARE)
            start = time.process_time()
            logp, entropy = side(*leaves)
            (logp.sum() + entropy.sum()).backward()
            seconds[name].append(time.process_time() - start)
    ratios = [d / c for c, d in zip(seconds["chunked"][1:], seconds["direct"][1:], strict=True)]
    times = {f"{name}_cpu_s": statistics.median(values[1:]) for name, values in seconds.items()}
    return {"memory_chunks": memory(), **found, **times, "ratio": statistics.median(ratios), "ratio_min": min(ratios)}


def inputs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states, weight, targets): logits with a deviation of 2.4."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(size, WIDTH, generator=generator)
    weight = 0.3 * torch.randn(VOCAB, WIDTH, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCAB, (size,), generator=generator)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from mcore_agent.learner.logprob import Head, head_output

    inner = torch.ones(len(hidden), dtype=torch.bool)
    inner[0] = False
    head = Head(targets, inner, 1.0, True, 0, len(weight), ALONE)
    layer: Any = SimpleNamespace(weight=weight, sequence_parallel=False)
    out = head_output(hidden[:, None], layer, None, head)
    assert out.entropy is not None
    return out.logp[1:], out.entropy[1:]


def direct(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.log_softmax(hidden @ weight.t(), -1)
    return table.gather(1, targets[:, None])[:-1, 0], -(table.exp() * table).sum(-1)[:-1]


def distances() -> dict[str, float]:
    """Largest relative distances of fp32 from the direct computation of the same inputs in fp64, over all 4,096 tokens.

    In fp32 the direct entropy itself is off by 1e-5: an error of log p is common to all columns, and so is its effect on p.
    """
    hidden, weight, targets = inputs(TOKENS)
    with torch.no_grad():
        found, exact = chunked(hidden, weight, targets), weight.double()
        parts = [slice(start, start + 65) for start in range(0, TOKENS - 1, 64)]  # direct leaves the last position out
        want = [torch.cat(v) for v in zip(*(direct(hidden[p].double(), exact, targets[p]) for p in parts), strict=True)]
    names = ("logp_distance", "entropy_distance")
    return {n: float(((f - w).abs() / w.abs().clamp_min(1)).max()) for n, f, w in zip(names, found, want, strict=True)}


def memory() -> float:
    """Measured in a fresh process; Linux only."""
    out = subprocess.run([sys.executable, __file__, "memory"], check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    return float(out.stdout.split()[-1])


def _resident(field: str) -> int:
    """Bytes that /proc/self/status gives under this name."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def _measure() -> float:
    from mcore_agent.learner.logprob import CHUNK

    torch.set_num_threads(1)
    hidden, weight, targets = inputs(TOKENS)
    logp, entropy = chunked(*(x[:8].detach().requires_grad_() for x in (hidden, weight)), targets[:8] % 8)
    (logp.sum() + entropy.sum()).backward()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _resident("VmRSS")
    logp, entropy = chunked(hidden, weight, targets)
    (logp.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    gradients = 4 * (hidden.grad.numel() + weight.grad.numel())
    return (_resident("VmHWM") - before - gradients) / (4 * CHUNK * VOCAB)


if __name__ == "__main__":
    print(_measure() if sys.argv[1:] == ["memory"] else run())
