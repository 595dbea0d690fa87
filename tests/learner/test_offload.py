"""Memory that is given back is really given back, and what comes again has the same bits."""

from pathlib import Path

import pytest
import torch

from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.offload import ASLEEP, AWAKE, TRIMMED, Offload, OffloadError, Storages
from mcore_agent.learner.optimizer import OptimSpec, live_parts
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.rollout.states import residual_memory
from tests.learner.jobs import learner_of
from tests.learner.models import config_of, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401

MICRO = [micro_of([7, 9, 3, 20], 1)]


def values_of(learner: Learner) -> list[torch.Tensor]:
    """Copies of parameters, master weights and moments."""
    masters = [(part, p) for part in live_parts(learner.optimizer) for p in part.get_parameters()]
    state = [t for part, p in masters for _, t in sorted(part.optimizer.state[p].items()) if torch.is_tensor(t)]
    return [t.detach().clone() for t in [*learner.model.parameters().values(), *(p for _, p in masters), *state]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def made(groups: Groups, dtype: str, **optim) -> Learner:
    learner = learner_of(groups, config_of("qwen3_moe", True), weights_of("qwen3_moe", True), dtype, **optim)
    learner.step(MICRO, [SftNll()], 1e-2)
    return learner


def there_and_back(groups: Groups, dtype: str, optimizer: str, to_host: bool) -> dict:
    """Steps with naps between them against steps without; one rank may be asleep alone, as nothing here is collective."""
    without, learner = made(groups, dtype, name=optimizer), made(groups, dtype, name=optimizer)
    offload = Offload(learner.model.chunks, learner.optimizer, to_host)
    full = offload.residual_bytes()
    before, bytes_, states = values_of(learner), {}, []
    for action in (offload.trim, offload.trim, offload.sleep, offload.sleep, offload.trim):
        action()
        states.append(offload.state)
        bytes_[offload.state] = offload.residual_bytes()
    offload.wake()
    back = same(before, values_of(learner)) and offload.residual_bytes() == full
    zero = not any(b.grad_data.any() for c in learner.model.chunks for b in c.buffers + c.expert_parallel_buffers)
    losses = []
    for _ in range(2):
        offload.sleep()
        offload.wake()
        losses.append([x.step(MICRO, [SftNll()], 1e-2).loss for x in (without, learner)])
    buffers = [b for c in learner.model.chunks for b in c.buffers + c.expert_parallel_buffers]
    flat = {b.param_data.untyped_storage()._cdata for b in buffers}
    inside = all(p.data.untyped_storage()._cdata in flat for p in learner.model.parameters().values())
    ends = same(values_of(without), values_of(learner))
    return {"full": full, "states": states, "bytes": bytes_, "back": back, "zero": zero, "losses": losses, "ends": ends, "inside": inside}


@pytest.mark.parametrize(
    ("layout", "dtype", "optimizer", "to_host"),
    [
        (Layout(), "fp32", "adamw", True),
        (Layout(), "bf16", "adamw", True),
        (Layout(), "fp32", "adamw", False),
        (Layout(dp=2), "bf16", "adamw", True),
        (Layout(dp=2), "fp32", "muon", True),
    ],
    ids=lambda v: str(v).replace(" ", ""),
)
def test_same_bits(ranks, layout, dtype, optimizer, to_host):  # noqa: F811
    for found in ranks(there_and_back, layout, dtype, optimizer, to_host):
        full, trimmed, asleep = found["full"], found["bytes"][TRIMMED], found["bytes"][ASLEEP]
        assert found["states"] == [TRIMMED, TRIMMED, ASLEEP, ASLEEP, ASLEEP]
        assert min(full["parameters"], full["optimizer"], full["gradients"]) > 0 and full["host"] == 0
        kept = 0 if to_host else full["optimizer"]
        assert trimmed == {"parameters": full["parameters"], "optimizer": kept, "gradients": 0, "host": full["optimizer"] - kept}
        moved = full["parameters"] + full["optimizer"] if to_host else 0
        stay = {k: 0 if to_host else full[k] for k in ("parameters", "optimizer")}
        assert asleep == stay | {"gradients": 0, "host": moved}
        assert found["back"] and found["zero"] and found["inside"] and found["ends"]
        assert all(a == b for a, b in found["losses"])


def saved_asleep(groups: Groups, folder: str) -> tuple:
    learner = made(groups, "bf16")
    offload = Offload(learner.model.chunks, learner.optimizer, to_host=True)
    values, out = values_of(learner), []
    for at, action in enumerate((offload.wake, offload.trim, offload.sleep)):
        action()
        place = Path(folder, str(at))
        place.mkdir(exist_ok=True)
        before = (offload.state, offload.residual_bytes())
        with offload.awake():
            learner.save(place)
        out.append((before, (offload.state, offload.residual_bytes())))
    offload.wake()
    other = made(groups, "bf16")
    other.load(Path(folder, "2"))
    return out, same(values, values_of(learner)), same(values, values_of(other))


@pytest.mark.defect("F2", "F6")
def test_a_checkpoint_leaves_memory_as_it_was(ranks, tmp_path):  # noqa: F811
    [(pairs, untouched, loaded)] = ranks(saved_asleep, Layout(), str(tmp_path))
    assert [before[0] for before, _ in pairs] == [AWAKE, TRIMMED, ASLEEP]
    assert all(before == after for before, after in pairs)
    assert untouched and loaded


def refusals(groups: Groups) -> list[str]:
    learner = made(groups, "fp32")
    offload = Offload(learner.model.chunks, learner.optimizer, to_host=False)
    out = []
    for action, wanted in ((offload.wake, ()), (offload.trim, (False,)), (offload.sleep, (False, True))):
        action()
        for parameters_only in (False, True):
            try:
                offload.need("take a step", parameters_only)
                assert parameters_only not in wanted
            except OffloadError as e:
                assert parameters_only in wanted
                out.append(str(e))
    return out


def test_what_is_away_is_not_used(ranks):  # noqa: F811
    [messages] = ranks(refusals, Layout())
    trimmed, *asleep = messages
    assert trimmed == ("the learner cannot take a step: its gradients and optimizer state are given back (state TRIMMED); call wake first")
    assert len(asleep) == 2 and all("parameters, gradients and optimizer state" in m and "ASLEEP" in m for m in asleep)


def wide(groups: Groups) -> tuple[int, list[int]]:
    """(bytes of the gradient buffers, resident memory awake, trimmed and awake again) of a model of 16 M parameters."""
    config = config_of("llama", True, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    learner = Learner(config, groups, "fp32", OptimSpec())
    offload = Offload(learner.model.chunks, learner.optimizer, to_host=False)
    for chunk in learner.model.chunks:
        chunk.zero_grad_buffer()  # touches every page
    found = [residual_memory()["rss"]]
    for action in (offload.trim, offload.wake):
        action()
        found.append(residual_memory()["rss"])
    return sum(b.grad_data.nbytes for b in learner.model.chunks[0].buffers), found


def test_resident_memory_shrinks(ranks):  # noqa: F811
    [(gradients, (awake, trimmed, again))] = ranks(wide, Layout())
    assert gradients > 40 * 2**20
    assert awake - trimmed > 0.95 * gradients
    assert abs(again - awake) < 0.05 * gradients


def test_storages_keep_views():
    flat = torch.arange(60, dtype=torch.float32)
    view, whole = flat[7:19].view(3, 4), flat.clone()
    store = Storages()
    store.free([flat.untyped_storage()])
    assert flat.untyped_storage().nbytes() == 0 and store.host_bytes() == 240
    store.restore()
    assert torch.equal(flat, whole) and store.host_bytes() == 0
    view.zero_()
    assert not flat[7:19].any() and flat[19:].all(), "the view is no longer a view"
