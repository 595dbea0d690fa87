"""From shards on many ranks to Hugging Face tensors on rank 0, and on others that want them, one Megatron parameter at a time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt_convert.families import Family, Param


class ExportError(RuntimeError):
    """The ranks do not hold the parameters that the family says they hold."""


class Place(Protocol):
    """What export needs to know of the process groups (``learner.groups.Groups``)."""

    @property
    def rank(self) -> int: ...

    @property
    def layout(self) -> Any: ...

    def global_rank(self, *, tp: int = 0, pp: int = 0) -> int: ...

    def expert_rank(self, *, etp: int = 0, ep: int = 0, pp: int = 0) -> int: ...


class Sharded(Protocol):
    """A model of which each rank holds a part (``learner.model.Model``)."""

    @property
    def family(self) -> Family: ...

    @property
    def groups(self) -> Place: ...

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's shards by global name."""
        ...

    def plain(self, tensor: Tensor) -> Tensor:
        """The tensor in the model's precision, also where it is kept in FP8."""
        ...


@dataclass(frozen=True)
class Shard:
    """Where a rank's share of a parameter lies, and what it looks like."""

    rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Owners:
    """The ranks that get whole tensors, rank 0 first; ``group`` is their process group, None when rank 0 is alone."""

    ranks: tuple[int, ...] = (0,)
    group: Any = None


def owners_of(ranks: Iterable[int]) -> Owners:
    """Collective over all ranks, which call it alike."""
    chosen = tuple(sorted({0, *ranks}))
    return Owners(chosen, dist.new_group(list(chosen)) if len(chosen) > 1 else None)


def export(model: Sharded, owners: Owners = Owners(), on_device: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) on the owners, in the family's order; nothing elsewhere.

    Tensors are on the CPU, or with ``on_device`` where the model is. Collective: every rank must exhaust it. A yielded
    tensor may be a view of a live parameter, valid until the next one is asked for. Raises ExportError, on every rank and
    before the first tensor, when a shard is nowhere.
    """
    own = {name: p.detach() for name, p in model.parameters().items()}
    places = _where(model, own)
    rank = model.groups.rank
    device = next(iter(own.values())).device
    where = device if on_device else torch.device("cpu")
    for param in model.family.globals():
        shards = [_fetch(model, own, param, shard, rank) for shard in places[param.name]]
        if rank not in owners.ranks:
            continue
        if rank == 0:
            whole = model.family.to_hf(param.name, shards)  # type: ignore[arg-type]
        else:
            dtype = places[param.name][0].dtype
            whole = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in zip(param.hf, param.shapes, strict=True)}
        for name, tensor in whole.items():
            if owners.group is not None:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, src=0, group=owners.group)
            yield name, tensor.to(where)


def _where(model: Sharded, own: Mapping[str, Tensor]) -> dict[str, list[Shard]]:
    """For each parameter the shards of one replica in tensor-parallel order, taken from what the ranks say they hold."""
    mine = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    world = model.groups.layout.world
    held: list[Any] = [mine]
    if world > 1:
        held = [None] * world
        dist.all_gather_object(held, mine)
    places = {}
    for param in model.family.globals():
        ranks = _ranks_of(param, model)
        for rank in ranks:
            if param.name not in held[rank]:
                raise ExportError(f"rank {rank} should hold {param.name} but does not; the layout {model.groups.layout} was changed")
        places[param.name] = [Shard(rank, *held[rank][param.name]) for rank in ranks]
    return places


def _ranks_of(param: Param, model: Sharded) -> list[int]:
    """Global ranks of the first replica that hold the tensor-parallel shards of a parameter."""
    place, layout, arch = model.groups, model.groups.layout, model.family.arch
    stage = 0 if param.name.startswith("embedding.") else layout.pp - 1
    if param.layer is not None:  # part after part of the layers is dealt out to all stages
        stage = param.layer // (arch.layers // (layout.pp * layout.vpp)) % layout.pp
    if param.expert is not None:
        holder = param.expert // (arch.experts // layout.ep)
        return [place.expert_rank(etp=etp, ep=holder, pp=stage) for etp in range(layout.etp)]
    return [place.global_rank(tp=tp, pp=stage) for tp in range(layout.tp)]


def _fetch(model: Sharded, own: Mapping[str, Tensor], param: Param, shard: Shard, rank: int) -> Tensor | None:
    """The shard on rank 0; on the rank that holds it, sending it; None on all others."""
    if shard.rank == rank == 0:
        return model.plain(own[param.name])
    if shard.rank == rank:
        dist.send(model.plain(own[param.name]).contiguous(), dst=0)
    elif rank == 0:
        where = next(iter(own.values())).device
        received = torch.empty(shard.shape, dtype=shard.dtype, device=where)
        dist.recv(received, src=shard.rank)
        return received
    return None
