"""What repairs.py repairs is still broken in the installed releases; a test fails once a repair is no longer needed."""

import importlib.metadata
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_agent.learner import repairs  # before megatron
from mcore_agent.learner.groups import Groups, Layout
from mcore_agent.learner.learner import Learner
from mcore_agent.learner.repairs import filesystem_async
from mcore_agent.loss.sft_nll import SftNll
from tests.learner.jobs import gloo_threads, learner_of
from tests.learner.models import config_of, micro_of, weights_of
from tests.ranks import ranks  # noqa: F401


def fresh(groups: Groups) -> Learner:
    return learner_of(groups, config_of("llama", True), weights_of("llama", True))


def unrepaired(learner: Learner, name: str, *arguments: Any) -> Any:
    part = learner.optimizer.chained_optimizers[0]
    with torch.no_grad():
        return getattr(type(part), name).__wrapped__(part, *arguments)


def of_a_fresh_optimizer(groups: Groups) -> tuple[str, list[float]]:
    learner = fresh(groups)
    try:
        unrepaired(learner, "state_dict")
        before = "passed"
    except AssertionError:
        before = "AssertionError"
    learner.optimizer.state_dict()
    return before, [s["step"].item() for s in learner.optimizer.chained_optimizers[0].optimizer.state.values()]


def of_a_load(groups: Groups) -> tuple[str, int, int, int]:
    learner = fresh(groups)
    learner.step([micro_of([7, 4], 1)], [SftNll()], 1e-3)
    part = learner.optimizer.chained_optimizers[0]
    parameter = next(iter(part.model_param_group_index_map))
    tensors = {key: value for key, value in part._get_main_param_and_optimizer_states(parameter).items() if key != "step"}
    try:
        unrepaired(learner, "_set_main_param_and_optimizer_states", parameter, tensors)
        before = "passed"
    except KeyError as e:
        before = repr(e)
    with torch.no_grad():
        part._set_main_param_and_optimizer_states(parameter, tensors)

    def distinct() -> int:
        return len({s["step"].data_ptr() for s in part.optimizer.state.values()})

    unrepaired(learner, "load_state_dict", part.state_dict())
    shared = distinct()
    part.load_state_dict(part.state_dict())
    return before, shared, distinct(), len(part.optimizer.state)


@pytest.mark.skipif(not repairs.needed(), reason="Transformer Engine or Apex is installed")
def test_fresh_optimizer_has_a_state(ranks):  # noqa: F811
    [(before, steps)] = ranks(of_a_fresh_optimizer, Layout())
    assert before == "AssertionError", "the release gives a fresh state by itself: remove the repair"
    assert set(steps) == {0.0}


@pytest.mark.skipif(not repairs.needed(), reason="Transformer Engine or Apex is installed")
def test_load(ranks):  # noqa: F811
    [(before, shared, own, parameters)] = ranks(of_a_load, Layout())
    assert before == "KeyError('step')", "the release loads torch's AdamW by itself: remove the repair"
    assert shared == 1, "the release gives each parameter its own step: remove the repair"
    assert own == parameters > 1


def cut_with_padding(groups: Groups) -> tuple[bool, bool]:
    """Whether a parameter's range leaves the state that was gathered, without and with the repair."""
    learner = fresh(groups)
    learner.step([micro_of([7, 4], 1)], [SftNll()], 1e-3)
    part = learner.optimizer.chained_optimizers[0]
    [buffer] = part.buffers
    end = max(end for _, end, _ in buffer.param_index_map.values())

    def size(state: Any) -> int:
        return next(iter(state[0].values()))["param"].numel()

    whole = {"use_gloo_comm": False, "return_on_all_ranks": True}
    before = part.__class__.get_parameter_state_dp_zero.__wrapped__(part, **whole)
    return size(before) < end, size(part.get_parameter_state_dp_zero(**whole)) < end


@pytest.mark.defect("E18")
def test_buckets_with_padding(ranks):  # noqa: F811
    """Tied embeddings under pipeline parallelism: the second stage holds the output layer in a bucket of its own."""
    _, (before, after) = ranks(cut_with_padding, Layout(pp=2))
    assert before, "the release pads what it gathers: remove the repair"
    assert not after


def test_a_save_would_start_a_process():
    source = inspect.getsource(filesystem_async.get_write_results_queue)
    assert "if _results_queue is None" in source and "Manager().Queue()" in source, "remove the repair of the checkpoint writer"


def _workers_of_a_new_group() -> int:
    """How many threads that run gloo's collectives come with one more group."""
    before = gloo_threads()
    group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    found = gloo_threads() - before
    dist.destroy_process_group(group)
    return found


def workers_of_a_group(groups: Groups) -> tuple[int, int]:
    """Without and with the repair."""
    plugins = dist.Backend._plugins
    repaired = plugins["GLOO"]
    plugins["GLOO"] = repaired._replace(creator_fn=dist.distributed_c10d._create_gloo_process_group)
    try:
        before = _workers_of_a_new_group()
    finally:
        plugins["GLOO"] = repaired
    return before, _workers_of_a_new_group()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have no names to read here")
def test_a_gloo_group_has_one_worker(ranks):  # noqa: F811
    """Two of them free the same string twice, once in tens of thousands of collectives: too rarely to provoke it here."""
    [(before, after)] = ranks(workers_of_a_group, Layout())
    assert before > 1, "the release has one worker for each group: remove the repair"
    assert after == 1
    assert importlib.metadata.version("torch").startswith(repairs.TORCH), (
        "look whether ProcessGroupGloo::runLoop of this torch still sets lastCompletedWorkName without the lock; if not, remove the repair"
    )
