"""Experts recorded under one layout are replayed under every other, token by token and layer by layer."""

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent.batch.microbatch import MicroBatch, PlanError
from mcore_agent.batch.plan import split
from mcore_agent.batch.rowset import RowSet
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.model import Setup
from mcore_agent.learner.packing import PackedRows
from mcore_agent.learner.routing import RoutingError
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.protocols import ModelOut
from tests.learner.jobs import learner_of, relative, whole_gradients
from tests.learner.models import config_of, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

LAYERS, EXPERTS, TOPK = 4, 4, 2
LENGTHS = [[7, 9, 3, 20], [5], [6, 6, 1], [2, 11]]


def learner(groups: Groups, setup: Setup) -> Learner:
    return learner_of(
        groups, config_of("qwen3_moe", False, num_hidden_layers=LAYERS), weights_of("qwen3_moe", False, layers=LAYERS), setup=setup
    )


def forced() -> list[MicroBatch]:
    """Micro-batches whose experts were drawn at random: no router would choose so."""
    rng = np.random.default_rng(8)
    out = []
    for i, lengths in enumerate(LENGTHS):
        m = micro_of(lengths, i)
        routing = np.argsort(rng.random((len(m.tokens), LAYERS, EXPERTS)), -1)[..., :TOPK].astype(np.int32)
        out.append(MicroBatch(m.tokens, m.lengths, m.rows, m.columns, routing))
    return out


FORCED = forced()


def shares(groups: Groups, micro: list[MicroBatch]) -> list[MicroBatch]:
    each = len(micro) // groups.layout.dp
    return micro[groups.dp_rank * each :][:each]


def replayed(groups: Groups, setup: Setup) -> tuple[float, list[np.ndarray], dict[str, torch.Tensor], list[np.ndarray]]:
    """(loss, log-probabilities, gradients, experts that the pass says it used)"""
    made = learner(groups, setup)
    done = made.gradients(shares(groups, FORCED), [SftNll()])
    used = [o["routing"] for o in made.outputs(shares(groups, FORCED), ["routing"])]
    return done.loss, done.logp, whole_gradients(made), used


def compared(groups: Groups, setup: Setup, reference: dict[str, torch.Tensor]) -> tuple[float, list[np.ndarray], float, list[np.ndarray]]:
    loss, logp, grads, used = replayed(groups, setup)
    made = learner(groups, setup)
    whole = {hf: t for name, value in reference.items() for hf, t in made.model.family.to_hf(name, [value]).items()}
    return loss, logp, max(relative(made, grads, whole).values()), used


@pytest.mark.defect("D1", "D4")
@pytest.mark.parametrize(("layout", "setup"), [
    (Layout(pp=2, vpp=2), Setup()),
    (Layout(pp=2, dp=2, ep=2), Setup("full")),
    (Layout(tp=2, sp=True, cp=2), Setup("selective")),
    (Layout(tp=2, sp=True, pp=2, vpp=2, ep=2, etp=1), Setup("full", "allgather")),
    (Layout(cp=2, pp=2, ep=2), Setup("full")),
], ids=str)  # fmt: skip
def test_replay_under_every_layout(ranks, layout, setup):  # noqa: F811
    """Micro-batches of 39, 5 and 13 tokens are filled up to a share for each rank: the filler has no recorded experts."""
    [(loss, logp, grads, used)] = ranks(replayed, Layout(), Setup())
    for m, own in zip(FORCED, used, strict=True):
        assert np.array_equal(own, m.routing)
    each = len(FORCED) // layout.dp
    for rank, (found, own, distance, routing) in enumerate(ranks(compared, layout, setup, grads)):
        replica = rank // (layout.tp * layout.cp) % layout.dp
        assert found == pytest.approx(loss, rel=1e-5) and distance < 1e-5
        for a, b in zip(own, logp[replica * each :][:each], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
        for a, m in zip(routing, FORCED[replica * each :][:each], strict=True):
            assert np.array_equal(a, m.routing)


def recorded(groups: Groups) -> tuple[list[np.ndarray], bool, bool]:
    """(experts of a free pass, replaying them gives its log-probabilities, experts drawn at random do not)"""
    made = learner(groups, Setup())
    free = [MicroBatch(m.tokens, m.lengths, m.rows, m.columns) for m in FORCED]
    first = made.outputs(free, ["routing"])
    again = [MicroBatch(m.tokens, m.lengths, m.rows, m.columns, o["routing"]) for m, o in zip(free, first, strict=True)]
    same = all(np.allclose(a["logp"], b, atol=2e-6) for a, b in zip(first, made.logprobs(again), strict=True))
    other = any(not np.allclose(a["logp"], b, atol=1e-4) for a, b in zip(first, made.logprobs(FORCED), strict=True))
    return [o["routing"] for o in first], same, other


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True, pp=2), Layout(cp=2, pp=2, vpp=2)], ids=str)
def test_recording(ranks, layout):  # noqa: F811
    [(alone, same, other)] = ranks(recorded, Layout())
    assert same and other
    for found, same, other in ranks(recorded, layout):
        assert same and other
        for a, b in zip(alone, found, strict=True):
            assert np.array_equal(np.sort(a, -1), np.sort(b, -1))


