"""A checkpoint written in the background holds the moment it began, and counts only once every rank has written its files."""

import gc
import random
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_agent import session
from mcore_agent.learner import checkpoint
from mcore_agent.learner.checkpoint import CheckpointError, Writing, all_done
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.offload import ASLEEP, Offload
from mcore_agent.loss.sft_nll import SftNll
from mcore_agent.session import Flight, Session
from mcore_agent.state import Checkpoints, StateStore
from tests.learner.test_torch_dist import RATES, make, resumed, run, slots_of
from tests.ranks import ranks  # noqa: F401


@contextmanager
def held() -> Iterator[threading.Event]:
    """Writers wait before their first tensor until the event is set."""
    gate, original = threading.Event(), checkpoint._each

    def waiting(tensors: Any, stop: threading.Event) -> Iterator[Any]:
        gate.wait(60)
        yield from original(tensors, stop)

    checkpoint._each = waiting
    try:
        yield gate
    finally:
        gate.set()
        checkpoint._each = original


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.distcp"))}


def whole(folder: Path) -> bool:
    return (folder / ".metadata").is_file() and (folder / "metadata.json").is_file()


# ------------------------------------------------------------------------------------------------------- the learner


def stepped_on(groups: Groups, kind: str, dtype: str, at_once: Path, behind: Path) -> dict[str, Any]:
    """Both saves of one moment; the steps after it come before the second one has written anything."""
    learner = make(groups, kind, False, dtype)
    run(learner, RATES[:2])
    learner.save(at_once)
    with held() as gate:
        writing = learner.begin_save(behind)
        rest = run(learner, RATES[2:])
        early = (writing.done, all_done([writing]), whole(behind))
        gate.set()
        writing._thread.join()
        late = (all_done([writing]), whole(behind))
        writing.finish()
    return {"rest": rest, "early": early, "late": late, "weights": {n: p.detach().clone() for n, p in learner.model.parameters().items()}}


@pytest.mark.parametrize(("layout", "kind", "dtype"), [
    (Layout(), "llama", "fp32"),
    (Layout(dp=2, ep=2), "qwen3_moe", "bf16"),
    (Layout(tp=2, pp=2, vpp=2, sp=True), "qwen3", "fp32"),
], ids=str)  # fmt: skip
def test_it_holds_the_moment_it_began(ranks, tmp_path, layout, kind, dtype):  # noqa: F811
    at_once, behind = tmp_path / "at_once", tmp_path / "behind"
    at_once.mkdir(), behind.mkdir()
    found = ranks(stepped_on, layout, kind, dtype, at_once, behind)
    assert shards(behind) == shards(at_once) and len(shards(behind)) == layout.world
    for rank in found:
        assert rank["early"] == (False, False, False) and rank["late"] == (True, False)
    assert whole(behind)
    assert ranks(resumed, layout, kind, False, dtype, behind) == [rank["rest"] for rank in found]


def test_a_tensor_that_owns_its_memory_is_copied_too(tmp_path):
    """Megatron copies views only; buffers and the moments of some optimizers are none."""
    live, gate, seen = torch.zeros(3), threading.Event(), []

    def write(rank: int, buckets: Any, results: Any) -> None:
        gate.wait(60)
        seen.extend(tensor.tolist() for _, _, (_, tensors) in buckets for _, tensor in tensors)

    arguments = [0, [("path", "key", ([], [("item", live)]))], None]
    request = SimpleNamespace(async_fn=write, async_fn_args=arguments, async_fn_kwargs={}, finalize_fns=[])
    writing = Writing(tmp_path, request)
    live += 1
    gate.set()
    writing.finish()
    assert seen == [[0, 0, 0]]


def no_op(groups: Groups, folder: Path) -> bool:
    learner = make(groups, "qwen3", False, "bf16", fresh=True)
    learner.load(folder)
    before = {n: p.detach().clone() for n, p in learner.model.parameters().items()}
    learner.step(slots_of(groups), [SftNll()], 0.0)
    return all(torch.equal(p, before[n]) for n, p in learner.model.parameters().items())


def saved_asleep(groups: Groups, at_once: Path, behind: Path) -> dict[str, Any]:
    learner = make(groups, "qwen3", False, "bf16")
    learner.offload = Offload(learner.model.chunks, learner.optimizer, to_host=True)
    run(learner, RATES[:2])
    learner.save(at_once)
    learner.offload.sleep()
    sizes = learner.offload.residual_bytes()
    with held():
        writing = learner.begin_save(behind)
        during = (learner.offload.state, learner.offload.residual_bytes() == sizes, writing.done)
    writing.finish()
    return {"during": during}


