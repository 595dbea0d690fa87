"""Which precision may run where, and under which names Megatron knows it."""

import dataclasses
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_convert.families import Family, family_of
from ckpt_convert.hfconfig import Arch
from mcore_agent.config import ConfigError
from mcore_agent.learner.precision import check_products, expert_fields, megatron_fields, sequential_name, use_engine
from mcore_agent.precision import (
    GPUS,
    RECIPES,
    Machine,
    PrecisionSpec,
    Split,
    alignment,
    check_precision,
    grouped_gemm,
    planned,
    this_machine,
    token_multiple,
)

FP8 = RECIPES[1:]
NAMES = {"delayed": "delayed", "current": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8"}
LATEST = {"delayed": "H100", "current": "L40S", "blockwise": "H200", "mxfp8": "B200"}


def arch(**changes) -> Arch:
    return family(**changes).arch


def family(**changes) -> Family:
    """Sizes that suit FP8 on up to two tensor-parallel ranks."""
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 6}
    config = {"model_type": "qwen3", "intermediate_size": 192, "vocab_size": 59, "max_position_embeddings": 96, **sizes}
    return family_of(config | {"tie_word_embeddings": True} | changes)


def moe_family(**changes) -> Family:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 64}
    return family(model_type="qwen3_moe", **experts, **changes)


def moe(**changes) -> Arch:
    return moe_family(**changes).arch


def refused(*words: str, spec: PrecisionSpec, machine: Machine | str = "B200", model: Arch | None = None, **split) -> None:
    """Refused with each of the words in the message, the first being the key."""
    where = planned(machine) if isinstance(machine, str) else machine
    with pytest.raises(ConfigError) as caught:
        check_precision(spec, model or arch(), Split(**split), where)
    assert caught.value.key == words[0]
    for word in words:
        assert word in str(caught.value)


# ------------------------------------------------------------------------------------------------- where it runs


@pytest.mark.parametrize("recipe", FP8)
def test_each_recipe_runs_somewhere(recipe):
    check_precision(PrecisionSpec("bf16", recipe), arch(), Split(), planned(LATEST[recipe]))


def test_without_fp8_every_machine_will_do():
    for dtype in ("fp32", "bf16"):
        check_precision(PrecisionSpec(dtype), arch(head_dim=10), Split(), Machine())


@pytest.mark.parametrize("recipe", FP8)
def test_no_gpu_no_fp8(recipe):
    refused("precision.fp8", recipe, "CUDA GPU", "precision.fp8=off", spec=PrecisionSpec("bf16", recipe), machine=Machine())


def test_no_transformer_engine_no_fp8():
    bare = Machine(GPUS["H100"], None, (12, 9))
    refused("precision.fp8", "Transformer Engine", "mcore-agent[gpu]", spec=PrecisionSpec("bf16", "current"), machine=bare)


@pytest.mark.parametrize(
    ("recipe", "gpu", "need", "way"),
    [
        ("delayed", "A100-80", "8.9", "off"),
        ("blockwise", "L40S", "9.0", "current"),
        ("mxfp8", "H100", "10.0", "blockwise"),
    ],
)
def test_a_recipe_that_the_gpu_lacks_names_the_best_that_it_has(recipe, gpu, need, way):
    refused("precision.fp8", need, gpu, f"precision.fp8={way}", spec=PrecisionSpec("bf16", recipe), machine=gpu)


def test_mxfp8_ends_at_capability_12():
    newer = dataclasses.replace(planned("B200"), gpu=dataclasses.replace(GPUS["B200"], name="RTX", capability=(12, 0)))
    refused("precision.fp8", "below 12.0", "RTX", "precision.fp8=blockwise", spec=PrecisionSpec("bf16", "mxfp8"), machine=newer)


