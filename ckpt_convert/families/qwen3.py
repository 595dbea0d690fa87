"""Qwen3 dense: as Llama, with norms on query and key heads and an explicit head size."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.families.base import Family, attention, decoder, gated_mlp
from ckpt_convert.hfconfig import Reader, read_arch


def family(hf_config: Mapping[str, Any]) -> Family:
    """Rules of one checkpoint. Raises ConvertError for a config that these rules do not cover."""
    r = Reader(hf_config, "qwen3")
    arch = read_arch(r, ffn=r.size("intermediate_size"), head_dim=128, qk_norm=True)
    return decoder("qwen3", arch, lambda a, i: attention(a, i) + gated_mlp(a, i))