@pytest.mark.defect("E28")
def test_memory_is_given_back_as_soon_as_it_is_copied(ranks, tmp_path):  # noqa: F811
    """And what was saved so loads: a step with learning rate 0 then changes no weight."""
    at_once, behind = tmp_path / "at_once", tmp_path / "behind"
    at_once.mkdir(), behind.mkdir()
    for rank in ranks(saved_asleep, Layout(tp=2), at_once, behind):
        assert rank["during"] == (ASLEEP, True, False)
    assert shards(behind) == shards(at_once)
    assert ranks(no_op, Layout(tp=2), behind) == [True, True]


def two_at_once(groups: Groups, folders: list[Path]) -> list[bool]:
    """Two learners (policy and critic, say) whose writings end in the other order, and a save that waits between them."""
    learners = [make(groups, kind, False, "fp32") for kind in ("llama", "qwen3")]
    with held():
        writings = [learner.begin_save(folder) for learner, folder in zip(learners, folders, strict=False)]
    learners[1].save(folders[2])
    for writing in reversed(writings):
        writing.finish()
    for learner, folder in zip([*learners, learners[1]], folders, strict=True):
        learner.load(folder)  # fails when the files are not what the metadata say
    return [whole(folder) for folder in folders]


def test_saves_do_not_mix(ranks, tmp_path):  # noqa: F811
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    assert ranks(two_at_once, Layout(tp=2), folders) == [[True] * 3] * 2
    assert shards(folders[1]) == shards(folders[2]) != shards(folders[0])


def tensor_bytes() -> int:
    gc.collect()
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    return sum(found.values())


def memory(groups: Groups, folder: Path) -> tuple[int, int, int, int, int]:
    learner = make(groups, "llama", False, "fp32")
    learner.step(slots_of(groups), [SftNll()], 1e-3)
    learner.save(folder)  # what a first save makes for good
    before = tensor_bytes()
    with held() as gate:
        writing = learner.begin_save(folder)
        during = tensor_bytes()
        gate.set()
        writing._thread.join()
        written = tensor_bytes()
    writing.finish()
    return sum(p.nbytes for p in learner.model.parameters().values()), before, during, written, tensor_bytes()


def test_memory_after_a_save_is_that_before(ranks, tmp_path):  # noqa: F811
    """While it is written there are copies of all parameters and of two moments, at least."""
    [(size, before, during, written, after)] = ranks(memory, Layout(), tmp_path)
    assert during >= before + 3 * size
    assert written == after == before


def full_disk(groups: Groups, folder: Path, full: int) -> str:
    """The other rank has written all before this one finds its disk full."""
    learner = make(groups, "llama", False, "fp32")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with held() as gate:
        writing = learner.begin_save(folder)
        if groups.rank == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        else:
            gate.set()
            writing._thread.join()
        assert writing.done == (groups.rank != full) and not all_done([writing])
        gate.set()
        writing._thread.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        writing.finish()
    except CheckpointError as e:
        run(learner, RATES[:1])  # the ranks are still in step
        return str(e)
    return "no error"


def test_a_full_disk_is_said_on_every_rank(ranks, tmp_path):  # noqa: F811
    first, second = ranks(full_disk, Layout(tp=2), tmp_path, 1)
    assert "the tensors cannot be written" in first and "is the disk full? Free space" in first
    assert "the tensors cannot be written; the coordinating rank says why" in second
    assert not whole(tmp_path)


def abandoned(groups: Groups, folder: Path) -> tuple[bool, bool, str]:
    learner = make(groups, "llama", False, "fp32")
    with held() as gate:
        writing = learner.begin_save(folder)
        writing.abandon(0.0)
        waits = not writing.done
        gate.set()
        writing.abandon(30.0)
    try:
        writing.finish()
    except CheckpointError as e:
        return waits, writing.done, str(e)
    return waits, writing.done, "no error"


@pytest.mark.defect("G12")
def test_what_was_abandoned_is_no_checkpoint(ranks, tmp_path):  # noqa: F811
    [(waits, done, said)] = ranks(abandoned, Layout(), tmp_path)
    assert waits and done and "the tensors cannot be written" in said and not whole(tmp_path)


