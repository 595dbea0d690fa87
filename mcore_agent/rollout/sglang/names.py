"""Which weights a model has, by checkpoint name, and whether an update gave each exactly once.

SGLang skips names that it does not know and says that all went well, so this is checked before anything is sent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_agent.rollout.errors import WeightUpdateError
from mcore_agent.rollout.served import DTYPES, _listed, checkpoint_views

PROJECTION = re.compile(r"\.layers\.\d+\..*_proj(_with_mqa)?\.weight$")
SCALE = "_scale_inv"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Kind:
    """What a tensor must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def expected_weights(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Kind]:
    """The checkpoint's tensors, from the model that transformers builds of the config, without memory for it.

    With ``quantization_config`` of method fp8 the projections are e4m3, each followed by its block scales.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    config = AutoConfig.for_model(**plain)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    views = checkpoint_views(model, bool(config.tie_word_embeddings))
    kinds = {name: Kind(tuple(t.shape), t.dtype) for name, t in views.items()}
    quantization = hf_config.get("quantization_config") or {}
    if not quantization:
        return kinds
    if quantization.get("quant_method") != "fp8" or not quantization.get("weight_block_size"):
        raise ValueError(f"hf_config.quantization_config is {quantization}; only fp8 with weight_block_size can be served")
    rows, columns = quantization["weight_block_size"]
    out: dict[str, Kind] = {}
    for name, kind in kinds.items():
        if not PROJECTION.search(name):
            out[name] = kind
            continue
        out[name] = Kind(kind.shape, torch.float8_e4m3fn)
        out[name + SCALE] = Kind((-(-kind.shape[0] // rows), -(-kind.shape[1] // columns)), torch.float32)
    return out


class Ledger:
    """One update: what it must give and what it has given."""

    def __init__(self, expected: Mapping[str, Kind]):
        self.expected = expected
        self._given: dict[str, int] = {}

    def take(self, name: str, tensor: Tensor) -> bool:
        """Notes a tensor; whether it is to be sent. Raises WeightUpdateError for a wrong shape or type."""
        self._given[name] = self._given.get(name, 0) + 1
        kind = self.expected.get(name)
        if kind is None or self._given[name] > 1:
            return False
        if tuple(tensor.shape) != kind.shape or tensor.dtype != kind.dtype:
            raise WeightUpdateError(
                f"{name} was given as {tuple(tensor.shape)} {tensor.dtype}, but is {kind.shape} {kind.dtype}; "
                "begin a new update and give it so"
            )
        return True

    def finish(self) -> None:
        """Raises WeightUpdateError, listing names, unless every name was given exactly once."""
        missing = self.expected.keys() - self._given.keys()
        unknown = self._given.keys() - self.expected.keys()
        twice = [name for name, count in self._given.items() if count > 1]
        if missing or unknown or twice:
            raise WeightUpdateError(
                "the update is not complete and nothing is served until one is"
                f"{_listed('missing', missing)}{_listed('unknown', unknown)}{_listed('given more than once', twice)}"
            )
