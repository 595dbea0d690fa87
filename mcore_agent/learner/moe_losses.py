"""The router's load-balancing and z loss, weighted so that every layout and every split gives one process's gradients.

A micro-batch m has T_m real tokens (no padding, no filler row) and the global batch T. In each layer, with E experts of
which k are chosen, c_e tokens sent to expert e and P_e the sum of its probability,

    aux_m = E / (k T_m^2) * sum_e c_e P_e      Switch Transformer, 2101.03961 eq. 4-6; 1 when balanced
    z_m   = 1 / T_m * sum_t logsumexp(l_t)^2   ST-MoE, 2202.08906 eq. 5

and the step's loss gains ``sum_m T_m / T * (aux * aux_m + z * z_m)``, summed over layers. Both are sums over tokens once
c_e is known, so that ranks that split a micro-batch exchange one count and add their gradients, as for any other loss.

Megatron's own versions are left off. They weight a rank by *its* tokens times the number of ranks, which is right only
where padding is spread evenly; with a padding mask 0.19.2 takes the sum of all ranks for its own count, so that the
gradient of aux is as many times too large (Megatron-LM issue 7452, finding 10); and they expect a division by T
that this project never makes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model

from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.layout import LayoutError
from mcore_agent.learner.groups import Groups, device


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients; 0 leaves a loss out. Raises ValueError for a negative one."""

    aux: float = 0.0
    z: float = 0.0

    def __post_init__(self):
        for key, value in (("aux_loss", self.aux), ("z_loss", self.z)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"learner.{key} is {value}, but it weights a loss to be made small; use 0 (off) or a positive number")

    @property
    def active(self) -> bool:
        return self.aux > 0 or self.z > 0


class LossRouter(TopKRouter):
    """Megatron's router with the two losses attached to the probabilities it returns.

    The gradient goes through MoEAuxLossAutoScaler, whose scale is the main loss's own (1, or that of ``grad_scale_func``).
    """

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False, *, losses: RouterLosses):
        super().__init__(config=config, pg_collection=pg_collection, is_mtp_layer=is_mtp_layer)
        if self.score_function != "softmax":
            raise LayoutError(
                f"learner.aux_loss or learner.z_loss is set, but the model scores experts by {self.score_function!r}: both are "
                "defined for a softmax router; set them to 0"
            )
        self.losses = losses
        self.batch_tokens = 1  # T
        self.sums = torch.zeros(2, dtype=torch.float64)  # T_m aux_m and T_m z_m: this rank's part, over micro-batches

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(probabilities, chosen), both ``[t, E]``; ``padding_mask`` is ``[t, 1]``, True where a token is none.

        While gradients are on, enters an all-reduce of E + 1 counts over the ranks that split the micro-batch (TP x CP).
        """
        probs, chosen = super().routing(logits, padding_mask=padding_mask)
        if not (self.training and torch.is_grad_enabled()):  # includes the first forward of a recomputed layer
            return probs, chosen
        flat = logits.view(probs.shape)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        real = wide.new_ones(len(wide)) if padding_mask is None else (~padding_mask.reshape(-1)).to(wide.dtype)
        counts = torch.cat([real @ chosen.to(wide.dtype), real.sum(0, keepdim=True)]).detach().double()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        sent, tokens = counts[:-1].to(wide.dtype), counts[-1].clamp(min=1).to(wide.dtype)
        aux = (sent * (real @ wide.softmax(-1))).sum() * (len(sent) / self.topk) / tokens
        z = real @ wide.logsumexp(-1).square()
        self.sums += torch.stack([aux.detach(), z.detach()]).to(self.sums)
        loss = (self.losses.aux * aux + self.losses.z * z) / self.batch_tokens
        return MoEAuxLossAutoScaler.apply(probs, loss), chosen

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """0.19.2 combines ``[t, E]`` with a mask ``[t]``: an error, or for t = E a wrong count."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))


def attach(mlp: Any, losses: RouterLosses) -> None:
    """Puts the router with these losses into the mixture-of-experts part of a layer spec."""
    mlp.keywords["submodules"].router = partial(LossRouter, losses=losses)


def padding_of(micro: MicroBatch, length: int) -> np.ndarray:
    """``[length]`` bool: which of a micro-batch's tokens, filled up to ``length``, are padding or of a filler row."""
    return np.pad(np.repeat(micro.rows < 0, micro.lengths), (0, length - len(micro.tokens)), constant_values=True)


def padding_mask(padding: torch.Tensor, chunk: torch.nn.Module, groups: Groups) -> torch.Tensor:
    """What GPTModel takes: ``[1, t]`` for a context-parallel share ``[t]``.

    Under sequence parallelism Megatron cuts it into tensor-parallel shares, but only where it has the embedding; for the
    other chunks it is cut here.
    """
    if groups.layout.sp and not get_attr_wrapped_model(chunk, "pre_process"):
        padding = padding.chunk(groups.layout.tp)[groups.tp_rank]
    return padding[None]


def begin(modules: Iterable[torch.nn.Module], micro: Sequence[MicroBatch], groups: Groups) -> None:
    """Before a pass with gradients: counts the real tokens of the global batch. Collective over DP, on every rank."""
    count = torch.tensor(float(sum(m.lengths[m.rows >= 0].sum() for m in micro)), dtype=torch.float64, device=device())
    if groups.layout.dp > 1:
        dist.all_reduce(count, group=groups.dp)
    for router in _routers(modules):
        router.batch_tokens = max(1, int(count))
        router.sums = torch.zeros(2, dtype=torch.float64, device=device())


def metrics(modules: Iterable[torch.nn.Module], layers: int, groups: Groups) -> dict[str, float]:
    """After a pass: ``moe/aux`` and ``moe/z`` without coefficients, mean over real tokens and the model's ``layers`` with experts.

    Collective over all ranks, also those of a stage without experts.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device())
    for router in _routers(modules):
        sums += router.sums / router.batch_tokens
    if groups.layout.world > 1:  # no two ranks have the same token of the same layer: TP brings SP here
        dist.all_reduce(sums)
    aux, z = (sums / layers).tolist()
    return {"moe/aux": aux, "moe/z": z}


def _routers(modules: Iterable[torch.nn.Module]) -> list[LossRouter]:
    return [part for module in modules for part in module.modules() if isinstance(part, LossRouter)]
