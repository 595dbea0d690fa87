"""Qwen3 mixture of experts: every layer routed, softmax scores, no shared expert."""

from collections.abc import Mapping
from typing import Any

from ckpt_convert.errors import ConvertError
from ckpt_convert.families.base import Family, attention, decoder, experts
from ckpt_convert.hfconfig import REQUIRED, Reader, read_arch


def family(hf_config: Mapping[str, Any]) -> Family:
    """Rules of one checkpoint. Raises ConvertError for a config that these rules do not cover."""
    r = Reader(hf_config, "qwen3_moe")
    r.only("decoder_sparse_step", (1,), "every layer must hold experts")
    dense = r.take("mlp_only_layers", [])
    if dense:
        raise r.refusal("mlp_only_layers", dense, "every layer must hold experts")
    named = r.take("num_experts", None)  # transformers 5 writes num_local_experts
    count = r.size("num_local_experts", named or REQUIRED)
    if named not in (None, count):
        raise ConvertError(f"config.json: num_experts={named} and num_local_experts={count} differ; make them agree")
    topk, norm_topk = r.size("num_experts_per_tok"), bool(r.take("norm_topk_prob", False))
    if topk > count:
        raise ConvertError(f"config.json: num_experts_per_tok={topk} exceeds the {count} experts; correct config.json")
    if topk == 1 and norm_topk:
        raise r.refusal("norm_topk_prob", True, "with one expert per token its weight is always 1 and the router cannot learn")
    ffn = r.size("moe_intermediate_size")
    r.take("intermediate_size", None)  # of dense layers, and there are none
    arch = read_arch(r, ffn=ffn, qk_norm=True, experts=count, topk=topk, expert_ffn=ffn, norm_topk=norm_topk)
    return decoder("qwen3_moe", arch, lambda a, i: attention(a, i) + experts(a, i))
