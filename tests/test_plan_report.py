"""What ``check`` prints of memory, work and schedule follows the configuration."""

import pytest

from ckpt_convert.families import family_of
from mcore_agent.memory_plan import Shape, pieces, rank_state, save_copies


def check(*words: str) -> str:
    from mcore_agent.config import load_config
    from mcore_agent.plan_report import report

    gpu = [w.removeprefix("--gpu=") for w in words if w.startswith("--gpu=")]
    config = load_config("recipes/quickstart.yaml", [w for w in words if not w.startswith("--")], gpu=gpu[0] if gpu else None)
    return report(config, *gpu)


def line(text: str, name: str) -> str:
    return next(row for row in text.splitlines() if row.strip().startswith(name))


def test_report_without_a_gpu():
    text = check()
    assert "memory of each rank" in text and "CUDA and NCCL" not in text and "fullest" not in text
    shape = Shape(dtype="fp32", tokens=8192)
    state = rank_state(family_of(quickstart()), shape, 0)
    assert f"weights {state.weights / 1024:.3g} KiB, gradients {state.gradients / 1024:.3g} KiB" in line(text, "training")


def quickstart() -> dict:
    from mcore_agent.config import load_config
    from mcore_agent.config_rules import hf_config_of

    return hf_config_of(load_config("recipes/quickstart.yaml"))


def test_report_for_a_gpu():
    text = check("--gpu=H100", "learner.pp=2", "precision.dtype=bf16")
    assert "memory of each H100 GPU" in text and "stage 1 of 2" in text and "stage 2 of 2" in text
    assert line(text, "fullest").endswith("of 79.6 GiB: fits")
    assert "of 2 H100" in line(text, "training time")


def test_report_follows_the_layout():
    text = check("learner.tp=2", "learner.pp=2", "learner.cp=2", "learner.recompute=full")
    assert "8 = tp 2 x cp 2 x pp 2 x dp 1, sp on\n" in text and "activations (recompute full)" in text
    assert "vpp" not in text and "etp" not in text
    more = check("model.config.num_hidden_layers=4", "learner.pp=2", "learner.vpp=2")
    assert line(more, "learner ranks").endswith("dp 1, vpp 2")


def test_report_counts_a_separate_critic_and_an_offloaded_optimizer():
    """The critic's backbone is the policy's without the last stage's copy of the embedding."""
    words = ("learner.pp=2", "precision.dtype=bf16", "credit=[{name: gae}]", "critic.mode=separate", "--gpu=H100")
    family, shape = family_of(quickstart()), Shape(pp=2)
    own, critics = rank_state(family, shape, 1), rank_state(family, shape, 1, head=False)
    assert own.weights - critics.weights == 384 * 64 * 2
    text = check(*words)
    assert f"separate critic ~{critics.total / 1024:.3g} KiB" in line(text, "stage 2") and "a model of its own" in line(text, "critic")
    moved = line(check(*words, "learner.offload=true"), "stage 2")
    assert ", optimizer " not in moved and f"separate critic ~{(critics.weights + critics.gradients) / 1024:.3g} KiB" in moved
    assert moved.endswith(f"in host memory ~{(own.optimizer + critics.optimizer) / 2**20:.3g} MiB of optimizer")


def test_report_says_when_it_does_not_fit():
    large = ("model.config.hidden_size=8192", "model.config.intermediate_size=28672", "model.config.num_hidden_layers=40")
    assert "does not fit" in line(check("--gpu=A100-40", *large), "fullest")


def test_a_micro_batch_is_no_fuller_than_a_step():
    """64 demonstrations of 260 tokens are the largest step; with 100 tasks in 3 mini-batches it is 34 groups of 16."""
    most = 64 * 260
    text = check("batch.token_budget=1000000000000")
    assert line(text, "micro-batches") == (
        f"  micro-batches         of up to {most:,} tokens on each of 1 data-parallel ranks "
        "(batch.token_budget=1,000,000,000,000 is never reached)"
    )
    assert line(text, "training").partition(";")[0] == line(check(f"batch.token_budget={most}"), "training").partition(";")[0]
    assert "never reached" not in check() and f"{most // 2:,} tokens on each of 2" in check("batch.token_budget=1000000", "learner.dp=2")
    assert f"{34 * 16 * 260:,} tokens" in check("batch.token_budget=1000000", "rollout.prompts=100", "batch.minibatches=3")


def test_report_says_when_the_warm_up_takes_a_whole_stage():
    assert line(check("stages.0.steps=20"), "1 sft").endswith("the warm-up of 50 steps takes all of them, and the rate ends at 0.0008, "
                                                               "until sampled success reaches 0.38")  # fmt: skip
    assert "warm-up" not in check()


@pytest.mark.parametrize("name", ["H100", "h100", "a100-80", "L40s"])
def test_report_knows_a_gpu_however_it_is_spelt(name):
    assert f"memory of each {name.upper()} GPU" in check(f"--gpu={name}")


def test_report_refuses_an_unknown_gpu():
    from mcore_agent.config import ConfigError

    with pytest.raises(ConfigError, match="--gpu = 'V1'"):
        check("--gpu=V1")


def test_report_counts_the_copies_for_a_save_in_the_background():
    family = family_of(quickstart())
    text = check("run.async_save=true", "credit=[{name: gae}]", "critic.mode=separate", "precision.dtype=bf16", "learner.pp=2")
    both = save_copies(family, Shape(pp=2), 1) + save_copies(family, Shape(pp=2), 1, head=False)
    assert line(text, "stage 2").endswith(f"in host memory ~{both / 2**20:.3g} MiB of copies while a checkpoint is written")
    elements = sum(p.elements for p in pieces(family, Shape(pp=2), 1, 0))
    assert save_copies(family, Shape(pp=2), 1) == elements * (2 + 4 + 4 + 4) and "copies" not in check()
