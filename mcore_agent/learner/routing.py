"""Routing replay (R2 and R3 of 2510.11370): training sends each token to the experts that an earlier pass or the rollout chose.

Which micro-batch a router works on is known to the attention of the same layer, which always runs just before it, in the
forward pass as in a recomputation; so it leaves the micro-batch's rows at the router. Nothing depends on the order in which
a pipeline schedule runs micro-batches.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mcore_agent.learner.groups import Groups
from mcore_agent.learner.packing import PackedRows


class RoutingError(ValueError):
    """Recorded experts do not fit the model or the tokens."""


class Chosen:
    """What stays of a micro-batch's routing to the end of a pass: which layers chose experts and, with ``keep``, which.

    Layers are numbered over the whole model, from 0.
    """

    def __init__(self, keep: bool, order: torch.Tensor | None):
        self.keep = keep
        self.order = order if keep else None  # [T'] of PackedRows
        self.experts: dict[int, torch.Tensor | None] = {}  # layer -> [t, k] of the tokens that this rank's routers see

    def note(self, layer: int, ids: torch.Tensor) -> None:
        self.experts[layer] = ids if self.keep else None


class Routes:
    """Of one micro-batch: the experts to be replayed, by layer (None: the router chooses), and where choices are noted."""

    def __init__(self, replay: dict[int, torch.Tensor] | None, chosen: Chosen):
        self.replay = replay  # layer -> [t, k]
        self.chosen = chosen


class Replay:
    """Stands where Megatron's RouterReplay would: a router asks it for the top k."""

    def __init__(self, layer: int):
        self.layer = layer
        self.rows: PackedRows | None = None  # of the micro-batch that the layer works on; the attention sets it

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, ids) of the chosen experts, both ``[t, k]``; gradients flow to the scores."""
        routes = None if self.rows is None else self.rows.routes
        if routes is not None and routes.replay is not None:
            ids = routes.replay[self.layer]
            values = scores.gather(1, ids)
        else:
            values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routes is not None:
            routes.chosen.note(self.layer, ids)
        return values, ids


def attach(module: GPTModel, config: Any) -> None:
    """Gives every router of a chunk its Replay, and tells the attention of its layer."""
    first = get_transformer_layer_offset(config, vp_stage=module.vp_stage)
    for index, layer in enumerate(module.decoder.layers):
        routers = [part for part in layer.mlp.modules() if isinstance(part, TopKRouter)]
        for router in routers:
            router.router_replay = Replay(first + index)
            layer.self_attention.core_attention.replay = router.router_replay


def forget(module: GPTModel) -> None:
    """Routers let go of the micro-batch that they worked on last."""
    for part in module.modules():
        if isinstance(part, TopKRouter) and part.router_replay is not None:
            part.router_replay.rows = None


def recorded(
    routing: np.ndarray, layers: Sequence[int], own: Iterable[int], rows: PackedRows, groups: Groups, experts: int
) -> dict[int, torch.Tensor]:
    """What this rank's routers, those of the layers ``own``, replay of ``routing`` [T, layers with experts, k].

    Padding tokens go to the first k experts. ``layers`` are the numbers of the layers with experts, over the whole model.
    Raises RoutingError.
    """
    size, held, topk = routing.shape
    if held != len(layers):
        raise RoutingError(f"routing has {held} layers, but the model has {len(layers)} with experts; record it with this model")
    if size and not (routing.min() >= 0 and routing.max() < experts):
        raise RoutingError(f"routing names experts {routing.min()} to {routing.max()}, but the model has {experts}")
    whole = np.broadcast_to(np.arange(topk), (int(rows.lengths.sum()), held, topk)).copy()
    whole[:size] = routing
    mine = whole[rows.own]
    if groups.layout.sp:
        mine = np.split(mine, groups.layout.tp)[groups.tp_rank]
    ids = torch.from_numpy(mine.astype(np.int64)).to(rows.device)
    return {layer: ids[:, i].contiguous() for i, layer in enumerate(layers) if layer in own}


def collect(chosen: Chosen, size: int, layers: Sequence[int], groups: Groups) -> np.ndarray:
    """``[size, layers, k]`` int32 experts that were chosen for the first ``size`` tokens of a pack, on every rank of its replica.

    Enters gathers of tp (under sequence parallelism), cp and pp. Raises RoutingError when a layer of this stage chose nothing.
    """
    here = {layer: _whole(ids, chosen.order, groups)[:size] for layer, ids in sorted(chosen.experts.items()) if ids is not None}
    stages: list[Any] = [here]
    if groups.layout.pp > 1:
        stages = [None] * groups.layout.pp
        dist.all_gather_object(stages, here, group=groups.pp)
    found = {layer: ids for stage in stages for layer, ids in stage.items()}
    if missing := sorted(set(layers) - found.keys()):
        raise RoutingError(f"no expert was recorded in layers {missing}")
    return np.stack([found[layer] for layer in layers], 1).astype(np.int32)


def _whole(ids: torch.Tensor, order: torch.Tensor | None, groups: Groups) -> np.ndarray:
    """[T', k] of the whole pack from what this rank's router saw."""
    for group, split in ((groups.tp, groups.layout.sp), (groups.cp, groups.layout.cp > 1)):
        if split:
            parts = [torch.empty_like(ids) for _ in range(group.size())]
            dist.all_gather(parts, ids.contiguous(), group=group)
            ids = torch.cat(parts)
    out = torch.empty_like(ids)
    out[slice(None) if order is None else order] = ids
    return out.cpu().numpy()


def check_consumed(chosen: Chosen, layers: Iterable[int]) -> None:
    """Raises RoutingError unless each of this stage's ``layers`` has replayed what was recorded for it."""
    if missing := sorted(set(layers) - chosen.experts.keys()):
        raise RoutingError(f"recorded experts of layers {missing} were not replayed")
