"""Optimizers against the formulas they come from, on one process and on several."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_agent.learner import optimizer
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.muon import Momentum
from mcore_agent.learner.optimizer import OptimError, OptimSpec, live_parts
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.weights.export import export
from tests.learner.jobs import learner_of, relative
from tests.learner.models import config_of, micro_of, weights_of
from tests.learner.test_muon import by_singular_values, random
from tests.ranks import ranks  # noqa: F401

SLOTS = [[micro_of([7, 9, 3, 20], 1)], [micro_of([2, 11, 4, 10], 4)]]
TERMS = [SftNll()]


# ------------------------------------------------------------------------------------------------ on one process


def by_hand(learner: Learner, names: list[str], spec: OptimSpec, lr: float, steps: int) -> dict[str, torch.Tensor]:
    """What torch's optimizers, and the formulas of Muon, make of this learner's gradients; it is stepped along."""
    parameters = {n: p.detach().clone().requires_grad_() for n, p in learner.model.parameters().items()}
    averages = {n: torch.zeros_like(p) for n, p in parameters.items()}
    rest = [n for n in parameters if n not in names]
    groups = [
        {"params": [parameters[n] for n in rest if (parameters[n].dim() > 1) == decayed], "weight_decay": spec.weight_decay * decayed}
        for decayed in (True, False)
    ]
    plain: Any
    if spec.name == "sgd":  # torch adds decay to the gradient, so it is applied here
        decay = {n: groups[0]["weight_decay"] for n, p in parameters.items() if p.dim() > 1}
        plain = torch.optim.SGD(list(parameters.values()), lr, spec.momentum, nesterov=spec.nesterov)
    else:
        decay = {}
        plain = torch.optim.AdamW(groups, lr * spec.rest_lr, spec.betas, spec.eps, fused=True)
    for _ in range(steps):
        learner.gradients(SLOTS[0], TERMS)
        for name, own in learner.model.parameters().items():
            parameters[name].grad = own.main_grad.clone()
        with torch.no_grad():
            for name, rate in decay.items():
                parameters[name].mul_(1 - lr * rate)
            for name in names:
                _muon_step(name, parameters[name], averages[name], spec, lr)
        plain.step()
        optimizer.update(learner.optimizer, spec, lr)
    return {n: p.detach() for n, p in parameters.items()}


def _muon_step(name: str, parameter: torch.Tensor, average: torch.Tensor, spec: OptimSpec, lr: float) -> None:
    """config_of("qwen3"): 4 heads in 2 query groups of head size 12, so 24 rows of q, 12 of k, 12 of v in each group."""
    assert parameter.grad is not None
    average.mul_(spec.momentum).add_(parameter.grad, alpha=1 - spec.momentum)
    direction = spec.momentum * average + (1 - spec.momentum) * parameter.grad if spec.nesterov else average
    rows = len(parameter)
    parts = [list(range(rows))]
    if "linear_qkv" in name:
        first = [*range(24), *range(48, 72)], [*range(24, 36), *range(72, 84)]
        parts = [*first, [r for r in range(96) if r not in first[0] + first[1]]]
    elif "linear_fc1" in name:
        parts = [parts[0][: rows // 2], parts[0][rows // 2 :]]
    parameter.mul_(1 - lr * spec.weight_decay)
    for part in parts:
        wide = max(len(part), parameter.shape[1])
        scale = 0.2 * wide**0.5 if spec.scale == "rms_match" else max(1.0, len(part) / parameter.shape[1]) ** 0.5
        parameter[part] -= lr * scale * by_singular_values(direction[part])


def matrix_names(learner: Learner) -> list[str]:
    """Global names of the fp32 parameters that are orthogonalized on this rank."""
    owned = set()
    for part in live_parts(learner.optimizer):
        pairs = zip(chain(*part.model_fp32_groups), chain(*part.shard_fp32_groups), strict=True)
        owned |= {id(model) for model, shard in pairs if isinstance(part.optimizer, Momentum) and shard in part.optimizer.matrices}
    return [name for name, p in learner.model.parameters().items() if id(p) in owned]


def compare_by_hand(groups: Groups, settings: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    spec = OptimSpec(**settings)
    learner = learner_of(groups, config_of("qwen3", False), weights_of("qwen3", False), **settings)
    names = matrix_names(learner)
    start = {n: p.detach().clone() for n, p in learner.model.parameters().items()}
    want = by_hand(learner, names, spec, lr=0.03, steps=3)
    found = learner.model.parameters()
    return names, {n: float((found[n] - want[n]).norm() / (want[n] - start[n]).norm()) for n in want}


SETTINGS = [
    {"name": "adamw", "weight_decay": 0.1, "clip_grad": 0.0},
    {"name": "sgd", "weight_decay": 0.1, "clip_grad": 0.0, "momentum": 0.8},
    {"name": "sgd", "clip_grad": 0.0, "nesterov": False},
    {"name": "muon", "weight_decay": 0.1, "clip_grad": 0.0, "scale": "rms_match"},
    {"name": "muon", "clip_grad": 0.0, "scale": "fan_in", "nesterov": False, "rest_lr": 0.2, "momentum": 0.9},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_three_steps_by_hand(ranks, settings):  # noqa: F811
    [(names, distances)] = ranks(compare_by_hand, Layout(), settings)
    assert len(names) == (2 * 4 if settings["name"] == "muon" else 0)
    worst = max(distances, key=distances.__getitem__)
    assert distances[worst] < 1e-4, (worst, distances[worst])


def groups_of_moe(groups: Groups) -> list[str]:
    return matrix_names(learner_of(groups, config_of("qwen3_moe", False), weights_of("qwen3_moe", False), name="muon"))


def test_only_linear_weights_of_layers_are_orthogonalized(ranks):  # noqa: F811
    """No embedding, output layer, norm or router."""
    [names] = ranks(groups_of_moe, Layout())
    want = set()
    for layer in range(2):
        want |= {f"decoder.layers.{layer}.self_attention.linear_{m}.weight" for m in ("qkv", "proj")}
        want |= {f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.linear_{m}.weight" for e in range(4) for m in ("fc1", "fc2")}
    assert set(names) == want


# ------------------------------------------------------------------------------------------------ on several processes


def stepped(groups: Groups, kind: str, settings: dict[str, Any], reference: dict[str, torch.Tensor] | None) -> Any:
    """Without ``reference``: weights and gradient norms of one process. With it: norms, and distance of every shard."""
    learner = learner_of(groups, config_of(kind, True), weights_of(kind, True), **settings)
    micro = [m for slot in SLOTS for m in slot] if groups.layout.dp == 1 else SLOTS[groups.dp_rank]
    norms = [learner.step(micro, TERMS, 0.02).grad_norm for _ in range(3)]
    if reference is None:
        return norms, {name: t.clone() for name, t in export(learner.model)}
    return norms, relative(learner, dict(learner.model.parameters()), reference)


LAYOUTS = [
    (Layout(tp=2), "qwen3"),
    (Layout(dp=2), "qwen3"),
    (Layout(pp=2), "qwen3"),
    (Layout(tp=2, dp=2), "qwen3"),
    (Layout(dp=2), "qwen3_moe"),
    (Layout(dp=2, ep=2), "qwen3_moe"),
    (Layout(tp=2, ep=2, etp=1, sp=True), "qwen3_moe"),
]


@pytest.mark.parametrize("name", ["muon", "sgd"])
@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=lambda v: str(v).replace(" ", ""))
def test_layouts_take_the_same_steps(ranks, layout, kind, name):  # noqa: F811
    settings = {"name": name, "weight_decay": 0.1, "clip_grad": 0.5}
    [(norms, weights)] = ranks(stepped, Layout(), kind, settings, None)
    for found, distances in ranks(stepped, layout, kind, settings, weights):
        assert found == pytest.approx(norms, rel=1e-4)
        worst = max(distances, key=distances.__getitem__)
        assert distances[worst] < 3e-5, (worst, distances[worst])


def saved(groups: Groups, name: str, folder: str) -> list[float]:
    learner = learner_of(groups, config_of("qwen3", True), weights_of("qwen3", True), name=name)
    learner.step(SLOTS[groups.dp_rank % 2], TERMS, 0.02)
    learner.save(Path(folder))
    return [learner.step(SLOTS[groups.dp_rank % 2], TERMS, 0.02).loss for _ in range(3)]


def resumed(groups: Groups, name: str, folder: str) -> list[float]:
    learner = learner_of(groups, config_of("qwen3", True), weights_of("qwen3", True), name=name)
    learner.load(Path(folder))
    micro = [m for slot in SLOTS for m in slot] if groups.layout.dp == 1 else SLOTS[groups.dp_rank]
    return [learner.step(micro, TERMS, 0.02).loss for _ in range(3)]


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_resume_in_the_same_and_in_another_layout(ranks, name, tmp_path):  # noqa: F811
    """The third loss after the load depends on weights, momentum and (of AdamW's part) the step count."""
    want = ranks(saved, Layout(dp=2), name, str(tmp_path))
    assert ranks(resumed, Layout(dp=2), name, str(tmp_path)) == want
    for layout in (Layout(), Layout(tp=2)):
        for found in ranks(resumed, layout, name, str(tmp_path)):
            assert found == pytest.approx(want[0], rel=1e-5)


# ------------------------------------------------------------------------------------------------ steps that change nothing


def idle(groups: Groups, name: str, dtype: str, folder: str) -> list[bool]:
    """Whether weights stay through a step at learning rate zero: after loading weights, a checkpoint, and only its weights."""
    learner = learner_of(groups, config_of("qwen3_moe", True), weights_of("qwen3_moe", True), dtype, name=name, weight_decay=0.1)
    out = []

    def unchanged() -> None:
        before = [p.detach().clone() for p in learner.model.parameters().values()]
        done = learner.step(SLOTS[groups.dp_rank], TERMS, 0.0)
        pairs = zip(before, learner.model.parameters().values(), strict=True)
        out.append(done.applied and all(torch.equal(a, b) for a, b in pairs))

    unchanged()
    learner.step(SLOTS[groups.dp_rank], TERMS, 0.02)
    learner.save(Path(folder))
    for weights_only in (False, True):
        learner.step(SLOTS[groups.dp_rank], TERMS, 0.02)
        learner.load(Path(folder), weights_only)
        unchanged()
    return out


@pytest.mark.defect("E28")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_step_at_learning_rate_zero_changes_nothing_after_a_load(ranks, name, dtype, tmp_path):  # noqa: F811
    for found in ranks(idle, Layout(dp=2), name, dtype, str(tmp_path)):
        assert found == [True, True, True]


def poisoned(groups: Groups, name: str) -> tuple[bool, float, bool]:
    """One rank's gradient has a NaN; the update is skipped on all."""
    learner = learner_of(groups, config_of("qwen3", True), weights_of("qwen3", True), name=name)
    learner.step(SLOTS[groups.dp_rank], TERMS, 0.02)
    states = [s for part in live_parts(learner.optimizer) for s in part.optimizer.state.values()]
    tensors = [*learner.model.parameters().values(), *(t for s in states for t in s.values())]
    before = [t.detach().clone() for t in tensors]
    learner.gradients(SLOTS[groups.dp_rank], TERMS)
    if groups.rank == 1:
        for parameter in learner.model.parameters().values():
            parameter.main_grad.fill_(float("nan"))
    done = optimizer.update(learner.optimizer, learner.spec, 0.02)
    return done.applied, done.grad_norm, all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.defect("B24")
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_gradient_that_is_not_finite_skips_the_step(ranks, name):  # noqa: F811
    for applied, norm, unchanged in ranks(poisoned, Layout(dp=2), name):
        assert not applied and norm != norm and unchanged


def kinds(groups: Groups, name: str) -> list[set[torch.dtype]]:
    learner = learner_of(groups, config_of("qwen3_moe", True), weights_of("qwen3_moe", True), "bf16", name=name)
    learner.step(SLOTS[0], TERMS, 0.02)
    parts = live_parts(learner.optimizer)
    masters = [p for part in parts for p in part.get_parameters()]
    parameters = learner.model.parameters().values()
    buffers = [b for c in learner.model.chunks for b in c.buffers + c.expert_parallel_buffers]
    return [
        {p.dtype for p in parameters},
        {p.main_grad.dtype for p in parameters} | {b.grad_dtype for b in buffers},
        {p.dtype for p in masters} | {p.grad.dtype for p in masters if p.grad is not None},
        {t.dtype for part in parts for s in part.optimizer.state.values() for t in s.values()},
    ]


@pytest.mark.defect("E29")
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_bf16_weights_have_fp32_gradients_masters_and_moments(ranks, name):  # noqa: F811
    [found] = ranks(kinds, Layout(), name)
    assert found == [{torch.bfloat16}, {torch.float32}, {torch.float32}, {torch.float32}]


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "lion"}, r"learner.optimizer is 'lion'; use adamw, sgd, muon"),
        ({"name": "muon", "scale": "spectral"}, r"learner.scale is 'spectral'; use rms_match or fan_in"),
        ({"momentum": 0.5}, r"learner.momentum is 0.5, but adamw has no use for it; leave it out, or set learner.optimizer to sgd, muon"),
        ({"name": "sgd", "eps": 1e-6}, r"learner.eps is 1e-06, but sgd has no use for it; .* adamw, muon"),
        ({"name": "muon", "offload": True}, r"learner.offload is True, but muon has no use for it; .* adamw"),
    ],
)
def test_settings_without_use_are_refused(settings, message):
    with pytest.raises(OptimError, match=message):
        OptimSpec(**settings)


