"""Runs in the server: loads a bucket that lies in a file, and says which bits the model holds.

SGLang calls ``act`` with the model of this rank, through its option for custom loaders; what to do is in a file of the
server's folder. Reading back turns SGLang's fused and sharded parameters into a checkpoint's tensors again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ckpt_convert.checksum import tensor_checksum

FAULTS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, OSError)


class ReadBackError(RuntimeError):
    """A parameter is kept in a form that no rule here turns back."""


def act(model: nn.Module, tensors: Any) -> None:
    """Does what ``order.json`` says, and replies in a file. ``tensors`` is empty: SGLang's own way would copy them once more.

    An exception would end the server, so a fault is part of the reply.
    """
    from sglang.srt.runtime_context import get_parallel

    folder = Path(os.environ["MCORE_AGENT_SERVER_FOLDER"])
    order = json.loads((folder / "order.json").read_text())
    reply: dict[str, Any] = {"error": "", "sums": {}}
    try:
        if order["action"] == "load":
            _load(model, order)
        else:
            # Collective: every rank makes all tensors, the first looks at them.
            first = get_parallel().tp_rank == 0
            for name, tensor in checkpoint_tensors(model):
                reply["sums"][name] = tensor_checksum(cropped(tensor, order["shapes"].get(name))) if first else ""
    except FAULTS as e:
        reply["error"] = f"{type(e).__name__}: {e}"
    (folder / f"{order['name']}-{get_parallel().tp_rank}.json").write_text(json.dumps(reply))


def _load(model: nn.Module, order: dict[str, Any]) -> None:
    from mcore_agent.rollout.sglang.buckets import mapped, unpack

    with open(order["file"], "rb") as file:
        flat = mapped(file, order["size"], write=False)
    device = next(model.parameters()).device
    model.load_weights((name, tensor.to(device)) for name, tensor in unpack(flat, order["tensors"]))  # type: ignore[operator]


def cropped(tensor: Tensor, shape: list[int] | None) -> Tensor:
    """Without the zeros that SGLang appends where a kernel wants rounder sizes. As it is, if it holds anything else there."""
    if shape is None or tensor.dim() != len(shape) or any(have < want for have, want in zip(tensor.shape, shape, strict=True)):
        return tensor
    inner = tensor[tuple(slice(size) for size in shape)]
    return inner if int(tensor.count_nonzero()) == int(inner.count_nonzero()) else tensor


def checkpoint_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its names in a checkpoint, whole. Raises ReadBackError for a module that has no rule here.

    With tensor parallelism a collective over the ranks: all must exhaust it.
    """
    owner = {f"{path}.{name}" if path else name: (path, module) for path, module in model.named_modules() for name in module._parameters}
    for full, parameter in model.named_parameters():
        path, module = owner[full]
        leaf = full.removeprefix(f"{path}.")
        yield from _restore(path, leaf, module, parameter.detach())


def _gather(shard: Tensor, dim: int, group: Any) -> Tensor:
    """The shards of all ranks of a group (None: of one) side by side."""
    return shard if group is None or group.world_size == 1 else group.all_gather(shard.contiguous(), dim=dim)


def _restore(path: str, leaf: str, module: nn.Module, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    from sglang.srt.layers.linear import (
        ColumnParallelLinear,
        LinearBase,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    head, _, last = path.rpartition(".")
    match module:
        case FusedMoE():
            yield from _experts(path, leaf, module, tensor)
        case VocabParallelEmbedding():
            yield f"{path}.{leaf}", _gather(tensor, 0, module.tp_group)[: module.org_vocab_size]
        case QKVParallelLinear():
            yield from _attention(head, leaf, module, tensor)
        case MergedColumnParallelLinear() if last == "gate_up_proj":
            gate, up = tensor.chunk(2)
            yield f"{head}.gate_proj.{leaf}", _gather(gate, 0, module.tp_group)
            yield f"{head}.up_proj.{leaf}", _gather(up, 0, module.tp_group)
        case MergedColumnParallelLinear():
            raise ReadBackError(f"{path} merges layers in a way that has no rule for reading it back")
        case ColumnParallelLinear():
            yield f"{path}.{leaf}", _gather(tensor, 0, module.tp_group)
        case RowParallelLinear():
            whole = tensor if leaf == "bias" else _gather(tensor, 1, module.tp_group)
            yield f"{path}.{leaf}", whole
        case ReplicatedLinear():
            yield f"{path}.{leaf}", tensor
        case LinearBase():
            raise ReadBackError(f"{path} is a {type(module).__name__}, which has no rule for reading it back")
        case _:
            yield f"{path}.{leaf}", tensor


def _attention(head: str, leaf: str, module: Any, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Queries, keys and values; heads of keys and values that several ranks share are taken once."""
    sizes = [module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size]
    if tensor.shape[0] != sum(sizes):  # block scales: one row for each block
        sizes = [tensor.shape[0] * size // sum(sizes) for size in sizes]
    for name, part in zip(("q_proj", "k_proj", "v_proj"), tensor.split(sizes), strict=True):
        whole = _gather(part, 0, module.tp_group)
        copies = 1 if name == "q_proj" else module.num_kv_head_replicas
        if copies > 1:
            whole = whole.view(-1, copies, part.shape[0], *part.shape[1:])[:, 0].flatten(0, 1)
        yield f"{head}.{name}.{leaf}", whole


def _experts(path: str, leaf: str, module: Any, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``w13`` [E, 2 I, H] holds gate above up, ``w2`` [E, H, I] down; ranks share experts, or each expert's rows."""
    kind, _, rest = leaf.partition("_")
    if kind not in ("w13", "w2") or not rest.startswith("weight") or tensor.dim() != 3:
        raise ReadBackError(f"{path}.{leaf} of shape {tuple(tensor.shape)} has no rule for reading it back")
    if module.moe_ep_size > 1 and module.moe_tp_size > 1:
        raise ReadBackError(f"{path} is shared by experts and by rows at once, which has no rule for reading it back")
    from sglang.srt.runtime_context import get_parallel

    if module.use_triton_kernels:
        tensor = tensor.transpose(1, 2)
    dim = 0 if module.moe_ep_size > 1 else (1 if kind == "w13" else 2)
    parts = {"down_proj": tensor}
    if kind == "w13":
        gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if _interleaved(module) else tensor.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up}
    for name, part in parts.items():
        for number, expert in enumerate(_gather(part, dim, get_parallel().tp_group)):
            yield f"{path}.{number}.{name}.{rest}", expert


def _interleaved(module: Any) -> bool:
    """Whether rows of gate and up alternate, as a fused kernel wants them."""
    method = module.quant_method
    return hasattr(method, "w13_swiglu_interleaved") and bool(method.w13_swiglu_interleaved)
