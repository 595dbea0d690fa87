"""Llama and its kin (SmolLM2): grouped-query attention, SiLU-gated layers, no biases."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.families.base import Family, attention, decoder, gated_mlp
from ckpt_convert.hfconfig import Reader, read_arch


def family(hf_config: Mapping[str, Any]) -> Family:
    """Rules of one checkpoint. Raises ConvertError for a config that these rules do not cover."""
    r = Reader(hf_config, "llama")
    arch = read_arch(r, ffn=r.size("intermediate_size"))
    return decoder("llama", arch, lambda a, i: attention(a, i) + gated_mlp(a, i))
