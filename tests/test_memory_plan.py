"""What ``check`` plans: exact where it says so, held against what the learner allocates on gloo ranks."""

import dataclasses

import pytest
import torch

from ckpt_convert.families import family_of
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.model import Setup
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.memory_plan import (
    CHUNK,
    COMMUNICATOR,
    CONTEXT,
    HEAD_COPIES,
    Shape,
    activations,
    communication,
    engine_weights,
    flops,
    fp8_copies,
    in_flight,
    kv_bytes,
    lay_out,
    layer_bytes,
    pieces,
    plan,
    rank_state,
    save_copies,
)
from tests.learner.jobs import learner_of
from tests.learner.models import config_of, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

# ------------------------------------------------------------------------- against what the learner allocates


def storages(tensors) -> dict[int, int]:
    """Bytes of the distinct storages of tensors, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


def allocated(groups: Groups, config: dict, weights: dict, dtype: str) -> tuple[list[list[int]], list[int], int, int]:
    """(sizes of the parameters of each part; bytes of weights, gradients, optimizer state after a step; place among
    replicas; among expert replicas)."""
    from megatron.core import parallel_state  # after the learner's adaptation of it

    learner = learner_of(groups, config, weights, dtype)
    learner.step([micro_of([7, 9], 1)], [SftNll()], 1e-3)
    buffers = [b for chunk in learner.model.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    parameters = storages(learner.model.parameters().values())
    assert set(parameters) == set(storages(b.param_data for b in buffers))
    state = {}
    for part in learner.optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            state |= storages(p for group in part.optimizer.param_groups for p in group["params"])
            state |= storages(t for kept in part.optimizer.state.values() for t in kept.values() if torch.is_tensor(t))
    found = [
        sum(parameters.values()),
        sum(storages(b.grad_data for b in buffers).values()),
        sum(size for address, size in state.items() if address not in parameters),  # fp32 weights are their own masters
    ]
    return (
        [[p.numel() for p in module.parameters()] for module in learner.model.modules],
        found,
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_rank(),
    )


LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=2, ep=2),
    Layout(dp=2, etp=2),
    Layout(tp=2, ep=2, etp=1, sp=True),
    Layout(dp=2, pp=2),
    Layout(cp=2),
    Layout(pp=2, vpp=2),
]


def deep(kind: str, tied: bool, layers: int) -> tuple[dict, dict]:
    """(config, weights) of the tiny model with its first layer repeated."""
    whole = weights_of(kind, tied)
    weights = {n: w for n, w in whole.items() if ".layers." not in n}
    weights |= {n.replace(".layers.0.", f".layers.{i}."): w for n, w in whole.items() if ".layers.0." in n for i in range(layers)}
    return config_of(kind, tied, num_hidden_layers=layers), weights


MODELS = [("qwen3", False), ("qwen3", True), ("qwen3_moe", True)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_state_is_what_the_learner_allocates(ranks, layout, dtype):  # noqa: F811
    """Weights, gradients and optimizer state of every rank, to the byte, dense and experts, tied and untied."""
    for kind, tied in MODELS:
        if (layout.ep > 1 or layout.etp != layout.tp) and kind == "qwen3":
            continue
        if kind == "qwen3_moe" and layout.tp > 1:  # Megatron trains experts under tensor parallelism only so
            layout = dataclasses.replace(layout, sp=True)
        config, weights = deep(kind, tied, 2 * layout.vpp)
        family, shape = family_of(config), Shape(**dataclasses.asdict(layout), dtype=dtype)
        found = ranks(allocated, layout, config, weights, dtype)
        totals: dict[int, int] = {}
        for rank, (sizes, bytes_, replica, expert_replica) in enumerate(found):
            stage = rank // (layout.tp * layout.cp * layout.dp)
            want = rank_state(family, shape, stage, replica, expert_replica)
            assert sizes == [[p.elements for p in pieces(family, shape, stage, part)] for part in range(layout.vpp)]
            assert bytes_ == [want.weights, want.gradients, want.optimizer], (kind, tied, rank)
            totals[stage] = max(totals.get(stage, 0), sum(bytes_))
        for stage, total in totals.items():  # the plan's fullest rank may be fullest in both buffers at once
            assert total <= rank_state(family, shape, stage).total <= total + 12 * 128


def kept_bytes(groups: Groups, config: dict, weights: dict, length: int) -> int:
    """Bytes that a forward pass in fp32 keeps for backward, without parameters."""
    learner = learner_of(groups, config, weights, "fp32")
    known = storages(b.param_data for chunk in learner.model.chunks for b in chunk.buffers)
    seen: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # so that no address is used twice
        seen.update(storages([tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        learner.gradients([micro_of([length // 2, length // 2], 1)], [SftNll()])
    return sum(size for address, size in seen.items() if address not in known)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_activations_are_near_what_a_layer_keeps(ranks, kind):  # noqa: F811
    """The difference of a deeper model and a shallow one, so that embedding and head cancel."""
    length, sizes = 80, {}
    for layers in (2, 4):
        [sizes[layers]] = ranks(kept_bytes, Layout(), *deep(kind, True, layers), length)
    found = (sizes[4] - sizes[2]) / 2 / length
    planned = layer_bytes(family_of(config_of(kind, True)).arch, Shape(dtype="fp32"), "off")
    assert planned == pytest.approx(found, rel=0.25)


# ---------------------------------------------------------------------------------------------------- by hand


def dense(**changes):
    """hidden 6, 3 heads and groups of 2, 4 layers, intermediate 5, vocabulary 7."""
    sizes = {"hidden_size": 6, "num_attention_heads": 3, "num_hidden_layers": 4, "intermediate_size": 5, "vocab_size": 7}
    return family_of({"model_type": "llama", "tie_word_embeddings": True, **sizes} | changes)


def experts(**changes):
    """hidden 6, 3 heads of 2, 1 layer, 4 experts of 10 of which a token takes 2, vocabulary 7."""
    sizes = {"hidden_size": 6, "num_attention_heads": 3, "head_dim": 2, "num_hidden_layers": 1, "vocab_size": 7}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True, "max_position_embeddings": 9}
    return family_of({"model_type": "qwen3_moe", "num_key_value_heads": 3, "tie_word_embeddings": True, **sizes, **moe} | changes)


@pytest.mark.parametrize(
    ("sizes", "replicas", "elements", "updated", "tensors"),
    [
        ([(100, False), (70, False)], 2, 256, [70, 100], [1, 1]),  # 70 at 0, 100 at 128
        ([(100, False), (70, False)], 3, 384, [70, 100, 0], [1, 1, 0]),
        ([(300, False)], 3, 384, [128, 128, 44], [1, 1, 1]),
        ([(50, True), (10, False)], 2, 256, [60, 0], [2, 0]),  # 10 in a bucket of 128, 50 in another
    ],
)
def test_buffers(sizes, replicas, elements, updated, tensors):
    buffer = lay_out(sizes, replicas)
    assert (buffer.elements, buffer.updated, buffer.tensors) == (elements, updated, tensors)


def test_shards_of_experts():
    """4 experts over ep = 2, each over etp = 3: two products of 2 * 10 * 6 / 3 and 6 * 10 / 3, in a buffer of their own."""
    mine = pieces(experts(moe_intermediate_size=12), Shape(tp=1, ep=2, etp=3, dp=6), 0, 0)
    assert sorted(p.elements for p in mine if p.expert) == [24, 24, 48, 48]
    same = pieces(experts(), Shape(), 0, 0)
    assert not any(p.expert for p in same) and sum(p.elements == 60 for p in same) == 4


def test_the_vocabulary_is_padded_and_the_tied_head_is_on_both_ends():
    family = dense()
    for stage, tables in ((0, 1), (1, 1)):
        mine = pieces(family, Shape(tp=2, pp=2), stage, 0)
        assert sum(p.elements == 8 // 2 * 6 and p.alone for p in mine) == tables
    assert sum(p.elements == 42 for p in pieces(family, Shape(), 0, 0)) == 1
    assert sum(p.elements == 42 for p in pieces(dense(tie_word_embeddings=False), Shape(), 0, 0)) == 2


def test_interleaved_stages_hold_every_other_part():
    """Four layers as 0 | 1 | 0 | 1; the outermost stay out of FP8."""
    shape = Shape(pp=2, vpp=2, fp8="current", fp8_edge_bf16=1)
    found = [[any(p.product for p in pieces(dense(), shape, stage, part)) for part in (0, 1)] for stage in (0, 1)]
    assert found == [[False, True], [True, False]]


def test_fp8_parameters_take_a_byte_and_keep_a_second_copy():
    family, products = dense(), 4 * (6 * 18 + 6 * 6 + 3 * 6 * 5)
    assert fp8_copies(family, Shape(fp8="current"), 0) == 2 * products
    assert fp8_copies(family, Shape(fp8="current", fp8_params=True), 0) == products
    assert fp8_copies(family, Shape(), 0) == 0
    narrow = rank_state(family, Shape(fp8="current", fp8_params=True), 0)
    wide = rank_state(family, Shape(), 0)
    assert wide.weights - narrow.weights == pytest.approx(products, abs=64 * 18)  # a byte each, but for paddings


def test_other_optimizers():
    """bf16: 4 bytes of master weight; SGD 4 more; Muon 4 more for matrices of layers and 8 for all else."""
    family = dense()
    matrices, rest = 4 * (6 * 18 + 6 * 6 + 3 * 6 * 5), 7 * 6 + 9 * 6
    assert rank_state(family, Shape(optimizer="sgd"), 0).optimizer == 8 * (matrices + rest)
    assert rank_state(family, Shape(optimizer="muon"), 0).optimizer == 8 * matrices + 12 * rest
    assert rank_state(family, Shape(), 0).optimizer == 12 * (matrices + rest) + 4 * 26  # a step count for each of 26 tensors


def test_schedules():
    assert [in_flight(Shape(pp=4, micro_batches=8), s) for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(Shape(pp=4, micro_batches=2), s) for s in range(4)] == [2, 2, 2, 1]
    assert [in_flight(Shape(pp=2, vpp=2, micro_batches=8), s) for s in range(2)] == [2 + 2 + 1, 0 + 2 + 1]
    assert in_flight(Shape(pp=2, vpp=2, micro_batches=1), 0) == 2


def test_activations_of_a_layer():
    a = dense().arch
    heads = 3 * 2  # elements of queries, and of keys, and of values
    norms, attention, mlp = 4 * 6 * 2, (3 * heads + heads) * 2, 4 * 5 * 2
    inside = (2 * heads + heads) * 2 + 4 * 3
    assert layer_bytes(a, Shape(), "selective") == norms + attention + mlp
    assert layer_bytes(a, Shape(), "off") == norms + attention + inside + mlp
    assert layer_bytes(a, Shape(), "full") == 6 * 2
    assert layer_bytes(a, Shape(tp=3), "off") == pytest.approx(norms + (attention + inside + mlp) / 3)
    assert layer_bytes(a, Shape(tp=3, sp=True), "off") == pytest.approx((norms + attention + inside + mlp) / 3)
    assert layer_bytes(a, Shape(tp=3, sp=True), "full") == 6 * 2 / 3
    in_fp8 = layer_bytes(a, Shape(fp8="current"), "off")  # inputs of the four products: two norms, attention, gated product
    assert layer_bytes(a, Shape(), "off") - in_fp8 == 6 + 6 + heads + 5


def test_activations_of_experts():
    """Two copies of a token: its hidden vector, and five of an expert's intermediate size; more with etp, for each rank gathers."""
    a = experts().arch
    one = layer_bytes(a, Shape(), "off")
    three = layer_bytes(experts(moe_intermediate_size=30).arch, Shape(), "off")
    assert three - one == 2 * 20 * 5 * 2
    assert layer_bytes(a, Shape(etp=3), "off") - one == 2 * 2 * 6 * 2