def draws(groups: Groups, seed: int) -> tuple[Any, bool]:
    learner: Learner = make(groups, "qwen3_moe", False, "bf16")
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    steps = run(learner, RATES)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    return steps, torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_a_step_draws_from_no_global_generator(ranks):  # noqa: F811
    """So a checkpoint needs none of their states."""
    [(one, untouched)], [(other, _)] = (ranks(draws, Layout(), seed) for seed in (1, 2))
    assert one == other and untouched


# ------------------------------------------------------------------------------------------------------- the session


class Slow:
    """A writing that is done when it is told to be."""

    def __init__(self, error: Exception | None = None):
        self.done, self.said, self.error = False, [], error

    def finish(self) -> None:
        self.said.append("finish")
        if self.error:
            raise self.error

    def abandon(self, limit_s: float) -> None:
        self.said.append("abandon")


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """A session of one rank, without a model; what it saves is ``made``, one after another."""
    monkeypatch.setattr(session, "all_done", lambda writings: all(w.done for w in writings))
    s: Any = object.__new__(Session)
    made: list[list[Slow]] = []
    said: list[str] = []
    s.config = SimpleNamespace(run=SimpleNamespace(save_every=2), world=1)
    s.progress, s.store, s.numbers = session.Progress(), StateStore(), {}
    s.store.add("progress", s.progress)
    s.checkpoints, s.flight, s.earlier_s, s.started = Checkpoints(tmp_path, keep=2), None, 0.0, 0.0
    s.lead = SimpleNamespace(describe=lambda folder: (folder / "meta").touch(), console=SimpleNamespace(say=said.append))
    serving = SimpleNamespace(tell=lambda name, *arguments: None)
    s.policy = SimpleNamespace(share=lambda value: value, save=lambda folder: made.pop(0), serving=serving)

    def step(number: int, *writings: Slow) -> list[str]:
        s.progress.step = s.progress.done = number
        made[:] = [list(writings)]
        s.save(None, number)
        return [path.name[-1] for path in s.checkpoints.complete()]

    return s, step, said


def test_it_is_complete_only_when_all_is_written(run_of):
    s, step, _ = run_of
    policy, critic, second = Slow(), Slow(), Slow()
    assert step(2, policy, critic) == []
    policy.done = True
    assert step(3) == [] and policy.said == critic.said == []
    critic.done = True
    assert step(3) == ["2"] and policy.said == critic.said == ["finish"]
    assert step(4, second) == ["2"] and not second.said
    assert step(6, Slow()) == ["2", "4"] and second.said == ["finish"]  # the next save waits for it
    assert step(8) == ["6", "8"]  # one that has written already
    assert s.store.read(s.checkpoints.folder(6) / "state.json")["progress"]["done"] == 6


def test_at_a_stage_end_the_run_waits(run_of):
    s, step, _ = run_of
    s.progress.over, s.config.run.export = True, False
    s.lead.finish = lambda progress, wall_s: {"steps": [path.name[-1] for path in s.checkpoints.complete()]}
    assert step(3, Slow()) == []
    assert s.finish() == {"steps": ["3"]}


@pytest.mark.defect("G12")
@pytest.mark.parametrize(("error", "world", "complete", "told"), [
    (ValueError(), 1, ["2", "4"], "finish"),
    (KeyboardInterrupt(), 1, ["2"], "abandon"),
    (ValueError(), 2, ["2"], "abandon"),
], ids=["a fault", "interrupted", "one of several ranks"])  # fmt: skip
def test_leaving_with_a_checkpoint_in_flight(run_of, error, world, complete, told):
    s, step, _ = run_of
    s.config.world, writing = world, Slow()
    step(2)
    step(4, writing)
    s._leave(type(error), error, None)
    assert writing.said == [told]
    assert [path.name[-1] for path in s.checkpoints.complete()] == complete


def test_an_error_of_the_writer_comes_at_the_next_step(run_of):
    s, step, said = run_of
    writing = Slow(CheckpointError("the disk is full"))
    step(2)
    step(4, writing)
    writing.done = True
    with pytest.raises(CheckpointError, match="the disk is full"):
        step(5)
    assert [path.name for path in s.checkpoints.root.iterdir() if path.is_dir()] == ["step-000002"] and s.flight is None
    s.flight = Flight(6, s.checkpoints.partial(6), [writing])
    s._leave(ValueError, ValueError(), None)  # the run's own error goes on
    assert said == ["The checkpoint of step 6 is given up: the disk is full"]
