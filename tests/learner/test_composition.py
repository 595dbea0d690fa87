"""Losses and gradients where kinds of parallelism meet: router losses, and what Megatron-LM issue 7452 lists."""

import functools
import math
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import mcore_agent
from ckpt_convert.errors import ConvertError
from ckpt_convert.families import family_of
from ckpt_convert.source import DictSource, check_source
from mcore_agent.batch.microbatch import MicroBatch, filler
from mcore_agent.layout import Layout
from mcore_agent.learner.model import Setup
from mcore_agent.learner.moe_losses import RouterLosses, padding_of
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.composition_jobs import (
    averaged_loss,
    bias_counts,
    labelled_loss,
    router_gradients,
    smoothed_loss,
    split_parameters,
    token_counts,
)
from tests.learner.models import config_of, hugging_face, logp_of, micro_of, per_expert, weights_of
from tests.ranks import ranks  # noqa: F401

LOSSES = RouterLosses(aux=0.7, z=0.05)  # large enough to be seen in every gradient
COLUMNS = ["mask:sft", "mask:pg", "w:0", "advantage", "logp_old"]
# token counts differ between micro-batches and ranks, none of the first three is even, and one slot is a filler
MICRO = [micro_of([7, 9, 3], 1), micro_of([5], 2), micro_of([11, 4, 10, 2], 5), filler(COLUMNS)]
SLOTS = {1: [MICRO], 2: [MICRO[:2], MICRO[2:]]}
LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(pp=2),
    Layout(pp=2, vpp=2),
    Layout(tp=2, sp=True),
    Layout(tp=2, sp=True, ep=2, etp=1),
    Layout(cp=2),
    Layout(cp=2, ep=2),
    Layout(tp=2, sp=True, pp=2),
    Layout(tp=2, sp=True, dp=2, ep=2),
    Layout(tp=2, sp=True, cp=2),
]


def name_of(layout: Layout) -> str:
    return "-".join(f"{key}{int(value)}" for key, value in asdict(layout).items() if value > 1 or value is True) or "one"


@functools.cache
def reference(layers: int, losses: RouterLosses) -> tuple[dict[str, torch.Tensor], float, float]:
    """(gradients, mean aux, mean z) over all micro-batches by Hugging Face, autograd and the definitions."""
    model = hugging_face("qwen3_moe", False) if layers == 2 else deep_model()
    logits: dict[int, list[torch.Tensor]] = {}

    def keep(index, gate, inputs, _):
        logits.setdefault(index, []).append(inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T)

    hooks = [layer.mlp.gate.register_forward_hook(functools.partial(keep, i)) for i, layer in enumerate(model.model.layers)]
    real = [m for m in MICRO if m.rows[0] >= 0]
    total = sum(len(m.tokens) for m in real)
    model.zero_grad()
    loss, aux_mean, z_mean = torch.zeros(()), 0.0, 0.0
    for micro in real:
        logits.clear()
        loss = loss - (torch.from_numpy(micro.columns["w:0"]) * logp_of(model, micro)).sum()
        for per_row in logits.values():
            table = torch.cat(per_row)  # [T_m, 4]
            tokens, experts = table.shape
            assert tokens == len(micro.tokens)
            chosen = table.argsort(dim=-1, descending=True)[:, :2]
            share_sent = torch.bincount(chosen.flatten(), minlength=experts) / (2 * tokens)
            share_meant = torch.softmax(table, -1).mean(0)
            aux = experts * (share_sent * share_meant).sum()
            z = torch.logsumexp(table, -1).square().mean()
            loss = loss + tokens / total * (losses.aux * aux + losses.z * z)
            aux_mean += float(tokens / total * aux) / layers
            z_mean += float(tokens / total * z) / layers
    loss.backward()
    for hook in hooks:
        hook.remove()
    return per_expert({n: p.grad.clone() for n, p in model.named_parameters()}), aux_mean, z_mean