def test_old_software_is_named():
    old = Machine(GPUS["H100"], (2, 1), (12, 9))
    refused("precision.fp8", "Transformer Engine 2.3", "2.1 is here", "precision.fp8=delayed", spec=PrecisionSpec("bf16", "blockwise"),
            machine=old)  # fmt: skip
    old = Machine(GPUS["H100"], (2, 9), (12, 8))
    refused("precision.fp8", "CUDA 12.9", "12.8 is here", "precision.fp8=current", spec=PrecisionSpec("bf16", "blockwise"), machine=old)


def test_fp8_needs_bf16():
    refused("precision.dtype", "fp32", "precision.dtype=bf16", spec=PrecisionSpec("fp32", "current"))


@pytest.mark.parametrize(("field", "value"), [("fp8", "tensorwise"), ("fp8_format", "e5m2"), ("fp8_edge_bf16", -1)])
def test_unknown_values(field, value):
    refused(f"precision.{field}", repr(value), spec=dataclasses.replace(PrecisionSpec("bf16", "current"), **{field: value}))


@pytest.mark.parametrize(("field", "value"), [("fp8_params", True), ("fp8_format", "e4m3"), ("fp8_edge_bf16", 1)])
def test_a_key_without_effect_is_refused(field, value):
    refused(f"precision.{field}", "no effect", spec=dataclasses.replace(PrecisionSpec("bf16"), **{field: value}))


def test_fp8_parameters_need_adamw():
    refused(
        "precision.fp8_params",
        "muon",
        "precision.fp8_params=false",
        spec=PrecisionSpec("bf16", "current", fp8_params=True),
        optimizer="muon",
    )


def test_offloaded_masters_do_not_return_to_fp8():
    spec = PrecisionSpec("bf16", "current", fp8_params=True)
    refused("precision.fp8_params", "0.19.2", "learner.offload=false", spec=spec, offload=True)
    check_precision(dataclasses.replace(spec, fp8_params=False), arch(), Split(offload=True), planned("H100"))


def test_edges():
    refused("precision.fp8_edge_bf16", "delayed", "precision.fp8=current", spec=PrecisionSpec("bf16", "delayed", fp8_edge_bf16=1))
    edge = PrecisionSpec("bf16", "current", fp8_edge_bf16=2)
    check_precision(edge, arch(), Split(pp=3), planned("H100"))  # six layers, two on each stage
    refused("precision.fp8_edge_bf16", "3 pipeline stages", "precision.fp8_edge_bf16=2",
            spec=dataclasses.replace(edge, fp8_edge_bf16=3), pp=3)  # fmt: skip
    refused("precision.fp8_edge_bf16", "precision.fp8_edge_bf16=2", spec=dataclasses.replace(edge, fp8_edge_bf16=3))  # none left for FP8


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 88}, "hidden size is 88"),
        ({"head_dim": 10, "hidden_size": 48}, "head size 10"),
        ({"head_dim": 12, "hidden_size": 48}, "size 12"),
        ({"intermediate_size": 200}, "intermediate size"),
    ],
)
def test_sizes_that_fp8_cannot_take(changes, what):
    # 4 heads of 10 make 40 rows and 4 of 12 make 48; with keys and values 80 and 96: only what is odd is refused
    if changes.get("head_dim") == 12:
        changes = changes | {"num_attention_heads": 3, "num_key_value_heads": 1}
    if changes.get("head_dim") == 10:
        what = "heads of size 10"
    refused("precision.fp8", what, "divisible by 16", "precision.fp8=off", spec=PrecisionSpec("bf16", "current"), model=arch(**changes))


def test_odd_shards_name_a_smaller_tp():
    spec = PrecisionSpec("bf16", "current")
    check_precision(spec, arch(intermediate_size=96), Split(tp=2, etp=2), planned("H100"))
    refused("precision.fp8", "24 on each rank", "learner.tp=2", spec=spec, model=arch(intermediate_size=96), tp=4, etp=4)


def test_mxfp8_takes_multiples_of_32_and_names_current_for_multiples_of_16():
    spec = PrecisionSpec("bf16", "mxfp8")
    check_precision(spec, arch(), Split(), planned("B200"))
    refused("precision.fp8", "divisible by 32", "precision.fp8=current", spec=spec, model=arch(hidden_size=80))


