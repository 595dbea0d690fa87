"""The model and the weights that an engine serves: storage that comes and goes, and updates that are complete or refused."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.rollout.attention import install
from mcore_agent.rollout.errors import WeightUpdateError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXPERTS = ".experts."
SHOWN = 8


def build_model(hf_config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """A causal model of a Hugging Face config, its weights not initialized. Raises ValueError for sliding windows."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**hf_config)
    fields = config.to_dict()
    windows = set(fields.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if windows or fields.get("sliding_window") is not None:
        raise ValueError(
            f"hf_config asks for {sorted(windows) or 'a sliding window'}, but the local engine has full attention only; "
            "use another engine or set use_sliding_window to false"
        )
    # Grouped matrix products on a CPU want sizes in multiples of 16 bytes and gain nothing at small batches.
    experts = {"experts_implementation": "eager"} if device.type == "cpu" else {}
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=install(), dtype=dtype, **experts)
    model.tie_weights()
    return model.eval().requires_grad_(False).to(device)


def checkpoint_views(model: nn.Module, tied: bool) -> dict[str, Tensor]:
    """The model's weights under the names of a Hugging Face checkpoint, each a view of the memory that is served.

    transformers 5 keeps all experts of a layer in ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I]; checkpoints
    name each expert's matrices. ``tied``: the output layer is the embedding, and checkpoints name only the latter.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor = tensor.detach()
        if tied and name == "lm_head.weight":
            continue
        head, found, leaf = name.rpartition(EXPERTS)
        if found and leaf == "gate_up_proj":
            half = tensor.shape[1] // 2
            for e, expert in enumerate(tensor):
                views[f"{head}{EXPERTS}{e}.gate_proj.weight"] = expert[:half]
                views[f"{head}{EXPERTS}{e}.up_proj.weight"] = expert[half:]
        elif found and leaf == "down_proj":
            views.update({f"{head}{EXPERTS}{e}.down_proj.weight": expert for e, expert in enumerate(tensor)})
        else:
            views[name] = tensor
    return views


def _listed(what: str, names: Iterable[str]) -> str:
    names = sorted(names)
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"; {len(names)} {what}: {', '.join(names[:SHOWN])}{more}"


class ServedWeights:
    """Weights of one model by checkpoint name. ``ready`` only after an update that gave every name exactly once."""

    def __init__(self, model: nn.Module, tied: bool):
        self.views = checkpoint_views(model, tied)
        self._storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.views.values()}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        self.resident = True
        self.ready = False
        self._given: dict[str, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    @property
    def updating(self) -> bool:
        return self._given is not None

    def free(self) -> None:
        """Gives the memory back to the system; what was served is gone."""
        for storage in self._storages.values():
            storage.resize_(0)
        self.resident = self.ready = False
        self._given = None

    def allocate(self) -> None:
        """Zero weights, not ready to be served."""
        for key, storage in self._storages.items():
            storage.resize_(self._sizes[key])
            storage.fill_(0)
        self.resident = True

    def begin(self) -> None:
        self._given, self.ready = {}, False

    @torch.no_grad()
    def put(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors in place. Raises WeightUpdateError, which ends the update, on a wrong shape or type."""
        given = self._given
        assert given is not None, "put outside an update"
        self._given = None  # whatever happens below, also inside the caller's iterator, the update is over unless it ends well
        for name, tensor in bucket:
            given[name] = given.get(name, 0) + 1
            target = self.views.get(name)
            if target is None or given[name] > 1:
                continue
            if target.shape != tensor.shape or target.dtype != tensor.dtype:
                raise WeightUpdateError(
                    f"{name} was given as {tuple(tensor.shape)} {tensor.dtype}, but is {tuple(target.shape)} {target.dtype}; "
                    "begin a new update and give it so"
                )
            target.copy_(tensor)
        self._given = given

    def finish(self) -> None:
        """Raises WeightUpdateError, listing names, unless every name was given exactly once. The update is over either way."""
        given, self._given = self._given, None
        assert given is not None, "finish outside an update"
        missing = self.views.keys() - given.keys()
        unknown = given.keys() - self.views.keys()
        twice = [name for name, count in given.items() if count > 1]
        if missing or unknown or twice:
            raise WeightUpdateError(
                "the update is not complete and nothing is served until one is"
                f"{_listed('missing', missing)}{_listed('unknown', unknown)}{_listed('given more than once', twice)}"
            )
        self.ready = True

    def checksums(self) -> dict[str, str]:
        # Of copies: a storage that numpy has looked at can never be freed and taken again.
        return {name: tensor_checksum(view.clone()) for name, view in self.views.items()}