def test_offload_is_refused_where_it_cannot_be():
    with pytest.raises(OptimError, match="learner.offload is on, but torch sees no GPU: .* switch learner.offload off"):
        optimizer.check_offload(torch.bfloat16, cuda=False)
    with pytest.raises(OptimError, match="learner.offload is on with torch.float32: .* set precision.dtype to bf16"):
        optimizer.check_offload(torch.float32, cuda=True)
    optimizer.check_offload(torch.bfloat16, cuda=True)


def test_offloaded_adamw_begins_with_nothing():
    """Megatron would fill its state by a step on random gradients."""
    weight = torch.nn.Parameter(random(5, 3).bfloat16())
    inner = optimizer.HybridDeviceOptimizer(
        [{"params": [weight], "lr": 0.1}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
    )
    optimizer._begin(inner)
    [state] = inner.state.values()
    assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    assert torch.equal(state["master_param"], weight.float())


def offloaded(groups: Groups, name: str) -> list[dict[str, torch.Tensor]]:
    out = []
    for offload in (False, True):
        learner = learner_of(groups, config_of("qwen3", True), weights_of("qwen3", True), "bf16", name=name, offload=offload)
        learner.step(SLOTS[0], TERMS, 0.0)
        before = {n: p.detach().cpu().clone() for n, p in learner.model.parameters().items()}
        learner.step(SLOTS[0], TERMS, 0.02)
        out += [before, {n: p.detach().cpu().clone() for n, p in learner.model.parameters().items()}]
    return out


@pytest.mark.gpu
@pytest.mark.defect("E28")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_offloaded_adamw_takes_the_same_steps(ranks):  # noqa: F811
    [(start, want, other_start, found)] = ranks(offloaded, Layout(), "adamw")
    for name in want:
        assert torch.equal(start[name], other_start[name])
        torch.testing.assert_close(found[name], want[name], rtol=1e-2, atol=1e-4)