def test_experts_count_by_their_own_tensor_parallelism():
    spec = PrecisionSpec("bf16", "current")
    check_precision(spec, moe(), Split(tp=2, etp=4), planned("H100"))
    refused("precision.fp8", "etp=8", "learner.tp=1 learner.etp=1", spec=spec, model=moe(), tp=2, etp=8)


def test_unknown_gpu():
    with pytest.raises(ConfigError, match=r"--gpu = 'H1000'.*H100, H200"):
        planned("H1000")


def test_here_there_is_what_torch_sees():
    import torch

    assert (this_machine().gpu is None) == (not torch.cuda.is_available())


def test_tokens_are_padded_to_what_every_rank_can_multiply():
    assert [alignment(name) for name in RECIPES] == [1, 16, 16, 16, 32]
    assert token_multiple("current", tp=2, cp=3, sp=False) == 48
    assert token_multiple("mxfp8", tp=2, cp=3, sp=True) == 192
    assert token_multiple("off", tp=2, cp=1, sp=True) == 2


# ------------------------------------------------------------------------------------------------ Megatron's names


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("params", [False, True])
def test_fields_are_fields_and_megatron_accepts_them(recipe, params):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    edge = 0 if recipe == "delayed" else 2
    spec = PrecisionSpec("bf16", recipe, "e4m3", edge, params)
    for cls, fields in zip((TransformerConfig, OptimizerConfig, DistributedDataParallelConfig), megatron_fields(spec), strict=True):
        assert fields.keys() <= {f.name for f in dataclasses.fields(cls)}
    model, optimizer, ddp = megatron_fields(spec)
    made = TransformerConfig(num_layers=6, hidden_size=96, num_attention_heads=4, bf16=True, **model)
    assert (made.fp8, made.fp8_recipe, made.fp8_param) == ("e4m3", NAMES[recipe], params)
    assert (made.first_last_layers_bf16, made.num_layers_at_start_in_bf16, made.num_layers_at_end_in_bf16)[: 1 + 2 * (edge > 0)] == (
        (True, 2, 2) if edge else (False,)
    )
    through = params and recipe == "mxfp8"
    kept = OptimizerConfig(bf16=True, use_distributed_optimizer=True, **optimizer)
    assert (kept.fp8_recipe, kept.reuse_grad_buf_for_mxfp8_param_ag) == (NAMES[recipe], through)
    wrapped = DistributedDataParallelConfig(use_distributed_optimizer=True, **ddp)
    assert (wrapped.fp8_param_gather, wrapped.reuse_grad_buf_for_mxfp8_param_ag) == (params, through)


def test_delayed_scaling_looks_back():
    model = megatron_fields(PrecisionSpec("bf16", "delayed"))[0]
    assert (model["fp8_amax_history_len"], model["fp8_amax_compute_algo"], model["fp8_margin"]) == (1024, "max", 0)
    assert "fp8_amax_history_len" not in megatron_fields(PrecisionSpec("bf16", "current"))[0]


def test_megatron_too_refuses_edges_of_delayed_scaling():
    """The rule is Megatron's own; once a release lifts it, ours can go."""
    from megatron.core.transformer import TransformerConfig

    model = megatron_fields(PrecisionSpec("bf16", "delayed", fp8_edge_bf16=1))[0]
    with pytest.raises(ValueError, match="Delayed scaling does not support"):
        TransformerConfig(num_layers=6, hidden_size=96, num_attention_heads=4, bf16=True, **model)


def test_alignment_is_megatrons():
    from megatron.core.fp8_utils import get_fp8_align_size

    for ours, theirs in NAMES.items():
        assert alignment(ours) == get_fp8_align_size(theirs)


