"""Builds Megatron's GPTModel from a model family, with this project's norm and attention in the local layer spec."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ckpt_convert.families import Family
from ckpt_convert.ops import padded_vocabulary
from mcore_agent.layout import Layout, LayoutError
from mcore_agent.learner import muon, routing
from mcore_agent.learner.attention import PackedAttention, RmsNorm
from mcore_agent.learner.context import context_mode
from mcore_agent.learner.groups import Groups
from mcore_agent.learner.moe_losses import RouterLosses, attach
from mcore_agent.learner.packing import rotary_frequencies
from mcore_agent.learner.precision import check_products, expert_fields, megatron_fields, sequential_name, use_engine
from mcore_agent.learner.value import NAME, Critic, ValueHead
from mcore_agent.precision import Machine, PrecisionSpec, Split, check_precision, this_machine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "off": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@dataclass(frozen=True)
class Setup:
    """How a model is computed, which changes nothing but rounding, and what its last stage computes from hidden states."""

    recompute: str = "off"  # which activations backward computes again: off, selective (attention), full (whole layers)
    dispatcher: str = "alltoall"  # how tokens travel to experts: alltoall or allgather
    grouped_gemm: str = "auto"  # experts of a layer as one product: auto (where it can), on, off
    precision: PrecisionSpec = PrecisionSpec()  # of matrix products; its dtype is that of the model
    whole_matrices: bool = False  # each data-parallel rank's optimizer owns whole matrices, as Muon wants
    head: str = "lm"  # what the last stage has: lm (log-probabilities), value, or both
    detach_value: bool = False  # the value's gradient leaves the backbone alone
    losses: RouterLosses = RouterLosses()  # coefficients of the routers' own losses


PLAIN = Setup()


@dataclass(frozen=True)
class Model:
    """This rank's part of a model: its chunks (one, or ``vpp``) as the optimizer sees them, and the plain modules inside."""

    family: Family
    groups: Groups
    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    modules: list[GPTModel]
    dtype: torch.dtype
    frequencies: torch.Tensor  # [head_dim / 2] rotary frequencies
    losses: RouterLosses
    precision: PrecisionSpec

    @property
    def equal_lengths(self) -> bool:
        """Whether all micro-batches of a pass must have the same number of tokens, padding included, on every rank."""
        return not self.config.variable_seq_lengths

    @property
    def vocab_columns(self) -> int:
        """Columns of the logits on each tensor-parallel rank, padding included."""
        return padded_vocabulary(self.family.arch.vocab, self.groups.layout.tp) // self.groups.layout.tp

    @property
    def context_mode(self) -> str:
        """How context-parallel ranks share attention: by heads, or by gathering keys."""
        arch, layout = self.family.arch, self.groups.layout
        return context_mode(arch.groups // layout.tp, arch.heads // layout.tp, layout.cp)

    @property
    def expert_layers(self) -> list[int]:
        """Numbers of the layers with experts, over the whole model."""
        return list(range(self.family.arch.layers)) if self.family.arch.experts else []

    @property
    def own_layers(self) -> set[int]:
        """Numbers of this rank's layers, over the whole model."""
        first = [(get_transformer_layer_offset(self.config, vp_stage=m.vp_stage), len(m.decoder.layers)) for m in self.modules]
        return {start + i for start, count in first for i in range(count)}

    @property
    def value_head(self) -> ValueHead | None:
        """On the last stage of a model that has one."""
        return dict(self.modules[-1].named_children()).get(NAME)  # type: ignore[return-value]

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by global name (layers and experts counted over the whole model)."""
        experts = (self.family.arch.experts or 0) // self.groups.layout.ep * self.groups.ep_rank
        return {
            global_name(name, get_transformer_layer_offset(self.config, vp_stage=module.vp_stage), experts): parameter
            for module in self.modules
            for name, parameter in module.named_parameters()
        }

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter in the model's precision, also where it is kept in FP8."""
        return dequantize_fp8_tensor(tensor) if is_float8tensor(tensor) else tensor

    def shard(self, name: str, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """This rank's part of the parameter of that global name; ``get`` reads Hugging Face tensors by name."""
        return self.family.to_mcore(name, get, *self.groups.shard(self.family.param(name).expert is not None))


def global_name(local: str, layers: int, experts: int) -> str:
    """``decoder.layers.0.…local_experts.1.…`` of a chunk that begins at these layers and experts of the whole model.

    It is the same whether experts are grouped into one product or not.
    """
    words = sequential_name(local).split(".")
    for marker, first in (("layers", layers), ("local_experts", experts)):
        if marker in words:
            at = words.index(marker) + 1
            words[at] = str(int(words[at]) + first)
    return ".".join(words)


def build(family: Family, groups: Groups, dtype: str, setup: Setup = PLAIN) -> Model:
    """The model of this rank, its weights not yet filled in.

    Raises LayoutError or ConvertError for a layout it cannot have, and ConfigError for a precision that this machine,
    or the model, cannot have.
    """
    if dtype not in DTYPES:
        raise LayoutError(f"precision.dtype is {dtype!r}; the learner computes in {' or '.join(DTYPES)}")
    layout = groups.layout
    family.check_layout(tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep, etp=layout.etp)
    layout.check_experts(family.arch.experts)
    if setup.losses.active and not family.arch.experts:
        raise LayoutError("learner.aux_loss or learner.z_loss is set, but the model has no experts to balance; set both to 0")
    setup = replace(setup, precision=replace(setup.precision, dtype=dtype))
    machine = this_machine()
    split = Split(layout.tp, layout.etp, layout.pp, "muon" if setup.whole_matrices else "adamw")
    check_precision(setup.precision, family.arch, split, machine)
    config = _config(family, groups, DTYPES[dtype], setup, machine)
    modules = [_module(config, family, groups, setup, part if layout.vpp > 1 else None) for part in range(layout.vpp)]
    chunks = [_wrap(config, module, layout, setup) for module in modules]
    model = Model(
        family=family,
        groups=groups,
        config=config,
        chunks=chunks,
        modules=modules,
        dtype=DTYPES[dtype],
        frequencies=rotary_frequencies(family.arch.head_dim, family.arch.rope_theta),
        losses=setup.losses,
        precision=setup.precision,
    )
    # Megatron's wrapper holds nodes of autograd whose hooks hold the wrapper: a circle that Python's collector cannot see,
    # and with it weights, buffers and process groups
    weakref.finalize(model, _clear, [chunk.grad_accs for chunk in chunks])
    return model


def _clear(lists: list[list[Any]]) -> None:
    for found in lists:
        found.clear()


def _module(config: TransformerConfig, family: Family, groups: Groups, setup: Setup, part: int | None) -> GPTModel:
    """The layers of this stage, or of one of its parts under interleaving."""
    last = groups.last_stage and part in (None, groups.layout.vpp - 1)
    kind = partial(Critic, detach=setup.detach_value) if setup.head == "value" else GPTModel
    module = kind(
        config,
        _spec(config, part, setup),
        **_arguments(family, groups.layout.tp),
        pre_process=groups.first_stage and part in (None, 0),
        post_process=last,
        vp_stage=part,
    )
    if last and setup.head == "both":
        module.value_head = ValueHead(config, setup.detach_value)
    if family.arch.experts:
        routing.attach(module, config)
    check_products(setup.precision, module.named_modules())
    module.train()
    return module.to(device=torch.cuda.current_device(), dtype=config.params_dtype if config.params_dtype == torch.float64 else None)


def _wrap(config: TransformerConfig, module: GPTModel, layout: Layout, setup: Setup) -> DistributedDataParallel:
    wrapped: MegatronModule = Float16Module(config, module) if config.bf16 else module
    # a float64 gradient is not rounded on its way; every other one is summed in fp32
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype != torch.float64,
        use_distributed_optimizer=True,
        **megatron_fields(setup.precision)[2],
    )
    dp = layout.dp * layout.cp
    if setup.whole_matrices:
        shards = muon.whole_matrices(wrapped, config, dp, layout.expert_dp, ddp)
    else:
        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        shards = DistributedOptimizer.compute_full_param_layout(parameters, None, dp, ddp, expert_data_parallel_world_size=layout.expert_dp)
    return DistributedDataParallel(config, ddp, wrapped, full_param_layout=shards)


def _arguments(family: Family, tp: int) -> dict[str, Any]:
    facts = family.model_kwargs()
    facts["vocab_size"] = padded_vocabulary(family.arch.vocab, tp)
    facts["position_embedding_type"] = "none"  # PackedAttention turns queries and keys by the position in their row
    del facts["rotary_base"]
    return facts


def _config(family: Family, groups: Groups, dtype: torch.dtype, setup: Setup, machine: Machine) -> TransformerConfig:
    """Fusions are off, but for those of experts on ``machine``: each wants a GPU, Apex or Transformer Engine.

    Gradients are plain sums (``calculate_per_token_loss``).
    """
    layout = groups.layout
    facts = family.transformer_kwargs()
    if family.arch.experts:
        facts |= {
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
            **expert_fields(setup.precision.dtype, machine, setup.grouped_gemm),
        }
    facts |= RECOMPUTE[setup.recompute] | megatron_fields(setup.precision)[0]
    if layout.vpp > 1:
        facts["virtual_pipeline_model_parallel_size"] = layout.vpp
    # Ranks that gather tokens for their experts, and interleaved stages, take micro-batches of one length only.
    equal = layout.vpp > 1 or (bool(family.arch.experts) and setup.dispatcher == "allgather")
    return TransformerConfig(
        **facts,
        activation_func=F.silu,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # variable lengths ask for alltoall, in a dense model too
        moe_token_dispatcher_type=setup.dispatcher if family.arch.experts else "alltoall",
        variable_seq_lengths=not equal,
        # interleaved stages on two ranks: batched messages would be matched with the wrong ones, silently
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
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


def _spec(config: TransformerConfig, part: int | None, setup: Setup) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if setup.losses.active:
        attach(parts.mlp, setup.losses)
    use_engine(parts, fp8=setup.precision.fp8 != "off", grouped=config.moe_grouped_gemm)
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=part), layer_norm=RmsNorm)
