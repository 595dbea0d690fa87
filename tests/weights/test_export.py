"""What comes out of a sharded model is what went in, bit for bit, under every layout."""

import pytest
import torch

from ckpt_convert.families import family_of
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.weights.export import ExportError, export, owners_of
from tests.learner.jobs import learner_of
from tests.learner.models import KINDS, config_of, weights_of
from tests.ranks import ranks  # noqa: F401


def exported(groups: Groups, kind: str, tied: bool, dtype: str) -> list[tuple[str, torch.Tensor]]:
    learner = learner_of(groups, config_of(kind, tied, num_hidden_layers=4), weights_of(kind, tied, layers=4), dtype)
    return [(name, tensor.clone()) for name, tensor in export(learner.model)]


DENSE = [Layout(), Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(pp=2, vpp=2), Layout(tp=2, pp=2, cp=2, sp=True)]
EXPERTS = [
    *(Layout(), Layout(dp=2, ep=2), Layout(tp=2, sp=True), Layout(tp=2, dp=2, ep=2, sp=True), Layout(tp=2, dp=2, ep=4, etp=1, sp=True)),
    *(Layout(dp=4, ep=2, etp=2), Layout(tp=2, pp=2, vpp=2, ep=2, etp=1, sp=True)),
]


@pytest.mark.defect("E15", "E16", "E17", "E27")
@pytest.mark.parametrize(("layout", "kind"), [
    (layout, kind) for kind in KINDS for layout in (EXPERTS if kind == "qwen3_moe" else DENSE)
], ids=str)  # fmt: skip
def test_bits(ranks, layout, kind):  # noqa: F811
    for tied, dtype in ((True, "fp32"), (False, "bf16")):
        first, *others = ranks(exported, layout, kind, tied, dtype)
        family = family_of(config_of(kind, tied, num_hidden_layers=4))
        assert [name for name, _ in first] == [n for p in family.globals() for n in p.hf]
        weights = weights_of(kind, tied, layers=4)
        assert {name for name, _ in first} == set(weights)
        for name, tensor in first:
            want = weights[name].to(torch.bfloat16 if dtype == "bf16" else torch.float32)
            assert torch.equal(tensor, want) and tensor.device.type == "cpu", name
        assert not any(others)


def exported_to(groups: Groups, kind: str, ranks_: tuple[int, ...]) -> list[tuple[str, torch.Tensor]]:
    learner = learner_of(groups, config_of(kind, True, num_hidden_layers=4), weights_of(kind, True, layers=4), "fp32")
    return [(name, tensor.clone()) for name, tensor in export(learner.model, owners_of(ranks_))]


@pytest.mark.defect("E1", "E9")
@pytest.mark.parametrize(("layout", "kind", "owners"), [
    (Layout(tp=2, pp=2), "llama", (0, 2)), (Layout(dp=2, ep=2), "qwen3_moe", (1,)), (Layout(pp=2, dp=2, ep=2), "qwen3_moe", (0, 1, 3)),
], ids=str)  # fmt: skip
def test_several_owners_get_the_same(ranks, layout, kind, owners):  # noqa: F811
    """Ranks without any shard of a parameter, or without any expert, take part all the same, and in the same order."""
    found = ranks(exported_to, layout, kind, owners)
    weights = weights_of(kind, True, layers=4)
    for rank, items in enumerate(found):
        assert {name for name, _ in items} == (set(weights) if rank in (0, *owners) else set())
        assert all(torch.equal(tensor, weights[name]) for name, tensor in items)


def without_a_parameter(groups: Groups) -> str:
    learner = learner_of(groups, config_of("llama", True), weights_of("llama", True))
    if groups.rank == 1:
        del learner.model.modules[0].decoder.layers[0].mlp.linear_fc2
    with pytest.raises(ExportError) as caught:
        list(export(learner.model))
    return str(caught.value)


def test_a_missing_shard_is_found_on_all_ranks(ranks):  # noqa: F811
    for message in ranks(without_a_parameter, Layout(tp=2)):
        assert "rank 1 should hold decoder.layers.0.mlp.linear_fc2.weight" in message