def test_experts_by_device():
    gpu, bare, cpu = planned("H100"), Machine(GPUS["H100"]), Machine()
    keys = ("moe_grouped_gemm", "moe_permute_fusion")
    assert [[expert_fields("bf16", m)[k] for k in keys] for m in (gpu, bare, cpu)] == [[True, True], [False, False], [False, False]]
    assert [[expert_fields(t, gpu)[k] for k in keys] for t in ("fp32", "fp64")] == [[False, True], [False, False]]
    assert expert_fields("bf16", gpu, "off")["moe_grouped_gemm"] is False


@pytest.mark.parametrize(("machine", "lacks"), [(Machine(), "a CUDA GPU"), (Machine(GPUS["H100"]), "Transformer Engine")])
def test_grouped_products_are_refused_where_they_cannot_run(machine, lacks):
    with pytest.raises(ConfigError, match=f"learner.grouped_gemm = 'on': .*{lacks}.*learner.grouped_gemm=auto"):
        grouped_gemm("on", "bf16", machine)
    assert grouped_gemm("on", "bf16", planned("H100"))


def test_grouped_products_would_round_fp32():
    with pytest.raises(ConfigError, match=r"learner.grouped_gemm = 'on': .*precision.dtype=bf16 or learner.grouped_gemm=auto"):
        grouped_gemm("on", "fp32", planned("H100"))
    assert not grouped_gemm("auto", "fp32", planned("H100"))


def test_micro_batches_are_filled_up_for_fp8():
    """What each of 2 tensor-parallel ranks has of a sequence must be a multiple of 16, or of 32."""
    from mcore_agent.learner.groups import Layout
    from mcore_agent.learner.step import _whole

    groups = SimpleNamespace(layout=Layout(tp=2, sp=True))
    lengths = {}
    for fp8 in ("off", "current", "mxfp8"):
        model: Any = SimpleNamespace(groups=groups, precision=PrecisionSpec("bf16", fp8))
        lengths[fp8] = [_whole(n, model) for n in (1, 32, 33)]
    assert lengths == {"off": [2, 32, 34], "current": [32, 32, 64], "mxfp8": [64, 64, 64]}


def test_the_optimizer_knows_of_fp8():
    import torch

    from mcore_agent.learner.optimizer import OptimSpec, _config

    model: Any = SimpleNamespace(dtype=torch.bfloat16, precision=PrecisionSpec("bf16", "mxfp8", fp8_params=True))
    made = _config(model, OptimSpec())
    assert (made.fp8_recipe, made.reuse_grad_buf_for_mxfp8_param_ag) == ("mxfp8", True)
    model.precision = PrecisionSpec("bf16")
    assert _config(model, OptimSpec()).fp8_recipe is None


# ------------------------------------------------------------------------------------------- layers and their names


