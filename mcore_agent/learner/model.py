"""Builds Megatron's GPTModel from a model family, with this project's norm and attention in the local layer spec."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from ckpt_convert.families import Family
from ckpt_convert.ops import padded_vocabulary
from mcore_agent.learner.attention import PackedAttention, RmsNorm
from mcore_agent.learner.groups import Groups, LayoutError
from mcore_agent.learner.packing import rotary_frequencies

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """This rank's part of a model: the chunks as the optimizer sees them, and the plain modules inside."""

    family: Family
    groups: Groups
    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    modules: list[GPTModel]
    dtype: torch.dtype
    frequencies: torch.Tensor  # [head_dim / 2] rotary frequencies

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by global name (layers and experts counted over the whole model)."""
        return {
            global_name(name, self.family, self.groups): parameter
            for module in self.modules
            for name, parameter in module.named_parameters()
        }


def global_name(local: str, family: Family, groups: Groups) -> str:
    """``decoder.layers.0.…local_experts.1.…`` of this stage and expert rank, counted over the whole model."""
    words = local.split(".")
    for marker, per_rank, rank in (
        ("layers", family.arch.layers // groups.layout.pp, groups.pp_rank),
        ("local_experts", family.arch.experts // groups.layout.ep, groups.ep_rank),
    ):
        if marker in words:
            at = words.index(marker) + 1
            words[at] = str(int(words[at]) + per_rank * rank)
    return ".".join(words)


def build(family: Family, groups: Groups, dtype: str) -> Model:
    """The model of this rank, its weights not yet filled in. Raises LayoutError or ConvertError for a layout it cannot have."""
    if dtype not in DTYPES:
        raise LayoutError(f"precision.dtype is {dtype!r}; the learner computes in {' or '.join(DTYPES)}")
    layout = groups.layout
    family.check_layout(tp=layout.tp, pp=layout.pp, ep=layout.ep)
    config = _config(family, groups, DTYPES[dtype])
    module = GPTModel(
        config,
        _spec(config),
        **_arguments(family, layout.tp),
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
    )
    module.train()
    module.to(torch.cuda.current_device())
    wrapped: MegatronModule = Float16Module(config, module) if config.bf16 else module
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    shards = DistributedOptimizer.compute_full_param_layout(
        [p for p in wrapped.parameters() if p.requires_grad],
        None,
        layout.dp,
        ddp,
        expert_data_parallel_world_size=layout.dp // layout.ep,
    )
    chunk = DistributedDataParallel(config, ddp, wrapped, full_param_layout=shards)
    return Model(
        family=family,
        groups=groups,
        config=config,
        chunks=[chunk],
        modules=[module],
        dtype=DTYPES[dtype],
        frequencies=rotary_frequencies(family.arch.head_dim, family.arch.rope_theta),
    )


def _arguments(family: Family, tp: int) -> dict[str, Any]:
    facts = family.model_kwargs()
    facts["vocab_size"] = padded_vocabulary(family.arch.vocab, tp)
    facts["position_embedding_type"] = "none"  # PackedAttention turns queries and keys by the position in their row
    del facts["rotary_base"]
    return facts


def _config(family: Family, groups: Groups, dtype: torch.dtype) -> TransformerConfig:
    """Every fusion is off: each wants a GPU, Apex or Transformer Engine. Gradients are plain sums (``calculate_per_token_loss``)."""
    layout = groups.layout
    facts = family.transformer_kwargs()
    if family.arch.experts:
        facts |= {
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            # Megatron trains experts under tensor parallelism only with sequence parallelism
            "sequence_parallel": layout.tp > 1,
        }
    return TransformerConfig(
        **facts,
        activation_func=F.silu,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp,
        moe_token_dispatcher_type="alltoall",  # variable lengths ask for it, in a dense model too
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,  # weights always come from a source
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RmsNorm)