def test_activations_of_a_stage():
    a, shape = dense().arch, Shape(pp=2, tokens=100, micro_batches=4)
    layer = layer_bytes(a, shape, "off")
    assert activations(a, shape, 0) == round(100 * (2 * 2 + 1) * layer)  # 2 micro-batches x 2 layers, and one at work
    head = 100 * 6 * 2 * 4 + HEAD_COPIES * 100 * 7 * 4
    assert activations(a, shape, 1) == round(100 * (1 * 2 + 1) * layer + head)
    assert activations(a, dataclasses.replace(shape, cp=2), 0) == round(50 * 5 * layer)
    long = dataclasses.replace(shape, tokens=1000)
    assert activations(a, long, 1) == round(1000 * 3 * layer + 1000 * 6 * 2 * 4 + HEAD_COPIES * CHUNK * 7 * 4)


def test_communication_and_sums():
    family, shape = dense(), Shape(tp=2, pp=2, dp=2)
    assert communication(Shape()) == CONTEXT
    assert communication(shape) == CONTEXT + 5 * COMMUNICATOR  # tp, pp, dp; etp as tp; expert replicas
    with_gpu, without = plan(family, shape, True), plan(family, shape, False)
    for stage, (one, other) in enumerate(zip(with_gpu, without, strict=True)):
        assert one.total - other.total == communication(shape)
        assert other.total == rank_state(family, shape, stage).total + activations(family.arch, shape, stage)


