"""FP8 on a real GPU: the rules agree with Transformer Engine's, and every recipe that may run here trains."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("transformer_engine.pytorch")

from ckpt_convert.families import family_of  # noqa: E402
from ckpt_convert.source import RandomSource  # noqa: E402
from mcore_agent.config import ConfigError  # noqa: E402
from mcore_agent.learner import groups as learner_groups  # noqa: E402
from mcore_agent.learner.groups import Layout  # noqa: E402
from mcore_agent.learner.learner import Learner, OptimSpec, Setup  # noqa: E402
from mcore_agent.learner.precision import check_products, megatron_fields  # noqa: E402
from mcore_agent.precision import RECIPES, PrecisionSpec, Split, check_precision, this_machine  # noqa: E402
from mcore_agent.registry import create  # noqa: E402
from mcore_agent.weights.export import export  # noqa: E402
from tests.learner.models import micro_of  # noqa: E402

pytestmark = pytest.mark.gpu

LAYERS, HIDDEN, VOCAB, TOKENS = 4, 128, 256, 128
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 256,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def may_run(spec: PrecisionSpec) -> bool:
    try:
        check_precision(spec, family_of(CONFIG).arch, Split(), this_machine())
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def alone():
    yield learner_groups.initialize(Layout())
    learner_groups.destroy()


def build(spec: PrecisionSpec):
    """(model in DistributedDataParallel, its distributed optimizer) of Megatron's Transformer Engine layers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    model_fields, optimizer_fields, ddp_fields = megatron_fields(spec)
    config = TransformerConfig(
        **family_of(CONFIG).transformer_kwargs(),
        activation_func=torch.nn.functional.silu,
        params_dtype=torch.bfloat16,
        bf16=True,
        calculate_per_token_loss=True,
        **model_fields,
    )
    torch.manual_seed(3)
    module = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(normalization="RMSNorm"), VOCAB, TOKENS,
                      position_embedding_type="rope", share_embeddings_and_output_weights=False).cuda()  # fmt: skip
    check_products(spec, module.named_modules())
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, **ddp_fields)
    wrapped = DistributedDataParallel(config, ddp, Float16Module(config, module))
    kept = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
                           clip_grad=1.0, **optimizer_fields)  # fmt: skip
    return wrapped, get_megatron_optimizer(kept, [wrapped], use_gloo_process_groups=False)


def losses(spec: PrecisionSpec, steps: int) -> list[float]:
    """Mean loss of the same tokens before each of ``steps`` updates."""
    model, optimizer = build(spec)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (1, TOKENS), generator=generator).cuda()
    positions = torch.arange(TOKENS, device="cuda")[None]
    out = []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, None, labels=tokens.roll(-1)).float().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        out.append(float(loss))
    return out


def test_rules_agree_with_transformer_engine():
    from transformer_engine.pytorch import fp8

    theirs = {
        "delayed": fp8.check_fp8_support,
        "current": fp8.check_fp8_support,
        "blockwise": fp8.check_fp8_block_scaling_support,
        "mxfp8": fp8.check_mxfp8_support,
    }
    for recipe in RECIPES[1:]:
        assert may_run(PrecisionSpec("bf16", recipe)) == theirs[recipe]()[0], recipe


@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_trains_near_bf16(alone, recipe, params):
    spec = PrecisionSpec("bf16", recipe, fp8_edge_bf16=0 if recipe == "delayed" else 1, fp8_params=params)
    if not may_run(spec):
        pytest.skip(f"{recipe} does not run on {this_machine().gpu}")
    plain, rounded = losses(PrecisionSpec("bf16"), 8), losses(spec, 8)
    assert all(map(math.isfinite, rounded))
    assert rounded != plain, "no product was computed in FP8"
    assert rounded[0] == pytest.approx(plain[0], rel=0.02)
    assert rounded[-1] < 0.9 * rounded[0] and rounded[-1] == pytest.approx(plain[-1], rel=0.1)


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_fp8_parameters_and_edges(alone, recipe):
    """Weights of inner layers are Transformer Engine's quantized tensors, those of the edges are not."""
    from megatron.core.fp8_utils import is_float8tensor

    edge = 0 if recipe == "delayed" else 1
    spec = PrecisionSpec("bf16", recipe, fp8_edge_bf16=edge, fp8_params=True)
    if not may_run(spec):
        pytest.skip(f"{recipe} does not run on {this_machine().gpu}")
    layers = build(spec)[0].module.module.decoder.layers
    found = [is_float8tensor(layer.mlp.linear_fc1.weight) for layer in layers]
    assert found == [edge <= i < LAYERS - edge for i in range(LAYERS)]
    assert not any(is_float8tensor(p) for p in build(dataclasses.replace(spec, fp8_params=False))[0].parameters())


# ------------------------------------------------------------------------------------------------- the learner's model