@dataclass(frozen=True)
class Count:
    """A loss of 0 that counts, whenever it is taken, the packs that are alive."""

    seen: list[int]
    channel: str = "pg"
    needs: tuple[str, ...] = ()
    scales_with: None = None
    coef: float = 1.0
    aggregate: str = "token_mean"

    def per_token(self, out: ModelOut, columns: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.seen.append(packs())
        return out.logp * 0, {}


def packs() -> int:
    return sum(type(thing) is PackedRows for thing in gc.get_objects())


def alive(groups: Groups, setup: Setup) -> tuple[int, int, int]:
    """Most packs alive at once in a pass with gradients and in one without, on the stage that takes the loss; afterwards."""
    made = learner(groups, setup)
    trained, scored = Count([]), Count([])
    made.gradients(FORCED * 2, [trained])
    made.loss(FORCED * 2, [scored])
    made.outputs(FORCED, ["routing"])
    gc.collect()
    return max(trained.seen, default=0), max(scored.seen, default=0), packs()


@pytest.mark.defect("F7")
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(pp=2, vpp=2)], ids=str)
def test_a_pack_is_forgotten_when_its_turn_is_over(ranks, layout):  # noqa: F811
    """Of eight micro-batches with recorded experts only those stay that a stage has under way, and after the pass none."""
    found = ranks(alive, layout, Setup("full"))
    under_way = 2 if layout.vpp == 1 else 2 * layout.pp
    assert 1 <= found[-1][0] <= under_way and 1 <= found[-1][1] <= under_way
    assert [after for _, _, after in found] == [0] * layout.world


def refused(groups: Groups) -> list[str]:
    made, messages = learner(groups, Setup()), []
    m = FORCED[0]
    for routing in (m.routing[:, :3], m.routing + 3):
        with pytest.raises(RoutingError) as caught:
            made.logprobs([MicroBatch(m.tokens, m.lengths, m.rows, m.columns, routing)])
        messages.append(str(caught.value))
    return messages


def test_what_does_not_fit(ranks):  # noqa: F811
    [(layers, experts)] = ranks(refused, Layout())
    assert "3 layers, but the model has 4" in layers and "the model has 4" in experts


@pytest.mark.defect("D2")
def test_routing_goes_with_its_tokens(tmp_path):
    m = FORCED[0]
    with pytest.raises(PlanError, match=r"routing has shape \(38, 4, 2\), expected \(39, layers, experts per token\)"):
        MicroBatch(m.tokens, m.lengths, m.rows, {}, m.routing[:-1])
    rows = RowSet(m.tokens, m.lengths, m.rows, len(m.rows), {}, m.routing)
    rows.save(tmp_path / "rows.npz")
    rows = RowSet.load(tmp_path / "rows.npz")
    for slots in split(rows, 12, 2).slots:
        for part in slots:
            for row, a, b in zip(part.rows, part.starts[:-1], part.starts[1:], strict=True):
                if row >= 0:
                    start = m.starts[row]
                    assert np.array_equal(part.routing[a:b], m.routing[start : start + b - a])