def test_engine():
    a = dense().arch
    assert kv_bytes(a, 10, "fp32") == 10 * 4 * 2 * 3 * 2 * 4
    assert kv_bytes(a, 10, "fp32", tp=2) == 10 * 4 * 2 * 2 * 2 * 4  # 3 groups on 2 ranks
    assert engine_weights(dense(), "bf16") == 2 * (42 + 6 + 4 * (12 + 6 * 18 + 6 * 6 + 3 * 6 * 5))


def test_flops():
    """4 tokens in rows of 4: 2 per weight and token; scores and values of 4 x 4 / 2 pairs, 2 each per query element."""
    work = flops(dense().arch, 4, 4)
    layers = 4 * (2 * 4 * (6 * 18 + 6 * 6 + 3 * 6 * 5) + 2 * 2 * 6 * (4 * 4 / 2))
    head = 2 * 4 * 7 * 6
    assert (work.forward, work.backward, work.recompute) == (layers + head, 2 * (layers + head), 0)
    assert flops(dense().arch, 4, 4, "full").recompute == layers
    assert flops(dense().arch, 4, 4, "selective").recompute == 4 * 2 * 2 * 6 * (4 * 4 / 2)
    active = flops(experts().arch, 1, 0)  # a router over 4 experts, and 2 of them
    assert active.forward == 2 * (6 * 18 + 6 * 6 + 6 * 4 + 2 * 3 * 6 * 10 + 7 * 6)