DENSE = CONFIG | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 64,
}
ROWS = ([5, 61, 9, 30], [40, 3])  # 105 and 43 tokens: neither is a multiple of 16
TERMS = [create("loss", {"name": "sft_nll"})]


def learner(groups, config: dict, **setup) -> Learner:
    made = Learner(config, groups, "bf16", OptimSpec(), setup=Setup(**setup))
    made.load_weights(RandomSource(family_of(config), 3))
    return made


def batch() -> list:
    return [micro_of(rows, seed, vocab=VOCAB) for seed, rows in enumerate(ROWS)]


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in model.parameters().items()}


def distance(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.float() - want.float()).norm() / want.float().norm().clamp_min(1e-12))


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_learner_in_fp8_is_near_bf16(alone, recipe, config):
    if not may_run(PrecisionSpec("bf16", recipe)):
        pytest.skip(f"{recipe} does not run on {this_machine().gpu}")
    plain, rounded = learner(alone, config), learner(alone, config, precision=PrecisionSpec(fp8=recipe))
    assert plain.model.parameters().keys() == rounded.model.parameters().keys()
    for _ in range(4):
        want, found = plain.step(batch(), TERMS, 1e-3), rounded.step(batch(), TERMS, 1e-3)
        assert found.applied and found.loss != want.loss, "no product was computed in FP8"
        assert found.loss == pytest.approx(want.loss, rel=0.05)
        assert found.grad_norm == pytest.approx(want.grad_norm, rel=0.25)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_in_fp8(alone, recompute):
    plain = learner(alone, DENSE, precision=PrecisionSpec(fp8="current"))
    again = learner(alone, DENSE, precision=PrecisionSpec(fp8="current"), recompute=recompute)
    want, found = plain.gradients(batch(), TERMS), again.gradients(batch(), TERMS)
    assert found.loss == pytest.approx(want.loss, rel=1e-3)
    grads = gradients(plain.model)
    assert max(distance(g, grads[name]) for name, g in gradients(again.model).items()) < 0.02


def test_grouped_experts_are_the_single_ones(alone):
    single, grouped = learner(alone, EXPERTS, grouped_gemm="off"), learner(alone, EXPERTS, grouped_gemm="on")
    assert not single.model.config.moe_grouped_gemm and grouped.model.config.moe_grouped_gemm
    assert grouped.model.config.moe_permute_fusion and grouped.model.config.moe_token_dispatcher_type == "alltoall"
    want, found = single.gradients(batch(), TERMS), grouped.gradients(batch(), TERMS)
    assert found.loss == pytest.approx(want.loss, rel=1e-3)
    for a, b in zip(found.logp, want.logp, strict=True):
        assert abs(a - b).max() < 0.05
    grads = gradients(single.model)
    assert grads.keys() == gradients(grouped.model).keys()
    assert max(distance(g, grads[name]) for name, g in gradients(grouped.model).items()) < 0.03


@pytest.mark.parametrize("recipe", ["off", "current"])
def test_checkpoints_and_exports_do_not_know_who_computes(alone, recipe, tmp_path):
    """Written by Megatron's own layers and read by Transformer Engine's, and the other way round."""
    single = learner(alone, EXPERTS, grouped_gemm="off")
    other = learner(alone, EXPERTS, grouped_gemm="on", precision=PrecisionSpec(fp8=recipe))
    single.step(batch(), TERMS, 1e-2)
    for source, target in ((single, other), (other, single)):
        source.step(batch(), TERMS, 1e-2)
        folder = tmp_path / str(source is single)
        folder.mkdir()
        source.save(folder)
        target.load(folder)
        want, found = dict(export(source.model)), dict(export(target.model))
        assert want.keys() == found.keys() == family_of(EXPERTS).shapes().keys()
        assert all(torch.equal(want[name], found[name]) for name in want)


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_learner_keeps_fp8_parameters(alone, recipe, tmp_path):
    """Loading, stepping, exporting, keeping a snapshot and saving work on quantized weights."""
    spec = PrecisionSpec("bf16", recipe, fp8_params=True)
    if not may_run(spec):
        pytest.skip(f"{recipe} does not run on {this_machine().gpu}")
    made = learner(alone, DENSE, precision=spec)
    source = RandomSource(family_of(DENSE), 3)
    assert all(distance(tensor, source.get(name).to(tensor)) < 0.1 for name, tensor in export(made.model))
    before = made.logprobs(batch())
    made.snapshot("start")
    losses = [made.step(batch(), TERMS, 1e-3).loss for _ in range(4)]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    for a, b in zip(made.logprobs(batch(), under="start"), before, strict=True):
        assert abs(a - b).max() < 0.05
    made.save(tmp_path)
    again = learner(alone, DENSE, precision=spec)
    again.load(tmp_path)
    assert again.loss(batch(), TERMS) == pytest.approx(made.loss(batch(), TERMS), rel=0.02)
