"""A turn earns the evidence that it newly verifies, in the order of a hidden graph (M110; DiscoPO)."""

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_agent.registry import register
from mcore_agent.reward.goals import goals_of, pay
from mcore_agent.reward.pipeline import RewardError
from mcore_agent.types import Episode

CLAIM = "the final claim"


@register("reward", "evidence_dag")
@dataclass(frozen=True)
class EvidenceDag:
    """``r_t = sum of w_v`` over the nodes v first verified at turn t whose parents are verified; the last turn also earns the claim.

    The graph is the task's gold: ``{"nodes": [{"name": …, "state": regex, "action": regex, "weight": w, "after": [parents]}],
    "claim": regex, "claim_weight": w}`` (nodes are goals, see Goal). An environment that verifies evidence itself writes what
    holds into its state key. A node visited before its parents pays nothing and must be visited again; one seen twice pays
    once. The claim pays 1, or ``claim_weight``, when the last turn's action matches it.

    a -> b with weights 1 and 2, visited as b a b b, and the claim right in a fifth turn: [0, 1, 2, 0, 1].
    """

    def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """``{"evidence": one number per turn}``. Raises RewardError when the task's gold is no such graph."""
        gold, where = episode.task.gold, f"reward 'evidence_dag': task {episode.task.id!r}: gold"
        if not isinstance(gold, Mapping) or "nodes" not in gold or not gold.keys() <= {"nodes", "claim", "claim_weight"}:
            raise RewardError(f"{where} is {gold!r}, but must have nodes and, if wanted, claim and claim_weight")
        earned = pay(goals_of(gold["nodes"], f"{where}['nodes']"), episode.turns)
        if "claim" in gold and episode.turns:
            claim = {"name": CLAIM, "action": gold["claim"], "weight": gold.get("claim_weight", 1.0)}
            earned[-1] += pay(goals_of([claim], f"{where}['claim']"), episode.turns[-1:])[0]
        return {"evidence": earned}
