"""Precision as megatron-core 0.19.2 names it: fields of its three configurations, and the layers that have FP8 products.

Who may use which precision is decided in ``mcore_agent.precision``, before any of this runs.
"""

import re
from collections.abc import Iterable
from typing import Any

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.moe.moe_layer import MoESubmodules

from mcore_agent.config import ConfigError
from mcore_agent.precision import Machine, PrecisionSpec, check_precision, grouped_gemm, this_machine, token_multiple

__all__ = [
    "Machine",
    "PrecisionSpec",
    "check_precision",
    "check_products",
    "expert_fields",
    "megatron_fields",
    "sequential_name",
    "this_machine",
    "token_multiple",
    "use_engine",
]

RECIPE = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
PRODUCTS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")  # Megatron's names of a layer's matrix products
GROUPED = re.compile(r"(.*\.experts)\.(linear_fc[12])\.weight(\d+)")  # a weight of an expert in Megatron's TEGroupedMLP
HISTORY = 1024  # steps whose largest value delayed scaling looks back on: Transformer Engine's default, megatron's is 1

Fields = dict[str, Any]


def megatron_fields(spec: PrecisionSpec) -> tuple[Fields, Fields, Fields]:
    """Fields of (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig) that FP8 decides; all empty without it.

    Gradients stay fp32. Under mxfp8 with FP8 parameters the gathered parameters pass through the gradient buffer,
    because an mxfp8 tensor cannot be a view of a flat buffer.

    >>> megatron_fields(PrecisionSpec("bf16"))
    ({}, {}, {})
    >>> megatron_fields(PrecisionSpec("bf16", "current"))[1]
    {'fp8_recipe': 'tensorwise', 'reuse_grad_buf_for_mxfp8_param_ag': False}
    """
    if spec.fp8 == "off":
        return {}, {}, {}
    recipe, edge = RECIPE[spec.fp8], spec.fp8_edge_bf16
    through_gradients = spec.fp8_params and spec.fp8 == "mxfp8"
    model: Fields = {
        "fp8": spec.fp8_format,
        "fp8_recipe": recipe,
        "fp8_param": spec.fp8_params,
        "fp8_wgrad": True,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        "fp8_output_proj": False,  # the head's log-probabilities are what the loss is made of
        "first_last_layers_bf16": edge > 0,
    }
    if edge:
        model |= {"num_layers_at_start_in_bf16": edge, "num_layers_at_end_in_bf16": edge}
    if spec.fp8 == "delayed":
        model |= {"fp8_margin": 0, "fp8_amax_history_len": HISTORY, "fp8_amax_compute_algo": "max"}
    optimizer: Fields = {"fp8_recipe": recipe, "reuse_grad_buf_for_mxfp8_param_ag": through_gradients}
    ddp: Fields = {"fp8_param_gather": spec.fp8_params, "reuse_grad_buf_for_mxfp8_param_ag": through_gradients}
    return model, optimizer, ddp


def expert_fields(dtype: str, machine: Machine, grouped: str = "auto") -> Fields:
    """Fields of TransformerConfig for a mixture of experts on ``machine``. Raises ConfigError (see ``grouped_gemm``).

    Grouped products and the fused permutation are Transformer Engine's. The router is not padded for FP8: that would
    route tokens anew; the layers with experts pad each expert's tokens themselves.
    """
    fused = machine.gpu is not None and machine.engine is not None and machine.engine >= (2, 1) and dtype != "fp64"
    return {
        "moe_grouped_gemm": grouped_gemm(grouped, dtype, machine),
        "moe_permute_fusion": fused,
        "moe_router_padding_for_quantization": False,
    }


def use_engine(layer: Any, fp8: bool, grouped: bool) -> None:
    """Puts Transformer Engine's products in place of Megatron's in the parts of a local layer spec (which it changes).

    With ``fp8`` all of them, else only experts, and only ``grouped`` into one product: what is left to Megatron is
    computed as it is without Transformer Engine. Norms and attention stay, and so do the names of parameters, except
    those of grouped experts (``sequential_name``).
    """
    engine = TESpecProvider()
    column, row = engine.column_parallel_linear(), engine.row_parallel_linear()
    mlp = layer.mlp.keywords["submodules"]
    experts = isinstance(mlp, MoESubmodules)
    if fp8:
        attention = layer.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        if not experts:
            mlp.linear_fc1, mlp.linear_fc2 = column, row
    if experts and (fp8 or grouped):
        mlp.experts = engine.grouped_mlp_modules(grouped)


def sequential_name(name: str) -> str:
    """The name that a parameter of grouped experts has without grouping; every other name is its own.

    >>> sequential_name("decoder.layers.2.mlp.experts.linear_fc1.weight3")
    'decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight'
    >>> sequential_name("decoder.layers.2.mlp.linear_fc1.weight")
    'decoder.layers.2.mlp.linear_fc1.weight'
    """
    found = GROUPED.fullmatch(name)
    return f"{found[1]}.local_experts.{found[3]}.{found[2]}.weight" if found else name


def check_products(spec: PrecisionSpec, modules: Iterable[tuple[str, Any]]) -> None:
    """Raises ConfigError when a layer's product would stay out of FP8 unnoticed. ``modules``: a model's ``named_modules()``.

    Megatron's FP8 context reaches Transformer Engine's modules only; those of its local layer spec ignore it.
    """
    if spec.fp8 == "off":
        return
    for name, module in modules:
        if name.rpartition(".")[2] in PRODUCTS and not any(c.__module__.startswith("transformer_engine.") for c in type(module).__mro__):
            raise ConfigError("precision.fp8", spec.fp8, f"{name} is a {type(module).__name__}, which Transformer Engine does not "
                              "compute", "Give the layers its products with use_engine, or use precision.fp8=off")  # fmt: skip