def kinds(experts: int | None, **how) -> dict[str, object]:
    """What computes the products of a layer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    layer = get_gpt_layer_local_submodules(num_experts=experts, normalization="RMSNorm")
    before = {"input_layernorm": layer.input_layernorm, "core_attention": layer.self_attention.submodules.core_attention}
    use_engine(layer, **how)
    mlp = layer.mlp.keywords["submodules"]
    assert before == {"input_layernorm": layer.input_layernorm, "core_attention": layer.self_attention.submodules.core_attention}
    found = {"qkv": layer.self_attention.submodules.linear_qkv, "proj": layer.self_attention.submodules.linear_proj}
    if experts:
        mlp = mlp.experts
        found["experts"] = mlp.func
        mlp = mlp.keywords["submodules"]
    return found | {"fc1": mlp.linear_fc1, "fc2": mlp.linear_fc2}


def test_without_fp8_and_groups_layers_are_megatrons():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.moe.experts import SequentialMLP

    plain = {"qkv": ColumnParallelLinear, "proj": RowParallelLinear, "fc1": ColumnParallelLinear, "fc2": RowParallelLinear}
    assert kinds(None, fp8=False, grouped=False) == plain
    assert kinds(4, fp8=False, grouped=False) == plain | {"experts": SequentialMLP}


def test_layers_get_the_engines_products(monkeypatch):
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    for name in ("TEColumnParallelLinear", "TERowParallelLinear", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        monkeypatch.setattr(provider, name, name)  # Megatron has none of them without Transformer Engine
    monkeypatch.setattr(provider, "is_te_min_version", lambda version: True)
    engine = {"qkv": "TEColumnParallelLinear", "proj": "TERowParallelLinear"}
    single = {"fc1": "TEColumnParallelLinear", "fc2": "TERowParallelLinear"}
    grouped = {"experts": TEGroupedMLP, "fc1": "TEColumnParallelGroupedLinear", "fc2": "TERowParallelGroupedLinear"}
    assert kinds(None, fp8=True, grouped=False) == engine | single
    assert kinds(4, fp8=True, grouped=False) == engine | single | {"experts": SequentialMLP}
    assert kinds(4, fp8=True, grouped=True) == engine | grouped
    assert kinds(4, fp8=False, grouped=True) == {"qkv": ColumnParallelLinear, "proj": RowParallelLinear} | grouped


def test_grouped_experts_have_the_names_of_single_ones():
    """Of every parameter of a model with experts: what Megatron calls it when grouped leads back to what the family calls it."""
    from mcore_agent.learner.model import global_name

    names = [p.name for p in moe_family().globals()]
    grouped = {}
    for name in names:
        head, found, tail = name.partition(".local_experts.")
        expert, _, rest = tail.partition(".")
        grouped[f"{head}.{rest}{expert}" if found else name] = name
    assert len(grouped) == len(names) and sum("linear_fc1.weight3" in name for name in grouped) == 6
    assert {theirs: sequential_name(theirs) for theirs in grouped} == grouped
    assert [sequential_name(name) for name in names] == names
    # the second half of twelve experts, in a chunk that begins at the third layer
    local = "decoder.layers.1.mlp.experts.linear_fc2.weight4"
    assert global_name(local, 2, 6) == "decoder.layers.3.mlp.experts.local_experts.10.linear_fc2.weight"


def test_a_model_in_fp8_is_refused_where_there_is_none():
    import torch

    from mcore_agent.learner.groups import Layout
    from mcore_agent.learner.model import Setup, build

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    class Alone:
        layout = Layout()

    with pytest.raises(ConfigError, match="precision.fp8 = 'current': FP8 needs a CUDA GPU"):
        build(moe_family(), Alone(), "bf16", Setup(precision=PrecisionSpec(fp8="current")))  # type: ignore[arg-type]


def test_products_that_would_stay_out_of_fp8_are_refused():
    import torch

    class Theirs(torch.nn.Linear):
        __module__ = "transformer_engine.pytorch.module.linear"

    class Wrapped(Theirs):
        """As Megatron wraps them."""

    def layers(kind):
        return torch.nn.ModuleDict({"linear_qkv": kind(2, 2), "router": torch.nn.Linear(2, 2)})

    check_products(PrecisionSpec("bf16", "current"), layers(Wrapped).named_modules())
    check_products(PrecisionSpec("bf16"), layers(torch.nn.Linear).named_modules())
    with pytest.raises(ConfigError, match="precision.fp8 = 'current': linear_qkv is a Linear"):
        check_products(PrecisionSpec("bf16", "current"), layers(torch.nn.Linear).named_modules())


def test_the_rules_are_light_to_import():
    code = "import sys, mcore_agent.precision; print([m for m in ('torch', 'megatron', 'transformer_engine') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_key_of_a_spec_has_an_effect():
    base = PrecisionSpec("bf16", "current")
    for name, value in {"fp8": "blockwise", "fp8_format": "e4m3", "fp8_edge_bf16": 1, "fp8_params": True}.items():
        assert megatron_fields(dataclasses.replace(base, **{name: value})) != megatron_fields(base), name
    assert set(inspect.signature(PrecisionSpec).parameters) == {"dtype", "fp8", "fp8_format", "fp8_edge_bf16", "fp8_params"}