@functools.cache
def deep_model():
    """Four layers, for stages of two parts each: the two of ``hugging_face``, twice."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of("qwen3_moe", False, num_hidden_layers=4)))
    generator = torch.Generator().manual_seed(8)
    for name, parameter in model.named_parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise if "norm" in name else noise
    return model


def check(ranks, layout: Layout, losses: RouterLosses, scale: float = 1.0, **setup: str) -> None:  # noqa: F811
    layers = layout.pp * layout.vpp if layout.vpp > 1 else 2
    grads, aux, z = reference(layers, losses)
    model = hugging_face("qwen3_moe", False) if layers == 2 else deep_model()
    weights = per_expert({n: p.detach().clone() for n, p in model.named_parameters()})
    config = config_of("qwen3_moe", False, num_hidden_layers=layers)
    given = config, weights, SLOTS[layout.dp], [SftNll()], grads, Setup(losses=losses, **setup), scale
    for metrics, apart in ranks(router_gradients, layout, *given):
        assert metrics["moe/aux"] == pytest.approx(aux, rel=1e-5)
        assert metrics["moe/z"] == pytest.approx(z, rel=1e-5)
        worst = max(apart, key=apart.__getitem__)
        assert apart[worst] < 1e-5, (worst, apart[worst])


@pytest.mark.defect("B2", "B3", "B16", "B28")
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_router_losses_equal_their_definition(ranks, layout):  # noqa: F811
    check(ranks, layout, LOSSES)


@pytest.mark.parametrize("losses", [RouterLosses(aux=0.7), RouterLosses(z=0.05)], ids=["aux", "z"])
def test_each_router_loss_alone(ranks, losses):  # noqa: F811
    check(ranks, Layout(tp=2, sp=True), losses)


def test_recomputed_layers_count_once(ranks):  # noqa: F811
    check(ranks, Layout(tp=2, sp=True), LOSSES, recompute="full")


@pytest.mark.defect("B22")
def test_a_scaled_loss_scales_both_router_losses(ranks):  # noqa: F811
    check(ranks, Layout(pp=2), LOSSES, scale=8.0)


def test_gathered_dispatch(ranks):  # noqa: F811
    """All ranks fill their micro-batches up to one length, mostly with padding."""
    check(ranks, Layout(dp=2, ep=2), LOSSES, dispatcher="allgather")


def test_reference_would_notice():
    """The router losses are a visible part of the gradients that are compared."""
    with_losses, *_ = reference(2, LOSSES)
    without, *_ = reference(2, RouterLosses())
    gate = "model.layers.0.mlp.gate.weight"
    assert (with_losses[gate] - without[gate]).norm() > 0.5 * without[gate].norm()


def test_filler_and_padding_are_not_real():
    micro = MicroBatch(np.arange(5), np.array([2, 3]), np.array([4, -1]))
    assert padding_of(micro, 7).tolist() == [False, False, True, True, True, True, True]


@pytest.mark.defect("B16")
def test_expert_bias_counts_real_tokens(ranks):  # noqa: F811
    """Token t likes expert t mod 4 best, then 3, then 0; tokens 1, 4 and 5 are padding."""
    [counts] = ranks(bias_counts, Layout(), config_of("qwen3_moe", False), [False, True, False, False, True, True])
    assert counts == [2.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize(("key", "losses"), [("aux_loss", {"aux": -1.0}), ("z_loss", {"z": math.nan})])
def test_coefficients_that_cannot_be(key, losses):
    with pytest.raises(ValueError, match=rf"learner\.{key} is .*use 0 \(off\) or a positive number"):
        RouterLosses(**losses)


# ------------------------------------------------------------------------------------------ Megatron-LM issue 7452
# Findings of 2026-09 against main, each looked up in the pinned release. The tests below show the ones that a
# learner could meet there; when one fails because Megatron was repaired, what avoids it here may go.


@pytest.mark.defect("B28")
def test_finding_1_smoothed_cross_entropy_is_of_the_local_vocabulary(ranks):  # noqa: F811
    logits, targets = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 7, 3, 4, 2])
    first, second = ranks(smoothed_loss, Layout(tp=2), logits, targets)
    assert (first - second).abs().max() > 1e-3


@pytest.mark.defect("B28")
def test_finding_2_labels_with_gathered_logits_count_the_vocabulary_twice(ranks):  # noqa: F811
    arguments = config_of("llama", False), weights_of("llama", False), torch.arange(2, 13)
    right = ranks(labelled_loss, Layout(tp=2), *arguments, False)[0]
    wrong = ranks(labelled_loss, Layout(tp=2), *arguments, True)[0]
    torch.testing.assert_close(wrong - right, torch.full((11,), math.log(2)), rtol=0, atol=1e-4)


@pytest.mark.defect("B3", "B28")
def test_finding_9_the_schedule_averages_locally_unless_told_not_to(ranks):  # noqa: F811
    arguments = config_of("llama", False), weights_of("llama", False)
    assert ranks(averaged_loss, Layout(), *arguments, False) == [2.0]
    assert ranks(averaged_loss, Layout(), *arguments, True) == [6.0]


@pytest.mark.defect("B28")
def test_finding_10_masked_local_token_count_is_the_global_one(ranks):  # noqa: F811
    """Ranks with 5 and 2 real tokens should count 5 and 2 of 7."""
    assert ranks(token_counts, Layout(tp=2), [5, 2]) == [(7.0, 7.0), (7.0, 7.0)]


@pytest.mark.defect("B28")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_finding_8_every_split_parameter_is_in_the_norm_of_all_ranks(ranks, kind):  # noqa: F811
    """Attention sinks are split by head but not marked so; nothing that the learner builds is."""
    layout = Layout(tp=2, sp=kind == "qwen3_moe")
    for found in ranks(split_parameters, layout, config_of(kind, False), weights_of(kind, False)):
        assert {name for name, (split, marked) in found.items() if split != marked} == set()
        assert any(split for split, _ in found.values())


AVOIDED = {  # finding -> what the learner would have to mention to meet it
    "1: smoothed vocabulary-parallel cross entropy": r"vocab_parallel_cross_entropy|label_smoothing",
    "2: Megatron's loss on gathered logits": r"runtime_gather_output|\bparallel_output\b|labels=",
    "3, 4: multi-token prediction": r"mtp_num_layers|mtp_block_spec|MultiTokenPrediction",
    "4: distributed saved activations": r"distribute_saved_activations",
    "5, 6, 7, 13: groups other than the global ones": r"ProcessGroupCollection\(",
    "6: cross attention": r"CrossAttention",
    "8: attention sinks": r"softmax_type|softmax_offset",
    "9: averages over local tokens": r"calculate_per_token_loss=(?!True)",
    "11: gated delta net": r"GatedDeltaNet|experimental_attention_variant",
    "12 and appendix C: Megatron-FSDP": r"use_megatron_fsdp|fully_shard|megatron\.core\.distributed\.fsdp",
    "appendix C: global_aux_loss": r"global_aux_loss",
}


@pytest.mark.defect("B28")
@pytest.mark.parametrize("finding", AVOIDED)
def test_findings_that_are_avoided(finding):
    files = sorted((Path(mcore_agent.__file__).parent / "learner").rglob("*.py"))
    assert len(files) > 5
    met = [f"{f.name}: {m.group()}" for f in files for m in re.finditer(AVOIDED[finding], f.read_text())]
    assert met == []


# ---------------------------------------------------------------------------------------------- what no family has


@pytest.mark.defect("D5")
@pytest.mark.parametrize(("kind", "changes", "said"), [
    ("qwen3_moe", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': no rule of qwen3_moe knows this key"),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': no rule of qwen3_moe knows this key"),
    ("deepseek_v3", {"topk_method": "noaux_tc"}, "model_type is 'deepseek_v3', which has no family"),
    ("glm4_moe", {}, "model_type is 'glm4_moe', which has no family"),
], ids=["key", "scores", "deepseek_v3", "glm4_moe"])  # fmt: skip
def test_a_model_whose_router_has_a_bias_is_refused(kind, changes, said):
    """The bias that balances such a router must stay fp32 on every way; nothing here carries it, so nothing rounds it."""
    with pytest.raises(ConvertError, match=re.escape(said)):
        family_of(config_of("qwen3_moe", False, **{**changes, "model_type": kind}))


@pytest.mark.defect("D5")
def test_a_checkpoint_with_a_routers_bias_is_refused():
    family = family_of(config_of("qwen3_moe", False))
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    with pytest.raises(ConvertError, match=re.escape(f"{name} has no rule in family qwen3_moe")):
        check_source(family, DictSource(weights_of("qwen3_moe", False) | {name: torch.zeros(4)}))
    assert not any("bias" in p.name for p in family.globals())


@pytest.mark.defect("B19")
@pytest.mark.parametrize(("kind", "changes", "said"), [
    ("qwen3_next", {"full_attention_interval": 4}, "model_type is 'qwen3_next', which has no family"),
    ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "only full attention has a rule"),
    ("qwen3", {"linear_num_value_heads": 4}, "linear_num_value_heads is 4: no rule of qwen3 knows this key"),
    ("llama", {"layer_types": ["mamba", "full_attention"]}, "only full attention has a rule"),
], ids=["hybrid", "layers", "heads", "mamba"])  # fmt: skip
def test_linear_attention_is_refused(kind, changes, said):
    """Its gradients under sequence and context parallelism are nobody's here, and no packed row has a state to leak."""
    base = kind if kind in ("qwen3", "llama") else "qwen3"
    with pytest.raises(ConvertError, match=re.escape(said)):
        family_of(config_of(base, False, **{**changes, "model_type": kind}))
