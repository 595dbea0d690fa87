"""Which weights an update must give: the checkpoint's own names."""

import pytest
import torch

from mcore_agent.rollout.errors import WeightUpdateError
from mcore_agent.rollout.sglang.names import Kind, Ledger, expected_weights
from mcore_agent.weights.quantize import quantization_config, quantized
from tests.rollout.tiny import CONFIGS, checkpoint


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_names_are_those_of_a_checkpoint(family: str, dtype: str):
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert expected_weights(CONFIGS[family], dtype) == {n: Kind(tuple(t.shape), kind) for n, t in checkpoint(family).items()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_names_are_those_that_quantizing_makes(family: str):
    config = {**CONFIGS[family], "quantization_config": quantization_config(checkpoint(family))}
    made = dict(quantized((n, t.bfloat16()) for n, t in checkpoint(family).items()))
    assert expected_weights(config, "bf16") == {n: Kind(tuple(t.shape), t.dtype) for n, t in made.items()}


def test_other_quantizations_are_refused():
    with pytest.raises(ValueError, match="quantization_config.*awq"):
        expected_weights({**CONFIGS["qwen3"], "quantization_config": {"quant_method": "awq"}}, "bf16")


def test_a_ledger_names_what_is_wrong():
    kinds = {name: Kind((2, 3), torch.float32) for name in "abc"}
    good = torch.zeros(2, 3)
    ledger = Ledger(kinds)
    assert [ledger.take(name, good) for name in ("a", "x", "a", "b")] == [True, False, False, True]
    with pytest.raises(WeightUpdateError, match="1 missing: c; 1 unknown: x; 1 given more than once: a"):
        ledger.finish()
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.bfloat16)):
        with pytest.raises(WeightUpdateError, match="a was given as"):
            Ledger(kinds).take("a", wrong)
    full = Ledger(kinds)
    assert all(full.take(name, good) for name in kinds)
    full.finish()
