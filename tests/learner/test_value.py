"""A value head and a critic: what they say, what their gradients reach, and that every layout agrees with one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_convert.families import family_of
from mcore_agent.batch.microbatch import MicroBatch
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.model import Setup
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.loss.value_mse import ValueMse
from tests.learner.jobs import learner_of, whole_gradients
from tests.learner.models import config_of, hugging_face, logp_of, micro_of, per_expert, weights_of
from tests.ranks import ranks  # noqa: F401

LAYERS = 4
SEED = torch.Generator().manual_seed(9)
HEAD = {"value_head.weight": 0.1 * torch.randn(1, 40, generator=SEED), "value_head.bias": torch.tensor([0.3])}
HEADS = {"both": Setup(head="both"), "detached": Setup(head="both", detach_value=True), "critic": Setup(head="value")}


BOTH = ("value", "value_behind")  # of the state that a token was drawn in, and of the one that it led to


def with_returns(micro: MicroBatch, seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    more = {name: rng.normal(size=len(micro.tokens)) for name in ("returns", "values")}
    return MicroBatch(micro.tokens, micro.lengths, micro.rows, {**micro.columns, "w:1": micro.columns["w:0"], **more})


MICRO = [with_returns(micro_of(lengths, i), i) for i, lengths in enumerate([[7, 9, 3, 20], [5], [6, 1], [2, 11]])]
TERMS = {"lm": [SftNll()], "both": [SftNll(), ValueMse(clip=0.2)]}
TERMS |= {"detached": TERMS["both"], "critic": [SftNll(coef=0.0), ValueMse(clip=0.2)]}


def make(groups: Groups, kind: str, head: str, fill: bool = True) -> Learner:
    config, weights = config_of(kind, True, num_hidden_layers=LAYERS), weights_of(kind, True, layers=LAYERS)
    learner = learner_of(groups, config, weights, setup=HEADS[head])
    with torch.no_grad():
        for name, parameter in learner.model.parameters().items():
            if fill and name in HEAD:
                parameter.copy_(HEAD[name])
    learner.reset_optimizer()
    return learner


def computed(groups: Groups, kind: str, head: str) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """(loss, values, distance of every gradient from the definition's)."""
    learner = make(groups, kind, head)
    each = len(MICRO) // groups.layout.dp
    micro = MICRO[groups.dp_rank * each :][:each]
    values = [np.stack([found[name] for name in BOTH]) for found in learner.outputs(micro, BOTH)]
    done = learner.gradients(micro, TERMS[head])
    _, _, want = by_definition(kind, head)
    distances = {}
    for name, found in whole_gradients(learner).items():
        target = want[name] if name in HEAD else learner.model.shard(name, want.__getitem__)
        distances[name] = float((found - target).norm() / target.norm().clamp_min(1e-6))
    return done.loss, values, distances


def by_definition(kind: str, head: str) -> tuple[float, list[np.ndarray], dict[str, torch.Tensor]]:
    """The same from transformers and autograd, row by row."""
    model = hugging_face(kind, True, layers=LAYERS)
    model.zero_grad()
    leaves = {name: value.clone().requires_grad_() for name, value in HEAD.items()}
    loss, values = torch.zeros((), dtype=torch.float64), []
    for micro in MICRO:
        columns = {name: torch.from_numpy(v) for name, v in micro.columns.items()}
        rows, behind = [], []
        for a, b in zip(micro.starts[:-1], micro.starts[1:], strict=True):
            states = model.model(input_ids=torch.from_numpy(micro.tokens[a:b])[None]).last_hidden_state[0]
            states = states.detach() if head == "detached" else states
            spoken = states @ leaves["value_head.weight"][0] + leaves["value_head.bias"]
            rows.append(torch.cat([torch.zeros(1), spoken[:-1]]))
            behind.append(spoken)
        value = torch.cat(rows)
        near = columns["values"] + (value - columns["values"]).clamp(-0.2, 0.2)
        square = torch.maximum((value - columns["returns"]) ** 2, (near - columns["returns"]) ** 2) / 2
        loss = loss + 0.5 * (columns["w:1"].double() * square.double() * columns["mask:pg"]).sum()
        if head != "critic":
            loss = loss - (columns["w:0"] * logp_of(model, micro)).sum()
        values.append(torch.stack([value, torch.cat(behind)]).detach().numpy())
    loss.backward()
    grads = per_expert({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
    return loss.item(), values, grads | {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.defect("B14")
@pytest.mark.parametrize(("layout", "kind"), [
    (Layout(), "qwen3"),
    (Layout(tp=2), "qwen3"),
    (Layout(tp=2, cp=2, sp=True), "qwen3"),
    (Layout(pp=2, vpp=2, dp=2), "qwen3"),
    (Layout(tp=2, pp=2, ep=2, etp=1, sp=True), "qwen3_moe"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head", HEADS)
def test_equals_the_definition(ranks, layout, kind, head):  # noqa: F811
    loss, values, _ = by_definition(kind, head)
    each = len(MICRO) // layout.dp
    for rank, (found, own, distances) in enumerate(ranks(computed, layout, kind, head)):
        replica = rank // (layout.tp * layout.cp) % layout.dp
        assert found == pytest.approx(loss, rel=1e-5)
        for a, b in zip(own, values[replica * each :][:each], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        worst = max(distances, key=distances.__getitem__)
        assert distances[worst] < 1e-5, (rank, worst, distances[worst])


def sizes(groups: Groups) -> dict[str, int]:
    config = config_of("llama", False)
    return {
        name: sum(p.numel() for p in Learner(config, groups, "fp32", TERM_FREE, setup=setup).model.parameters().values())
        for name, setup in {"off": Setup(), **HEADS}.items()
    }


TERM_FREE: Any = __import__("mcore_agent.learner.optimizer", fromlist=["OptimSpec"]).OptimSpec()


def test_memory(ranks):  # noqa: F811
    """M24, M96: without a critic nothing is allocated; on the policy's backbone it is h + 1 numbers; alone it has no vocabulary."""
    [found] = ranks(sizes, Layout())
    whole = sum(int(np.prod(shape)) for shape in family_of(config_of("llama", False)).shapes().values())
    assert found == {"off": whole, "both": whole + 41, "detached": whole + 41, "critic": whole + 41 - 59 * 40}


def temperature_apart(groups: Groups) -> tuple[list[np.ndarray], list[np.ndarray]]:
    learner = make(groups, "qwen3", "both")
    found = []
    for learner.temperature in (1.0, 0.5):
        found.append([out["value"] for out in learner.outputs(MICRO, ["value"])])
    return found[0], found[1]


@pytest.mark.defect("B14")
def test_temperature_does_not_touch_values(ranks):  # noqa: F811
    [(one, half)] = ranks(temperature_apart, Layout())
    assert all(np.array_equal(a, b) for a, b in zip(one, half, strict=True))


def round_trip(groups: Groups, folder: Path) -> tuple[bool, bool, bool]:
    """(a critic begins at 0 from a policy's weights, it goes on with the same bits, its optimizer came back)"""
    policy, both = learner_of(groups, config_of("qwen3", True), weights_of("qwen3", True)), folder / "policy"
    both.mkdir(exist_ok=True)
    policy.save(both, weights_only=True)
    config, weights = config_of("qwen3", True), weights_of("qwen3", True)
    critic = learner_of(groups, config, weights, setup=HEADS["critic"])
    critic.load(both, weights_only=True)
    zero = all(not out["value"].any() for out in critic.outputs(MICRO, ["value"]))
    critic.step(MICRO, TERMS["critic"], 1e-2)
    own = folder / "critic"
    own.mkdir(exist_ok=True)
    critic.save(own)
    straight = [critic.step(MICRO, TERMS["critic"], 1e-2).loss for _ in range(2)]
    again = learner_of(groups, config, weights, setup=HEADS["critic"])
    again.load(own)
    resumed = [again.step(MICRO, TERMS["critic"], 1e-2).loss for _ in range(2)]
    return zero, straight == resumed, straight[0] != straight[1]


@pytest.mark.defect("G10")
def test_its_own_checkpoint(ranks, tmp_path):  # noqa: F811
    assert ranks(round_trip, Layout(), tmp_path) == [(True, True, True)]
