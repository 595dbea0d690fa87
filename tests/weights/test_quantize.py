"""FP8 rollout weights: names, exact bounds of the rounding, and that transformers reads what is written."""

from types import SimpleNamespace

import pytest
import torch

from ckpt_convert.checksum import tensor_checksum
from mcore_agent.weights.quantize import (
    BLOCK,
    SCALE,
    QuantizeError,
    dequantize,
    is_quantized,
    quantization_config,
    quantize,
    quantized,
)
from tests.learner.models import KINDS, weights_of


@pytest.mark.parametrize(("name", "expected"), [
    ("model.layers.0.self_attn.q_proj.weight", True),
    ("model.layers.11.self_attn.kv_a_proj_with_mqa.weight", True),
    ("model.layers.0.mlp.down_proj.weight", True),
    ("model.layers.0.mlp.experts.127.gate_proj.weight", True),
    ("model.layers.0.mlp.shared_experts.up_proj.weight", True),
    ("model.layers.0.self_attn.q_proj.bias", False),
    ("model.layers.0.self_attn.q_norm.weight", False),
    ("model.layers.0.input_layernorm.weight", False),
    ("model.layers.0.mlp.gate.weight", False),  # a router
    ("model.layers.0.mlp.shared_expert_gate.weight", False),
    ("model.embed_tokens.weight", False),
    ("lm_head.weight", False),
    ("model.norm.weight", False),
])  # fmt: skip
def test_what_is_quantized(name, expected):
    assert is_quantized(name) == expected


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 128), (128, 131), (1, 1), (257, 300), (5, 700)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_within_its_bounds(shape, dtype):
    """e4m3 has 3 bits behind the leading one, so rounding moves a normal number by at most 2^-4 of itself, and a number
    below its least normal 2^-6 by half of the step 2^-9; 1e-6 more is for float32. The largest of a block is 448 scales."""
    torch.manual_seed(sum(shape))
    weight = (torch.randn(shape) * torch.logspace(-4, 1, shape[1])).to(dtype)
    small, scale = quantize(weight)
    assert small.shape == weight.shape and small.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert tuple(scale.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide, back = weight.double(), dequantize(small, scale).double()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            block, off, s = wide[place], (back[place] - wide[place]).abs(), scale[i, j].double()
            torch.testing.assert_close(s, block.abs().max() / 448, rtol=1e-6, atol=0)
            assert (off <= torch.maximum(block.abs() * 2**-4, s * 2**-10) * (1 + 1e-6)).all()
            assert small[place].float().abs().max() == 448
    assert (back - wide).abs().max() > 0 or shape == (1, 1)


def test_numbers_that_e4m3_has_come_back_to_the_bit():
    """Block maxima of 448 and 224 give the scales 1 and 1/2; multiples that need 4 significant bits are exact."""
    one = torch.tensor([448.0, -1.125, 0.001953125, 240, 0, -0.015625]).repeat(2, 64)[:, :200]
    weight = torch.cat([one, one / 2], dim=0).repeat_interleave(128, 0)[:400]
    small, scale = quantize(weight)
    assert scale.tolist() == [[1, 1], [1, 1], [0.5, 0.5], [0.5, 0.5]]
    assert torch.equal(dequantize(small, scale), weight)


def test_blocks_do_not_see_each_other():
    """A huge value in one block leaves the bits of all others alone."""
    torch.manual_seed(0)
    weight = torch.randn(300, 290)
    small, scale = quantize(weight)
    weight[129, 5] = 1e30
    other, loud = quantize(weight)
    changed = torch.zeros(300, 290, dtype=torch.bool)
    changed[128:256, :128] = True
    assert torch.equal(small.view(torch.uint8)[~changed], other.view(torch.uint8)[~changed])
    assert (scale != loud).nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 3e38])
def test_zeros_and_extremes(value):
    small, scale = quantize(torch.full((129, 3), value))
    back = dequantize(small, scale)
    assert torch.isfinite(back).all() and torch.isfinite(small.float()).all() and (scale > 0).all()
    assert (back - value).abs().max() <= max(value * 2**-4, float(scale.max()) * 2**-10)
    if value == 0:
        assert scale.tolist() == [[1.0], [1.0]] and not back.any()


@pytest.mark.parametrize(("weight", "says"), [
    (torch.tensor([[1.0, float("inf")]]), "w.weight holds a value that is not finite"),
    (torch.tensor([[1.0, float("nan")]]), "w.weight holds a value that is not finite"),
    (torch.ones(3), r"w.weight has shape \(3,\)"),
    (torch.ones(2, 2, dtype=torch.int32), "dtype torch.int32"),
])  # fmt: skip
def test_what_cannot_be_quantized_is_refused(weight, says):
    with pytest.raises(QuantizeError, match=says):
        quantize(weight, "w.weight")


def test_a_refusal_still_exhausts_the_stream():
    """Other ranks take part in making the tensors, and wait for the one that stops."""
    seen = []

    def stream():
        for i, value in enumerate([1.0, float("nan"), 2.0, 3.0]):
            seen.append(i)
            yield f"model.layers.{i}.mlp.up_proj.weight", torch.full((2, 2), value)

    with pytest.raises(QuantizeError, match="layers.1.mlp.up_proj"):
        list(quantized(stream()))
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_its_projections_quantized_and_nothing_else(kind):
    weights = weights_of(kind, True)
    out = list(quantized(weights.items()))
    names = [name for name, _ in out]
    assert len(set(names)) == len(names)
    made = dict(out)
    for name, tensor in weights.items():
        if is_quantized(name):
            assert names[names.index(name) + 1] == name + SCALE == name.replace(".weight", ".weight_scale_inv")
            assert torch.equal(made[name].view(torch.uint8), quantize(tensor)[0].view(torch.uint8))
        else:
            assert made[name] is tensor  # not even copied
    kept = {name for name in weights if not is_quantized(name)}
    assert not any("_proj." in name for name in kept if name.endswith(".weight")) and any(map(is_quantized, weights))
    assert made.keys() == weights.keys() | {name + SCALE for name in weights if is_quantized(name)}
    assert len({tensor_checksum(t) for t in made.values()}) > len(weights) / 2  # a publish can name the bits of FP8 tensors


def test_the_config_names_what_stays():
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.up_proj.weight",
             "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"]  # fmt: skip
    assert quantization_config(names) == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"],
    }  # fmt: skip


def test_scales_of_another_shape_are_refused():
    small, _ = quantize(torch.ones(130, 4))
    with pytest.raises(QuantizeError, match=r"130 x 4 has \(2, 1\) blocks, but the scales have shape \(1, 1\)"):
        dequantize(small, torch.ones(1, 1))


def test_transformers_reads_the_same_weights():
    """Its own loader takes the config, and makes of our two tensors what we make of them, to the bit."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    name = "model.layers.0.self_attn.q_proj.weight"
    config = FineGrainedFP8Config(**quantization_config([name, "lm_head.weight"]))
    assert config.weight_block_size == [128, 128] and config.modules_to_not_convert == ["lm_head"] and config.scale_fmt == "float"
    torch.manual_seed(7)
    weight = torch.randn(384, 256)
    made = dict(quantized([(name, weight)]))
    reader = Fp8Dequantize(SimpleNamespace(quantization_config=config))
    read = reader.convert({key: [tensor] for key, tensor in made.items()}, full_layer_name=name)
    (tensor,) = read[name] if isinstance(read[name], list) else [read[name]]
    ours = dequantize(made[name], made[name + SCALE])
    assert torch.equal(tensor, ours.to(tensor.dtype)) and not torch.equal(ours, weight)