# ----------------------------------------------------------------------------------- checkpoints in the background


def copied(groups: Groups, config: dict, weights: dict, dtype: str, name: str, folder) -> int:
    """Bytes that a rank copies to host memory for a save that does not wait."""
    learner = learner_of(groups, config, weights, dtype, setup=Setup(whole_matrices=name == "muon"), name=name)
    learner.step([micro_of([7, 9], 1)], [SftNll()], 1e-3)
    writing = learner.begin_save(folder)
    writing.finish()
    return sum(path.stat().st_size for path in folder.glob(f"__{groups.rank}_*.distcp"))


@pytest.mark.parametrize(("layout", "dtype", "name"), [
    (Layout(), "bf16", "adamw"),
    (Layout(dp=2), "fp32", "adamw"),
    (Layout(tp=2, sp=True), "bf16", "sgd"),
    (Layout(pp=2), "bf16", "muon"),
], ids=str)  # fmt: skip
def test_copies_for_a_save_are_what_is_written(ranks, tmp_path, layout, dtype, name):  # noqa: F811
    """The files of the fullest rank hold its copies, beside a header of about 1 KiB for each tensor."""
    config, weights = deep("qwen3", False, 4)
    family, shape = family_of(config), Shape(**dataclasses.asdict(layout), dtype=dtype, optimizer=name)
    found = max(ranks(copied, layout, config, weights, dtype, name, tmp_path))
    planned = max(save_copies(family, shape, stage) for stage in range(layout.pp))
    assert 0.98 * planned <= found <= 1.02 * planned + 400 * 1024
