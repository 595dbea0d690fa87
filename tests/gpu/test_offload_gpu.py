"""What the learner still holds on a GPU after it gave its memory back, and what that costs on the host."""

import resource

import pytest
import torch

from ckpt_convert.families import family_of
from ckpt_convert.source import RandomSource
from mcore_agent.learner.groups import Groups, Layout, destroy, initialize
from mcore_agent.learner.learner import Learner, OptimSpec, Setup
from mcore_agent.learner.offload import Offload
from mcore_agent.precision import PrecisionSpec
from mcore_agent.registry import create
from mcore_agent.rollout.states import residual_memory
from tests.learner.models import micro_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
SLACK = 256 << 20  # bytes: workspaces of cuBLAS and Transformer Engine


@pytest.fixture
def groups():
    yield initialize(Layout())
    destroy()


def stepped(groups: Groups, fp8: str, **optim) -> Learner:
    setup = Setup(precision=PrecisionSpec("bf16", fp8))
    learner = Learner(CONFIG, groups, "bf16", OptimSpec(**optim), setup=setup)
    learner.load_weights(RandomSource(family_of(CONFIG), 0))
    learner.step([micro_of([64, 64], 0, vocab=256)], [create("loss", {"name": "ppo_clip"})], 1e-4)
    return learner


@pytest.mark.defect("F3", "F5")
@pytest.mark.parametrize("fp8", ["off", "delayed", "current"])
@pytest.mark.parametrize("offload", [False, True], ids=["moments here", "moments on the host"])
def test_little_stays(groups, fp8, offload):
    learner = stepped(groups, fp8, offload=offload)
    before = learner.offload.residual_bytes()
    Offload.sleep(learner.offload)
    left = learner.offload.residual_bytes()
    assert left["parameters"] == left["optimizer"] == left["gradients"] == 0 and before["parameters"] > 0
    assert residual_memory()["cuda_allocated"] < SLACK
    Offload.wake(learner.offload)
    assert learner.offload.residual_bytes()["parameters"] == before["parameters"]


@pytest.mark.defect("F4")
def test_the_host_holds_one_copy(groups):
    learner = stepped(groups, "off")
    held = learner.offload.residual_bytes()
    Offload.sleep(learner.offload)
    Offload.wake(learner.offload)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(3):
        Offload.sleep(learner.offload)
        Offload.wake(learner.offload)
    again = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert again - peak < 0.1 * (held["parameters"] + held["optimizer"])
