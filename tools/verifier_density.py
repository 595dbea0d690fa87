"""Does credit that is aimed at single turns help? It depends on how many of them the verifier shows (M90).

    python tools/verifier_density.py                        the study: a chain of 6 decisions, a table as the policy
    python tools/verifier_density.py --episodes FILE.npz    the density of recorded episodes, by group

In the study an episode takes C decisions of 3 choices each, the first of which is right, and succeeds when all are. The verifier shows
the last k decisions: V_d = k / C. Every arm has the same random numbers and, in each step, the same mass of advantage.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mcore_agent.credit.density import densities  # noqa: E402
from mcore_agent.rollout.records import load_episodes  # noqa: E402
from mcore_agent.types import Batch  # noqa: E402

CHOICES, GROUP, STEPS, LR = 3, 8, 150, 0.5
ARMS = {
    "sparse": "the outcome alone (1 when all decisions are right), evenly on all decisions",
    "uniform": "the share of right decisions, evenly on all decisions",
    "target": "the same advantage on the k decisions shown, none on the others",
    "random": "the same on k decisions drawn anew for each episode: the shuffled control of target",
    "to_go": "each decision by how many of those shown are right from it on, against the group",
    "own": "each decision shown by whether it was right itself, against the group",
}


def advantages(reward: np.ndarray) -> np.ndarray:
    """[S, G] the reward against the group, over its deviation; 0 where all are equal."""
    centered = reward - reward.mean(axis=1, keepdims=True)
    return centered / (reward.std(axis=1, keepdims=True) + 1e-8)


def credit(arm: str, right: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """[S, G, C] what each decision is credited with: ``sum |A|`` over a group is the same for all arms of one reward.

    ``right`` [S, G, C] says which decisions of S seeds' groups of G episodes were right. Arms that compare decisions have
    nothing to scale where none differ, and give 0.
    """
    chain = right.shape[-1]
    shown = np.arange(chain) >= chain - k
    reward = right.all(axis=-1).astype(float) if arm == "sparse" else right.mean(axis=-1)
    whole = advantages(reward)
    if arm in ("sparse", "uniform"):
        return whole[..., None] * np.full(chain, 1 / chain)
    if arm == "target":
        return whole[..., None] * (shown / k)
    if arm == "random":
        return whole[..., None] * (rng.random(right.shape).argsort(axis=-1) < k) / k
    value = np.where(shown, right, 0.0)
    if arm == "to_go":
        value = value[..., ::-1].cumsum(axis=-1)[..., ::-1]
    own = value - value.mean(axis=1, keepdims=True)
    mass = abs(own).sum(axis=(1, 2), keepdims=True)
    return own * abs(whole).sum(axis=1)[:, None, None] / np.maximum(mass, 1e-8)


def train(arm: str, k: int, chain: int, seeds: int) -> np.ndarray:
    """[seeds] the probability that all decisions are right after training, exactly."""
    draws = np.stack([np.random.default_rng(seed).random((STEPS, GROUP, chain)) for seed in range(seeds)], axis=1)
    rng = np.random.default_rng(10**6)
    logits = np.zeros((seeds, chain, CHOICES))
    for step in range(STEPS):
        policy = _softmax(logits)  # [S, C, A]
        taken = (draws[step][..., None] > policy.cumsum(axis=-1)[:, None, :, :-1]).sum(axis=-1)  # [S, G, C]
        found = credit(arm, taken == 0, k, rng)
        chosen = taken[..., None] == np.arange(CHOICES)
        gradient = (found[..., None] * (chosen - policy[:, None])).sum(axis=1)
        logits += LR * chain * gradient / GROUP
    return _softmax(logits)[..., 0].prod(axis=-1)


def study(chain: int = 6, shown: tuple[int, ...] = (1, 2, 3, 5, 6), seeds: int = 10) -> dict[tuple[str, int], np.ndarray]:
    """Final success by (arm, k) for each seed; of arms to which k does not matter with k = chain alone."""
    out = {(arm, chain): train(arm, chain, chain, seeds) for arm in ("sparse", "uniform")}
    return out | {(arm, k): train(arm, k, chain, seeds) for k in shown for arm in ARMS if arm not in ("sparse", "uniform")}


def _softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def report(found: dict[tuple[str, int], np.ndarray], chain: int) -> str:
    """The table, and in brackets in how many seeds the uniform arm was better."""
    base = found["uniform", chain]
    arms = [arm for arm in ARMS if arm not in ("sparse", "uniform")]
    lines = [f"uniform {base.mean():.3f}   sparse {found['sparse', chain].mean():.3f}   ({len(base)} seeds)", ""]
    lines += ["| k | V_d | " + " | ".join(arms) + " |", "|---|---|" + "---|" * len(arms)]
    for k in sorted({k for arm, k in found if arm in arms}):
        cells = [f"{found[arm, k].mean():.3f} ({int((base > found[arm, k]).sum())}/{len(base)})" for arm in arms]
        lines.append(f"| {k} | {k / chain:.2f} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{arm}: {text}" for arm, text in ARMS.items())])


def measured(path: Path, success: float) -> str:
    """The densities of recorded episodes, one line for each group, and their mean."""
    batch = Batch(tuple(e for e in load_episodes(path) if e.status != "infra_fail"))
    found = densities(batch, success)
    lines = [f"{group}: k = {d.exposed}, C = {d.chain}, V_d = {d.value:.3f}" for group, d in found.items()]
    if not found:
        return f"no group of {path} has a success"
    return "\n".join([*lines, f"{len(found)} groups with a success, mean V_d {np.mean([d.value for d in found.values()]):.3f}"])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=Path, help="a file of recorded episodes, whose density is measured instead")
    parser.add_argument("--success", type=float, default=0.5, help="the reward from which on an episode counts as a success")
    parser.add_argument("--chain", type=int, default=6, help="decisions of an episode in the study")
    parser.add_argument("--seeds", type=int, default=10)
    a = parser.parse_args(words)
    if a.episodes:
        print(measured(a.episodes, a.success))
        return
    shown = tuple(sorted({k for k in (1, 2, a.chain // 2, a.chain - 1, a.chain) if k > 0}))
    print(report(study(a.chain, shown, a.seeds), a.chain))


if __name__ == "__main__":
    main()
